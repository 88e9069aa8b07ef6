"""Gradient clipping a lane, against torch's own on a run of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainables import Points, points

from hfta_tune import FusionError, Worker


class ByNorm(Points):
    gradient_clip_val = 0.1


class ByValue(Points):
    gradient_clip_val = 0.01
    gradient_clip_algorithm = "value"


def alone(kind: type[Points], config: dict[str, Any], rounds: int) -> tuple[dict[str, Any], bool]:
    """Train in plain PyTorch; return the parameters, and whether clipping changed anything."""
    hooks = kind._outside_tune(config)
    torch.manual_seed(config["seed"])
    model = hooks.build_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    limit = config.get("gradient_clip_val", kind.gradient_clip_val)
    clipped = False
    for _ in range(rounds):
        x, y = points()
        for own, target in zip(x.split(32), y.split(32), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(own), target).backward()
            before = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            if kind.gradient_clip_algorithm == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), limit)
            after = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            clipped |= not before.equal(after)
            optimizer.step()
    return model.state_dict(), clipped


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
@pytest.mark.parametrize("kind", [ByNorm, ByValue])
def test_each_lane_is_clipped_by_its_own(kind: type[Points], strategy: str) -> None:
    class WithSGD(kind):  # type: ignore[valid-type, misc]
        def build_optimizer(self, model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=config["lr"])

    configs: list[dict[str, Any]] = [{"lr": 0.1, "seed": number} for number in range(4)]
    configs[1]["gradient_clip_val"] = 0.005
    configs[2]["gradient_clip_val"] = 1e6
    worker = Worker(4, device="cpu", strategy=strategy)
    for number, config in enumerate(configs):
        worker.add(str(number), WithSGD._outside_tune(config), config)
    for _ in range(3):
        worker.run_round()
    (array,) = worker.describe()["arrays"]
    assert array["strategy"] == strategy
    changed = []
    for number, config in enumerate(configs):
        expected, clipped = alone(kind, config, rounds=3)
        changed.append(clipped)
        torch.testing.assert_close(worker.state_dict(str(number))["model"], expected, rtol=1e-4, atol=1e-6)
    assert changed == [True, True, False, True]


class Branching(nn.Module):
    """A head that some trials never use, so that it has a gradient in some of the lanes only."""

    def __init__(self, uses_head: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 3), nn.Linear(8, 3)
        self.register_buffer("uses_head", torch.tensor(uses_head))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.head(x) if self.uses_head else self.body(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::hfta_tune.FusionWarning")
@pytest.mark.parametrize("kind", [ByNorm, ByValue])
def test_lanes_with_gradients_of_different_parameters(kind: type[Points]) -> None:
    class Differing(kind):  # type: ignore[valid-type, misc]
        def build_model(self, config: dict[str, Any]) -> nn.Module:
            return Branching(config["uses_head"])

        def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=config["lr"])

    configs: list[dict[str, Any]] = [{"lr": 0.1, "seed": n, "uses_head": n % 2 == 0} for n in range(3)]
    worker = Worker(3, device="cpu")
    for number, config in enumerate(configs):
        worker.add(str(number), Differing._outside_tune(config), config)
    for _ in range(2):
        worker.run_round()
    for number, config in enumerate(configs):
        expected, clipped = alone(Differing, config, rounds=2)
        assert clipped
        torch.testing.assert_close(worker.state_dict(str(number))["model"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("limit", [0, -1.0, "small", True])
def test_a_limit_that_is_no_positive_number(limit: Any) -> None:
    config = {"lr": 0.1, "gradient_clip_val": limit}
    with pytest.raises(FusionError, match=rf"trial odd: gradient_clip_val is {limit!r}"):
        Worker(1, device="cpu").add("odd", Points._outside_tune(config), config)


def test_an_unknown_algorithm() -> None:
    class Unknown(Points):
        gradient_clip_algorithm = "length"

    with pytest.raises(FusionError, match="trial odd: gradient_clip_algorithm is 'length'"):
        Worker(1, device="cpu").add("odd", Unknown._outside_tune({"lr": 0.1}), {"lr": 0.1})
