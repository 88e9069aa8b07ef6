"""The figures of a run, from made-up events."""

from __future__ import annotations

import pytest

from hfta_tune.monitor import Figures
from hfta_tune.rounds import ArrayRound, Round


def array(number: int, *trials: str, strategy: str = "vmap", steps: int = 10, **measured: float) -> ArrayRound:
    seconds = {name.replace("_", " "): value for name, value in measured.items()}
    return ArrayRound(number, trials, strategy, steps, samples=8 * steps, seconds_a_step=seconds)


def figures_of(*trials: str, lanes: int = 4) -> Figures:
    figures = Figures()
    figures.worker_opened(0, lanes)
    for lane, trial in enumerate(trials):
        figures.trial_joined(trial, 0, lane)
    return figures


def test_a_run_that_has_not_begun() -> None:
    now = Figures().now()
    assert (now.workers, now.lanes_in_use, now.rounds, now.array_lanes, now.trials_ended) == (0, 0, 0, (), {})
    assert (now.computing_ratio, now.driver_seconds_per_result) == (0, 0)
    assert (now.speed_up, now.memory_used, now.memory_size) == (None, None, None)
    assert str(now) == "0 of 0 lanes in use, 0 arrays"


def test_lanes_and_refills() -> None:
    figures = figures_of("a", "b", "c")
    figures.trials_wait(2)
    now = figures.now()
    assert (now.workers, now.lanes_in_use, now.lanes_free, now.trials_waiting, now.refills) == (1, 3, 1, 2, 0)
    figures.trial_left("b")
    figures.trial_joined("d", 0, 1)  # b's lane
    figures.trial_joined("e", 0, 3)  # which nobody had
    now = figures.now()
    assert (now.lanes_in_use, now.lanes_free, now.refills) == (4, 0, 1)
    figures.worker_opened(0, 8)  # B="auto"
    assert figures.now().lanes_free == 4


def test_amounts_are_of_single_models() -> None:
    figures = figures_of("a", "b", "c")
    figures.round_ended(0, Round(100.0, 102.0, (array(0, "a", "b"), array(1, "c", steps=5))))
    now = figures.now()
    assert (now.rounds, now.model_rounds, now.model_steps, now.training_samples) == (1, 3, 25, 200)
    assert (now.array_lanes, now.strategies, now.round_seconds) == ((2, 1), ("vmap", "vmap"), 2.0)
    assert (now.model_rounds_per_second, now.model_steps_per_second) == (1.5, 12.5)
    assert now.training_samples_per_second == 100.0


def test_rates_are_of_the_last_ten_rounds_of_open_workers() -> None:
    figures = figures_of("a", "b")
    for number in range(30):  # ever slower: a second, and as long between two
        begin = 1000.0 * number if number < 20 else 20_000.0 + 4.0 * number
        figures.round_ended(0, Round(begin, begin + 1.0, (array(0, "a", "b"),)))
    now = figures.now()
    assert now.rounds == 30 and now.model_rounds == 60
    assert now.model_rounds_per_second == pytest.approx(20 / 37)
    assert now.computing_ratio == pytest.approx(10 / 37)
    figures.worker_opened(1, 4)
    figures.trial_joined("c", 1, 0)
    figures.round_ended(1, Round(0.0, 2.0, (array(0, "c"),)))
    assert figures.now().model_rounds_per_second == pytest.approx(20 / 37 + 0.5)
    figures.worker_closed(0)
    now = figures.now()
    assert (now.workers, now.lanes_in_use, now.rounds, now.model_rounds_per_second) == (1, 1, 31, 0.5)


def test_an_array_keeps_its_place_until_its_trials_are_gone() -> None:
    figures = figures_of("a", "b", "c")
    arrays = figures.workers[0].arrays
    figures.round_ended(0, Round(0.0, 1.0, (array(5, "a"), array(7, "b", "c"))))
    assert {place: own.number for place, own in arrays.items()} == {0: 5, 1: 7}
    figures.round_ended(0, Round(1.0, 2.0, (array(7, "b", "c"),)))  # a took no part
    assert {place: own.number for place, own in arrays.items()} == {0: 5, 1: 7}
    figures.trial_left("a")
    assert set(arrays) == {1}
    figures.trial_joined("d", 0, 0)
    figures.round_ended(0, Round(2.0, 3.0, (array(9, "d"), array(7, "b", "c"))))
    assert {place: own.number for place, own in arrays.items()} == {0: 9, 1: 7}
    figures.round_ended(0, Round(3.0, 4.0, (array(9, "d"), array(10, "b"), array(11, "c"))))  # it was split
    assert {place: own.number for place, own in arrays.items()} == {0: 9, 1: 10, 2: 11}
    assert figures.now().array_lanes == (1, 1, 1)


def test_places_are_as_few_as_lanes() -> None:
    figures = figures_of(lanes=2)
    for number in range(50):
        figures.trial_joined(str(number), 0, number % 2)
        present = range(max(0, number - 1), number + 1)
        figures.round_ended(0, Round(number, number + 1, tuple(array(own, str(own)) for own in present)))
        if number:
            figures.trial_left(str(number - 1))
        assert set(figures.workers[0].arrays) <= {0, 1}


def test_speed_up_weighs_arrays_by_their_steps() -> None:
    figures = figures_of("a", "b", "c", "d")
    fused = array(0, "a", "b", strategy="compiled", steps=30, compiled=0.01, vmap=0.02, lane_by_lane=0.08)
    alone = array(1, "c", "d", strategy="lane by lane", steps=10, vmap=0.02, lane_by_lane=0.01)
    unknown = array(2, "e", strategy="lane by lane")
    figures.round_ended(0, Round(0.0, 1.0, (fused,)))
    assert figures.now().speed_up == pytest.approx(8.0)
    figures.round_ended(0, Round(1.0, 2.0, (fused, alone, unknown)))
    now = figures.now()
    assert now.speed_up == pytest.approx((30 * 0.08 + 10 * 0.01) / (30 * 0.01 + 10 * 0.01))
    assert str(now) == "4 of 4 lanes in use, 3 arrays, 3.5 models' rounds/s, 6.2 times as fast as one at a time"


def test_memory_results_and_ends() -> None:
    figures = figures_of("a")
    figures.worker_opened(1, 4)
    figures.memory_measured(0, 10, 100)
    assert (figures.now().memory_used, figures.now().memory_size) == (10, 100)
    figures.memory_measured(1, 30, 100)
    figures.memory_measured(0, 20, 100)
    figures.results_given(0, 0.5)
    figures.results_given(4, 0.3)
    for reason in ("done", "nan", "done"):
        figures.trial_ended("a", reason)  # type: ignore[arg-type]
    now = figures.now()
    assert (now.memory_used, now.memory_size) == (50, 200)
    assert now.driver_seconds_per_result == pytest.approx(0.2)
    assert now.trials_ended == {"done": 2, "nan": 1}
    figures.run_ended()
    now = figures.now()
    assert (now.workers, now.memory_used, now.trials_ended) == (0, None, {"done": 2, "nan": 1})
