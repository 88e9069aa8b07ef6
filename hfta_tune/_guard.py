"""A stand-in for `self` that speaks for several trials at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hfta_tune.fusion import FusionError, comparable, first_incomparable, model_signature

__all__ = ["AttributeUse", "same_value", "shared_self", "watched_self"]

_MISSING = object()


@dataclass(eq=False, slots=True)
class AttributeUse:
    """The attributes of self that a hook was seen to read and to set."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def values(self, trainable: Any) -> Hashable:
        """Return a key of the values that were read, or None if a change in them could go unseen."""
        if self.written:
            return None
        key = tuple((name, _key(getattr(trainable, name))) for name in sorted(self.read))
        return key if first_incomparable(key) is None else None


def _key(value: Any) -> Hashable:
    if isinstance(value, nn.Module):
        return model_signature(value).key, comparable(value.state_dict())
    return comparable(value)


def shared_self(trainables: Sequence[Any], names: Sequence[str], hook: str, config: Any, use: AttributeUse) -> Any:
    """Return a `self` for one call of `hook` that stands for all of `trainables`.

    Reading an attribute that is equal in all of them gives it; assigning sets it in all of them;
    `self.config` is `config`. `use` notes both.

    Raises:
        FusionError: on reading an attribute that differs, with its name and the trials'.
    """

    def read(name: str, values: list[Any]) -> Any:
        if name == "config":
            return config
        use.read.add(name)
        for trial, value in zip(names[1:], values[1:], strict=True):
            if not same_value(values[0], value):
                raise FusionError(
                    f"{hook} reads self.{name}, which differs between trial {names[0]} and trial {trial}; "
                    "one call of it serves all lanes of an array. Read the value from config in "
                    f"{hook} instead, or make it part of the model in build_model."
                )
        return values[0]

    def write(name: str, value: Any) -> None:
        use.written.add(name)
        for trainable in trainables:
            setattr(trainable, name, value)

    return _stand_in(trainables, read, write)


def watched_self(trainable: Any, config: Any, read: dict[str, Any], written: dict[str, Any]) -> Any:
    """Return a `self` that notes the attributes of this trial that are read, and those that are set."""

    def note_read(name: str, values: list[Any]) -> Any:
        if name == "config":
            return config
        if name not in written:
            read.setdefault(name, values[0])
        return values[0]

    def note_write(name: str, value: Any) -> None:
        written[name] = value
        setattr(trainable, name, value)

    return _stand_in([trainable], note_read, note_write)


def _stand_in(
    trainables: Sequence[Any], read: Callable[[str, list[Any]], Any], write: Callable[[str, Any], None]
) -> Any:
    """An instance of a subclass of the trainables' class, so that super() and isinstance work on it."""
    kind: Any = type(trainables[0])
    stand_in: Any = object.__new__(_class_of_stand_ins(kind))  # __init__ was run, for each trainable
    object.__setattr__(stand_in, "__spoken_for__", (trainables, read, write))
    return stand_in


@functools.lru_cache(maxsize=64)
def _class_of_stand_ins(kind: Any) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        trainables, read, _ = object.__getattribute__(self, "__spoken_for__")
        values = [vars(trainable).get(name, _MISSING) for trainable in trainables]
        if all(value is _MISSING for value in values):
            return super(made, self).__getattribute__(name)  # type: ignore[arg-type]
        return read(name, values)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        _, _, write = object.__getattribute__(self, "__spoken_for__")
        write(name, value)

    methods = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    made: type = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
    return made


def same_value(one: Any, other: Any) -> bool:
    """Whether two values may stand for each other; in doubt they may not."""
    if one is other:
        return True
    if one is _MISSING or other is _MISSING:
        return False
    return _key(one) == _key(other)
