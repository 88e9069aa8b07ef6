"""The loops that a Worker hosts: each runs until it reports, and waits there for the next round."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from hfta_tune.fusion.calls import CalledArray
from hfta_tune.loops._hub import Ended, LoopLane
from hfta_tune.loops._runs import LaneRuns
from hfta_tune.rounds import ArrayRound

__all__ = ["LoopHost"]


class LoopHost:
    """Functions with loops of their own, as trials of a worker. A round of one ends where it calls `LoopLane.park`.

    Args:
        numbers: Numbers the arrays, with the worker's others.
        strategy: "auto", "vmap" or "lane by lane".
        audit: Whether the first call of every kind is compared with each lane's own.
    """

    def __init__(self, numbers: Iterator[int], *, strategy: str, audit: bool) -> None:
        self._make_runs = functools.partial(LaneRuns, strategy=strategy, audit=audit, numbers=numbers)
        self._runs: LaneRuns | None = None
        self._around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._lanes: dict[str, LoopLane] = {}
        self._functions: dict[str, Callable[[], Any]] = {}
        self._done: dict[CalledArray, tuple[int, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._lanes or name in self._functions

    @property
    def names(self) -> list[str]:
        """The trials."""
        return [*self._lanes, *self._functions]

    def add(
        self, name: str, function: Callable[[], Any], around: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """Give a trial a lane; its function begins with its first round. `around` makes what all runs are within."""
        self._around = around
        self._functions[name] = function

    def remove(self, name: str) -> None:
        """End a trial's function where it waits; its finally clauses run."""
        if self._functions.pop(name, None) is None:
            assert self._runs is not None
            with self._around():
                self._runs.stop(self._lanes.pop(name))
            self._close_if_empty()

    def run(self, names: Collection[str]) -> dict[str, Any]:
        """Let the trials run until each has reported or ended; return what they parked with, or what they raised.

        A trial that has ended has lost its lane.
        """
        runs = self._runs = self._runs or self._make_runs()
        for name in names:
            if name in self._functions:
                self._lanes[name] = runs.start(name, self._functions.pop(name))
        outcomes: dict[str, Any] = {}
        with self._around():
            stopped = list(runs.run_until_parked([self._lanes[name] for name in names]))
        for lane, ended in stopped:
            if ended is None:
                outcomes[lane.name] = lane.parked
                continue
            del self._lanes[lane.name]
            if ended.error is not None and not isinstance(ended.error, Exception):
                ended = Ended(error=RuntimeError(f"trial {lane.name} ended by {ended.error!r}; raise an error."))
            outcomes[lane.name] = ended.error or RuntimeError(f"trial {lane.name} ended without a last report.")
        self._close_if_empty()
        return outcomes

    def _close_if_empty(self) -> None:
        if self._runs is not None and not self.names:
            self._runs.close()
            self._runs = None

    def key(self, name: str) -> int:
        """A number that trials share which may share an array; 0 as long as it has prepared nothing."""
        trial = self._lanes[name].trial if name in self._lanes else None
        return 0 if trial is None else hash(("loop", trial.key))

    def array_of(self, name: str) -> CalledArray | None:
        """The array of a trial, if it has one."""
        trial = self._lanes[name].trial if name in self._lanes else None
        return None if trial is None else trial.array

    def arrays(self) -> dict[CalledArray, tuple[str, ...]]:
        """{array: its trials}."""
        found: dict[CalledArray, list[str]] = {}
        for name in self.names:
            array = self.array_of(name)
            if array is not None:
                found.setdefault(array, []).append(name)
        return {array: tuple(names) for array, names in found.items()}

    def tallies(self, names: Collection[str]) -> tuple[ArrayRound, ...]:
        """What the arrays of these trials have done since this was asked last."""
        rounds = []
        before, self._done = self._done, {}
        for array, own in self.arrays().items():
            self._done[array] = array.steps, array.samples
            if set(own) & set(names):
                steps, samples = before.get(array, (0, 0))
                done = array.steps - steps, array.samples - samples
                rounds.append(ArrayRound(array.number, own, array.strategy, *done, 0.0, array.seconds_a_step))
        return tuple(rounds)
