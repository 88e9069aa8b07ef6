"""How many lanes a worker should have: found by doubling their number while that pays. No Ray, no torch, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

__all__ = ["LaneDoubling", "Memory"]


class Memory(NamedTuple):
    """The memory of a worker's device, in bytes: what others hold there counts too.

    Attributes:
        used: What is in use.
        total: All there is.
        at_start: What was in use before the worker had its first trial.
    """

    used: int
    total: int
    at_start: int


class LaneDoubling:
    """Finds the number of lanes at which a worker trains the most.

    Throughput is the models' rounds a second of full rounds, in which every lane took part. It is measured in one
    worker, the first that trains. As long as doubling the lanes raised it by more than `rise`, and memory allows,
    and trials wait for the new lanes, their number is doubled again; else the better of the last two numbers is
    kept. Rounds with empty lanes are not measured. After `patience` rounds in which no trial waited for a lane it
    stops as well, but goes on should trials wait after all.

    The first full round after a change is left out, and the best of `rounds` is taken: a compile or a new trial's
    start makes single rounds slow.

    Args:
        start: The number of lanes at first.
        rise: By which part throughput has to rise.
        rounds: How many full rounds are measured at each number.
        share: Which part of the memory may be in use after a doubling. What a doubling needs is predicted from
            what the last lanes needed, each.
        patience: Of how many rounds without need for more lanes it stops.
    """

    def __init__(
        self, start: int = 4, *, rise: float = 0.1, rounds: int = 3, share: float = 0.9, patience: int = 20
    ) -> None:
        self.lanes = start
        self.throughput: dict[int, float] = {}
        self._rise = rise
        self._share = share
        self._patience = patience
        self._worker: Hashable = None
        self._fresh = True  # the next full round is not measured
        self._seconds: deque[float] = deque(maxlen=rounds)
        self._idle = 0
        self._memory: dict[int, int] = {}
        self._verdict = ""
        self._final = False

    def begin(self) -> None:
        """A run begins, or the worker in which throughput was measured is gone: measure the present number anew."""
        self._worker = None
        self._measure_anew()

    def lost(self, worker: Hashable) -> None:
        """A worker died or closed."""
        if worker == self._worker:
            self.begin()

    @property
    def stopped(self) -> bool:
        """Whether the number stays as it is."""
        return bool(self._verdict)

    def record(
        self,
        worker: Hashable,
        lanes: int,
        seconds: float,
        *,
        memory: Memory | None = None,
        fitting: int | None = None,
        waiting: bool = True,
    ) -> bool:
        """Note a round; returns whether the number of lanes changed, or stopped to change.

        Args:
            worker: The worker that trained it.
            lanes: How many lanes took part.
            seconds: How long it took.
            memory: The device's memory after it, where that is known.
            fitting: How many lanes fit into it, once it has run out.
            waiting: Whether trials wait for a lane.
        """
        if self._final:
            return False
        if self._worker is None:
            self._worker = worker
        if worker != self._worker:
            return False
        if fitting is not None and fitting < self.lanes:
            return self._stop(fitting, f"the memory of the device ran out at {self.lanes}")
        if lanes == self.lanes:
            if self._fresh:
                self._fresh = False
                return False
            self._seconds.append(seconds)
            if len(self._seconds) == self._seconds.maxlen:
                self.throughput[lanes] = lanes / min(self._seconds)
                reason = self._reason_to_stop(memory)
                if reason:
                    best = max(lanes, lanes // 2, key=lambda number: self.throughput.get(number, 0.0))
                    return self._stop(best, reason)
                if waiting:
                    self.lanes *= 2
                    self._verdict = ""
                    self._measure_anew()
                    return True
        if lanes < self.lanes or not waiting:
            self._idle += 1
            if self._idle == self._patience:
                self._verdict = "no trials wait for more lanes"
                return True
        return False

    def __str__(self) -> str:
        """The number, the figures it rests on, and why it stays."""
        figures = ", ".join(f"{rate:.3g} with {lanes}" for lanes, rate in sorted(self.throughput.items()))
        measured = f"models' rounds a second of a worker: {figures}" if figures else "no full round was measured"
        return f"{self.lanes} lanes a worker ({measured}; {self._verdict or 'measuring'})"

    def _measure_anew(self) -> None:
        self._fresh = True
        self._seconds.clear()
        self._idle = 0

    def _stop(self, lanes: int, verdict: str) -> bool:
        self.lanes, self._verdict, self._final = lanes, verdict, True
        return True

    def _reason_to_stop(self, memory: Memory | None) -> str | None:
        lanes = self.lanes
        before = self.throughput.get(lanes // 2)
        if before is not None:
            gain = self.throughput[lanes] / before - 1
            if gain <= self._rise:
                return f"the step to {lanes} changed that by {gain:+.0%}, and doubling has to gain {self._rise:.0%}"
        if memory is None:
            return None
        self._memory[lanes] = memory.used
        fewer = lanes // 2 if lanes // 2 in self._memory else 0
        a_lane = (memory.used - self._memory.get(fewer, memory.at_start)) / (lanes - fewer)
        need = memory.used + lanes * max(0.0, a_lane)
        if need > self._share * memory.total:
            return (
                f"{2 * lanes} lanes would need about {need / 1e9:.1f} GB of the device's memory of "
                f"{memory.total / 1e9:.1f} GB"
            )
        return None
