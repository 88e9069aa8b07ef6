"""The packer against a model of it: every trial gets a lane, none two, and no worker holds more than B."""

from __future__ import annotations

import random

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


@pytest.mark.parametrize("seed", range(20))
def test_random_lives(seed: int) -> None:
    """Random adds, ends, grants and deaths: invariants hold, and in the end every trial has run."""
    draw = random.Random(seed)
    lanes, groups = draw.randint(1, 5), ["cpu", "gpu"]
    packer = Packer(lanes)
    todo = list(range(60))
    ran: set[int] = set()
    while todo or packer.waiting or packer.lanes_in_use:
        if todo and draw.random() < 0.5:
            trial = todo.pop()
            packer.add(trial, groups[trial % 2])
        plan = packer.schedule(keep_idle=draw.random() < 0.5)
        for placement in plan.place:
            assert isinstance(placement.trial, int) and placement.trial not in ran
            ran.add(placement.trial)
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
