"""What happens to one lane is nothing to the others: one diverges, one raises, one leaves, one joins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fusion.breadth import fused
from reference import CNN, STEPS_A_ROUND, Config, Run, assert_same
from torch import nn
from torch.optim import lr_scheduler

from hfta_tune import FusedTrainable, Worker

ROUNDS = 5
FAILS_IN = 3
LANES: dict[str, Config] = {
    "stays": dict(seed=1, lr=0.02, gradient_clip_val=0.5),
    "diverges": dict(seed=2, lr=1e30, gradient_clip_val=1e30),
    "raises": dict(seed=3, lr=0.01, gradient_clip_val=1.0, fails=True),
    "leaves": dict(seed=4, lr=0.03, gradient_clip_val=0.1),
    "joins": dict(seed=5, lr=0.005, gradient_clip_val=2.0),
}


class OwnFault(Exception):
    """What the hook of one trial raises."""


class Common(CNN):
    """Batch norm, Adam, a schedule and clipping: whatever could leak from a lane has a place to go."""

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.9)


class InEvaluate(Common):
    def evaluate(self, model: Any, config: Config) -> dict[str, float]:
        if config.get("fails") and int(model[1].num_batches_tracked) == FAILS_IN * STEPS_A_ROUND:
            raise OwnFault
        return {"size": float(model[0].weight.detach().abs().mean())}


class InTheScheduler(Common):
    lr_scheduler_interval = "step"

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        def factor(steps: int) -> float:
            if config.get("fails") and steps == FAILS_IN * STEPS_A_ROUND - 1:
                raise OwnFault
            return 1 / (1 + steps)

        return lr_scheduler.LambdaLR(optimizer, factor)


class Lazy(torch.optim.SGD):
    """Builds its state when it is first needed, which fails in one trial."""

    def __init__(self, params: Any, lr: float, steps: int) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.param_groups[0]["steps"] = steps

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["steps"] -= 1
        if self.param_groups[0]["steps"] == 0:
            raise OwnFault
        super().step()


class InTheOptimizer(Common):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        steps = FAILS_IN * STEPS_A_ROUND - 1 if config.get("fails") else 1000
        return Lazy(model.parameters(), config["lr"], steps)


class Alone(Run):
    """The plain loop, with clipping."""

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config["gradient_clip_val"])


def add(worker: Worker, kind: type[FusedTrainable], trial: str) -> None:
    worker.add(trial, kind._outside_tune(LANES[trial]), LANES[trial])


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane", "auto"])
@pytest.mark.parametrize("kind", [InEvaluate, InTheScheduler, InTheOptimizer])
def test_each_trial_comes_to_what_it_comes_to_alone(kind: type[Common], strategy: str) -> None:
    worker = Worker(5, device="cpu", strategy=strategy)
    runs = {trial: Alone(kind(), config) for trial, config in LANES.items()}
    here = ["stays", "diverges", "raises", "leaves"]
    for trial in here:
        add(worker, fused(kind), trial)
    for round_ in range(1, ROUNDS + 1):
        if round_ == 2:
            add(worker, fused(kind), "joins")
            here.append("joins")
        results = worker.run_round()
        assert list(results) == here
        if round_ < FAILS_IN:
            assert [len(array["trials"]) for array in worker.describe()["arrays"]] == [len(here)]
        if round_ == FAILS_IN:
            assert type(results["raises"]) is OwnFault
            here.remove("raises")
        for trial in here:
            result = results[trial]
            assert not isinstance(result, Exception), result
            if trial == "diverges":
                continue
            metrics, state = runs[trial].run_round(), worker.state_dict(trial)
            where = f"{trial} round {round_}"
            assert_same({name: result[name] for name in metrics}, metrics, where)
            for part in ("model", "optimizer", "lr_scheduler"):
                assert_same(state[part], getattr(runs[trial], part).state_dict(), where)
        if round_ == 2:
            worker.remove("leaves")
            here.remove("leaves")
    assert not math.isfinite(results["diverges"]["train_loss"])
    assert here == ["stays", "diverges", "joins"] and worker.free_lanes == 2
