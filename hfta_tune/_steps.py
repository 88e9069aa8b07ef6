"""The user's training_step and validation_step as steps of the engine: one call for all lanes of an array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hfta_tune._guard import AttributeUse, shared_self
from hfta_tune._recording import MISSING, ConfigPath, RecordingConfig, lookup
from hfta_tune._running import Running
from hfta_tune.fusion import FusedArray, Lane, LanesDiffer, comparable

__all__ = ["Steps", "dotted"]


@dataclass(eq=False)
class Steps:
    """The steps of one FusedTrainable class in one worker, and the config keys that they were seen to read.

    A float arrives in a step as a 0-d tensor, each lane its own. Any other value is handed over as it
    is, so it must be equal in all lanes that share a call: its key joins the signature.

    Attributes:
        kind: The FusedTrainable class.
        owners: The trainable and the config of each lane.
        warn: Says something to the user, once.
        running: Is told which step runs, and for which lanes.
        keys: The keys that joined the signature.
        numbers: The keys that were read as tensors.
    """

    kind: type
    owners: Mapping[Lane, tuple[Any, Mapping[Any, Any]]]
    warn: Callable[[str], None]
    running: Running
    keys: set[ConfigPath] = field(default_factory=set)
    numbers: set[ConfigPath] = field(default_factory=set)
    _trying: frozenset[ConfigPath] = frozenset()
    _attributes: dict[str, AttributeUse] = field(default_factory=lambda: defaultdict(AttributeUse))

    def training(self, lanes: Sequence[Lane], model: nn.Module, batch: Any, values: Mapping[Any, Tensor]) -> Any:
        """Call training_step for `lanes`."""
        return self._call("training_step", lanes, model, batch, values)

    def validation(self, lanes: Sequence[Lane], model: nn.Module, batch: Any, values: Mapping[Any, Tensor]) -> Any:
        """Call validation_step for `lanes`."""
        return self._call("validation_step", lanes, model, batch, values)

    def signature(self, config: Mapping[Any, Any]) -> tuple[Any, ...]:
        """The values of the keys that joined the signature."""
        return tuple((path, comparable(lookup(config, path))) for path in sorted(self.keys, key=repr))

    def surroundings(self, trainable: Any) -> Hashable:
        """A key of what training_step was seen to read from self, or None if a change in that could go unseen."""
        return self._attributes["training_step"].values(trainable)

    def must_be_python_numbers(self, array: FusedArray, step: Callable[..., Any], batch: Any) -> bool:
        """After a failure under vmap: find the floats whose use as tensors caused it, if any.

        Those join the signature; returns whether there were any. Each is found once, so asking again comes to an end.
        """
        numbers = self.numbers - self.keys
        candidates = [frozenset({path}) for path in sorted(numbers, key=repr)]
        if len(candidates) > 1:
            candidates.append(frozenset(numbers))
        for candidate in candidates:
            self._trying = candidate
            try:
                array.probe(step, batch)
            except Exception:
                continue
            finally:
                self._trying = frozenset()
            self.keys |= candidate
            listed = ", ".join(f"config[{dotted(path)!r}]" for path in sorted(candidate, key=repr))
            self.warn(
                f"{step.__name__}_step of {self.kind.__name__} turns {listed} into a Python number, so only "
                "trials with equal values of it share an array. Use it in tensor arithmetic to let it differ."
            )
            return True
        return False

    def _call(
        self, hook: str, lanes: Sequence[Lane], model: nn.Module, batch: Any, values: Mapping[Any, Tensor]
    ) -> Any:
        owners = [self.owners[lane] for lane in lanes]
        configs = [config for _, config in owners]

        def on_read(path: ConfigPath, value: Any) -> Any:
            if path in self._trying:
                return value
            own = [lookup(config, path) for config in configs]
            if path in values and path not in self.keys and any(isinstance(number, float) for number in own):
                self.numbers.add(path)
                return values[path]
            self.keys.add(path)
            first = comparable(own[0])
            if any(comparable(other) != first for other in own[1:]):
                raise LanesDiffer(f"{hook} reads config[{dotted(path)!r}]")
            return value

        def on_read_all() -> None:
            self.warn(
                f"{hook} of {self.kind.__name__} reads its whole config (it iterates over it or copies it), so "
                "only trials that agree in every value that is no float share an array. Read single keys instead."
            )

        config = RecordingConfig(configs[0], on_read, on_read_all)
        trainable: Any = owners[0][0]
        if len(lanes) > 1:
            trainable = shared_self(
                [t for t, _ in owners], [lane.name for lane in lanes], hook, config, self._attributes[hook]
            )
        with self.running.hook(hook, lanes):
            return getattr(self.kind, hook)(trainable, model, batch, config)


def dotted(path: ConfigPath) -> str:
    """A path as a message shows it: optimizer/lr."""
    return "/".join(str(key) for key in path if key is not MISSING)
