"""Prepared modules: the user's own objects, of a class that sends their calls to the hub."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hfta_tune.loops._hub import current_lane

__all__ = ["as_bare", "make_bare", "make_prepared", "prepared_class_of"]


_CRITERION = "_hfta_tune_criterion"


class Prepared:
    """Mixed into the class of a module that is prepared."""

    _hfta_tune_class: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bare = super().__call__  # type: ignore[misc]
        lane = current_lane()
        if lane is None or lane.trial is None:
            return bare(*args, **kwargs)
        criterion = vars(self).get(_CRITERION)
        if criterion is not None:
            return lane.trial.call_function(criterion, bare, args, kwargs)
        return lane.trial.call(self, bare, args, kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        # Of a row of the array, torch.save would write the rows of all lanes.
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("keep_vars"):
            return state
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.clone()
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for _, buffer in self.named_buffers():  # type: ignore[attr-defined]
            memo.setdefault(id(buffer), buffer.detach().clone())
        with as_bare([self]):  # type: ignore[list-item]
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        lane = current_lane()
        if lane is not None and lane.trial is not None:
            lane.trial.own_storage()  # of a row, the rows of all lanes would be written
        with as_bare([self]):  # type: ignore[list-item]
            reduced: Any = object.__reduce_ex__(self, protocol)
        own = reduced[0] not in (copyreg.__newobj__, copyreg._reconstructor)  # type: ignore[attr-defined]
        return reduced if own else (_new, *reduced[1:])


def _new(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    """A bare module without its contents; pickle's own function insists on the class of what it was given."""
    return kind.__new__(kind, *arguments)


@functools.cache
def _class_for(kind: type[nn.Module]) -> type[nn.Module]:
    own = type(kind.__name__, (Prepared, kind), {"_hfta_tune_class": kind, "__module__": kind.__module__})
    own.__qualname__ = kind.__qualname__
    return own


def prepared_class_of(module: nn.Module) -> type[nn.Module] | None:
    """The module's own class if it is prepared, else None."""
    return type(module)._hfta_tune_class if isinstance(module, Prepared) else None


def make_prepared(module: nn.Module, criterion: Any = None) -> None:
    """Send the module's calls to the hub: as those of a model, or of a criterion.

    Raises:
        TypeError: if its class cannot be extended.
    """
    if not isinstance(module, Prepared):
        module.__class__ = _class_for(type(module))  # type: ignore[arg-type]
    if criterion is not None:
        vars(module)[_CRITERION] = criterion


def make_bare(module: nn.Module) -> None:
    """Give the module its own class back."""
    own = prepared_class_of(module)
    if own is not None:
        module.__class__ = own
        vars(module).pop(_CRITERION, None)


@contextlib.contextmanager
def as_bare(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The modules have their own classes meanwhile."""
    before: list[tuple[nn.Module, Any, Any]] = []
    for module in modules:
        if isinstance(module, Prepared):
            before.append((module, type(module), vars(module).pop(_CRITERION, None)))
    for module, kind, _ in before:
        module.__class__ = kind._hfta_tune_class
    try:
        yield
    finally:
        for module, kind, criterion in before:
            module.__class__ = kind
            if criterion is not None:
                vars(module)[_CRITERION] = criterion
