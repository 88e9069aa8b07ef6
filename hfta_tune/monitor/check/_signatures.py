"""Which trials of a search space have equal signatures, and which keys of its configs decide that."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfta_tune._loaders import Data
from hfta_tune._recording import ConfigPath
from hfta_tune._steps import dotted
from hfta_tune.fusion import (
    Options,
    Signature,
    change_of_model,
    change_of_optimizers,
    comparable,
)
from hfta_tune.monitor.check._hooks import explained
from hfta_tune.monitor.check._space import Config, spread, value_at, varied, with_value
from hfta_tune.trainable import FusedTrainable
from hfta_tune.worker import Worker

__all__ = ["Builder", "Built", "Keys", "arrays_expected", "keys_of", "signatures_of"]

# Building all sampled trials may take so long; then one for each combination of structural values must do.
_SECONDS_FOR_BUILDING = 60.0


@dataclass(frozen=True, slots=True)
class Built:
    """What decides with which trials a trial that has been built may share an array, but for what its steps read.

    Attributes:
        model: The signature of its model.
        optimizers: The forms of its optimizers, the parameters in their groups, the clipping algorithm.
        options: Precision and accumulation.
        data: Which data loaders it has, by number.
        steps_per_round: How many batches its rounds have, or None.
        obstacle: Why it trains lane by lane, or None.
        summary: The model and the optimizers, in words.
    """

    model: Signature
    optimizers: Any
    options: Options
    data: int
    steps_per_round: int | None
    obstacle: str | None
    summary: str

    @property
    def key(self) -> Hashable:
        """Equal for trials that may share an array."""
        return self.model.key, self.optimizers, self.options, self.data, self.steps_per_round

    def change_to(self, other: Built) -> str | None:
        """What changes from this trial to another, in words; None if nothing that counts."""
        if self.key == other.key:
            return None
        if self.data != other.data:
            return "is read by the data loader hooks"
        if self.steps_per_round != other.steps_per_round:
            return f"changes steps_per_round from {self.steps_per_round} to {other.steps_per_round}"
        if self.options.precision != other.options.precision:
            return f"changes precision from {self.options.precision} to {other.options.precision}"
        if self.options != other.options:
            before, after = self.options.accumulate, other.options.accumulate
            return f"changes accumulate_grad_batches from {before} to {after}"
        return change_of_model(self.model, other.model) or change_of_optimizers(self.optimizers, other.optimizers)


class Builder:
    """Builds trials one at a time, as a worker does that gives them lanes, and keeps their signatures only.

    Args:
        trainable: The FusedTrainable class.
        device: Where the models are built.
    """

    def __init__(self, trainable: type[FusedTrainable], device: torch.device) -> None:
        self._trainable = trainable
        self._worker = Worker(1, device=device)
        self._data: list[Data] = []

    @property
    def loader_keys(self) -> list[ConfigPath]:
        """What the data loader hooks of the trials were seen to read."""
        return list(dict.fromkeys(path for data in self._data for path in data.config_read))

    def build(self, name: str, config: Config) -> Built:
        """Build a trial.

        Raises:
            FusionError: if a hook raises, with the trial, its config, and what to do.
        """
        with explained(self._trainable, name, config):
            trainable = self._trainable._outside_tune(config)
            self._worker.add(name, trainable, config)
        try:
            trial = self._worker.hosted(name)
            parameters = trial.lane.parameters()
            optimizers = ", ".join(type(own).__name__ for own in trial.lane.optimizers.values())
            model, count = trial.lane.model, sum(parameter.numel() for _, parameter in parameters)
            return Built(
                trial.model,
                trial.optimizers,
                trial.options,
                self._number_of(trial.data, trainable, config),
                trial.steps_per_round,
                trial.obstacle,
                f"{type(model).__name__}, {count:,} parameters in {len(parameters)} tensors; {optimizers}",
            )
        finally:
            self._worker.remove(name)

    def _number_of(self, data: Data, trainable: FusedTrainable, config: Config) -> int:
        for number, known in enumerate(self._data):
            if known.serves(trainable, config):
                return number
        self._data.append(Data(data.kind, data.config_read, data.self_read))  # without the loaders
        return len(self._data) - 1


@dataclass(slots=True)
class Keys:
    """The keys of the configs that differ between trials.

    Attributes:
        structural: {key: what it changes}: trials that differ in it cannot share an array.
        free: Those in which the lanes of an array may differ.
    """

    structural: dict[ConfigPath, str]
    free: list[ConfigPath]

    def is_read_in_step(self, path: ConfigPath) -> None:
        """Note that a step reads a key as something else than a tensor."""
        if path in self.free:
            self.free.remove(path)
            self.structural[path] = "is read in a step, as a value that all lanes of an array share"


def keys_of(configs: Sequence[Config], builder: Builder) -> Keys:
    """Vary one key at a time, from the first config, and compare what is built.

    Where models cannot be compared, there are neither structural keys nor free ones.

    Raises:
        FusionError: if a hook raises for the first config.
    """
    base = configs[0]
    of_base = builder.build("0", base)
    keys = Keys({}, [])
    if of_base.model.obstacle is not None:
        return keys
    for path, values in varied(configs).items():
        change = None
        for value in spread([value for value in values if comparable(value) != comparable(value_at(base, path))]):
            if path in builder.loader_keys:
                change = "is read by the data loader hooks"
                break
            try:
                other = builder.build(f"0 with {dotted(path)}={value!r:.40}", with_value(base, path, value))
            except Exception:  # it goes with other keys: look at a trial that has it
                number = next(
                    i for i, own in enumerate(configs) if comparable(value_at(own, path)) == comparable(value)
                )
                change = of_base.change_to(builder.build(str(number), configs[number]))
                change = change and f"{change}, along with the keys that go with it"
            else:
                change = of_base.change_to(other)
            if change is not None:
                break
        if change is None:
            keys.free.append(path)
        else:
            keys.structural[path] = change
    return keys


def signatures_of(configs: Sequence[Config], keys: Keys, builder: Builder) -> tuple[list[Built], int]:
    """Build the trials of configs.

    Returns:
        What was built of each, and how many were built: where that takes long, one of each combination of values of
        structural keys stands for the others.
    """
    begin = time.monotonic()
    known: dict[Hashable, Built] = {}
    built: dict[int, Built] = {}
    # Trials that share data loaders come one after the other: a worker keeps few that nobody uses.
    order = sorted(
        range(len(configs)), key=lambda i: repr([value_at(configs[i], path) for path in builder.loader_keys])
    )
    count = 0
    for number in order:
        combination = tuple(comparable(value_at(configs[number], path)) for path in keys.structural)
        unlike_others = combination not in known or known[combination].model.obstacle is not None
        if unlike_others or time.monotonic() - begin < _SECONDS_FOR_BUILDING:
            built[number] = builder.build(str(number), configs[number])
            known.setdefault(combination, built[number])
            count += 1
        else:
            built[number] = known[combination]
    return [built[number] for number in range(len(configs))], count


def arrays_expected(signatures: Sequence[Hashable], lanes: int) -> float:
    """How many arrays so many lanes are expected to make, if any of the trials may have them.

    The number of different signatures in a sample of the trials without replacement: the sum over signatures of the
    hypergeometric probability that it is in the sample.
    """
    trials = len(signatures)
    taken = min(lanes, trials)
    every = math.comb(trials, taken)
    return sum(1 - math.comb(trials - own, taken) / every for own in Counter(signatures).values())
