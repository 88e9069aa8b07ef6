"""A run in figures: what its workers, arrays and trials have done so far. No Ray, no Optuna, no clock."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hfta_tune.fusion import LANE_BY_LANE
from hfta_tune.rounds import ArrayRound, EndReason, Observer, Round

__all__ = ["Figures", "RunFigures", "WorkerFigures"]

_RECENT_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run at the end of a round.

    Where it says "recent", the figure is of the last 10 rounds of each open worker.

    Attributes:
        workers: Open workers.
        lanes_in_use: Their lanes that have a trial.
        lanes_free: Their lanes that have none.
        trials_waiting: Trials that wait for a lane.
        array_lanes: The lanes of each array.
        strategies: How each array trains, in the same order: "recorded", "compiled" (or "compiled by 8",
            "by 32"), "vmap" or "lane by lane".
        rounds: Rounds so far.
        round_seconds: How long the last one took.
        model_rounds: Rounds of single models so far: a round with 32 lanes is 32 of them.
        model_steps: Training steps of single models so far.
        training_samples: Samples that single models were trained on so far.
        model_rounds_per_second: Recent rate.
        model_steps_per_second: Recent rate.
        training_samples_per_second: Recent rate.
        computing_ratio: Which part of the recent time the workers spent in rounds, 0 to 1.
        refills: How often a trial took a lane that another one had had.
        trials_ended: {reason: trials}, with the reasons "done", "stopped", "pruned", "error" and "nan".
        compile_seconds: How long compilations took so far.
        memory_used: Bytes in use of the device's memory, of all workers; None where that is not known.
        memory_size: Bytes of the device's memory, of all workers; None where that is not known.
        driver_seconds_per_result: CPU time that Tune or Optuna, and what belongs to them, took for a result so far.
        speed_up: How many times as fast as one trial at a time the recent arrays train; estimated from steps that
            were measured both ways, None where there are none.
    """

    workers: int
    lanes_in_use: int
    lanes_free: int
    trials_waiting: int
    array_lanes: tuple[int, ...]
    strategies: tuple[str, ...]
    rounds: int
    round_seconds: float
    model_rounds: int
    model_steps: int
    training_samples: int
    model_rounds_per_second: float
    model_steps_per_second: float
    training_samples_per_second: float
    computing_ratio: float
    refills: int
    trials_ended: Mapping[EndReason, int]
    compile_seconds: float
    memory_used: int | None
    memory_size: int | None
    driver_seconds_per_result: float
    speed_up: float | None

    def __str__(self) -> str:
        """One line: lanes, arrays, rate and speed-up."""
        lanes = self.lanes_in_use + self.lanes_free
        line = f"{self.lanes_in_use} of {lanes} lanes in use, {counted(len(self.array_lanes), 'array')}"
        if self.rounds:
            line += f", {self.model_rounds_per_second:.3g} models' rounds/s"
        if self.speed_up is not None:
            line += f", {self.speed_up:.1f} times as fast as one at a time"
        return line


@dataclass(slots=True)
class _Recent:
    """A round, as the recent rates need it."""

    begin: float
    end: float
    models: int
    steps: int
    samples: int


@dataclass(slots=True)
class WorkerFigures:
    """A worker so far.

    An array has a place among its worker's arrays, counted from 0, which the next array takes when it is gone: so
    there are never more places than lanes, however many structures a search tries.

    Attributes:
        lanes: How many it has; 0 once it is closed.
        trials: Those that have a lane.
        arrays: {place: what the array in it did in its last round}.
        refills: How often a trial took a lane that another one had had.
        rounds: Its rounds.
        round_seconds: How long the last one took.
        model_rounds: Rounds of single models.
        model_steps: Training steps of single models.
        training_samples: Samples that single models were trained on.
        compile_seconds: How long compilations took.
        memory_used: Bytes in use of its device's memory, once they were measured.
        memory_size: Bytes of its device's memory, once they were measured.
    """

    lanes: int
    trials: set[str] = field(default_factory=set)
    arrays: dict[int, ArrayRound] = field(default_factory=dict)
    refills: int = 0
    rounds: int = 0
    round_seconds: float = 0.0
    model_rounds: int = 0
    model_steps: int = 0
    training_samples: int = 0
    compile_seconds: float = 0.0
    memory_used: int | None = None
    memory_size: int | None = None
    _used_lanes: set[int] = field(default_factory=set)
    _recent: deque[_Recent] = field(default_factory=lambda: deque(maxlen=_RECENT_ROUNDS))

    @property
    def lanes_in_use(self) -> int:
        """Lanes that have a trial."""
        return len(self.trials)

    @property
    def lanes_free(self) -> int:
        """Lanes that have none."""
        return max(0, self.lanes - len(self.trials))

    @property
    def computing_ratio(self) -> float:
        """Which part of the time of its last rounds it spent in them."""
        return min(1.0, self.rate(*(own.end - own.begin for own in self._recent)))

    @property
    def model_rounds_per_second(self) -> float:
        """Rate of the last rounds."""
        return self.rate(*(own.models for own in self._recent))

    @property
    def model_steps_per_second(self) -> float:
        """Rate of the last rounds."""
        return self.rate(*(own.steps for own in self._recent))

    @property
    def training_samples_per_second(self) -> float:
        """Rate of the last rounds."""
        return self.rate(*(own.samples for own in self._recent))

    def rate(self, *amounts: float) -> float:
        """What the last rounds amount to, a second of the time from the first one's beginning to the last one's end."""
        span = self._recent[-1].end - self._recent[0].begin if self._recent else 0.0
        return sum(amounts) / span if span > 0 else 0.0

    def join(self, trial_id: str, lane: int) -> None:
        """A trial was given a lane."""
        self.trials.add(trial_id)
        self.refills += lane in self._used_lanes
        self._used_lanes.add(lane)

    def leave(self, trial_id: str) -> None:
        """A trial gave up its lane; an array without trials is gone."""
        self.trials.discard(trial_id)
        for place, array in list(self.arrays.items()):
            if self.trials.isdisjoint(array.trials):
                del self.arrays[place]

    def add_round(self, own: Round) -> None:
        """It has trained a round."""
        models = sum(len(array.trials) for array in own.arrays)
        steps = sum(array.steps * len(array.trials) for array in own.arrays)
        samples = sum(array.samples * len(array.trials) for array in own.arrays)
        self.rounds += 1
        self.round_seconds = own.seconds
        self.model_rounds += models
        self.model_steps += steps
        self.training_samples += samples
        self.compile_seconds += sum(array.compile_seconds for array in own.arrays)
        self._recent.append(_Recent(own.begin, own.end, models, steps, samples))
        self._arrange(own.arrays)

    def close(self) -> None:
        """It is gone: what it has done remains."""
        self.lanes = 0
        self.trials.clear()
        self.arrays.clear()
        self._recent.clear()
        self.memory_used = self.memory_size = None

    def _arrange(self, arrays: Iterable[ArrayRound]) -> None:
        present = {array.number: array for array in arrays if array.trials}
        trained = {trial for array in present.values() for trial in array.trials}
        for place, old in list(self.arrays.items()):
            if old.number in present:
                self.arrays[place] = present.pop(old.number)
            elif not self.trials.intersection(old.trials) - trained:  # else it took no part in this round
                del self.arrays[place]
        for array in present.values():
            self.arrays[next(place for place in itertools.count() if place not in self.arrays)] = array


class Figures(Observer):
    """Keeps count of what a run tells.

    Attributes:
        workers: {number: a worker}, closed ones too.
        trials_waiting: Trials that wait for a lane.
        trials_ended: {reason: trials}.
        results: Results that Tune or Optuna was given.
        driver_seconds: CPU time that this took in the driver.
    """

    def __init__(self) -> None:
        self.workers: dict[int, WorkerFigures] = {}
        self.trials_waiting = 0
        self.trials_ended: Counter[EndReason] = Counter()
        self.results = 0
        self.driver_seconds = 0.0
        self._worker_of: dict[str, int] = {}
        self._last_round_seconds = 0.0

    def worker_opened(self, worker: int, lanes: int) -> None:
        """A worker is there, or has another number of lanes."""
        self.workers.setdefault(worker, WorkerFigures(lanes)).lanes = lanes

    def worker_closed(self, worker: int) -> None:
        """A worker is gone."""
        self.workers[worker].close()

    def trial_joined(self, trial_id: str, worker: int, lane: int) -> None:
        """A trial was given a lane."""
        self._worker_of[trial_id] = worker
        self.workers[worker].join(trial_id, lane)

    def trial_left(self, trial_id: str) -> None:
        """A trial gave up its lane."""
        self.workers[self._worker_of.pop(trial_id)].leave(trial_id)

    def trial_ended(self, trial_id: str, reason: EndReason) -> None:
        """A trial is over."""
        self.trials_ended[reason] += 1

    def round_ended(self, worker: int, own: Round) -> None:
        """A worker has told the results of a round."""
        self._last_round_seconds = own.seconds
        self.workers[worker].add_round(own)

    def memory_measured(self, worker: int, used: int, size: int) -> None:
        """The memory of a worker's device was measured."""
        self.workers[worker].memory_used, self.workers[worker].memory_size = used, size

    def results_given(self, results: int, driver_seconds: float) -> None:
        """Tune or Optuna was given results."""
        self.results += results
        self.driver_seconds += driver_seconds

    def trials_wait(self, trials: int) -> None:
        """So many trials wait for a lane now."""
        self.trials_waiting = trials

    def run_ended(self) -> None:
        """The run is over."""
        for worker in self.workers.values():
            worker.close()
        self.trials_waiting = 0

    def now(self) -> RunFigures:
        """The figures of the whole run."""
        every = list(self.workers.values())
        opened = [worker for worker in every if worker.lanes]
        arrays = [array for worker in opened for array in worker.arrays.values()]
        trained = [worker for worker in opened if worker.rounds]
        used, size = zip(*((own.memory_used, own.memory_size) for own in opened), strict=True) if opened else ((), ())
        return RunFigures(
            workers=len(opened),
            lanes_in_use=sum(worker.lanes_in_use for worker in opened),
            lanes_free=sum(worker.lanes_free for worker in opened),
            trials_waiting=self.trials_waiting,
            array_lanes=tuple(len(array.trials) for array in arrays),
            strategies=tuple(array.strategy for array in arrays),
            rounds=sum(worker.rounds for worker in every),
            round_seconds=self._last_round_seconds,
            model_rounds=sum(worker.model_rounds for worker in every),
            model_steps=sum(worker.model_steps for worker in every),
            training_samples=sum(worker.training_samples for worker in every),
            model_rounds_per_second=sum(worker.model_rounds_per_second for worker in trained),
            model_steps_per_second=sum(worker.model_steps_per_second for worker in trained),
            training_samples_per_second=sum(worker.training_samples_per_second for worker in trained),
            computing_ratio=sum(worker.computing_ratio for worker in trained) / max(1, len(trained)),
            refills=sum(worker.refills for worker in every),
            trials_ended=dict(self.trials_ended),
            compile_seconds=sum(worker.compile_seconds for worker in every),
            memory_used=_sum_of_known(used),
            memory_size=_sum_of_known(size),
            driver_seconds_per_result=self.driver_seconds / max(1, self.results),
            speed_up=speed_up(arrays),
        )


def speed_up(arrays: Iterable[ArrayRound]) -> float | None:
    """How many times as fast the arrays' steps are as lane by lane: one model after the other, in one process.

    It weighs arrays by their steps, and knows only those whose steps were measured both ways.
    """
    alone = fused = 0.0
    for array in arrays:
        if array.strategy in array.seconds_a_step and LANE_BY_LANE in array.seconds_a_step:
            alone += array.steps * array.seconds_a_step[LANE_BY_LANE]
            fused += array.steps * array.seconds_a_step[array.strategy]
    return alone / fused if fused else None


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 array" or "2 arrays"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _sum_of_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
