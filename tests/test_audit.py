"""The audit: silent about what is right; what is wrong is found, said, and trained lane by lane."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch
from fusion.breadth import fused, run_round
from reference import CNN, TRAIN_SAMPLES, DampedMomentum, Run, Task, assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import hfta_tune
from hfta_tune import Worker
from hfta_tune.fusion import COMPILED, LANE_BY_LANE, VMAP
from hfta_tune.fusion import array as array_module
from hfta_tune.fusion.compiled import BoundStep
from hfta_tune.fusion.kernels import _mode
from hfta_tune.fusion.optimizers import FusedAdam, FusedSGD

Config = dict[str, Any]

TRIALS = ["ada", "bob", "cyd"]
LANES: list[Config] = [dict(seed=number, lr=0.01 * number) for number in (1, 2, 3)]


class MLP(Task):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)


class Scheduled(MLP):
    lr_scheduler_interval = "step"

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=20)


class Views(Task):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return DampedMomentum(model.parameters(), lr=config["lr"])


class Limited(torch.optim.Optimizer):
    """An optimizer with an attribute of its own, which copying an optimizer loses."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, dict(lr=lr))
        self.limits = {id(p): 0.1 for group in self.param_groups for p in group["params"]}
        self.limit = 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.clamp(-self.limit, self.limit), alpha=group["lr"])


class Attributed(Task):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return Limited(model.parameters(), lr=config["lr"])


class Accumulating(MLP):
    accumulate_grad_batches = 2
    gradient_clip_val = 0.1


class Lower(CNN):
    precision = "bf16"


class Branching(MLP):
    """It trains lane by lane, and there is nothing to audit."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return 2 * loss if loss > 1 else loss


class ByKey(MLP):
    """Its lanes turn out to differ while they are audited."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return 2 * loss if config["seed"] == 2 else loss


class ChangesItsBatch(MLP):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        batch[0].mul_(2)
        return super().training_step(model, batch, config)


class Dropping(MLP):
    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


class Reading(MLP):
    """A layer that drops within, over sequences."""

    def layer(self) -> nn.Module:
        raise NotImplementedError

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), self.layer(), nn.Flatten(), nn.Linear(24, 3))


class Attention(Reading):
    def layer(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True)


class First(nn.Module):
    """The outputs of a recurrent layer without its states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


class Recurrent(Reading):
    def layer(self) -> nn.Module:
        return First()


class Several(Task):
    """An optimizer for the body and one for the head."""

    def build_optimizer(self, model: Any, config: Config) -> Any:
        return {
            "body": torch.optim.SGD(model[0].parameters(), lr=config["lr"]),
            "head": torch.optim.AdamW(model[2].parameters(), lr=config["lr"]),
        }

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return {"head": loss, "body": loss**2}


def start(kind: type[Task], *, audit: bool = True, strategy: str | None = None) -> Worker:
    worker = Worker(3, device="cpu", audit=audit, strategy=strategy)
    for trial, config in zip(TRIALS, LANES, strict=True):
        worker.add(trial, fused(kind)._outside_tune(config), config)
    return worker


def strategies(worker: Worker) -> set[str]:
    return {array["strategy"] for array in worker.describe()["arrays"]}


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The audits that came to a result."""
    done: list[str] = []
    for name in ("audit_vmap", "audit_of_tensors"):
        real = getattr(array_module, name)

        def audit(*arguments: Any, real: Any = real, name: str = name) -> Any:
            result = real(*arguments)
            done.append(name)
            return result

        monkeypatch.setattr(array_module, name, audit)
    return done


RIGHT = [
    MLP,
    Scheduled,
    CNN,
    Views,
    Attributed,
    Accumulating,
    Lower,
    ChangesItsBatch,
    Dropping,
    Attention,
    Recurrent,
    Several,
]


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_trains_as_without_an_audit(
    kind: type[Task], audits: list[str], said: Callable[[], list[str]]
) -> None:
    audited, other = start(kind), start(kind, audit=False)
    for _ in range(2):
        assert run_round(audited) == run_round(other)
    for trial in TRIALS:
        # Not even rounding, nor the draws of a dropout.
        assert_same(audited.state_dict(trial), other.state_dict(trial), rtol=0, atol=0)
    assert audits == ["audit_vmap"]
    assert strategies(audited) == {VMAP} and not said()


STOCK = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
    "Adafactor",
]


@pytest.mark.parametrize("name", STOCK)
def test_no_optimizer_raises_a_false_alarm(name: str, audits: list[str], said: Callable[[], list[str]]) -> None:
    """With its defaults, and gradients that are rounding only: those of a bias before batch norm."""

    class Stock(Task):
        def build_model(self, config: Config) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

        def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
            build = getattr(torch.optim, name)
            return build(model.parameters(), lr=0.1 * config["lr"])  # type: ignore[no-any-return]

    worker = start(Stock)
    run_round(worker)
    assert audits == ["audit_vmap"] and not said()


@pytest.mark.parametrize("kind", [Branching, ByKey])
def test_what_cannot_be_fused_is_not_audited(kind: type[Task], said: Callable[[], list[str]]) -> None:
    worker = start(kind)
    assert_as_alone(worker, kind)
    assert not [message for message in said() if "audit" in message]


def test_lane_by_lane_there_is_nothing_to_audit(audits: list[str]) -> None:
    assert_as_alone(start(MLP, strategy=LANE_BY_LANE), MLP)
    assert not audits


class Accumulated(Run):
    """The plain loop for `Accumulating`."""

    def _train(self) -> float:
        total = 0.0
        for x, y in self.train_loader:  # of two batches
            loss = self.task.training_step(self.model, (x, y), self.config)
            (loss / 2).backward()
            total += float(loss.detach()) * len(x)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.gradient_clip_val)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / TRAIN_SAMPLES


def assert_as_alone(worker: Worker, kind: type[Task], rounds: int = 2, run: type[Run] = Run, **arguments: Any) -> None:
    runs = [run(kind(), config) for config in LANES]
    for _ in range(rounds):
        results = run_round(worker, **arguments)
        for trial, own in zip(TRIALS, runs, strict=True):
            metrics = own.run_round()
            assert_same({name: results[trial][name] for name in metrics}, metrics, trial)
            assert_same(worker.state_dict(trial)["model"], own.model.state_dict(), trial)


# What is wrong: in the forward pass, in the backward pass, in a buffer, in an optimizer.


class Steeper(torch.autograd.Function):
    """The identity, with a gradient that is 1% too large."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.01 * gradient


def wrong_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(input, 1.01 * weight, bias)

    monkeypatch.setitem(_mode._KERNELS, torch._C._nn.linear, linear)


def wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return F.linear(input, Steeper.apply(weight) if weight.shape[-1] == 8 else weight, bias)

    monkeypatch.setitem(_mode._KERNELS, torch._C._nn.linear, linear)


def wrong_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _mode._KERNELS[F.batch_norm]

    def slower(*arguments: Any, **options: Any) -> Any:
        # F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if "momentum" in options:
            options["momentum"] *= 0.9
        else:
            arguments = (*arguments[:6], 0.9 * arguments[6], *arguments[7:])
        return real(*arguments, **options)

    monkeypatch.setitem(_mode._KERNELS, F.batch_norm, slower)


def wrong_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last lane only."""
    real = FusedAdam._apply.__func__  # type: ignore[attr-defined]

    def apply(cls: Any, parameters: list[Tensor], gradients: list[Tensor], update: Any) -> None:
        real(cls, parameters, gradients, update)
        parameters[2][-1] += 0.001

    monkeypatch.setattr(FusedAdam, "_apply", classmethod(apply))


WRONG = [
    (MLP, wrong_forward, "ada: the loss"),
    (MLP, wrong_backward, "ada: the gradient of '2.weight'"),
    (Dropping, wrong_backward, "ada: the gradient of '3.weight'"),
    (CNN, wrong_statistics, "ada: the buffer '1.running_mean'"),
    (MLP, wrong_optimizer, "cyd: the update of the parameter '2.weight'"),
    (Accumulating, wrong_optimizer, "cyd: the update of the parameter '2.weight'"),
]


@pytest.mark.parametrize(("kind", "break_it", "where"), WRONG)
def test_what_is_wrong_is_found(
    kind: type[Task],
    break_it: Callable[[pytest.MonkeyPatch], None],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
) -> None:
    break_it(monkeypatch)
    worker = start(kind)
    if kind is Dropping:  # which no two runs of are equal
        run_round(worker)
    else:
        assert_as_alone(worker, kind, run=Accumulated if kind is Accumulating else Run)
    assert strategies(worker) == {LANE_BY_LANE}
    (message,) = said()
    assert message.startswith(f"audit of Fused{kind.__name__}: trial {where} differs by up to ")
    assert "where plain PyTorch has " in message and message.endswith("; its array goes on lane by lane.")


@pytest.mark.parametrize("break_it", [wrong_forward, wrong_backward, wrong_optimizer])
def test_without_an_audit_it_would_go_unnoticed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Else the tests above would prove nothing."""
    break_it(monkeypatch)
    worker = start(MLP, audit=False)
    with pytest.raises(AssertionError):
        assert_as_alone(worker, MLP)
    assert not said()


@pytest.mark.parametrize("options", [{"kind": Branching}, {"kind": MLP, "strategy": LANE_BY_LANE}])
@pytest.mark.usefixtures("said")
def test_what_is_not_audited_is_plain_pytorch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where forward and backward pass are not fused, fused optimizers are not either."""
    wrong_optimizer(monkeypatch)
    assert_as_alone(start(**options), options["kind"])


def test_one_of_several_optimizers_is_wrong(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    real = FusedSGD._apply.__func__  # type: ignore[attr-defined]

    def apply(cls: Any, parameters: list[Tensor], gradients: list[Tensor], update: Any) -> None:
        real(cls, parameters, [1.1 * gradient for gradient in gradients], update)

    monkeypatch.setattr(FusedSGD, "_apply", classmethod(apply))
    worker = start(Several)
    run_round(worker)
    (message,) = said()
    assert "trial ada: the update of the parameter '0.weight' differs" in message
    assert strategies(worker) == {LANE_BY_LANE}


# What cannot be audited


class Drawing(MLP):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch
        return F.cross_entropy(model(F.dropout(x, 0.5)), y)


def test_a_step_that_draws_cannot_be_audited(said: Callable[[], list[str]]) -> None:
    worker = start(Drawing)
    run_round(worker)
    (message,) = said()
    assert message == (
        "audit of FusedDrawing: the step draws random numbers besides its Dropout modules', so it could not be audited."
    )
    assert strategies(worker) == {VMAP}


class Locked(torch.optim.SGD):
    """An optimizer that nobody can copy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["lock"] = threading.Lock()


class Uncopyable(Task):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return Locked(model.parameters(), lr=config["lr"])


def test_an_optimizer_that_cannot_be_copied_cannot_be_audited(said: Callable[[], list[str]]) -> None:
    worker = start(Uncopyable)
    run_round(worker)
    (message,) = said()
    assert message.startswith("audit of FusedUncopyable: ") and message.endswith("so it could not be audited.")
    assert "TypeError" in message
    assert strategies(worker) == {VMAP}


# Compiled steps


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_compiled_step(
    wrong: bool,
    always_compiles: None,
    steps_of_tensors: list[int],
    audits: list[str],
    said: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Even(MLP):
        """Batches of one size."""

        def train_dataloader(self, config: Config) -> Any:
            x, y = self.data(48, seed=0).tensors
            return list(zip(x.split(8), y.split(8), strict=True))

    if wrong:
        real = BoundStep.__call__

        def call(self: BoundStep, batch: Any) -> Any:
            result = real(self, batch)
            self._blocks[0][2][1] *= 1.01  # the second lane's weights of the last layer
            return result

        monkeypatch.setattr(BoundStep, "__call__", call)
    worker = start(Even)
    assert_as_alone(worker, Even, rounds=4, rounds_left=1e9)
    assert audits == ["audit_vmap", "audit_of_tensors"]
    if wrong:
        (message,) = said()
        assert "trial bob: the update of the parameter '2.weight' differs by up to" in message
        assert strategies(worker) == {LANE_BY_LANE}
        assert steps_of_tensors == [3]  # on copies
    else:
        assert not said()
        assert strategies(worker) == {COMPILED}
        assert len(steps_of_tensors) > 6


# Front ends


def test_optimize_audits(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    values = []
    for break_it, audit in ((False, False), (True, True)):
        if break_it:
            wrong_forward(monkeypatch)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        hfta_tune.optimize(
            study,
            fused(MLP),
            lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "seed": trial.number},
            n_trials=4,
            epochs=2,
            metric="val_loss",
            B=2,
            device="cpu",
            audit=audit,
        )
        values.append([trial.value for trial in study.trials])
    assert values[1] == pytest.approx(values[0], rel=1e-4)
    assert {message.split(" differs")[0] for message in said()} <= {
        f"audit of FusedMLP: trial {number}: the loss" for number in range(4)
    }
    assert said()
