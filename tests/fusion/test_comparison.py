"""Keys of values: equal keys only for values that may stand for each other."""

from __future__ import annotations

import enum
import functools
import operator
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hfta_tune.fusion import comparable, first_incomparable


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    width: int
    names: list[str]


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


class WithState:
    def __init__(self, x: int) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None: ...


def scale_by(factor: float) -> Any:
    return lambda x: x * factor


EQUAL = [
    (lambda: None),
    (lambda: float("nan")),
    (lambda: [1, 2.5, "a", (True, None)]),
    (lambda: {"a": 1, "b": {"c": (2,)}}),
    (lambda: OrderedDict(a=1)),
    (lambda: {3, 1, 2}),
    (lambda: torch.float16),
    (lambda: torch.ones(2, 3)),
    (lambda: torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)),
    (lambda: np.arange(3)),
    (lambda: np.float32(1.5)),
    (lambda: Colour.RED),
    (lambda: F.relu),
    (lambda: torch.tanh),
    (lambda: nn.ReLU),
    (lambda: functools.partial(F.gelu, approximate="tanh")),
    (lambda: scale_by(2.0)),
    (lambda: Settings(3, ["a"])),
    (lambda: range(4)),
]


@pytest.mark.parametrize("make", EQUAL, ids=range(len(EQUAL)))
def test_values_made_alike_are_equal(make: Any) -> None:
    assert comparable(make()) == comparable(make())
    assert hash(comparable(make())) == hash(comparable(make()))
    assert first_incomparable(comparable(make())) is None


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("1", 1),
    ([1, 2], (1, 2)),
    ([1, 2], [2, 1]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # their order is seen by a loop
    (torch.ones(2), torch.zeros(2)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2, 1), torch.ones(1, 2)),
    (np.arange(3), np.arange(3.0)),
    (Colour.RED, Colour.BLUE),
    (F.relu, torch.tanh),
    (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu, approximate="none")),
    (scale_by(2.0), scale_by(3.0)),
    (Settings(3, ["a"]), Settings(3, ["b"])),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_values_that_differ(one: Any, other: Any) -> None:
    assert comparable(one) != comparable(other)


@pytest.mark.parametrize(
    "make", [object, lambda: Slotted(1), lambda: WithState(1), lambda: iter([1]), lambda: nn.Linear(1, 1)]
)
def test_in_doubt_only_the_same_object_is_equal(make: Any) -> None:
    value = make()
    key = comparable([value])
    assert key == comparable([value]) and hash(key) == hash(comparable([value]))
    assert key != comparable([make()])
    assert first_incomparable(key) is not None


def test_a_cycle_is_compared_by_its_form() -> None:
    def cycle() -> list[Any]:
        ring: list[Any] = [1]
        ring.append(ring)
        return ring

    assert comparable(cycle()) == comparable(cycle())


def test_bound_methods_compare_by_their_object() -> None:
    assert comparable(Settings(1, []).__eq__) == comparable(Settings(1, []).__eq__)
    assert comparable(Settings(1, []).__eq__) != comparable(Settings(2, []).__eq__)
    assert comparable(operator.add) == comparable(operator.add)
