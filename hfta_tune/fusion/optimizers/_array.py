"""All optimizers of an array: one for each name that build_optimizer gave, each over its own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers._choice import fuse_optimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, NativeOptimizer
from hfta_tune.fusion.optimizers._views import OptimizerViews
from hfta_tune.fusion.stack import LaneStack

__all__ = ["ArrayOptimizers", "Updates", "form_of_updates", "tensors_of_updates", "with_tensors"]

Updates: TypeAlias = dict[str, list[GroupUpdate]]
"""{optimizer: its groups' updates}, of those that are native."""


class ArrayOptimizers:
    """The optimizers of a stack by name.

    Attributes:
        trains: {optimizer: the names of the parameters that it trains}.
    """

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack) -> None:
        self._fused = {name: fuse_optimizer(lanes, stack, name) for name in lanes[0].optimizers}
        names = {id(parameter): name for name, parameter in lanes[0].parameters()}
        self.trains = {
            optimizer: tuple(dict.fromkeys(names[id(parameter)] for parameter in lanes[0].trained_by(optimizer)))
            for optimizer in lanes[0].optimizers
        }
        self._numbers_known: tuple[tuple[frozenset[str], str | None], Updates] | None = None
        self._last: Updates = {}

    @property
    def are_native(self) -> bool:
        """Whether all of them can be compiled."""
        return all(isinstance(fused, NativeOptimizer) for fused in self._fused.values())

    def numbers_may_have_changed(self) -> None:
        """Read the lanes' numbers again before the next step."""
        self._numbers_known = None

    def is_native(self, optimizer: str) -> bool:
        """Whether it steps for all lanes at once."""
        return isinstance(self._fused[optimizer], NativeOptimizer)

    def prepare(self, names: frozenset[str], only: str | None = None) -> Updates:
        """Do the host's part of a step over the parameters `names`.

        Args:
            names: The parameters that have a gradient.
            only: The optimizer that steps; by default all do.

        Returns:
            The updates; the same object again as long as nothing in them has changed.
        """
        if self._numbers_known is not None and self._numbers_known[0] == (names, only):
            return self._numbers_known[1]
        updates = {
            optimizer: fused.prepare(names & set(self.trains[optimizer]))
            for optimizer, fused in self._fused.items()
            if isinstance(fused, NativeOptimizer) and only in (None, optimizer)
        }
        # Preparing keeps books of first steps. Once it comes to the same tensors twice, a third time would too.
        if _identity(updates) == _identity(self._last):
            updates = self._last
            self._numbers_known = (names, only), updates
        self._last = updates
        return updates

    def apply(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], updates: Updates) -> None:
        """Update parameters [lanes, ...] and state in place by the native optimizers; tensor operations only."""
        for optimizer, own in updates.items():
            type(self._fused[optimizer]).apply(parameters, gradients, own)  # type: ignore[attr-defined]

    def step_views(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the parameters of those optimizers that are not native."""
        for optimizer, fused in self._fused.items():
            if isinstance(fused, OptimizerViews):
                fused.step({name: gradients[name] for name in self.trains[optimizer] if name in gradients})


def form_of_updates(updates: Updates) -> Any:
    """What the sequence of operations of the updates depends on."""
    return tuple((optimizer, tuple(update.form for update in own)) for optimizer, own in updates.items())


def tensors_of_updates(updates: Updates) -> dict[str, list[dict[str, Any]]]:
    """The tensors that the updates read and change."""
    return {
        optimizer: [{"numbers": update.numbers, "state": update.state, "clocks": update.clocks} for update in own]
        for optimizer, own in updates.items()
    }


def with_tensors(updates: Updates, tensors: Mapping[str, Sequence[Mapping[str, Any]]]) -> Updates:
    """The same updates of other tensors, such as `tensors_of_updates` returns."""
    return {
        optimizer: [replace(update, **given) for update, given in zip(own, tensors[optimizer], strict=True)]
        for optimizer, own in updates.items()
    }


def _identity(updates: Updates) -> Any:
    return form_of_updates(updates), [id(tensor) for tensor in pytree.tree_leaves(tensors_of_updates(updates))]
