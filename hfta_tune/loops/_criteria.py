"""Criteria: functions of tensors, of which equal ones are called once for all lanes."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss

from hfta_tune.fusion.comparison import comparable, first_incomparable
from hfta_tune.fusion.signature import model_signature
from hfta_tune.loops._classes import as_bare
from hfta_tune.loops._hub import current_lane
from hfta_tune.loops._watched import Watched

__all__ = ["Criterion", "PreparedFunction", "is_criterion"]


def is_criterion(module: nn.Module) -> bool:
    """Whether a module is called for what it computes only."""
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return not trains and (isinstance(module, _Loss) or not (*module.parameters(), *module.buffers()))


class Criterion:
    """What tells a lane's criterion from others.

    Args:
        function: The criterion: a module or a function.
        number: Numbers criteria by what tells them apart.
    """

    def __init__(self, function: Any, number: Callable[[Any], int]) -> None:
        self._function = function
        self._number = number
        self._watched = Watched(function) if isinstance(function, nn.Module) else None
        self._contents = _contents(function)
        self._key = self._find()

    @property
    def key(self) -> int | None:
        """A number that equal criteria share; None if it cannot be known whether they are equal."""
        if self._watched is not None:
            if self._watched.have_changed():
                self._watched = Watched(self._function)
                self._key = self._find()
        elif self._contents or not isinstance(self._function, types.FunctionType):
            contents = _contents(self._function)
            if len(contents) != len(self._contents) or any(
                one is not other for one, other in zip(contents, self._contents, strict=True)
            ):
                self._contents = contents
                self._key = self._find()
        return self._key

    def _find(self) -> int | None:
        function = self._function
        key: Hashable
        if isinstance(function, nn.Module):
            with as_bare(function.modules()):
                signature = model_signature(function)
            buffers = tuple(comparable(buffer.tolist()) for buffer in function.buffers())
            modes = tuple(module.training for module in function.modules())
            key = None if signature.obstacle is not None else (signature.key, buffers, modes)
        else:
            key = comparable(function)
            key = key if first_incomparable(key) is None or _is_of_a_module(function) else None
        return None if key is None else self._number(key)


def _contents(function: Any) -> list[Any]:
    """What a function keeps besides its code."""
    if isinstance(function, types.FunctionType):
        return [cell.cell_contents for cell in function.__closure__ or ()]
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    return list(getattr(owner, "__dict__", {}).values())


def _is_of_a_module(function: Any) -> bool:
    """Whether it is one function for all trials."""
    return (
        isinstance(function, types.FunctionType)
        and not function.__closure__
        and "<locals>" not in function.__qualname__
    )


class PreparedFunction:
    """A criterion that is no module."""

    def __init__(self, function: Callable[..., Any], criterion: Criterion) -> None:
        self._function = function
        self._criterion = criterion

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lane = current_lane()
        if lane is None or lane.trial is None:
            return self._function(*args, **kwargs)
        return lane.trial.call_function(self._criterion, self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_function", "_criterion"):
            raise AttributeError(name)
        return getattr(self._function, name)
