"""What the native fused optimizers that count steps have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
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

    @staticmethod
    def _decay(group: ParameterGroup) -> dict[str, Tensor]:
        """The number of weight decay, coupled or decoupled; none where no lane decays."""
        decay = group.numbers.host("weight_decay")
        if not any(decay):
            return {}
        if group.flags.get("decoupled_weight_decay"):
            kept = [1 - rate * number for rate, number in zip(group.numbers.host("lr"), decay, strict=True)]
            return {"1-lr*decay": group.numbers.device("1-lr*decay", kept, group.wide)}
        return {"decay": group.numbers.device("decay", decay, group.dtype)}

    @staticmethod
    def _decayed(parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> list[Tensor]:
        """Return the gradients as formulas read them: with the sign of a descent and the coupled decay.

        A decoupled decay is done to the parameters, in place.
        """
        _, flags, present, _ = update.form
        if dict(flags)["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if "1-lr*decay" in present:
            torch._foreach_mul_(parameters, update.number("1-lr*decay"))
        if "decay" in present:
            gradients = list(torch._foreach_addcmul(gradients, parameters, update.number("decay")))
        return gradients
