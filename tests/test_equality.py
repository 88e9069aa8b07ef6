"""Every lane of an array comes to what its trial comes to alone, in a plain PyTorch loop."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from fusion.breadth import run_round
from reference import LANES, MODELS, OPTIMIZERS, SCHEDULES, Config, Snapshot, Task, assert_like, assert_same
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hfta_tune import FusedTrainable
from hfta_tune.worker import Worker

ROUNDS = 3
TRIALS = ["ada", "bob", "cyd", "dee"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the user has been told so far: by warnings, or by the log."""
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, logger="hfta_tune"):
        warnings.simplefilter("always")

        def texts() -> list[str]:
            records = [record for record in caplog.records if record.name.startswith("hfta_tune")]
            return [str(warning.message) for warning in caught] + [record.getMessage() for record in records]

        yield texts


@functools.cache  # two classes, however alike, never share an array
def fused(task: type[Task]) -> type[FusedTrainable]:
    return type(f"Fused{task.__name__}", (task, FusedTrainable), {})


def add(worker: Worker, trial: str, trainable: type[FusedTrainable], config: Config) -> None:
    worker.add(trial, trainable._outside_tune(config), config)


def start(task: type[Task], configs: Sequence[Config], lanes: int | None = None) -> Worker:
    """A worker with one trial for each config, named ada, bob, ..."""
    worker = Worker(lanes=lanes or len(configs))
    trainable = fused(task)
    for trial, config in zip(TRIALS, configs, strict=False):
        add(worker, trial, trainable, config)
    return worker


def alone(task: type[Task], configs: Sequence[Config], rounds: int = ROUNDS) -> list[list[Snapshot]]:
    return [reference.train(task(), config, rounds) for config in configs]


def assert_lane(worker: Worker, trial: str, result: dict[str, float], expected: Snapshot, where: str) -> None:
    where = f"{trial} {where}"
    assert_same({name: result[name] for name in expected.metrics}, expected.metrics, f"{where} metrics")
    assert_like(worker.state_dict(trial), expected, where)


def assert_equal_to_alone(task: type[Task], configs: Sequence[Config], rounds: int = ROUNDS) -> Worker:
    """Trains the configs as lanes of one worker, and each alone, and compares them after every round."""
    expected = alone(task, configs, rounds)
    worker = start(task, configs)
    for r in range(rounds):
        results = run_round(worker)
        assert sorted(results) == TRIALS[: len(configs)]
        for trial, snapshots in zip(TRIALS, expected, strict=False):
            assert_lane(worker, trial, results[trial], snapshots[r], f"round {r + 1}")
    return worker


def arrays(worker: Worker) -> dict[frozenset[str], str]:
    """Which trials sit together, and the strategy they are trained by."""
    return {frozenset(a["trials"]): a["strategy"] for a in worker.describe()["arrays"] if a["trials"]}


def assert_one_array(worker: Worker, trials: Iterable[str], strategy: str = "vmap") -> None:
    """Without this an equality would prove nothing: lanes trained one by one are equal too."""
    assert arrays(worker) == {frozenset(trials): strategy}


# The table of the models, optimizers and schedules that a fused run promises to be equal for.

TABLE = [pytest.param(*line, id="-".join(line)) for line in itertools.product(MODELS, OPTIMIZERS, SCHEDULES)]


@functools.cache
def alone_in_table(model: str, optimizer: str, schedule: str, lane: int) -> list[Snapshot]:
    return reference.train(reference.compose(model, optimizer, schedule)(), LANES[lane], ROUNDS)


@pytest.mark.parametrize(("model", "optimizer", "schedule"), TABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("error")
def test_table_of_full_arrays(model: str, optimizer: str, schedule: str) -> None:
    worker = start(reference.compose(model, optimizer, schedule), LANES)
    for r in range(ROUNDS):
        results = run_round(worker)
        assert_one_array(worker, TRIALS)
        for lane, trial in enumerate(TRIALS):
            expected = alone_in_table(model, optimizer, schedule, lane)[r]
            assert_lane(worker, trial, results[trial], expected, f"round {r + 1}")


@pytest.mark.parametrize(("model", "optimizer", "schedule"), TABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("error")
def test_table_of_arrays_that_lanes_join_and_leave(model: str, optimizer: str, schedule: str) -> None:
    expected = functools.partial(alone_in_table, model, optimizer, schedule)
    task = reference.compose(model, optimizer, schedule)
    worker = start(task, LANES[:3], lanes=4)
    run_round(worker)
    add(worker, "dee", fused(task), LANES[3])
    results = run_round(worker)
    assert_one_array(worker, TRIALS)
    assert_lane(worker, "ada", results["ada"], expected(0)[1], "at its leaving")
    assert_lane(worker, "dee", results["dee"], expected(3)[0], "in the round it joined in")
    worker.remove("ada")
    results = run_round(worker)
    assert_one_array(worker, ["bob", "cyd", "dee"])
    assert_lane(worker, "bob", results["bob"], expected(1)[2], "at the end")
    assert_lane(worker, "cyd", results["cyd"], expected(2)[2], "at the end")
    assert_lane(worker, "dee", results["dee"], expected(3)[1], "at the end")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "constant"])
def test_the_table_changes_learning_rates(optimizer: str, schedule: str) -> None:
    lanes = [alone_in_table("mlp", optimizer, schedule, lane) for lane in range(4)]
    rates = [[round_.optimizer["param_groups"][0]["lr"] for round_ in lane] for lane in lanes]
    assert any(lane[0] != lane[-1] for lane in rates)
    assert len({lane[-1] for lane in rates}) == 4


# Optimizers: numbers that change what is done, not only how much.


def optimizing(build: Callable[[Any, Config], torch.optim.Optimizer], base: type[Task] = Task) -> type[Task]:
    class Optimizing(base):  # type: ignore[valid-type, misc]
        def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
            return build(model.parameters(), config)

    return Optimizing


def lanes_with(**numbers: Sequence[Any]) -> list[Config]:
    """Configs with seeds 1, 2, ... and, of each key, the value of their lane."""
    count = len(next(iter(numbers.values())))
    return [
        {"seed": lane + 1, "lr": 0.01 * (lane + 1)} | {k: v[lane] for k, v in numbers.items()} for lane in range(count)
    ]


OPTIMIZER_CASES: dict[str, tuple[Callable[[Any, Config], torch.optim.Optimizer], list[Config]]] = {
    "sgd-plain": (
        lambda params, c: torch.optim.SGD(params, lr=c["lr"], weight_decay=c["wd"]),
        lanes_with(wd=[0.0, 0.1, 0.01]),
    ),
    "sgd-dampening": (
        lambda params, c: torch.optim.SGD(
            params, lr=c["lr"], momentum=0.9, dampening=c["dampening"], weight_decay=c["wd"]
        ),
        lanes_with(dampening=[0.0, 0.5, 0.9], wd=[0.1, 0.0, 0.1]),
    ),
    "sgd-maximize": (
        lambda params, c: torch.optim.SGD(params, lr=c["lr"], momentum=c["momentum"], weight_decay=0.1, maximize=True),
        lanes_with(momentum=[0.9, 0.5, 0.1]),
    ),
    "sgd-momentum-zero-in-one-lane": (
        lambda params, c: torch.optim.SGD(params, lr=c["lr"], momentum=c["momentum"], dampening=c["damp"]),
        lanes_with(momentum=[0.9, 0.0, 0.5, 0.0], damp=[0.0, 0.0, 0.5, 0.5]),
    ),
    "sgd-momentum-zero-in-all-lanes": (
        lambda params, c: torch.optim.SGD(params, lr=c["lr"], momentum=c["momentum"]),
        lanes_with(momentum=[0.0, 0.0]),
    ),
    "sgd-nesterov-in-one-lane": (
        lambda params, c: torch.optim.SGD(params, lr=c["lr"], momentum=0.9, nesterov=c["nesterov"]),
        lanes_with(nesterov=[True, False, True]),
    ),
    "adam-maximize": (
        lambda params, c: torch.optim.Adam(params, lr=c["lr"], eps=c["eps"], maximize=True, weight_decay=0.1),
        lanes_with(eps=[1e-3, 1e-4, 1e-2]),
    ),
    "adam-maximize-in-one-lane": (
        lambda params, c: torch.optim.Adam(params, lr=c["lr"], eps=1e-3, maximize=c["maximize"]),
        lanes_with(maximize=[True, False, False]),
    ),
    "adam-amsgrad-in-one-lane": (
        lambda params, c: torch.optim.Adam(params, lr=c["lr"], eps=1e-3, amsgrad=c["amsgrad"]),
        lanes_with(amsgrad=[True, False, True]),
    ),
    "adam-default-eps": (
        lambda params, c: torch.optim.Adam(params, lr=c["lr"]),
        lanes_with(lr=[1e-3, 3e-3, 1e-2]),
    ),
    "adam-betas-zero": (
        lambda params, c: torch.optim.Adam(params, lr=c["lr"], betas=(c["b1"], c["b2"]), eps=1e-2),
        lanes_with(b1=[0.0, 0.9, 0.0], b2=[0.999, 0.0, 0.0]),
    ),
    "adam-weight-decay-zero-in-some-lanes": (
        lambda params, c: torch.optim.Adam(params, lr=c["lr"], eps=1e-3, weight_decay=c["wd"]),
        lanes_with(wd=[0.0, 0.1, 0.0]),
    ),
    "adam-decoupled": (
        lambda params, c: torch.optim.Adam(
            params, lr=c["lr"], eps=1e-3, weight_decay=c["wd"], decoupled_weight_decay=True
        ),
        lanes_with(wd=[0.0, 0.5, 0.1]),
    ),
    "adamw-weight-decay-zero-in-some-lanes": (
        lambda params, c: torch.optim.AdamW(params, lr=c["lr"], eps=1e-3, weight_decay=c["wd"]),
        lanes_with(wd=[0.0, 0.5, 0.0]),
    ),
    "adam-tensor-lr": (
        lambda params, c: torch.optim.Adam(params, lr=torch.tensor(c["lr"]), eps=1e-3),
        lanes_with(lr=[1e-3, 3e-3, 1e-2]),
    ),
    "rmsprop-centered": (
        lambda params, c: torch.optim.RMSprop(params, lr=c["lr"], eps=c["eps"], centered=True),
        lanes_with(lr=[1e-3, 3e-3, 1e-2], eps=[1e-1, 2e-1, 1e-1]),
    ),
    "nadam": (
        lambda params, c: torch.optim.NAdam(params, lr=c["lr"], eps=1e-2, momentum_decay=c["decay"]),
        lanes_with(decay=[4e-3, 1e-2, 0.0]),
    ),
    "radam": (
        lambda params, c: torch.optim.RAdam(params, lr=c["lr"], eps=1e-2, weight_decay=c["wd"]),
        lanes_with(wd=[0.0, 0.1, 0.01]),
    ),
    "asgd": (
        lambda params, c: torch.optim.ASGD(params, lr=c["lr"], lambd=c["lambd"]),
        lanes_with(lambd=[1e-4, 1e-2, 1e-1]),
    ),
    "adadelta": (
        lambda params, c: torch.optim.Adadelta(params, lr=10 * c["lr"], rho=c["rho"], eps=1e-3),
        lanes_with(rho=[0.9, 0.5, 0.99]),
    ),
}


@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_optimizers(case: str) -> None:
    build, configs = OPTIMIZER_CASES[case]
    worker = assert_equal_to_alone(optimizing(build), configs)
    if not case.endswith(("nesterov-in-one-lane", "maximize-in-one-lane", "amsgrad-in-one-lane")):
        assert_one_array(worker, TRIALS[: len(configs)])


class SgdSubclass(torch.optim.SGD):
    """Looks like SGD to isinstance, and steps twice as far."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


class GroupsTask(Task):
    """Several parameter groups, each with numbers of its own."""

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        weights = [module.weight for module in model if isinstance(module, nn.Linear)]
        biases = [module.bias for module in model if isinstance(module, nn.Linear)]
        groups = [
            {"params": weights[1:], "lr": config["lr"], "weight_decay": config["wd"]},
            {"params": biases, "lr": config["bias_lr"], "weight_decay": 0.0, "name": "biases"},
            {"params": weights[:1]},
        ]
        return self.optimizer(groups, config)

    def optimizer(self, groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
        raise NotImplementedError


GROUPS = lanes_with(bias_lr=[0.1, 0.03, 0.01], wd=[0.0, 0.1, 0.2], eps=[1e-3, 1e-2, 1e-3])


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "subclass"])
def test_parameter_groups(name: str) -> None:
    def build(groups: list[dict[str, Any]], c: Config) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(groups, lr=c["lr"] / 2, momentum=0.9, weight_decay=0.05)
        if name == "adamw":
            return torch.optim.AdamW(groups, lr=c["lr"] / 2, eps=c["eps"])
        if name == "subclass":
            return SgdSubclass(groups, lr=c["lr"] / 2, momentum=0.9)
        return torch.optim.Adagrad(groups, lr=c["lr"] / 2, eps=c["eps"])

    class Groups(GroupsTask):
        def optimizer(self, groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
            return build(groups, config)

        def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
            return lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5**e, lambda e: 1.0, lambda e: 0.9**e])

    assert_one_array(assert_equal_to_alone(Groups, GROUPS), TRIALS[:3])


def test_schedules_differ_between_lanes() -> None:
    class Scheduled(Task):
        def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

        def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
            if config["schedule"] is None:
                return None
            if config["schedule"] == "warm-up":
                warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
                after = lr_scheduler.ExponentialLR(optimizer, 0.5)
                return lr_scheduler.SequentialLR(optimizer, [warm_up, after], milestones=[2])
            return lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5)

    configs = lanes_with(schedule=[None, "warm-up", "times"])
    expected = alone(Scheduled, configs, 4)
    worker = start(Scheduled, configs)
    for r in range(4):
        results = run_round(worker)
        for trial, snapshots in zip(TRIALS, expected, strict=False):
            assert_same(results[trial]["train_loss"], snapshots[r].metrics["train_loss"], trial)
            assert_same(worker.state_dict(trial)["model"], snapshots[r].model, trial)


# Models.


class Frozen(Task):
    """The optimizer is handed frozen parameters too, as it often is."""

    def build_model(self, config: Config) -> nn.Module:
        model = super().build_model(config)
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(False)
        return model

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], eps=1e-3, weight_decay=0.5)


class FrozenAndLeftOut(Frozen):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=config["lr"], eps=1e-2)


class OptimizedInPart(Task):
    """A parameter that takes gradients, but that no optimizer holds."""

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        return torch.optim.SGD(model[2].parameters(), lr=config["lr"], momentum=0.9)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.mix(self.embedding(tokens).mean(1))))


class Tied(Task):
    def build_model(self, config: Config) -> nn.Module:
        return TiedModel()

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](model.parameters(), config)

    def data(self, samples: int, seed: int) -> TensorDataset:
        return reference.words(samples, seed=seed)


class UnusedModel(nn.Module):
    """`spare` never gets a gradient, `late` in some batches only: torch skips what has no grad."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, reference.CLASSES)
        self.spare = nn.Linear(6, 2)
        self.late = nn.Linear(6, reference.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.body(x)
        return logits + self.late(x) if len(x) < reference.BATCH else logits


class Unused(Task):
    def build_model(self, config: Config) -> nn.Module:
        return UnusedModel()

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](model.parameters(), config)


class BufferModel(nn.Module):
    """Buffers as people write them: changed in place, assigned anew, of integers, and not saved at all."""

    mean: Tensor
    steps: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, reference.CLASSES)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * (x + self.body.bias.detach().mean()).mean(0)
            self.steps += 1
            self.calls.add_(1)
        return self.body(x - self.mean) / (1 + self.calls)


class Buffers(Task):
    def build_model(self, config: Config) -> nn.Module:
        return BufferModel()


class ManyLayers(Task):
    """Layers that have rules of their own under vmap."""

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4, affine=False),
            nn.PReLU(4),
            nn.Conv2d(4, 4, 3, groups=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.GELU(),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
            nn.InstanceNorm2d(4, affine=True),
            nn.AvgPool2d(2),
            nn.ReLU(inplace=True),
            nn.Upsample(scale_factor=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(16),
            nn.Linear(16, reference.CLASSES),
        )

    def data(self, samples: int, seed: int) -> TensorDataset:
        return reference.vectors(samples, 1, 6, 6, seed=seed)


MODEL_CASES: dict[str, type[Task]] = {
    "frozen": Frozen,
    "frozen-and-left-out": FrozenAndLeftOut,
    "optimized-in-part": OptimizedInPart,
    "buffers": Buffers,
    "many-layers": ManyLayers,
}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_models(case: str) -> None:
    assert_one_array(assert_equal_to_alone(MODEL_CASES[case], LANES), TRIALS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", [Tied, Unused])
def test_tied_and_unused_parameters(task: type[Task], optimizer: str) -> None:
    case = type(task.__name__, (task,), {"optimizer_name": optimizer})
    assert_one_array(assert_equal_to_alone(case, LANES), TRIALS)


def test_attention_is_trained_without_a_word(messages: Callable[[], list[str]]) -> None:
    """torch would have the user file an issue with PyTorch, because of what the engine does underneath."""
    run_round(start(reference.compose("transformer", "adam", "constant"), LANES))
    assert messages() == []


def test_tied_parameters_stay_tied() -> None:
    worker = start(type("Tied", (Tied,), {"optimizer_name": "adam"}), LANES)
    run_round(worker)
    for trial in TRIALS:
        model = worker.state_dict(trial)["model"]
        assert torch.equal(model["decoder.weight"], model["embedding.weight"])


def test_lanes_of_different_widths_share_a_worker() -> None:
    class Width(Task):
        def build_model(self, config: Config) -> nn.Module:
            return nn.Sequential(nn.Linear(6, config["width"]), nn.ReLU(), nn.Linear(config["width"], 3))

    worker = assert_equal_to_alone(Width, lanes_with(width=[8, 5, 8, 5]))
    assert arrays(worker) == {frozenset({"ada", "cyd"}): "vmap", frozenset({"bob", "dee"}): "vmap"}


def test_lanes_of_different_activations_share_a_worker() -> None:
    """The shapes are equal, the models are not."""

    class Activation(Task):
        def build_model(self, config: Config) -> nn.Module:
            activation = nn.LeakyReLU(config["slope"]) if config["slope"] else nn.Tanh()
            return nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3))

    worker = assert_equal_to_alone(Activation, lanes_with(slope=[0.0, 0.1, 0.5, 0.1]))
    assert {"bob", "dee"} in [set(trials) for trials in arrays(worker)]


def test_lanes_of_different_closures_share_a_worker() -> None:
    """Functions that look alike may hold different values: lanes of them must not be taken for equal."""

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.body = nn.Linear(6, reference.CLASSES)
            self.scaled = lambda x: x * scale

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(self.body(x))

    class Closure(Task):
        def build_model(self, config: Config) -> nn.Module:
            return Scaled(config["scale"])

    assert_equal_to_alone(Closure, lanes_with(scale=[1.0, 2.0, 3.0]))


def test_forward_hooks_are_part_of_a_model() -> None:
    class Hooked(Task):
        def build_model(self, config: Config) -> nn.Module:
            model = super().build_model(config)
            scale = config["scale"]
            model.register_forward_hook(lambda module, args, output: output * scale)
            return model

    assert_equal_to_alone(Hooked, lanes_with(scale=[1.0, 2.0, 3.0]))


def test_trials_share_a_frozen_part() -> None:
    """Loaded once and kept, as people do with what is large: it is one object in all the lanes' models."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}

    class Shared(Task):
        def build_model(self, config: Config) -> nn.Module:
            return nn.Sequential(backbone, nn.Linear(8, reference.CLASSES))

    assert_equal_to_alone(Shared, LANES)
    assert_same(backbone.state_dict(), before, "backbone", rtol=0, atol=0)


def test_float64_models() -> None:
    class Double(Task):
        def build_model(self, config: Config) -> nn.Module:
            return super().build_model(config).double()

        def data(self, samples: int, seed: int) -> TensorDataset:
            x, y = super().data(samples, seed).tensors
            return TensorDataset(x.double(), y)

    worker = assert_equal_to_alone(Double, LANES)
    assert worker.state_dict("ada")["model"]["0.weight"].dtype == torch.float64


# Models that vmap cannot do.


class LstmModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, reference.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Lstm(Task):
    def build_model(self, config: Config) -> nn.Module:
        return LstmModel()

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)

    def data(self, samples: int, seed: int) -> TensorDataset:
        return reference.vectors(samples, 4, 3, seed=seed)


class BranchingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, reference.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if hidden.mean() > 0:
            hidden = 2 * hidden
        return self.head(hidden.relu())


class Branching(Task):
    def build_model(self, config: Config) -> nn.Module:
        return BranchingModel()


class CumulativeBatchNorm(Task):
    """momentum=None makes batch_norm read a number of batches, which vmap has not."""

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))


class WeightNorm(Task):
    def build_model(self, config: Config) -> nn.Module:
        hidden = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        return nn.Sequential(hidden, nn.ReLU(), nn.Linear(8, 3))


UNFUSIBLE: dict[str, tuple[type[Task], str]] = {
    "branch-on-a-tensor": (Branching, r"BranchingModel|hidden\.mean\(\) > 0|control flow"),
    "batch-norm-without-momentum": (CumulativeBatchNorm, "BatchNorm1d|momentum"),
}


@pytest.mark.parametrize("case", UNFUSIBLE)
def test_what_vmap_cannot_do_runs_lane_by_lane(case: str, messages: Callable[[], list[str]]) -> None:
    task, named = UNFUSIBLE[case]
    worker = assert_equal_to_alone(task, LANES)
    assert set(arrays(worker).values()) == {"lane by lane"}
    assert sorted(itertools.chain(*arrays(worker))) == TRIALS
    [told] = messages()
    assert re.search(named, told, re.IGNORECASE), told


def test_lanes_join_and_leave_lane_by_lane(messages: Callable[[], list[str]]) -> None:
    expected = alone(Branching, LANES)
    worker = start(Branching, LANES[:3], lanes=4)
    run_round(worker)
    add(worker, "dee", fused(Branching), LANES[3])
    results = run_round(worker)
    assert_lane(worker, "ada", results["ada"], expected[0][1], "at its leaving")
    worker.remove("ada")
    results = run_round(worker)
    assert_lane(worker, "bob", results["bob"], expected[1][2], "at the end")
    assert_lane(worker, "dee", results["dee"], expected[3][1], "at the end")


def test_an_lstm_is_fused(messages: Callable[[], list[str]]) -> None:
    worker = assert_equal_to_alone(Lstm, LANES)
    assert set(arrays(worker).values()) == {"vmap"} and len(arrays(worker)) == 1
    assert not messages()


@pytest.mark.usefixtures("messages")
def test_parametrized_modules() -> None:
    """Fused or not, they have to be right."""
    assert_equal_to_alone(WeightNorm, LANES)


def test_vmap_fails_in_evaluation_only(messages: Callable[[], list[str]]) -> None:
    class EvaluatesByBranch(Task):
        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            logits = model(batch[0])
            return {"sure": 1.0 if logits.softmax(-1).amax() > 0.6 else 0.0, "mean": logits.mean()}

    assert_equal_to_alone(EvaluatesByBranch, LANES)
    assert len(messages()) == 1


def test_vmap_fails_in_a_late_batch(messages: Callable[[], list[str]]) -> None:
    """The first batches fuse, the last one of a round does not: what they have trained must not be lost."""

    class LateBranch(reference.CNN):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            logits = model(x)
            if len(x) < reference.BATCH and logits.mean() > 0:
                logits = 2 * logits
            return F.cross_entropy(logits, y)

    assert_equal_to_alone(LateBranch, LANES)


# Dropout.


class DropoutTask(Task):
    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(config["p"]), nn.Linear(8, 3))


class MaskTask(Task):
    """Nothing but dropout on ones, so that the loss is a statistic of the masks."""

    samples, width = 64, 500

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Dropout(config["p"]), nn.Linear(self.width, 1))

    def data(self, samples: int, seed: int) -> TensorDataset:
        return TensorDataset(torch.ones(self.samples, self.width), torch.zeros(self.samples))

    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return {"mean": model[0](batch[0]).mean()}


class ZerosTask(MaskTask):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return (model[0](batch[0]) == 0).float().mean() + 0 * model[1].weight.sum()


class MeanTask(MaskTask):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return model[0](batch[0]).mean() + 0 * model[1].weight.sum()


class MaskedRampTask(MaskTask):
    """Its loss tells which entries were dropped, not only how many."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        kept = model[0](batch[0]) != 0
        ramp = torch.linspace(0, 1, kept.numel()).view_as(kept)
        return (kept * ramp).sum() + 0 * model[1].weight.sum()


RATES = [0.0, 0.3, 0.9, 1.0]


def test_dropout_of_rate_zero_is_no_dropout() -> None:
    configs = lanes_with(p=[0.0, 0.5, 0.9])
    [expected] = alone(DropoutTask, configs[:1])
    worker = start(DropoutTask, configs)
    for r in range(ROUNDS):
        results = run_round(worker)
        assert_lane(worker, "ada", results["ada"], expected[r], f"round {r + 1}")
    assert_one_array(worker, TRIALS[:3])


def test_dropout_rates_are_those_of_the_lanes() -> None:
    worker = start(ZerosTask, lanes_with(p=RATES))
    for _ in range(ROUNDS):
        results = run_round(worker)
        # 32,000 entries: the standard deviation of the share of zeros is below 0.003.
        for trial, p in zip(TRIALS, RATES, strict=True):
            assert abs(results[trial]["train_loss"] - p) < (0.02 if 0 < p < 1 else 1e-6)
    assert_one_array(worker, TRIALS)


def test_dropout_keeps_the_mean() -> None:
    results = run_round(start(MeanTask, lanes_with(p=RATES)))
    for trial, p in zip(TRIALS, RATES, strict=True):
        expected = 0.0 if p == 1 else 1.0
        assert abs(results[trial]["train_loss"] - expected) < (0.1 if 0 < p < 1 else 1e-6)


def test_dropout_masks_differ_between_lanes_and_steps() -> None:
    worker = start(MaskedRampTask, lanes_with(p=[0.5, 0.5, 0.5]))
    losses = [result["train_loss"] for _ in range(ROUNDS) for result in run_round(worker).values()]
    assert len(set(losses)) == len(losses)


def test_dropout_is_off_in_evaluation() -> None:
    worker = start(ZerosTask, lanes_with(p=RATES))
    for _ in range(2):
        assert [result["mean"] for result in run_round(worker).values()] == [1.0] * 4


def test_dropout_follows_a_lane_that_joins() -> None:
    worker = start(ZerosTask, lanes_with(p=[0.1, 0.9]), lanes=3)
    run_round(worker)
    add(worker, "cyd", fused(ZerosTask), {"seed": 3, "lr": 0.1, "p": 0.5})
    worker.remove("ada")
    results = run_round(worker)
    assert_one_array(worker, ["bob", "cyd"])
    assert abs(results["bob"]["train_loss"] - 0.9) < 0.02
    assert abs(results["cyd"]["train_loss"] - 0.5) < 0.02


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize(
    "layer",
    [nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout],
    ids=lambda layer: layer.__name__,
)
def test_other_dropouts_of_rate_zero(layer: Callable[[float], nn.Module]) -> None:
    class OtherDropout(Task):
        def build_model(self, config: Config) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), layer(config["p"]), nn.Linear(8, 3))

    configs = lanes_with(p=[0.0, 0.5])
    [expected] = alone(OtherDropout, configs[:1])
    worker = start(OtherDropout, configs)
    for r in range(ROUNDS):
        results = run_round(worker)
        assert_lane(worker, "ada", results["ada"], expected[r], f"round {r + 1}")


@pytest.mark.usefixtures("messages")
def test_functional_dropout_with_a_rate_of_the_config() -> None:
    class FunctionalDropout(Task):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            return F.cross_entropy(F.dropout(model(x), p=config["p"]), y)

    configs = lanes_with(p=[0.0, 0.5, 0.0])
    expected = alone(FunctionalDropout, configs)
    worker = start(FunctionalDropout, configs)
    for r in range(ROUNDS):
        results = run_round(worker)
        for lane in (0, 2):
            assert_lane(worker, TRIALS[lane], results[TRIALS[lane]], expected[lane][r], f"round {r + 1}")
        assert math.isfinite(results["bob"]["train_loss"])


# What the steps read from config.


class Smoothed(Task):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        log_p = F.log_softmax(model(x), -1)
        smoothing = config["smoothing"]
        return -(1 - smoothing) * log_p.gather(1, y[:, None]).mean() - smoothing * log_p.mean()


class SmoothedByNumber(Task):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=float(config["smoothing"]))


class SmoothedByTorch(Task):
    """The float goes to an argument that takes Python numbers only. Nobody would think of a cast."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=config["smoothing"])


class SmoothedByBranch(Task):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        if config["smoothing"] > 0.05:
            loss = loss - config["smoothing"] * F.log_softmax(model(x), -1).mean()
        return loss


SMOOTHED = lanes_with(smoothing=[0.0, 0.1, 0.2, 0.1])


def test_floats_in_a_step_are_those_of_the_lane() -> None:
    worker = assert_equal_to_alone(Smoothed, SMOOTHED)
    assert_one_array(worker, TRIALS)


@pytest.mark.parametrize("task", [SmoothedByNumber, SmoothedByTorch, SmoothedByBranch])
def test_floats_made_python_numbers_join_the_signature(task: type[Task], messages: Callable[[], list[str]]) -> None:
    worker = assert_equal_to_alone(task, SMOOTHED)
    assert all(len({SMOOTHED[TRIALS.index(t)]["smoothing"] for t in trials}) == 1 for trials in arrays(worker))
    assert {"bob", "dee"} in [set(trials) for trials in arrays(worker)]
    [told] = messages()
    assert "smoothing" in told


@pytest.mark.usefixtures("messages")
def test_a_joiner_brings_a_float_that_was_made_a_number() -> None:
    """All lanes had the same number when the step was first called; the one that comes later has not."""
    configs = lanes_with(smoothing=[0.1, 0.1, 0.3])
    expected = alone(SmoothedByNumber, configs)
    worker = start(SmoothedByNumber, configs[:2], lanes=3)
    run_round(worker)
    add(worker, "cyd", fused(SmoothedByNumber), configs[2])
    for r in range(2):
        results = run_round(worker)
        assert_lane(worker, "ada", results["ada"], expected[0][r + 1], f"round {r + 2}")
        assert_lane(worker, "bob", results["bob"], expected[1][r + 1], f"round {r + 2}")
        assert_lane(worker, "cyd", results["cyd"], expected[2][r], f"round {r + 2}")


def test_other_values_in_a_step_join_the_signature() -> None:
    class Norm(Task):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            logits = model(x)
            penalty = logits.abs().mean() if config["penalty"] == "l1" else logits.square().mean()
            return F.cross_entropy(logits, y) + config["repeat"] * penalty

    configs = lanes_with(penalty=["l1", "l2", "l1", "l2"], repeat=[1, 2, 1, 3])
    worker = assert_equal_to_alone(Norm, configs)
    assert {"ada", "cyd"} in [set(trials) for trials in arrays(worker)]


def test_floats_in_validation_are_those_of_the_lane() -> None:
    class Threshold(Task):
        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            probability = model(batch[0]).softmax(-1).amax(-1)
            return {"sure": (probability > config["threshold"]).float().mean(), "set": config["threshold"]}

    assert_one_array(assert_equal_to_alone(Threshold, lanes_with(threshold=[0.35, 0.4, 0.5])), TRIALS[:3])


def test_a_key_that_only_some_trials_have() -> None:
    class Optional(Task):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            loss = F.cross_entropy(model(x), y)
            penalty = config.get("penalty", 0.0)
            if "penalty" in config:
                loss = loss + penalty * model(x).square().mean()
            return loss

    configs = lanes_with(penalty=[0.5, 0.1, 0.1])
    del configs[1]["penalty"]
    assert_equal_to_alone(Optional, configs)


# Data.


def test_lanes_of_different_batch_sizes_share_a_worker() -> None:
    class BatchSize(Task):
        def train_dataloader(self, config: Config) -> Iterable[Any]:
            return DataLoader(self.data(40, 0), batch_size=config["batch"])

    worker = assert_equal_to_alone(BatchSize, lanes_with(batch=[8, 16, 8, 40]))
    assert frozenset({"ada", "cyd"}) in arrays(worker)


@pytest.mark.usefixtures("messages")
def test_a_loader_that_reads_the_whole_config() -> None:
    class Copying(Task):
        def train_dataloader(self, config: Config) -> Iterable[Any]:
            settings = dict(config)
            return DataLoader(self.data(40, 0), batch_size=settings["batch"])

    assert_equal_to_alone(Copying, lanes_with(batch=[8, 16, 8]))


def test_a_loader_that_shuffles_by_a_generator_of_its_own() -> None:
    class Shuffling(Task):
        def train_dataloader(self, config: Config) -> Iterable[Any]:
            generator = torch.Generator().manual_seed(7)
            return DataLoader(self.data(40, 0), batch_size=16, shuffle=True, generator=generator)

    assert_one_array(assert_equal_to_alone(Shuffling, LANES), TRIALS)


class DictBatches(Task):
    def train_dataloader(self, config: Config) -> Iterable[Any]:
        x, y = self.data(40, 0).tensors
        return [{"x": a, "y": b} for a, b in zip(x.split(16), y.split(16), strict=True)]

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])


class TensorBatches(Task):
    def train_dataloader(self, config: Config) -> Iterable[Any]:
        return DataLoader(self.data(40, 0).tensors[0], batch_size=16)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return (model(batch) - batch[:, :3]).square().mean()


class ChangesItsBatch(Task):
    """In place: a batch that lanes share has to reach each of them as the loader made it."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        x.mul_(2).sub_(1)
        return F.cross_entropy(model(x), y)


class ChangesItsBatchByItsConfig(Task):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        x.mul_(1 + 10 * config["lr"])
        return F.cross_entropy(model(x), y)


class BranchingChangesItsBatch(Branching):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        x.mul_(2).sub_(1)
        return F.cross_entropy(model(x), y)


class BranchesAndChangesItsBatch(ChangesItsBatch):
    """What the attempt under vmap did to the batch, before it failed, must be undone."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return 2 * loss if loss > 1 else loss


class SmoothesAndChangesItsBatch(Task):
    """The same for the attempts that find out which float has to be a Python number."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        x.mul_(2).sub_(1)
        return F.cross_entropy(model(x), y, label_smoothing=float(config["gamma"]))


BATCH_CASES = [
    DictBatches,
    TensorBatches,
    ChangesItsBatch,
    ChangesItsBatchByItsConfig,
    BranchingChangesItsBatch,
    BranchesAndChangesItsBatch,
    SmoothesAndChangesItsBatch,
]


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("task", BATCH_CASES, ids=lambda task: task.__name__)
def test_batches(task: type[Task]) -> None:
    assert_equal_to_alone(task, LANES)


def test_a_task_without_validation() -> None:
    class Bare:
        build_model = Task.build_model
        build_optimizer = Task.build_optimizer
        train_dataloader = Task.train_dataloader
        training_step = Task.training_step
        data = Task.data

    worker = assert_equal_to_alone(Bare, LANES)  # type: ignore[arg-type]
    assert_one_array(worker, TRIALS)
    assert "val_loss" not in run_round(worker)["ada"]


def test_evaluate_gets_the_plain_model_of_its_lane() -> None:
    class Evaluated(Task):
        def evaluate(self, model: nn.Module, config: Config) -> dict[str, float]:
            assert type(model) is nn.Sequential and not model.training
            size = sum(float(p.detach().abs().sum()) for p in model.parameters())
            return {"size": size, "from_config": config["lr"]}

    assert_one_array(assert_equal_to_alone(Evaluated, LANES), TRIALS)


def test_a_plateau_watches_what_evaluate_returns() -> None:
    class Watching(Task):
        lr_scheduler_monitor = "size"

        def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=config["gamma"], patience=0, threshold=0.5)

        def evaluate(self, model: nn.Module, config: Config) -> dict[str, float]:
            return {"size": sum(float(p.detach().abs().sum()) for p in model.parameters())}

    assert_one_array(assert_equal_to_alone(Watching, LANES), TRIALS)


# Lanes are isolated.


def assert_others_undisturbed(
    worker: Worker, expected: Sequence[Sequence[Snapshot]], odd: int, rounds: int = ROUNDS
) -> list[Any]:
    """Runs rounds, compares all lanes but the odd one, and returns what the odd one reported."""
    reports = []
    for r in range(rounds):
        results = worker.run_round()
        reports.append(results.get(TRIALS[odd]))
        for lane, snapshots in enumerate(expected):
            if lane != odd:
                result = results[TRIALS[lane]]
                assert not isinstance(result, Exception), result
                assert_lane(worker, TRIALS[lane], result, snapshots[r], f"round {r + 1}")
    return reports


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "custom"])
def test_a_lane_that_diverges(model: str, optimizer: str) -> None:
    task = reference.compose(model, optimizer, "constant")
    configs = [*LANES[:2], LANES[2] | {"lr": 1e30}, LANES[3]]
    expected = [alone_in_table(model, optimizer, "constant", lane) for lane in range(4)]
    reports = assert_others_undisturbed(start(task, configs), expected, odd=2)
    assert not math.isfinite(reports[-1]["train_loss"])


@pytest.mark.usefixtures("messages")
def test_a_lane_that_diverges_lane_by_lane() -> None:
    configs = [LANES[0], LANES[1] | {"lr": math.inf}, LANES[2]]
    reports = assert_others_undisturbed(start(Branching, configs), alone(Branching, configs), odd=1)
    assert not math.isfinite(reports[-1]["train_loss"])


def test_a_lane_whose_schedule_runs_out() -> None:
    """OneCycleLR raises when it is stepped more often than it was told: here in the second round."""

    class RunsOut(Task):
        lr_scheduler_interval = "step"

        def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
            return lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=config["steps"], cycle_momentum=False)

    configs = lanes_with(steps=[20, 3, 20])
    expected = alone(RunsOut, [configs[0], configs[1] | {"steps": 20}, configs[2]])
    worker = start(RunsOut, configs)
    reports = assert_others_undisturbed(worker, expected, odd=1)
    assert isinstance(reports[1], ValueError) and "Tried to step" in str(reports[1])
    assert reports[2] is None
    assert worker.free_lanes == 1


class Refusing(reference.DampedMomentum):
    """Raises at the end of its fourth step where its learning rate is high."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.param_groups[0]["lr"] > 1 and next(iter(self.state.values()))["count"] == 4:
            raise ArithmeticError("the fourth step")


def test_a_lane_whose_optimizer_raises() -> None:
    task = optimizing(lambda params, c: Refusing(params, c["lr"]))
    configs = lanes_with(lr=[0.1, 2.0, 0.2])
    expected = alone(task, [configs[0], configs[1] | {"lr": 0.1}, configs[2]])
    worker = start(task, configs)
    reports = assert_others_undisturbed(worker, expected, odd=1)
    assert isinstance(reports[1], ArithmeticError)
    assert worker.free_lanes == 1


@pytest.mark.usefixtures("messages")
def test_a_lane_that_raises_in_the_middle_of_a_round() -> None:
    class Poisoned(reference.CNN):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            loss = super().training_step(model, batch, config)
            if config["poison"] and int(model[1].num_batches_tracked) == 3:
                raise ArithmeticError("the third batch")
            return loss

    configs = lanes_with(poison=[False, True, False])
    expected = alone(Poisoned, [configs[0], configs[1] | {"poison": False}, configs[2]])
    worker = start(Poisoned, configs)
    reports = assert_others_undisturbed(worker, expected, odd=1)
    assert reports[0]["train_loss"] == pytest.approx(expected[1][0].metrics["train_loss"], rel=1e-4)
    assert isinstance(reports[1], ArithmeticError) and reports[2] is None
    assert worker.free_lanes == 1


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_lane_that_raises_by_what_it_computes(where: str) -> None:
    """All lanes run the same code in one array, and one of them does not come through it."""

    class Careful(Task):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            loss = super().training_step(model, batch, config)
            if where == "training" and loss > 10:
                raise ArithmeticError("too large")
            return loss

        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            metrics = super().validation_step(model, batch, config)
            if where == "validation" and metrics["val_loss"] > 10:
                raise ArithmeticError("too large")
            return metrics

    configs = lanes_with(lr=[0.1, 1e4, 0.2])
    expected = alone(Careful, [configs[0], configs[1] | {"lr": 0.1}, configs[2]])
    worker = start(Careful, configs)
    reports = assert_others_undisturbed(worker, expected, odd=1)
    assert isinstance(reports[0], ArithmeticError) and reports[1:] == [None, None]
    assert worker.free_lanes == 1


def test_a_lane_whose_evaluate_raises() -> None:
    class Evaluated(Task):
        def evaluate(self, model: nn.Module, config: Config) -> dict[str, float]:
            if config["poison"]:
                raise ArithmeticError("cannot evaluate")
            return {"one": 1.0}

    configs = lanes_with(poison=[False, True, False])
    expected = alone(Evaluated, [configs[0], configs[1] | {"poison": False}, configs[2]])
    reports = assert_others_undisturbed(start(Evaluated, configs), expected, odd=1)
    assert isinstance(reports[0], ArithmeticError) and reports[1:] == [None, None]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_lane_is_replaced_between_two_rounds(optimizer: str) -> None:
    task = reference.compose("cnn", optimizer, "step")
    expected = [alone_in_table("cnn", optimizer, "step", lane) for lane in range(4)]
    worker = start(task, LANES[:3])
    run_round(worker)
    worker.remove("bob")
    assert worker.free_lanes == 1
    add(worker, "dee", fused(task), LANES[3])
    assert worker.free_lanes == 0
    for r in range(2):
        results = run_round(worker)
        assert_one_array(worker, ["ada", "cyd", "dee"])
        assert_lane(worker, "ada", results["ada"], expected[0][r + 1], f"round {r + 2}")
        assert_lane(worker, "cyd", results["cyd"], expected[2][r + 1], f"round {r + 2}")
        assert_lane(worker, "dee", results["dee"], expected[3][r], f"round {r + 2}")


def test_all_lanes_are_replaced() -> None:
    task = reference.compose("mlp", "adam", "cosine")
    expected = [alone_in_table("mlp", "adam", "cosine", lane) for lane in range(4)]
    worker = start(task, LANES[:2])
    run_round(worker)
    worker.remove("ada")
    worker.remove("bob")
    add(worker, "cyd", fused(task), LANES[2])
    add(worker, "dee", fused(task), LANES[3])
    for r in range(2):
        results = run_round(worker)
        assert_lane(worker, "cyd", results["cyd"], expected[2][r], f"round {r + 1}")
        assert_lane(worker, "dee", results["dee"], expected[3][r], f"round {r + 1}")


@pytest.mark.parametrize("optimizer", ["adam", "custom"])
def test_rounds_of_some_trials_leave_the_others_where_they_are(optimizer: str) -> None:
    task = reference.compose("cnn", optimizer, "onecycle")
    expected = [alone_in_table("cnn", optimizer, "onecycle", lane) for lane in range(4)]
    worker = start(task, LANES)
    run_round(worker)
    results = worker.run_round(["bob", "dee"])
    assert sorted(results) == ["bob", "dee"]
    for lane, r in ((0, 0), (1, 1), (2, 0), (3, 1)):
        assert_like(worker.state_dict(TRIALS[lane]), expected[lane][r], TRIALS[lane])
    results = run_round(worker)
    for lane, r in ((0, 1), (1, 2), (2, 1), (3, 2)):
        assert_lane(worker, TRIALS[lane], results[TRIALS[lane]], expected[lane][r], "at the end")


def test_one_lane_is_a_run_of_its_own() -> None:
    for lane, config in enumerate(LANES):
        expected = alone_in_table("cnn", "adamw", "onecycle", lane)
        worker = start(reference.compose("cnn", "adamw", "onecycle"), [config])
        for r in range(ROUNDS):
            assert_lane(worker, "ada", run_round(worker)["ada"], expected[r], f"round {r + 1}")


def test_the_seed_is_the_config_s_or_else_the_class_s() -> None:
    class Seeded(Task):
        seed = 5

    configs: list[Config] = [{"lr": 0.1}, {"lr": 0.1, "seed": 5}, {"lr": 0.1, "seed": 6}]
    worker = assert_equal_to_alone(Seeded, configs, rounds=1)
    first, second, third = (worker.state_dict(trial)["model"]["0.weight"] for trial in TRIALS[:3])
    assert torch.equal(first, second) and not torch.equal(first, third)


# `self` in the steps.


class Scaling(Task):
    def build_model(self, config: Config) -> nn.Module:
        self.scale = config["scale"]
        return super().build_model(config)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return self.scale * super().training_step(model, batch, config)


def test_attributes_of_self_that_are_equal_may_be_read() -> None:
    assert_one_array(assert_equal_to_alone(Scaling, lanes_with(scale=[2.0, 2.0, 2.0])), TRIALS[:3])
