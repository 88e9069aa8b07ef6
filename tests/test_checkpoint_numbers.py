"""Restoring with another config: its numbers hold from then on, and the schedule goes on in proportion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from trainables import Points

from hfta_tune import Worker


class Scheduled(Points):
    """SGD with momentum on a schedule that the config names."""

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        schedulers = torch.optim.lr_scheduler
        return {
            "none": lambda: None,
            "step": lambda: schedulers.StepLR(optimizer, step_size=2, gamma=0.5),
            "chained": lambda: schedulers.SequentialLR(
                optimizer,
                [schedulers.ConstantLR(optimizer, 0.1, 2), schedulers.ExponentialLR(optimizer, 0.9)],
                milestones=[2],
            ),
        }[config["schedule"]]()


def learning_rates(state: dict[str, Any], config: dict[str, Any], rounds: int) -> list[float]:
    worker = Worker(1, device="cpu")
    worker.add("a", Scheduled._outside_tune(config), config)
    worker.load_state_dict("a", state)
    seen = []
    for _ in range(rounds):
        seen.append(worker.state_dict("a")["optimizer"]["param_groups"][0]["lr"])
        assert isinstance(worker.run_round()["a"], dict)
    assert worker.state_dict("a")["optimizer"]["param_groups"][0]["momentum"] == config["momentum"]
    return seen


@pytest.mark.parametrize("schedule", ["none", "step", "chained"])
def test_numbers_of_a_changed_config_hold(schedule: str) -> None:
    saved = {"lr": 0.1, "momentum": 0.9, "schedule": schedule}
    worker = Worker(2, device="cpu")
    for name in "ab":
        worker.add(name, Scheduled._outside_tune(saved), saved)
    for _ in range(3):
        worker.run_round()
    state = worker.state_dict("b")
    same = learning_rates(state, saved, rounds=4)
    changed = learning_rates(state, {**saved, "lr": 0.3, "momentum": 0.5}, rounds=4)
    assert changed == pytest.approx([3 * lr for lr in same])
