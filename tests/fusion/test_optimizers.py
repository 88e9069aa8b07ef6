"""The table of optimizers: each of torch.optim trains in an array as it trains alone, its state included."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from fusion.breadth import FUSED, assert_equal_to_alone, lane_by_lane
from reference import Config, DampedMomentum
from torch import Tensor, nn

ROUNDS = 4  # of one step each; the last lane joins after the first

# Four lanes. eps stays well above rounding: a gradient that is zero but for rounding would else become a full step.
NUMBERS: dict[str, Sequence[Any]] = dict(
    seed=[1, 2, 3, 4],
    lr=[0.02, 0.005, 0.01, 0.05],
    decay=[0.0, 0.1, 0.01, 0.003],
    momentum=[0.9, 0.5, 0.95, 0.8],
    beta1=[0.9, 0.8, 0.5, 0.95],
    beta2=[0.99, 0.95, 0.999, 0.9],
    eps=[1e-3, 1e-2, 3e-3, 1e-2],
)

Build = Callable[[Any, Config], torch.optim.Optimizer]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: How a user would write it.
        build: Builds the optimizer over parameters or parameter groups.
        kind: The class of torch.optim that the row is about, if it is one.
        groups: Splits a model's parameters into what the optimizer is built over.
        model: Builds the model.
        numbers: What the lanes' configs have besides NUMBERS.
        strategy: How an array of it trains.
        evaluates: How it evaluates.
        reason: Why not fused: a part of what the user is told.
        rtol: Relative tolerance of the comparison.
    """

    name: str
    build: Build
    kind: type | None = None
    groups: Callable[[nn.Module, Config], Any] = lambda model, c: model.parameters()
    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    numbers: dict[str, Sequence[Any]] = field(default_factory=dict)
    strategy: str = FUSED
    evaluates: str = FUSED
    reason: str = ""
    rtol: float = 1e-4


def of(kind: type[torch.optim.Optimizer], **options: Any) -> Row:
    """The row of a class of torch.optim. Of its options, those in `c` are numbers of the lanes' own."""
    of_lanes = {name: number for name, number in options.items() if callable(number)}
    shared = {name: value for name, value in options.items() if name not in of_lanes}

    def build(parameters: Any, config: Config) -> torch.optim.Optimizer:
        return kind(parameters, **{name: number(config) for name, number in of_lanes.items()}, **shared)

    written = [f"{name}=..." for name in of_lanes] + [f"{name}={value!r}" for name, value in shared.items()]
    return Row(f"{kind.__name__}({', '.join(written)})", build, kind=kind)


def its(name: str) -> Callable[[Config], Any]:
    """The number of the lane."""
    return lambda config: config[name]
