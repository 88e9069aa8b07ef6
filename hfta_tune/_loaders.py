"""Data loaders of a worker: built once for each combination of the values that they were built from."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hfta_tune._guard import same_value, watched_self
from hfta_tune._recording import ConfigPath, RecordingConfig, lookup
from hfta_tune.fusion import FusionError

__all__ = ["Data", "DataCache"]

_UNUSED_KEPT = 2
_NUMBERS = itertools.count()


@dataclass(eq=False, slots=True)
class Data:
    """The loaders that lanes share, and what they were built from.

    Attributes:
        train: The training data loader.
        validation: The validation data loader, or None.
        config_read: The config values that the hooks read.
        self_read: The attributes of self that the hooks read.
        self_written: The attributes of self that the hooks set; a trial that shares the loaders gets them.
        number: No other data of this process had it, whereas an address may be used again.
    """

    kind: type
    config_read: dict[ConfigPath, Any] = field(default_factory=dict)
    self_read: dict[str, Any] = field(default_factory=dict)
    self_written: dict[str, Any] = field(default_factory=dict)
    train: Iterable[Any] = ()
    validation: Iterable[Any] | None = None
    number: int = field(default_factory=_NUMBERS.__next__)
    _cursors: dict[int, Iterator[Any]] = field(default_factory=dict)

    def round_of_training(self, steps: int | None, round_number: int) -> Iterable[Any]:
        """The training batches of a round: one pass, or `steps` batches that go on where the last round ended.

        Args:
            steps: How many batches, or None for one pass.
            round_number: Where to begin if no round went before: after that many rounds.
        """
        if steps is None:
            return self.train
        return self._next_batches(steps, round_number)

    def _next_batches(self, steps: int, round_number: int) -> Iterator[Any]:
        try:
            if steps not in self._cursors:
                self._cursors[steps] = _endless(self.train)
                skipped = itertools.islice(self._cursors[steps], round_number * steps)
                collections.deque(skipped, maxlen=0)
            yield from itertools.islice(self._cursors[steps], steps)
        except Exception:  # an iterator that has raised gives nothing more; trials to come begin another
            self._cursors.pop(steps, None)
            raise

    def serves(self, trainable: Any, config: Mapping[Any, Any]) -> bool:
        """Whether the hooks of this trial would read the same and so build the same loaders."""
        attributes = vars(trainable)
        return (
            type(trainable) is self.kind
            and all(same_value(lookup(config, p), v) for p, v in self.config_read.items())
            and all(n in attributes and same_value(attributes[n], v) for n, v in self.self_read.items())
        )


class DataCache:
    """Hands out one `Data` to all trials whose loader hooks read equal values.

    Args:
        warn: Says something to the user, once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._known: list[Data] = []
        self._warn = warn

    def get(self, name: str, trainable: Any, config: Mapping[Any, Any], in_use: list[Data]) -> Data:
        """Return the loaders of a trial, built now if no earlier ones serve.

        Raises:
            FusionError: if a loader is empty or can be read only once.
        """
        for data in self._known:
            if data.serves(trainable, config):
                self._known.remove(data)
                self._known.append(data)
                vars(trainable).update(data.self_written)
                return data
        data = self._build(name, trainable, config)
        self._known.append(data)
        unused = [known for known in self._known if known is not data and known not in in_use]
        for known in unused[: max(0, len(unused) - _UNUSED_KEPT)]:
            self._known.remove(known)
        return data

    def _build(self, name: str, trainable: Any, config: Mapping[Any, Any]) -> Data:
        data = Data(type(trainable))
        for hook in ("train_dataloader", "val_dataloader"):

            def on_read(path: ConfigPath, value: Any) -> Any:
                data.config_read[path] = value
                return value

            def on_read_all(hook: str = hook) -> None:
                self._warn(
                    f"{hook} of {type(trainable).__name__} reads its whole config (it iterates over it or "
                    "copies it), so only trials with equal configs can share an array and a data set. "
                    "Read single keys instead.",
                )

            recording = RecordingConfig(config, on_read, on_read_all)
            watched = watched_self(trainable, recording, data.self_read, data.self_written)
            loader = getattr(type(trainable), hook)(watched, recording)
            if hook == "train_dataloader":
                data.train = _checked(loader, hook, name)
            elif loader is not None:
                data.validation = _checked(loader, hook, name)
        return data


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of pass after pass; it ends with a pass that has none."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch


def _checked(loader: Any, hook: str, name: str) -> Iterable[Any]:
    if isinstance(loader, Iterator):
        raise FusionError(
            f"trial {name}: {hook} returned a one-shot iterator ({type(loader).__name__}), which is used up "
            "after one round. Return something that can be iterated again, such as a DataLoader or a list."
        )
    if not isinstance(loader, Iterable):
        raise FusionError(
            f"trial {name}: {hook} returned {loader!r:.80}; return an iterable of batches, such as a DataLoader."
        )
    try:
        length: int | None = len(loader)  # type: ignore[arg-type]
    except TypeError:
        length = None
    if length == 0:
        raise FusionError(
            f"trial {name}: {hook} returned an empty data loader (its length is 0). Check the data set's size, "
            "the batch size and drop_last."
        )
    return loader
