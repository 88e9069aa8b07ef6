"""What the native fused optimizers that count steps have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers._native import GroupUpdate, NativeOptimizer, ParameterGroup
from hfta_tune.fusion.stack import LaneStack

__all__ = ["ClockedOptimizer"]


class ClockedOptimizer(NativeOptimizer):
    """Base of the native optimizers that count steps; a subclass states its numbers, its state and its formula.

    Attributes:
        dials: The 0-d entries of state that change with every step, besides the count.
    """

    dials: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack, name: str = ONLY) -> None:
        super().__init__(lanes, stack, name)
        for group in self.groups:
            for key in self._keys(group.flags):
                group.stack_state(key)
            group.start_clocks(self.dials)

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        """The entries of state of a parameter's shape that every lane has."""
        raise NotImplementedError

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        """The numbers of this step."""
        raise NotImplementedError

    def _first(self, group: ParameterGroup) -> dict[str, list[float]]:
        """What entries and dials start from where that is not 0, a lane its own number."""
        return {}

    def _prepare(self, group: ParameterGroup, names: tuple[str, ...]) -> GroupUpdate:
        numbers, keys = self._numbers(group), self._keys(group.flags)
        clocks, clock_of = group.clocks_of(names)
        fresh = [name for name in names if not all(group.started[name])]
        if fresh:
            first = self._first(group)
            for name in fresh:
                group.start(name, keys, first)
        form = (names, tuple(group.flags.items()), tuple(numbers), clock_of)
        return GroupUpdate(names, numbers, {key: group.state[key] for key in keys}, clocks, clock_of, form)
