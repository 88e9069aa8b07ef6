"""Keys for values: two values may stand for each other in an array only if their keys are equal.

Lanes of one array run one piece of code with one set of plain Python values. A value whose equality
cannot be decided equals nothing but the very same object, so that doubt never fuses.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Incomparable", "comparable", "first_incomparable"]

_BY_VALUE = (
    type(None),
    bool,
    int,
    complex,
    str,
    bytes,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_BY_IDENTITY = (type, types.BuiltinFunctionType, types.ModuleType, np.ufunc)


class Incomparable:
    """The key of a value that is compared as an object only. `what` names it in messages."""

    def __init__(self, what: str, value: Any) -> None:
        self.what = what
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Incomparable) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return f"<incomparable {self.what}>"


def comparable(
    value: Any, modules: Mapping[int, str] | None = None, tensors: Mapping[int, str] | None = None
) -> Hashable:
    """Return a hashable key for `value`; equal keys mean interchangeable values.

    Args:
        value: Any Python value.
        modules: Names of the modules (by id) that are part of the compared tree; a reference to one of
            them compares by name. Any other module is incomparable.
        tensors: Names of the tree's parameters and buffers (by id). A reference to one of them elsewhere is
            incomparable: it would not follow when the tensor is exchanged for another lane's.

    Returns:
        A key. It is or holds an `Incomparable` where equality cannot be decided.
    """
    return _Keys(modules or {}, tensors or {}).of(value, ())


def first_incomparable(key: Hashable) -> Incomparable | None:
    """Return the first `Incomparable` inside a key, or None."""
    if isinstance(key, Incomparable):
        return key
    if isinstance(key, (tuple, frozenset)):
        for part in key:
            found = first_incomparable(part)
            if found is not None:
                return found
    return None


class _Keys:
    def __init__(self, modules: Mapping[int, str], tensors: Mapping[int, str]) -> None:
        self._modules = modules
        self._tensors = tensors

    def of(self, value: Any, parents: tuple[int, ...]) -> Hashable:
        kind = type(value)
        if kind in _BY_VALUE:
            return (kind, value)
        if isinstance(value, float):
            return (kind, value.hex() if value == value else "nan")
        if isinstance(value, (*_BY_IDENTITY, enum.Enum)):
            return (kind, value)
        if isinstance(value, np.generic):
            return (kind, value.item())
        if id(value) in self._modules:
            return (nn.Module, self._modules[id(value)])
        if id(value) in self._tensors:
            return Incomparable(f"a second reference to {self._tensors[id(value)]!r}", value)
        if id(value) in parents:
            return ("cycle", len(parents) - parents.index(id(value)))
        return self._of_parts(value, (*parents, id(value)))

    def _of_parts(self, value: Any, parents: tuple[int, ...]) -> Hashable:
        kind = type(value)

        def inner(part: Any) -> Hashable:
            return self.of(part, parents)

        if isinstance(value, (list, tuple)):
            return (kind, tuple(inner(part) for part in value))
        if isinstance(value, (set, frozenset)):
            return (kind, frozenset(inner(part) for part in value))
        if isinstance(value, Mapping):
            return (kind, tuple((inner(name), inner(part)) for name, part in value.items()))
        if isinstance(value, Tensor):
            return _tensor_key(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return (kind, value.shape, value.dtype.str, value.tobytes())
        if isinstance(value, functools.partial):
            return (kind, inner(value.func), inner(value.args), inner(value.keywords))
        if isinstance(value, types.MethodType):
            return (kind, value.__func__, inner(value.__self__))
        if isinstance(value, types.FunctionType):
            return _function_key(value, inner)
        return _object_key(value, inner)


def _tensor_key(value: Tensor) -> Hashable:
    if value.requires_grad:
        return Incomparable("tensor computed from parameters", value)
    if value.is_sparse or value.is_meta or type(value) is not Tensor:
        return Incomparable(f"tensor of type {type(value).__name__}", value)
    array = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return (Tensor, value.shape, value.dtype, value.device, array.numpy().tobytes())


def _function_key(value: types.FunctionType, inner: Any) -> Hashable:
    try:
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError:
        return Incomparable(f"function {value.__qualname__} with an unset closure variable", value)
    return (
        types.FunctionType,
        value.__code__,
        id(value.__globals__),
        inner(cells),
        inner(value.__defaults__),
        inner(value.__kwdefaults__),
    )


def _object_key(value: Any, inner: Any) -> Hashable:
    """A plain object is its class and its attributes, if Python itself would copy it so."""
    kind = type(value)
    what = f"{kind.__module__}.{kind.__qualname__} object"
    plain = (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module)
        and all(name not in vars(base) for base in kind.__mro__[:-1] for name in ("__reduce__", "__reduce_ex__"))
        and not hasattr(kind, "__setstate__")
        and not any("__slots__" in vars(base) for base in kind.__mro__[:-1])
        and all(base.__flags__ & (1 << 9) for base in kind.__mro__[:-1])  # heap types: no hidden C state
    )
    if not plain:
        return Incomparable(what, value)
    return (kind, inner(vars(value)))
