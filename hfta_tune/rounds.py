"""What a run tells those who watch it: its rounds, and which trial has which lane. No Ray, no Optuna, no torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["ArrayRound", "EndReason", "Observer", "Observers", "Round"]

logger = logging.getLogger(__name__)

EndReason: TypeAlias = Literal["done", "stopped", "pruned", "error", "nan"]
"""Why a trial ended: its epochs or stopping criteria, the run's end, a scheduler or pruner, an exception, a NaN."""


@dataclass(frozen=True, slots=True)
class ArrayRound:
    """What an array did in a round.

    Attributes:
        number: Which array of its worker it is.
        trials: The trials in it at the end of the round, in the order of its rows.
        strategy: How its last training step ran: "recorded", "compiled" (or "compiled by 8", "by 32"), "vmap"
            or "lane by lane".
        steps: Training steps of the round.
        samples: Samples that each of its trials was trained on.
        compile_seconds: How long recording or compiling the step at the round's end took, else 0.
        seconds_a_step: {strategy: seconds of a training step}, of those that have been measured on it.
    """

    number: int
    trials: tuple[str, ...]
    strategy: str
    steps: int
    samples: int
    compile_seconds: float = 0.0
    seconds_a_step: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a worker.

    Attributes:
        begin: When it began, in seconds since the epoch.
        end: When it ended.
        arrays: What each array did.
    """

    begin: float
    end: float
    arrays: tuple[ArrayRound, ...]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class Observer:
    """Is told what happens in a run, as it happens, in the process that asks for trials. These methods do nothing.

    Workers are numbered from 0 in the order in which they are opened; the lanes of each from 0 to B - 1.

    Attributes:
        wants_memory: Whether `memory_measured` is to be told: to measure takes about a millisecond.
    """

    wants_memory = False

    def worker_opened(self, worker: int, lanes: int) -> None:
        """A worker with so many lanes is there; a worker that is told again has another number of them."""

    def worker_closed(self, worker: int) -> None:
        """A worker was closed, or died."""

    def trial_joined(self, trial_id: str, worker: int, lane: int) -> None:
        """A trial was given a lane."""

    def trial_left(self, trial_id: str) -> None:
        """A trial gave up its lane: it ended, or was paused."""

    def trial_ended(self, trial_id: str, reason: EndReason) -> None:
        """A trial is over. It may have given up its lane before or do so afterwards."""

    def round_ended(self, worker: int, own: Round) -> None:
        """A worker has told the results of a round."""

    def memory_measured(self, worker: int, used: int, size: int) -> None:
        """So many bytes of the memory of a worker's device are in use, of so many; told now and then before a round."""

    def results_given(self, results: int, driver_seconds: float) -> None:
        """Tune or Optuna was given so many results since it was told last, which cost its thread so much CPU time."""

    def trials_wait(self, trials: int) -> None:
        """So many trials wait for a lane now."""

    def time_passed(self) -> None:
        """The run goes on; told about once a second while it does, by Tune's driver only."""

    def run_ended(self) -> None:
        """The run is over; nothing is told after this."""


class Observers(Observer):
    """Tells several observers. One that raises is told nothing more, and the run goes on."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    @property
    def wants_memory(self) -> bool:  # type: ignore[override]
        """Whether one of them does."""
        return any(observer.wants_memory for observer in self._observers)

    def _tell(self, event: str, *arguments: Any) -> None:
        for observer in list(self._observers):
            try:
                getattr(observer, event)(*arguments)
            except Exception:
                self._observers.remove(observer)
                logger.exception("%s no longer watches the run, because of this error.", type(observer).__name__)

    worker_opened = functools.partialmethod(_tell, "worker_opened")
    worker_closed = functools.partialmethod(_tell, "worker_closed")
    trial_joined = functools.partialmethod(_tell, "trial_joined")
    trial_left = functools.partialmethod(_tell, "trial_left")
    trial_ended = functools.partialmethod(_tell, "trial_ended")
    round_ended = functools.partialmethod(_tell, "round_ended")
    memory_measured = functools.partialmethod(_tell, "memory_measured")
    results_given = functools.partialmethod(_tell, "results_given")
    trials_wait = functools.partialmethod(_tell, "trials_wait")
    time_passed = functools.partialmethod(_tell, "time_passed")
    run_ended = functools.partialmethod(_tell, "run_ended")
