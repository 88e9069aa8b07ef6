"""B="auto": at which number of lanes the doubling stops, for made-up workers whose rounds take a known time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hfta_tune._doubling import LaneDoubling, Memory

GB = 10**9


def trained(
    doubling: LaneDoubling,
    seconds: Callable[[int], float],
    rounds: int = 60,
    used: Callable[[int], int] = lambda lanes: 0,
    trials: int = 10**6,
) -> list[int]:
    """Train rounds with as many lanes as there are; return the numbers that were tried."""
    tried = [doubling.lanes]
    for _ in range(rounds):
        lanes = min(doubling.lanes, trials)
        memory = Memory(used(lanes), 100 * GB, at_start=used(0))
        doubling.record("w", lanes, seconds(lanes), memory=memory, waiting=trials > lanes)
        if doubling.lanes != tried[-1]:
            tried.append(doubling.lanes)
    return tried


@pytest.mark.parametrize(
    ("throughput", "tried"),
    [
        ({4: 10, 8: 9}, [4, 8, 4]),
        ({4: 10, 8: 10.9}, [4, 8]),  # better, but not by 10%: it stays, and does not go on
        ({4: 10, 8: 11.1, 16: 11.0}, [4, 8, 16, 8]),
        ({4: 10, 8: 20, 16: 40, 32: 42}, [4, 8, 16, 32]),
        ({4: 10, 8: 20, 16: 40, 32: 30}, [4, 8, 16, 32, 16]),
    ],
)
def test_lanes_double_while_throughput_rises(throughput: dict[int, float], tried: list[int]) -> None:
    doubling = LaneDoubling()
    assert trained(doubling, lambda lanes: lanes / throughput[lanes]) == tried
    assert doubling.stopped
    assert doubling.throughput == pytest.approx(throughput)
    for lanes, rate in throughput.items():
        assert f"{rate:.3g} with {lanes}" in str(doubling)
    assert str(doubling).startswith(f"{tried[-1]} lanes a worker") and "doubling has to gain 10%" in str(doubling)


@pytest.mark.parametrize("slow", [[0], [1], [3], [0, 1, 2], [0, 3]])
def test_compile_pauses_do_not_mislead(slow: list[int]) -> None:
    """Of the rounds at each number of lanes these take long; one of those measured does not."""
    doubling = LaneDoubling()
    counts: dict[int, int] = {}

    def seconds(lanes: int) -> float:
        number = counts[lanes] = counts.get(lanes, -1) + 1
        return 1.0 + 50.0 * (number in slow) + (lanes > 16) * 2.0

    assert trained(doubling, seconds) == [4, 8, 16, 32, 16]


def test_the_first_full_round_after_a_change_is_not_measured() -> None:
    """It may be quick for a wrong reason too."""
    doubling = LaneDoubling(rounds=2)
    for seconds in (0.001, 1.0, 1.0):
        doubling.record("w", 4, seconds)
    assert doubling.throughput == {4: 4.0} and doubling.lanes == 8
    for seconds in (0.001, 1.0, 1.0):
        doubling.record("w", 8, seconds)
    assert doubling.throughput == {4: 4.0, 8: 8.0}


@pytest.mark.parametrize(
    ("used", "tried"),
    [
        (lambda lanes: 10 * GB + lanes * GB, [4, 8, 16, 32, 64]),  # 128 would need 138 GB
        (lambda lanes: 10 * GB + lanes * 3 * GB, [4, 8, 16]),  # 32 would need 106 GB
        (lambda lanes: 60 * GB if lanes else 20 * GB, [4]),  # the first four lanes took 40 GB
        (lambda lanes: 92 * GB if lanes else 99 * GB, [4]),  # more than 90% are in use, whoever uses them
    ],
)
def test_memory_must_allow_the_next_doubling(used: Callable[[int], int], tried: list[int]) -> None:
    doubling = LaneDoubling()
    assert trained(doubling, lambda lanes: 1.0, used=used) == tried
    assert doubling.stopped and f"{2 * tried[-1]} lanes would need about" in str(doubling)


def test_memory_that_others_gave_back_is_no_growth() -> None:
    doubling = LaneDoubling()
    tried = trained(doubling, lambda lanes: 1.0 if lanes < 32 else 3.0, used=lambda lanes: (80 - lanes) * GB)
    assert tried == [4, 8, 16, 32, 16]


def test_lanes_that_did_not_fit_end_it() -> None:
    doubling = LaneDoubling()
    trained(doubling, lambda lanes: 1.0, rounds=8)
    assert doubling.lanes == 16
    assert doubling.record("w", 16, 1.0, fitting=9)
    assert doubling.lanes == 9 and doubling.stopped and "ran out at 16" in str(doubling)
    assert not doubling.record("w", 9, 1.0)


def test_without_memory_figures_throughput_decides() -> None:
    doubling = LaneDoubling()
    while not doubling.stopped:
        doubling.record("w", doubling.lanes, 1.0 if doubling.lanes < 64 else 4.0)
    assert doubling.lanes == 32


@pytest.mark.parametrize(("trials", "lanes"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_with_few_trials_it_stops_unmeasured(trials: int, lanes: int) -> None:
    doubling = LaneDoubling()
    trained(doubling, lambda lanes: 1.0, trials=trials)
    assert doubling.lanes == lanes and doubling.stopped
    assert "no trials wait for more lanes" in str(doubling)
    if trials < 4:
        assert "no full round was measured" in str(doubling)


def test_it_goes_on_when_trials_wait_after_all() -> None:
    doubling = LaneDoubling()
    trained(doubling, lambda lanes: 1.0, trials=3)
    assert doubling.stopped
    assert trained(doubling, lambda lanes: 1.0 if lanes < 16 else 3.0) == [4, 8, 16, 8]


def test_rounds_with_empty_lanes_and_rounds_of_other_workers_are_not_measured() -> None:
    doubling = LaneDoubling()
    for _ in range(10):
        doubling.record("w", 3, 1.0)
        doubling.record("other", 4, 1.0)
    assert doubling.throughput == {} and doubling.lanes == 4


def test_when_the_measured_worker_is_lost_another_takes_over() -> None:
    doubling = LaneDoubling()
    for _ in range(3):
        doubling.record("w", 4, 1.0)
    doubling.lost("other")
    doubling.lost("w")
    for number in range(4):
        assert doubling.lanes == 4, number
        doubling.record("other", 4, 1.0)
    assert doubling.lanes == 8


def test_a_number_once_found_holds_in_the_next_run() -> None:
    doubling = LaneDoubling()
    trained(doubling, lambda lanes: 1.0 if lanes < 16 else 3.0)
    doubling.begin()
    assert trained(doubling, lambda lanes: 1.0) == [8]


def test_each_change_is_told_once() -> None:
    doubling = LaneDoubling()
    told = [doubling.record("w", doubling.lanes, 1.0 if doubling.lanes < 8 else 3.0) for _ in range(20)]
    assert [number for number, changed in enumerate(told) if changed] == [3, 7]
