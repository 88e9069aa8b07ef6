"""A short round of real training: the strategies' times, the audit, the memory of a lane, and what does not fuse."""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune._recording import MISSING, ConfigPath, copied
from hfta_tune.fusion import LANE_BY_LANE, Difference, FusedArray, FusionWarning, Lane, form_of_batch
from hfta_tune.monitor.check._hooks import error_of_hook, explained
from hfta_tune.monitor.check._modules import what_fuses
from hfta_tune.monitor.check._space import Config
from hfta_tune.trainable import FusedTrainable
from hfta_tune.worker import Worker

__all__ = ["LaneMemory", "Measured", "measure", "speed_up_of"]

# An array measures vmap on 4 of them, lane by lane on 3, and a compiled step on 4.
_TRAINING_STEPS = 11
_VALIDATION_STEPS = 2
_SURE_TO_PAY = 1e12
# Other processes make some steps slow. So the strategies are measured a few times, if that takes no longer, and the
# shortest time counts.
_SECONDS_FOR_REPEATS = 5.0
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """The memory of one lane after its first steps, in bytes.

    Attributes:
        parameters: Its parameters.
        buffers: Its buffers.
        gradients: The gradients of those parameters that an optimizer trains.
        optimizer: The tensors of its optimizers' state.
        peak: On CUDA the peak of all lanes together, activations included, divided by their number; else None.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    peak: int | None = None

    @property
    def total(self) -> int:
        """All but the peak."""
        return self.parameters + self.buffers + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Measured:
    """What a short round showed.

    Attributes:
        strategy: The fastest strategy, as an array would choose it.
        seconds: {strategy: seconds a training step of all lanes}.
        audits: {strategy: the largest difference from plain PyTorch, or why there is none}.
        said: What the worker warned of.
        memory: The memory of a lane.
        step_keys: The keys that steps read as something else than a tensor of each lane's own.
        modules: {path of a module: None if it fuses, else why not}.
    """

    strategy: str
    seconds: dict[str, float]
    audits: dict[str, Difference | str]
    said: list[str]
    memory: LaneMemory
    step_keys: set[ConfigPath]
    modules: dict[str, str | None]


def measure(
    trainable: type[FusedTrainable], configs: Sequence[Config], device: torch.device, *, compiling: bool
) -> Measured:
    """Train a lane for each config for a few steps, audited.

    Args:
        trainable: The FusedTrainable class.
        configs: A config for each lane.
        device: Where to train.
        compiling: Whether to compile the step too, which may take a minute.

    Raises:
        FusionError: if a hook raises.
    """
    kind = _with_short_rounds(trainable)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    times: list[float] = []

    def note_time() -> None:
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = Worker(len(configs), device=device, strategy="auto", audit=True)
        trainables = _train(worker, trainable, kind, configs, note_time, compiling=compiling)
        array = _largest_array(worker)
        memory = _memory_of(array.lanes[0])
        is_wrong = any(isinstance(found, Difference) and found.is_wrong for found in array.audits.values())
        if cuda:  # the audit's copies do not count
            torch.cuda.reset_peak_memory_stats(device)
        # A lane that has an array for itself is not measured by it.
        steps = [after - then for then, after in itertools.pairwise(times[:_TRAINING_STEPS])]
        seconds = _measured_again(worker, array) or {LANE_BY_LANE: statistics.median(steps)}
        if cuda:
            memory = replace(memory, peak=(torch.cuda.max_memory_allocated(device) - before) // len(configs))
        falls_back = any(LANE_BY_LANE + ": " in str(warning.message) for warning in caught)
        first = worker.hosted(worker.trial_ids[0])
        batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), next(iter(first.data.train)))

        def step(model: Any, batch: Any) -> Any:
            return trainables[0].training_step(model, batch, copied(trainables[0].config))

        modules = what_fuses(first.lane.model, step, batch, first.options, probe=falls_back)
    said = []
    for warning in caught:
        if issubclass(warning.category, FusionWarning):
            said.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return Measured(
        LANE_BY_LANE if is_wrong else min(seconds, key=seconds.__getitem__),
        seconds,
        array.audits,
        said,
        memory,
        {path[:-1] if path[-1] is MISSING else path for path in first.step_keys},
        modules,
    )


def speed_up_of(
    trainable: type[FusedTrainable], configs: Sequence[Config], device: torch.device, *, compiling: bool
) -> float:
    """How many times as fast as lane by lane the fastest strategy trains a lane for each config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were said of the measured array
        worker = Worker(len(configs), device=device, strategy="auto")
        _train(worker, trainable, _with_short_rounds(trainable), configs, None, compiling=compiling)
        seconds = _measured_again(worker, _largest_array(worker))
    return seconds[LANE_BY_LANE] / min(seconds.values()) if LANE_BY_LANE in seconds else 1.0


def _train(
    worker: Worker,
    trainable: type[FusedTrainable],
    kind: type[FusedTrainable],
    configs: Sequence[Config],
    between_steps: Callable[[], None] | None,
    *,
    compiling: bool,
) -> list[FusedTrainable]:
    """Give each config a lane as a trial of `kind`, and train a round; return the trials' instances.

    Raises:
        FusionError: if a hook raises; it names `trainable`.
    """
    trainables = []
    for number, config in enumerate(configs):
        config = _with_short_steps(config)
        with explained(trainable, str(number), config):
            trainables.append(kind._outside_tune(config))
            worker.add(str(number), trainables[-1], config)
    for left in (_SURE_TO_PAY, 0.0) if compiling else (None,):
        for name, outcome in worker.run_round(rounds_left=left, between_steps=between_steps).items():
            if isinstance(outcome, Exception):
                raise error_of_hook(outcome, trainable, name, configs[int(name)]) from outcome
    return trainables


def _largest_array(worker: Worker) -> FusedArray:
    arrays = [worker.hosted(name).array for name in worker.trial_ids]
    return max((array for array in arrays if array is not None), key=lambda array: len(array.lanes))


def _measured_again(worker: Worker, array: FusedArray) -> dict[str, float]:
    """The shortest times of an array's steps in this round and in some further ones."""
    seconds = array.seconds_a_step
    begin = time.monotonic()
    for repeat in range(_REPEATS if seconds else 1):
        if repeat and time.monotonic() - begin > _SECONDS_FOR_REPEATS:
            break
        array.measure_again()
        outcomes = worker.run_round()
        if any(isinstance(outcome, Exception) for outcome in outcomes.values()):  # a schedule may be over by now
            break
        for strategy, again in array.seconds_a_step.items():
            seconds[strategy] = min(again, seconds.get(strategy, again))
    return seconds


def _memory_of(lane: Lane) -> LaneMemory:
    trained = {id(p): p for name in lane.optimizers for p in lane.trained_by(name)}
    state = pytree.tree_leaves([dict(optimizer.state) for optimizer in lane.optimizers.values()])
    return LaneMemory(
        _bytes_of(parameter for _, parameter in lane.parameters()),
        _bytes_of(buffer for _, buffer in lane.buffers()),
        _bytes_of(trained.values()),
        _bytes_of({id(tensor): tensor for tensor in state if isinstance(tensor, Tensor)}.values()),
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _FirstBatches:
    """So many batches of the first one's form from the beginning of a loader, again and again if it has fewer."""

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        form, left = None, self._batches
        while left:
            before = left
            for batch in itertools.islice(self._loader, self._batches):
                form = form or form_of_batch(batch)
                if form_of_batch(batch) == form:
                    yield batch
                    left -= 1
                if not left:
                    return
            if left == before:
                return


def _with_short_rounds(trainable: type[FusedTrainable]) -> type[FusedTrainable]:
    class Short(trainable):  # type: ignore[misc, valid-type]
        steps_per_round = None

        def train_dataloader(self, config: dict[str, Any]) -> Iterable[Any]:
            return _FirstBatches(super().train_dataloader(config), _TRAINING_STEPS)

        def val_dataloader(self, config: dict[str, Any]) -> Iterable[Any] | None:
            loader = super().val_dataloader(config)
            return None if loader is None else _FirstBatches(loader, _VALIDATION_STEPS)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Short, name, getattr(trainable, name))
    return Short


def _with_short_steps(config: Mapping[str, Any]) -> Config:
    steps = config.get("steps_per_round")
    return {**config, "steps_per_round": min(steps, _TRAINING_STEPS)} if isinstance(steps, int) else dict(config)
