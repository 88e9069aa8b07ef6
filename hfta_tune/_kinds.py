"""Which trials will share an array: learned from the trials whose signatures are known. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

__all__ = ["Kinds", "flatten_config"]

Trial: TypeAlias = Hashable
Config: TypeAlias = dict[str, Hashable]


class Kinds:
    """Predicts from their configs which trials have equal signatures.

    A trial's signature is known only once its model has been built. Until something else is seen, every key of the
    config is presumed to be in it. A key is free once two trials that differ in it had equal signatures: so the
    learning rate is found to be free after one round of an array, while the width of a layer never is. A trial's
    kind is its trainable and the values of the keys that are not free.

    A prediction may be wrong, for a key may matter only at some values. It serves to choose between places, each
    of which would do.
    """

    def __init__(self) -> None:
        self._trials: dict[Trial, tuple[Hashable, Config]] = {}
        self._free: dict[Hashable, set[str]] = {}
        self._examples: dict[tuple[Hashable, Hashable], Config] = {}
        self._kinds: dict[Trial, Hashable] = {}

    def add(self, trial: Trial, trainable: Hashable, config: Mapping[Any, Any]) -> None:
        """Note a trial's config, or the new config of a trial that is known.

        Args:
            trial: The trial.
            trainable: What it trains; trials of two trainables are never of one kind.
            config: Its hyperparameters. Nested dicts are flattened; values need not be hashable.
        """
        self._trials[trial] = trainable, flatten_config(config)
        self._kinds.pop(trial, None)

    def remove(self, trial: Trial) -> None:
        """Forget a trial, but not what was learned from it. Removing it again does nothing."""
        self._trials.pop(trial, None)
        self._kinds.pop(trial, None)

    def learn(self, trial: Trial, signature: Hashable) -> None:
        """Note the signature that a trial turned out to have; one that was removed tells nothing."""
        if trial not in self._trials:
            return
        trainable, config = self._trials[trial]
        # One example of each signature tells as much as all of them: two trials that differ in a key cannot both
        # agree with it there.
        example = self._examples.setdefault((trainable, signature), config)
        if example is config:
            return
        free = self._free.setdefault(trainable, set())
        missing = object()
        found = {
            key
            for key in example.keys() | config.keys()
            if key not in free and example.get(key, missing) != config.get(key, missing)
        }
        if found:
            free |= found
            self._kinds.clear()

    def kind_of(self, trial: Trial) -> Hashable:
        """Return the kind of a trial, as far as is known now; kinds of different times cannot be compared."""
        if trial not in self._kinds:
            trainable, config = self._trials[trial]
            free = self._free.get(trainable, set())
            kept = frozenset((key, value) for key, value in config.items() if key not in free)
            self._kinds[trial] = trainable, kept
        return self._kinds[trial]

    def free_keys(self, trainable: Hashable) -> set[str]:
        """Return the keys in which trials of equal signature were seen to differ."""
        return set(self._free.get(trainable, ()))


def flatten_config(config: Mapping[Any, Any], prefix: str = "") -> Config:
    """Flatten nested dicts as Tune does: {"optimizer": {"lr": 1}} is {"optimizer/lr": 1}."""
    flat: Config = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten_config(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = _hashable(value)
    return flat


def _hashable(value: Any) -> Hashable:
    """Something that is equal for equal values, or at least for the same object."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value if value == value else "nan"
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_hashable, value))
    if isinstance(value, Mapping):
        return frozenset((_hashable(key), _hashable(part)) for key, part in value.items())
    try:  # not the value itself: comparing two of them may give an array, or fail
        return type(value), hash(value)
    except Exception:
        return type(value), repr(value)
