"""Tasks, and the loop that trains one trial of them alone, in plain PyTorch. Imports nothing of hfta_tune.

The tests make a FusedTrainable of a task class by deriving from both. What a fused lane must come to is what
`train` says here, so this file is to stay a loop that a reader can check at a glance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

Config = dict[str, Any]

CLASSES = 3
BATCH = 16
TRAIN_SAMPLES = 24  # batches of 16 and 8: the mean of a round must weigh them
VAL_SAMPLES = 20
STEPS_A_ROUND = math.ceil(TRAIN_SAMPLES / BATCH)


@dataclass(frozen=True)
class Snapshot:
    """One trial after one round: what was reported, and a copy of everything it has learnt."""

    metrics: dict[str, float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any] | None


class Run:
    """One trial of a task, trained alone."""

    def __init__(self, task: Any, config: Config) -> None:
        self.task, self.config = task, config
        torch.manual_seed(config.get("seed", getattr(task, "seed", 0)))
        self.model = task.build_model(config)
        self.optimizer = task.build_optimizer(self.model, config)
        build_lr_scheduler = getattr(task, "build_lr_scheduler", None)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, config) if build_lr_scheduler else None
        self.interval = getattr(task, "lr_scheduler_interval", "epoch")
        self.monitor = getattr(task, "lr_scheduler_monitor", None)
        self.train_loader = task.train_dataloader(config)
        self.val_loader = task.val_dataloader(config) if hasattr(task, "val_dataloader") else None

    def run_round(self) -> dict[str, float]:
        metrics = {"train_loss": self._train()}
        if self.val_loader is not None:
            metrics |= self._validate()
        if hasattr(self.task, "evaluate"):
            self.model.eval()
            metrics |= self.task.evaluate(self.model, self.config) or {}
        if self.lr_scheduler is not None and self.interval == "epoch":
            if self.monitor is None:
                self.lr_scheduler.step()
            else:
                self.lr_scheduler.step(metrics[self.monitor])
        return metrics

    def snapshot(self, metrics: dict[str, float]) -> Snapshot:
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        return copy.deepcopy(Snapshot(metrics, self.model.state_dict(), self.optimizer.state_dict(), schedule))

    def _train(self) -> float:
        self.model.train()
        total = samples = 0.0
        for batch in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.task.training_step(self.model, batch, self.config)
            loss.backward()
            self.clip()
            self.optimizer.step()
            if self.lr_scheduler is not None and self.interval == "step":
                self.lr_scheduler.step()
            total += float(loss.detach()) * batch_size(batch)
            samples += batch_size(batch)
        return total / samples

    def clip(self) -> None:
        """Clips nothing; a test's own run may."""

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        self.model.eval()
        totals: dict[str, float] = {}
        samples = 0
        for batch in self.val_loader:
            for name, value in self.task.validation_step(self.model, batch, self.config).items():
                totals[name] = totals.get(name, 0.0) + float(value) * batch_size(batch)
            samples += batch_size(batch)
        return {name: total / samples for name, total in totals.items()}


def train(task: Any, config: Config, rounds: int) -> list[Snapshot]:
    """Trains one trial alone. The snapshot of round r is at index r - 1."""
    run = Run(task, config)
    return [run.snapshot(run.run_round()) for _ in range(rounds)]


def batch_size(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[0])


def assert_same(actual: Any, expected: Any, where: str = "", *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Compares two state dicts, metrics or tensors, down to their leaves. Types, dtypes and keys count."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {type(actual).__name__} instead of a tensor"
        # RMSprop's momentum holds numbers of 10 and more: there rounding is of that size too.
        floating = expected.is_floating_point() and expected.numel() > 0
        scale = max(1.0, float(expected.abs().max())) if floating else 1.0
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * scale, msg=lambda text: f"{where}: {text}")
        if expected.is_floating_point() and expected.numel() > 1:
            # The second moments of Adam are often below atol, where the line above would pass anything.
            gap, size = float((actual - expected).norm()), float(expected.norm())
            assert gap <= 10 * rtol * size + 1e-7, f"{where}: off by {gap} of a norm of {size}"
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), f"{where}: {type(actual).__name__} instead of a dict"
        actual, expected = _present(actual), _present(expected)
        assert actual.keys() == expected.keys(), f"{where}: {sorted(actual)} instead of {sorted(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}", rtol=rtol, atol=atol)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} entries instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]", rtol=rtol, atol=atol)
    elif isinstance(expected, float):
        assert actual == expected or math.isclose(actual, expected, rel_tol=rtol, abs_tol=atol), (
            f"{where}: {actual} instead of {expected}"
        )
    else:
        assert actual == expected, f"{where}: {actual!r} instead of {expected!r}"


def _present(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Leaves out None and empty entries, which torch writes in some cases and not in others."""
    return {key: value for key, value in mapping.items() if value is not None and value != {}}


def assert_like(state: dict[str, Any], expected: Snapshot, where: str) -> None:
    """Compares the state of a trial (of Worker.state_dict or of a checkpoint) with a snapshot."""
    assert_same(state["model"], expected.model, f"{where} model")
    assert_same(state["optimizer"], expected.optimizer, f"{where} optimizer")
    assert_same(state["lr_scheduler"], expected.lr_scheduler, f"{where} lr_scheduler")


class DampedMomentum(torch.optim.Optimizer):
    """An optimizer that nobody else has.

    It divides by a norm over ALL its parameters, so that it goes wrong at once where it is shown more
    lanes than one; and it counts its steps in a Python int, as many do.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, scale: float = 1.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, scale=scale, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in with_gradient))
            for p in with_gradient:
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["velocity"] = torch.zeros_like(p)
                state["count"] += 1
                gradient = p.grad / (group["scale"] + norm) + group["weight_decay"] * p
                state["velocity"].mul_(group["momentum"]).add_(gradient)
                p.sub_(state["velocity"], alpha=group["lr"] / (1 + 0.1 * state["count"]))


def _sgd(params: Any, c: Config) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=c["lr"], momentum=c["momentum"], weight_decay=c["weight_decay"], nesterov=True)


def _adam(params: Any, c: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        params, lr=c["lr"], betas=(c["beta1"], c["beta2"]), eps=c["eps"], weight_decay=c["weight_decay"]
    )


def _adamw(params: Any, c: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params,
        lr=c["lr"],
        betas=(c["beta1"], c["beta2"]),
        eps=c["eps"],
        weight_decay=c["weight_decay"],
        amsgrad=True,
    )


def _rmsprop(params: Any, c: Config) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(
        params,
        lr=0.1 * c["lr"],
        alpha=c["beta2"],
        eps=10 * c["eps"],  # its momentum adds up what eps has let through
        weight_decay=c["weight_decay"],
        momentum=c["momentum"],
    )


def _adagrad(params: Any, c: Config) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        params, lr=c["lr"], lr_decay=1 - c["beta1"], eps=c["eps"], weight_decay=c["weight_decay"]
    )


def _custom(params: Any, c: Config) -> torch.optim.Optimizer:
    return DampedMomentum(params, c["lr"], c["momentum"], c["scale"], c["weight_decay"])


def _one_cycle(optimizer: torch.optim.Optimizer, c: Config) -> lr_scheduler.LRScheduler:
    cycles_momentum = not isinstance(optimizer, torch.optim.Adagrad)  # has neither momentum nor betas
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=2 * optimizer.defaults["lr"],
        total_steps=4 * STEPS_A_ROUND,
        pct_start=c["pct_start"],
        base_momentum=0.8,
        max_momentum=c["momentum"],
        cycle_momentum=cycles_momentum,
    )


def _cosine(optimizer: torch.optim.Optimizer, c: Config) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=0.1 * optimizer.defaults["lr"])


def _plateau(optimizer: torch.optim.Optimizer, c: Config) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=c["gamma"], patience=0, threshold=c["threshold"])


OPTIMIZERS: dict[str, Callable[[Any, Config], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "custom": _custom,
}

# What builds it, and the class attributes that go with it.
SCHEDULES: dict[str, tuple[Callable[[torch.optim.Optimizer, Config], Any], dict[str, Any]]] = {
    "constant": (lambda optimizer, c: None, {}),
    "step": (lambda optimizer, c: lr_scheduler.StepLR(optimizer, step_size=1, gamma=c["gamma"]), {}),
    "cosine": (_cosine, {}),
    "onecycle": (_one_cycle, {"lr_scheduler_interval": "step"}),
    "plateau": (_plateau, {"lr_scheduler_monitor": "val_loss"}),
}

# eps stays well above rounding. The gradient of a bias without effect (the keys' in attention) is rounding
# noise, which Adam with a tiny eps blows up to full steps, other ones for every order of summing.
LANES: list[Config] = [
    dict(seed=1, lr=0.02, momentum=0.9, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.0, scale=0.5)
    | dict(gamma=0.5, pct_start=0.3, threshold=0.5),
    dict(seed=2, lr=0.005, momentum=0.5, beta1=0.8, beta2=0.95, eps=1e-2, weight_decay=0.1, scale=1.0)
    | dict(gamma=0.1, pct_start=0.5, threshold=0.9),
    dict(seed=3, lr=0.01, momentum=0.95, beta1=0.5, beta2=0.999, eps=3e-3, weight_decay=0.01, scale=2.0)
    | dict(gamma=0.9, pct_start=0.2, threshold=0.0),
    dict(seed=4, lr=0.003, momentum=0.8, beta1=0.95, beta2=0.9, eps=1e-2, weight_decay=0.003, scale=0.1)
    | dict(gamma=0.7, pct_start=0.6, threshold=0.3),
]


def vectors(samples: int, *shape: int, seed: int = 0) -> TensorDataset:
    """Random inputs with labels that a small model can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, *shape, generator=generator)
    return TensorDataset(x, x.flatten(1)[:, :CLASSES].argmax(1))


def words(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (samples, 5), generator=generator)
    return TensorDataset(tokens, tokens[:, 0] % CLASSES)


class Task:
    """The hooks that most tasks share: classification of 6 numbers by an MLP, with SGD."""

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def train_dataloader(self, config: Config) -> Iterable[Any]:
        return DataLoader(self.data(TRAIN_SAMPLES, seed=0), batch_size=BATCH)

    def val_dataloader(self, config: Config) -> Iterable[Any]:
        return DataLoader(self.data(VAL_SAMPLES, seed=1), batch_size=BATCH)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        logits = model(x)
        accuracy = (logits.argmax(-1) == y).float().mean()
        return {"val_loss": F.cross_entropy(logits, y), "accuracy": accuracy}

    def data(self, samples: int, seed: int) -> TensorDataset:
        return vectors(samples, 6, seed=seed)


class CNN(Task):
    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 3 * 3, CLASSES),
        )

    def data(self, samples: int, seed: int) -> TensorDataset:
        return vectors(samples, 1, 6, 6, seed=seed)


class TransformerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens) + self.positions).mean(1))


class Transformer(Task):
    def build_model(self, config: Config) -> nn.Module:
        return TransformerModel()

    def data(self, samples: int, seed: int) -> TensorDataset:
        return words(samples, seed=seed)


MODELS: dict[str, type[Task]] = {"mlp": Task, "cnn": CNN, "transformer": Transformer}


def compose(model: str, optimizer: str, schedule: str) -> type[Task]:
    """The task class of one line of the table."""
    build_schedule, attributes = SCHEDULES[schedule]

    class Composed(MODELS[model]):  # type: ignore[misc]
        def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
            return OPTIMIZERS[optimizer](model.parameters(), config)

        def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
            return build_schedule(optimizer, config)

    for name, value in attributes.items():
        setattr(Composed, name, value)
    Composed.__name__ = Composed.__qualname__ = f"{model}_{optimizer}_{schedule}"
    return Composed
