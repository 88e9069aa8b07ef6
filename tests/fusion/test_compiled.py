"""The compiled step against plain PyTorch, while lanes come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import DampedMomentum
from torch import nn
from trainables import Points

from hfta_tune import FusedTrainable, Worker
from hfta_tune.fusion import COMPILED
from hfta_tune.fusion.compiled import CompiledStep

pytestmark = pytest.mark.slow


class Normed(Points):
    """Batch norm, dropout that drops nothing, and AdamW."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        # A bias before batch norm has no gradient but rounding, which Adam would magnify.
        first = nn.Linear(8, 16, bias=False)
        return nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.1, amsgrad=True)


class Convolved(Points):
    """Operations whose batching rules hold, recorded, for one number of lanes."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        head = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
        norm = nn.GroupNorm(2, 4)
        return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), norm, nn.ReLU(), head)


class Viewed(Points):
    """An optimizer of the user's own on views, with a step that reads a float."""

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return DampedMomentum(model.parameters(), lr=config["lr"], momentum=0.5)

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> torch.Tensor:
        return super().training_step(model, batch, config) * (1 + config["lr"])


class Momentum(Points):
    """SGD with Nesterov momentum on a schedule by step."""

    lr_scheduler_interval = "step"

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, nesterov=True)

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config["lr"], total_steps=40)


class Annealed(Points):
    """A step that reads an attribute of self, which changes from round to round."""

    temperature = 1.0

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        self.temperature = 1.0
        return super().build_model(config)

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> torch.Tensor:
        return super().training_step(model, batch, config) * self.temperature

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        self.temperature = 0.5 if self.temperature == 1.0 else 1.0
        return {}


class Counting(Points):
    """A step that counts its calls, and weighs the loss by the count."""

    calls = 0

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        return super().training_step(model, batch, config) / self.calls


@pytest.mark.parametrize(
    ("kind", "block"), [(Normed, None), (Convolved, None), (Viewed, None), (Momentum, None), (Normed, 2)]
)
def test_compiled_lanes_train_as_alone(
    kind: type[FusedTrainable],
    block: int | None,
    always_compiles: None,
    steps_of_tensors: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All lanes at once, and in blocks."""
    bind = CompiledStep.bind
    monkeypatch.setattr(CompiledStep, "bind", lambda self, tensors, _=None: bind(self, tensors, block))
    assert_as_alone_while_lanes_come_and_go(kind, COMPILED, steps_of_tensors)


def assert_as_alone_while_lanes_come_and_go(kind: type[FusedTrainable], strategy: str, steps: list[int]) -> None:
    """Trains lanes of which some leave and others join, and each alone.

    Args:
        kind: What they train.
        strategy: The one that is to train the last rounds.
        steps: The number of lanes of each step that it has trained.
    """
    worker = Worker(6, device="cpu")
    alone = {}

    def join(name: str, lr: float) -> None:
        config = {"lr": lr, "seed": ord(name)}
        worker.add(name, kind._outside_tune(config), config)
        alone[name] = Worker(1, device="cpu")
        alone[name].add(name, kind._outside_tune(config), config)

    for number, name in enumerate("abcd"):
        join(name, 0.003 * (number + 1))
    strategies = []
    for round_ in range(7):
        if round_ == 4:
            worker.remove("b")
            del alone["b"]
        if round_ == 5:
            join("e", 0.01)
            join("f", 0.02)
        results = worker.run_round(rounds_left=1e9)
        strategies += [array["strategy"] for array in worker.describe()["arrays"]]
        for name, own in alone.items():
            expected = own.run_round()[name]
            assert isinstance(expected, dict)
            assert results[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), (round_, name)
    assert strategies[-3:] == [strategy] * 3
    assert set(steps) == {3, 4, 5}
    for name, own in alone.items():
        expected, got = own.state_dict(name), worker.state_dict(name)
        torch.testing.assert_close(got["model"], expected["model"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["optimizer"], expected["optimizer"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lanes", [8, 3, 16])
def test_lanes_as_many_as_something_else(lanes: int) -> None:
    """The number of lanes at compilation is that of features; afterwards there are others."""

    def step(tensors: dict[str, Any]) -> dict[str, Any]:
        weight, x = tensors["weight"], tensors["batch"]
        out = torch.func.vmap(lambda own: ((x @ own).relu() @ own).softmax(-1).mean(0) * own.sum(0))(weight)
        return {"out": out, "total": weight.transpose(1, 2).flatten(1).sum(1)}

    def example(lanes: int) -> dict[str, Any]:
        return {"weight": torch.randn(lanes, 8, 8), "batch": torch.randn(16, 8)}

    compiled = CompiledStep(step, example(lanes))
    for other in (lanes, 8, 5, 16):
        given = example(other)
        torch.testing.assert_close(compiled.bind(given)(given["batch"]), step(given))
        torch.testing.assert_close(compiled.bind(given, 3)(given["batch"]), step(given))


def test_compiled_steps_follow_attributes_of_self(always_compiles: None, steps_of_tensors: list[int]) -> None:
    compare_with_alone(Annealed, rounds=6)
    assert steps_of_tensors


def test_a_step_that_changes_self_is_not_compiled(always_compiles: None, steps_of_tensors: list[int]) -> None:
    compare_with_alone(Counting, rounds=5)
    assert not steps_of_tensors


def compare_with_alone(kind: type[FusedTrainable], rounds: int) -> None:
    together, alone = Worker(3, device="cpu"), [Worker(1, device="cpu") for _ in range(3)]
    for number, own in enumerate(alone):
        config = {"lr": 0.003 * (number + 1), "seed": number}
        for worker in (together, own):
            worker.add(str(number), kind._outside_tune(config), config)
    for _ in range(rounds):
        results = together.run_round(rounds_left=1e9)
        for number, own in enumerate(alone):
            assert results[str(number)] == pytest.approx(own.run_round()[str(number)], rel=1e-4, abs=1e-5)
