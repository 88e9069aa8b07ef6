"""A limit on how long a worker may take over a call: a hook that hangs is named, and the run goes on without it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

__all__ = ["Overdue", "UnansweredCalls", "Watch", "checked_limit"]

# How long a worker may take to say what it runs. It says so at once unless a hook keeps Python to itself.
_PATIENCE_S = 5.0


def checked_limit(seconds: float | None) -> float | None:
    """Return a limit of a user's.

    Raises:
        ValueError: if it is neither None nor a positive number of seconds.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"round_timeout_s must be a positive number of seconds or None but got {seconds!r}.")
    return float(seconds)


class UnansweredCalls:
    """The calls that a worker has yet to answer, in the order in which it carries them out.

    Args:
        clock: The time in seconds.
        is_answered: Whether a call has been answered.
    """

    def __init__(self, clock: Callable[[], float], is_answered: Callable[[Any], bool]) -> None:
        self._clock, self._is_answered = clock, is_answered
        self._calls: deque[Any] = deque()
        self._since = clock()

    def sent(self, call: Any) -> None:
        """Note a call."""
        if not self._calls:
            self._since = self._clock()
        self._calls.append(call)

    def begin(self) -> None:
        """The worker can begin with the first of them only now."""
        self._since = self._clock()

    def seconds(self) -> float:
        """How long the worker has been busy with the first of them, at most; 0 if there is none."""
        while self._calls and self._is_answered(self._calls[0]):
            self._calls.popleft()
            self._since = self._clock()
        return self._clock() - self._since if self._calls else 0.0


class _Watched(Protocol):
    actor: Any
    ready: bool
    unanswered: UnansweredCalls | None


@dataclass(frozen=True)
class Overdue:
    """A call that a worker has not answered in time.

    Attributes:
        limit_s: The limit.
        hook: What it ran then, if it said so.
        trials: For which trials.
    """

    limit_s: float
    hook: str | None = None
    trials: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.hook is None:
            what = "It did not even say what it runs: something in it does not let other threads run"
        else:
            trials = f"trial {self.trials[0]}" if len(self.trials) == 1 else f"the trials {', '.join(self.trials)}"
            what = f"It was in {self.hook} of {trials}"
        return (
            f"A worker did not answer within round_timeout_s={self.limit_s:g} s. {what}. It was killed. If that is "
            "only slow, set a larger round_timeout_s."
        )

    def warning(self, others: Iterable[str], *, spared: bool) -> str:
        """Say what becomes of the worker's other trials."""
        names = ", ".join(others)
        if not names:
            return str(self)
        cost = "costs them no failure" if spared else "costs each a failure, since nothing says which is to blame"
        return f"{self} Its other trials go on from their last checkpoints, which {cost}: {names}."


class Watch:
    """Watches over the workers' unanswered calls.

    Args:
        limit_s: How long a worker may take over one call; None for as long as it likes.
        clock: The time in seconds.
    """

    def __init__(self, limit_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._looked = -math.inf

    def calls(self) -> UnansweredCalls | None:
        """Where a new worker's calls are to be noted, if they are."""
        return None if self._limit_s is None else UnansweredCalls(self._clock, _is_answered)

    def overdue(self, workers: Iterable[_Watched]) -> list[tuple[Any, Overdue]]:
        """Return the workers that are past the limit, and what they are in."""
        if self._limit_s is None or self._clock() - self._looked < min(1.0, self._limit_s / 10):
            return []
        self._looked = self._clock()
        found = []
        for worker in workers:
            assert worker.unanswered is not None
            if not worker.ready:  # its process is still starting
                worker.unanswered.begin()
            elif worker.unanswered.seconds() > self._limit_s:
                overdue = Overdue(self._limit_s, *_running(worker.actor))
                if worker.unanswered.seconds() > self._limit_s:  # else it has answered in the meantime
                    found.append((worker, overdue))
        return found


def _running(actor: Any) -> tuple[str | None, tuple[str, ...]]:
    """The hook that a worker is in, and the trials that it runs it for."""
    try:
        running = ray.get(actor.describe.remote(), timeout=_PATIENCE_S)["running"]
    except Exception:  # it hangs in a way that leaves no thread to answer
        running = None
    return (None, ()) if running is None else (running["hook"], tuple(running["trials"]))


def _is_answered(call: ray.ObjectRef) -> bool:
    return bool(ray.wait([call], timeout=0, fetch_local=False)[0])
