"""Configs that note which of their keys were read, so that only those must agree between lanes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

__all__ = ["MISSING", "ConfigPath", "RecordingConfig", "copied", "lookup", "numbers_of", "plain"]

ConfigPath: TypeAlias = tuple[Any, ...]
"""Where a value stands in a nested config: ("optimizer", "lr"). MISSING at the end asks whether it is there."""


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


class RecordingConfig(dict[Any, Any]):
    """A trial's config that calls `on_read(path, value)` for each leaf that is read.

    What `on_read` returns is handed to the reader. A nested dict is a RecordingConfig too, so that
    reading config["optimizer"]["lr"] reads one number and not the whole of config["optimizer"].
    Iterating or copying reads every leaf, after one call of `on_read_all`.
    """

    def __init__(
        self,
        config: Mapping[Any, Any],
        on_read: Callable[[ConfigPath, Any], Any],
        on_read_all: Callable[[], None],
        path: ConfigPath = (),
    ) -> None:
        super().__init__(config)
        self._on_read = on_read
        self._on_read_all = on_read_all
        self._path = path

    def _read(self, key: Any, value: Any) -> Any:
        if isinstance(value, dict) and value:
            return RecordingConfig(value, self._on_read, self._on_read_all, (*self._path, key))
        return self._on_read((*self._path, key), value)

    def __getitem__(self, key: Any) -> Any:
        if not super().__contains__(key):
            self._on_read((*self._path, key, MISSING), MISSING)
        return self._read(key, super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        if not super().__contains__(key):
            self._on_read((*self._path, key, MISSING), MISSING)
            return default
        return self[key]

    def __contains__(self, key: object) -> bool:
        present = super().__contains__(key)
        self._on_read((*self._path, key, MISSING), True if present else MISSING)
        return present

    def _read_everything(self) -> dict[Any, Any]:
        self._on_read_all()
        return {key: self._read(key, value) for key, value in super().items()}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read_everything())

    def __reversed__(self) -> Iterator[Any]:
        return iter(list(reversed(self._read_everything())))

    def __len__(self) -> int:
        return len(self._read_everything())

    def keys(self) -> Any:
        return self._read_everything().keys()

    def values(self) -> Any:
        return self._read_everything().values()

    def items(self) -> Any:
        return self._read_everything().items()

    def copy(self) -> dict[Any, Any]:
        return self._read_everything()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy({key: plain(value) for key, value in self._read_everything().items()}, memo)

    def __reduce__(self) -> Any:
        return (dict, ({key: plain(value) for key, value in self._read_everything().items()},))

    def __eq__(self, other: object) -> bool:
        return self._read_everything() == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, other: Any) -> Any:
        return self._read_everything() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._read_everything()

    def __repr__(self) -> str:
        return repr(self._read_everything())

    __hash__ = None


def plain(value: Any) -> Any:
    """A RecordingConfig as the dict it stands for; anything else as it is."""
    return {key: plain(part) for key, part in value.items()} if isinstance(value, RecordingConfig) else value


def copied(config: Any) -> Any:
    """Copy a config's dicts and lists. Other values stay the same objects: they may be large data."""
    if type(config) is dict:
        return {key: copied(value) for key, value in config.items()}
    return [copied(value) for value in config] if type(config) is list else config


def lookup(config: Mapping[Any, Any], path: ConfigPath) -> Any:
    """Return the value at `path`, MISSING if there is none; a path that ends in MISSING asks for presence."""
    value: Any = config
    for number, key in enumerate(path):
        if key is MISSING:
            return True
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
        if isinstance(value, Mapping) and number == len(path) - 1:
            return ("nested", tuple(value))
    return value


def numbers_of(config: Mapping[Any, Any], path: ConfigPath = ()) -> dict[ConfigPath, float]:
    """Return every int and float of a nested config by its path; bool is no number here."""
    numbers: dict[ConfigPath, float] = {}
    for key, value in config.items():
        place = (*path, key)
        if isinstance(value, Mapping):
            numbers.update(numbers_of(value, place))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[place] = float(value)
    return numbers
