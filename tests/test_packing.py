"""The packer against a model of it: every trial gets a lane, none two, and no worker holds more than B."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable

import pytest

from hfta_tune.packing import Packer, Plan, WorkerState


def carry_out(packer: Packer, plan: Plan, grant: int = 10) -> None:
    """Do what a plan says; give the resources of at most `grant` of the opened workers."""
    for number, _ in plan.open[:grant]:
        packer.opened(number)


def test_a_worker_is_requested_for_each_b_waiting_trials() -> None:
    packer = Packer(4)
    for trial in range(10):
        packer.add(trial, "cpu")
    plan = packer.schedule()
    assert [group for _, group in plan.open] == ["cpu"] * 3
    assert not plan.place and packer.waiting == 10


def test_trials_are_placed_first_come_first_served_once_the_worker_has_its_resources() -> None:
    packer = Packer(4)
    for trial in range(6):
        packer.add(trial, "cpu")
    plan = packer.schedule()
    packer.opened(plan.open[0][0])
    placed = packer.schedule().place
    assert [(p.trial, p.worker) for p in placed] == [(t, plan.open[0][0]) for t in range(4)]
    assert packer.waiting == 2


def test_a_freed_lane_is_taken_by_the_next_waiting_trial() -> None:
    packer = Packer(2)
    for trial in range(3):
        packer.add(trial, "cpu")
    worker = packer.schedule().open[0][0]
    packer.opened(worker)
    packer.schedule()
    packer.remove(0)
    plan = packer.schedule()
    assert [(p.trial, p.worker) for p in plan.place] == [(2, worker)]
    assert packer.trials_in(worker) == {1, 2}


def test_a_limited_worker_gets_no_more_trials_than_that() -> None:
    """Memory ran out in it: those that are there stay."""
    packer = Packer(4)
    for trial in range(8):
        packer.add(trial, "cpu")
    worker = packer.schedule().open[0][0]
    packer.opened(worker)
    packer.schedule()
    packer.limit(worker, 2)
    for trial in (0, 1):
        packer.remove(trial)
        assert not packer.schedule().place
    assert packer.trials_in(worker) == {2, 3}
    packer.remove(2)
    assert [(p.trial, p.worker) for p in packer.schedule().place] == [(4, worker)]
    assert not packer.schedule().place and packer.waiting == 3


def test_a_request_is_taken_back_when_a_free_lane_made_it_needless() -> None:
    packer = Packer(1)
    packer.add("a", "cpu")
    first = packer.schedule().open[0][0]
    packer.opened(first)
    packer.schedule()
    packer.add("b", "cpu")
    second = packer.schedule().open[0][0]
    packer.remove("a")
    plan = packer.schedule()
    assert [(p.trial, p.worker) for p in plan.place] == [("b", first)]
    assert plan.close == [second] and list(packer.workers) == [first]


def test_trials_of_other_resources_get_other_workers() -> None:
    packer = Packer(8)
    packer.add("a", "cpu")
    packer.add("b", "gpu")
    plan = packer.schedule()
    assert sorted(group for _, group in plan.open) == ["cpu", "gpu"]  # type: ignore[type-var]
    carry_out(packer, plan)
    placed = {p.trial: p.worker for p in packer.schedule().place}
    assert placed["a"] != placed["b"]


def test_an_empty_worker_closes_unless_more_trials_may_come() -> None:
    packer = Packer(2)
    packer.add("a", "cpu")
    worker = packer.schedule().open[0][0]
    packer.opened(worker)
    packer.schedule()
    packer.remove("a")
    assert packer.schedule(keep_idle=True).close == []
    assert packer.schedule(keep_idle=False).close == [worker]
    assert packer.workers == {}


def test_no_trial_is_placed_in_a_lost_worker() -> None:
    packer = Packer(2)
    packer.add("a", "cpu")
    worker = packer.schedule().open[0][0]
    packer.opened(worker)
    packer.schedule()
    assert packer.lost(worker) == ["a"]
    assert packer.lost(worker) == []
    packer.add("a", "cpu")
    plan = packer.schedule()
    assert not plan.place and plan.open[0][0] != worker


def test_no_more_requests_than_allowed() -> None:
    packer = Packer(1, most_requested=2)
    for trial in range(9):
        packer.add(trial, "cpu")
    assert len(packer.schedule().open) == 2
    assert packer.schedule().open == []


def first_letter(trial: Hashable) -> Hashable:
    """Kinds for tests: trials a0, a1, ... are of one kind."""
    assert isinstance(trial, str)
    return trial[0]


def with_workers(packer: Packer, *hosted: str) -> list[int]:
    """Open a worker for each string and place the trials that it names ("a0 b1") there."""
    workers: list[int] = []
    for number, _ in enumerate(hosted):  # filled up at first, so that the next one is needed
        for lane in range(packer.lanes):
            packer.add(f"filler {number} {lane}", "cpu")
        workers += [worker for worker, _ in packer.schedule().open]
        packer.opened(workers[-1])
        packer.schedule()
    for worker, names in zip(workers, hosted, strict=True):
        for trial, filler in zip(names.split(), sorted(packer.trials_in(worker)), strict=False):  # type: ignore[type-var]
            packer.remove(filler)
            packer.add(trial, "cpu")
            assert [p.worker for p in packer.schedule().place] == [worker]
    for worker in workers:
        for trial in packer.trials_in(worker):
            if str(trial).startswith("filler"):
                packer.remove(trial)
    return workers


def placed(packer: Packer, kind_of: Callable[[Hashable], Hashable] = first_letter) -> list[tuple[Hashable, int]]:
    return [(p.trial, p.worker) for p in packer.schedule(keep_idle=True, kind_of=kind_of).place]


@pytest.mark.parametrize(
    ("hosted", "waiting", "expected"),
    [
        # One trial waits, as with a searcher: to the worker that hosts its kind, be it the fuller one.
        (["a0 a1", "b0"], "a2", {"a2": 0}),
        (["a0", "b0 b1"], "b2", {"b2": 1}),
        # To where the larger part is of its kind.
        (["a0 b0 b1", "a1 a2 b2"], "b3", {"b3": 0}),
        (["a0 a1 b0", "a2"], "a3", {"a3": 1}),
        # A kind that no worker hosts goes to the emptiest, as does any trial if all are of one kind.
        (["a0 a1", "b0"], "c0", {"c0": 1}),
        (["a0 a1", "a2"], "a3", {"a3": 1}),
        (["a0 a1", ""], "a2", {"a2": 1}),
        (["", ""], "a0 a1", {"a0": 0, "a1": 1}),
        # An empty worker is for another kind.
        (["a0 a1", ""], "a2 b0", {"a2": 0, "b0": 1}),
        # Several wait: each finds its kind.
        (["a0", "b0"], "b1 a1 a2 b2", {"b1": 1, "a1": 0, "a2": 0, "b2": 1}),
        # No lane of the better worker is free: a trial never waits for one.
        (["a0 a1 a2 a3", "b0"], "a4", {"a4": 1}),
        (["a0 a1 a2", "b0 b1"], "a3 a4 a5", {"a3": 0, "a4": 1, "a5": 1}),
    ],
)
def test_a_trial_goes_to_the_worker_that_hosts_its_kind(
    hosted: list[str], waiting: str, expected: dict[str, int]
) -> None:
    packer = Packer(4)
    workers = with_workers(packer, *hosted)
    for trial in waiting.split():
        packer.add(trial, "cpu")
    assert dict(placed(packer)) == {trial: workers[worker] for trial, worker in expected.items()}


@pytest.mark.parametrize(
    ("hosted", "waiting", "expected"),
    [
        ("a0 a1 a2", "b0 a3 a4", "a3"),
        ("a0 b0 b1", "a1 b2", "b2"),  # most of its trials are of that kind
        ("a0 b0", "b1 a1", "b1"),  # as good as the other, and first
        ("a0 a1 a2", "b0 c0", "b0"),  # none is hosted
        ("", "b0 a0", "b0"),
    ],
)
def test_a_free_lane_is_taken_by_a_trial_of_a_hosted_kind(hosted: str, waiting: str, expected: str) -> None:
    packer = Packer(max(1, len(hosted.split())) + (1 if hosted else 0))
    with_workers(packer, hosted)
    for trial in waiting.split():
        packer.add(trial, "cpu")
    assert [trial for trial, _ in placed(packer)][:1] == [expected]


def test_without_kinds_it_is_first_come_first_served() -> None:
    packer = Packer(4)
    with_workers(packer, "a0")
    for trial in ("b0", "a1", "c0"):
        packer.add(trial, "cpu")
    assert [p.trial for p in packer.schedule().place] == ["b0", "a1", "c0"]


@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_a_trial_is_overtaken_so_often_and_no_more(lanes: int) -> None:
    """One lane is free again and again, and there is always a trial of the hosted kind."""
    packer = Packer(lanes)
    with_workers(packer, " ".join(f"a{lane}" for lane in range(lanes)))
    packer.add("b0", "cpu")
    running = [f"a{lane}" for lane in range(lanes)]
    overtaken_by = 0
    for number in range(lanes, 10 * lanes):
        packer.add(f"a{number}", "cpu")
        packer.remove(running.pop(0))
        [(trial, _)] = placed(packer)
        running.append(str(trial))
        if trial == "b0":
            break
        overtaken_by += 1
    assert overtaken_by == packer.most_overtaken == 2 * lanes


def test_more_lanes_for_every_worker() -> None:
    packer = Packer(2)
    for trial in range(20):
        packer.add(trial, "cpu")
    plan = packer.schedule()
    small, other = (number for number, _ in plan.open[:2])
    packer.opened(small)
    packer.opened(other)
    packer.schedule()
    packer.limit(small, 3)
    packer.resize(8)
    plan = packer.schedule()
    assert len(packer.trials_in(small)) == 3 and len(packer.trials_in(other)) == 8  # the limit of one holds
    requested = [number for number, state in packer.workers.items() if state is WorkerState.REQUESTED]
    assert len(requested) == 2 and packer.waiting == 9


def test_fewer_lanes_leave_those_that_are_there() -> None:
    packer = Packer(4)
    for trial in range(6):
        packer.add(trial, "cpu")
    worker = packer.schedule().open[0][0]
    packer.opened(worker)
    packer.schedule()
    packer.limit(worker, 3)
    packer.resize(2)
    assert packer.schedule().place == [] and len(packer.trials_in(worker)) == 4
    for trial in (0, 1, 2):
        packer.remove(trial)
    assert [p.trial for p in packer.schedule().place] == [4]


@pytest.mark.parametrize("seed", range(20))
def test_random_lives(seed: int) -> None:
    """Random adds, ends, grants, deaths and kinds: invariants hold, and in the end every trial has run."""
    draw = random.Random(seed)
    kinds = [draw.randrange(3) for _ in range(60)]
    arrivals = itertools.count()
    came: dict[int, int] = {}
    group_of: dict[int, str] = {}
    overtaken: dict[int, int] = {}  # by how many, of those that wait
    lanes, groups = draw.randint(1, 5), ["cpu", "gpu"]
    packer = Packer(lanes)
    todo = list(range(60))
    ran: set[int] = set()
    while todo or packer.waiting or packer.lanes_in_use:
        if todo and draw.random() < 0.5:
            trial = todo.pop()
            packer.add(trial, groups[trial % 2])
            came[trial], overtaken[trial] = next(arrivals), 0
        plan = packer.schedule(keep_idle=draw.random() < 0.5, kind_of=lambda trial: kinds[trial])  # type: ignore[index]
        group_of.update(plan.open)  # type: ignore[arg-type]
        for placement in plan.place:
            assert isinstance(placement.trial, int) and placement.trial not in ran
            ran.add(placement.trial)
            assert overtaken.pop(placement.trial) <= packer.most_overtaken
            for other in overtaken:
                overtaken[other] += other % 2 == placement.trial % 2 and came[other] < came[placement.trial]
        for number, state in packer.workers.items():
            if state is WorkerState.OPEN and len(packer.trials_in(number)) < lanes:
                assert group_of[number] not in {groups[trial % 2] for trial in overtaken}, "a lane is free"
        for number, state in packer.workers.items():
            inside = packer.trials_in(number)
            assert len(inside) <= lanes
            assert len({groups[t % 2] for t in inside}) <= 1  # type: ignore[operator]
            assert state is WorkerState.OPEN or not inside
            if state is WorkerState.REQUESTED and draw.random() < 0.5:
                packer.opened(number)
            elif inside and draw.random() < 0.3:
                packer.remove(draw.choice(sorted(inside)))  # type: ignore[type-var]
            elif draw.random() < 0.05:
                for trial in packer.lost(number):
                    ran.discard(trial)  # type: ignore[arg-type]
                    todo.append(trial)  # type: ignore[arg-type]
    assert ran == set(range(60))
