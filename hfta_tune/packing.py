"""Which trial goes to which worker, and when a worker opens or closes. No Ray, no torch, no clock."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Packer", "Placement", "Plan", "WorkerState"]

Trial: TypeAlias = Hashable
Group: TypeAlias = Hashable
"""Trials of one group can share a worker: they ask for the same resources."""
Kind: TypeAlias = Hashable
"""Trials of one kind are expected to share an array: as far as is known, their signatures are equal."""


class WorkerState(enum.Enum):
    """Life of a worker."""

    REQUESTED = "requested"  # its resources have been asked for
    OPEN = "open"  # it has its resources and takes trials


@dataclass(slots=True)
class _Worker:
    group: Group
    state: WorkerState = WorkerState.REQUESTED
    limit: int | None = None  # no more than that fit into its memory
    trials: set[Trial] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Placement:
    """A trial that now has a lane in a worker."""

    trial: Trial
    worker: int


@dataclass(slots=True)
class Plan:
    """What the owner of the packer is to do now."""

    place: list[Placement] = field(default_factory=list)
    open: list[tuple[int, Group]] = field(default_factory=list)
    close: list[int] = field(default_factory=list)


class Packer:
    """Packs waiting trials into the lanes of workers: first come, first served, like to like.

    A worker has `lanes` lanes. None stays free while a trial of the group waits, and a worker is requested only
    for trials that no present or requested worker has a lane for. Which trial takes which lane is a matter of
    kinds: a trial goes to the worker with the largest share of its kind, and a free lane to a trial of a kind that
    its worker hosts. A trial is overtaken so at most `2 * lanes` times; then it is next, and goes where a lane is.

    Args:
        lanes: B, the lanes of a worker.
        most_requested: How many workers may be waiting for resources at once.
    """

    def __init__(self, lanes: int, *, most_requested: int = 4) -> None:
        self.lanes = lanes
        self._most_requested = most_requested
        self._waiting: dict[Group, deque[Trial]] = {}
        self._overtaken: Counter[Trial] = Counter()
        self._workers: dict[int, _Worker] = {}
        self._worker_of: dict[Trial, int] = {}
        self._numbers = itertools.count()

    @property
    def most_overtaken(self) -> int:
        """How many trials that came later may be placed before one that waits."""
        return 2 * self.lanes

    def add(self, trial: Trial, group: Group) -> None:
        """Queue a trial for a lane."""
        self._waiting.setdefault(group, deque()).append(trial)

    def remove(self, trial: Trial) -> None:
        """Forget a trial; its lane, if it has one, is free. Removing it again does nothing."""
        worker = self._worker_of.pop(trial, None)
        if worker is not None:
            self._workers[worker].trials.discard(trial)
            return
        self._overtaken.pop(trial, None)
        for queue in self._waiting.values():
            if trial in queue:
                queue.remove(trial)

    def opened(self, worker: int) -> None:
        """A requested worker has its resources: it takes trials from now on."""
        self._workers[worker].state = WorkerState.OPEN

    def resize(self, lanes: int) -> None:
        """Give every worker `lanes` lanes from now on; where there are more trials, they stay."""
        self.lanes = lanes

    def limit(self, worker: int, lanes: int) -> None:
        """Place no more than `lanes` trials in this worker from now on; those that are there stay."""
        if worker in self._workers:
            self._workers[worker].limit = lanes

    def lost(self, worker: int) -> list[Trial]:
        """A worker died or closed: no trial is placed in it again; return those that were in it."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        for trial in gone.trials:
            del self._worker_of[trial]
        return list(gone.trials)

    def schedule(self, *, keep_idle: bool = False, kind_of: Callable[[Trial], Kind] = lambda trial: None) -> Plan:
        """Place waiting trials, and say which workers to open and to close.

        Args:
            keep_idle: Keep open workers without trials, since more trials may come.
            kind_of: The kind of a trial, as far as is known now.
        """
        plan = Plan()
        for group, queue in self._waiting.items():
            self._place(group, queue, plan, kind_of)
        for group, queue in self._waiting.items():
            self._adjust_requests(group, len(queue), plan)
        if not keep_idle:
            plan.close += [n for n, w in self._workers.items() if w.state is WorkerState.OPEN and not w.trials]
        for number in plan.close:
            del self._workers[number]
        return plan

    def _place(self, group: Group, queue: deque[Trial], plan: Plan, kind_of: Callable[[Trial], Kind]) -> None:
        hosted: dict[int, Counter[Kind]] = {}
        while queue and (free := self._free_workers(group)):
            for number in free:
                if number not in hosted:
                    hosted[number] = Counter(map(kind_of, self._workers[number].trials))
            position, number = self._choose(queue, {number: hosted[number] for number in free}, kind_of)
            self._overtaken.update(itertools.islice(queue, position))
            trial = queue[position]
            del queue[position]
            self._overtaken.pop(trial, None)
            self._workers[number].trials.add(trial)
            self._worker_of[trial] = number
            hosted[number][kind_of(trial)] += 1
            plan.place.append(Placement(trial, number))

    def _free_workers(self, group: Group) -> list[int]:
        return [
            number
            for number, worker in self._workers.items()
            if worker.group == group
            and worker.state is WorkerState.OPEN
            and len(worker.trials) < (self.lanes if worker.limit is None else min(self.lanes, worker.limit))
        ]

    def _choose(
        self, queue: deque[Trial], hosted: Mapping[int, Counter[Kind]], kind_of: Callable[[Trial], Kind]
    ) -> tuple[int, int]:
        """Return the place in the queue of the trial that is next, and the number of its worker."""
        first: dict[Kind, int] = {}  # of each kind, where its first trial stands
        for position, trial in enumerate(itertools.islice(queue, self.most_overtaken + 1)):
            first.setdefault(kind_of(trial), position)
            if self._overtaken[trial] >= self.most_overtaken:
                break
        total = {number: sum(kinds.values()) for number, kinds in hosted.items()}
        if len(set(first).union(*hosted.values())) == 1:  # so it matters only that workers have equally many
            return 0, min(hosted, key=lambda number: (total[number], number))
        *_, position, number = max(
            (kinds[kind] / max(1, total[number]), -position, -total[number], -number, position, number)
            for kind, position in first.items()
            for number, kinds in hosted.items()
        )
        return position, number

    def _adjust_requests(self, group: Group, waiting: int, plan: Plan) -> None:
        """Have one requested worker for each B waiting trials."""
        requested = [
            number
            for number, worker in self._workers.items()
            if worker.group == group and worker.state is WorkerState.REQUESTED
        ]
        needed = min(-(-waiting // self.lanes), self._most_requested)
        plan.close += requested[needed:]
        for _ in range(needed - len(requested)):
            number = next(self._numbers)
            self._workers[number] = _Worker(group)
            plan.open.append((number, group))

    # What is where

    def worker_of(self, trial: Trial) -> int | None:
        """The worker in which a trial has its lane, or None while it waits."""
        return self._worker_of.get(trial)

    def trials_in(self, worker: int) -> set[Trial]:
        """The trials that have a lane in a worker."""
        return set(self._workers[worker].trials) if worker in self._workers else set()

    @property
    def workers(self) -> dict[int, WorkerState]:
        """The present workers."""
        return {number: worker.state for number, worker in self._workers.items()}

    @property
    def waiting(self) -> int:
        """How many trials wait for a lane."""
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def lanes_in_use(self) -> int:
        """How many trials have a lane."""
        return len(self._worker_of)
