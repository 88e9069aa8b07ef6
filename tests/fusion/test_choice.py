"""The choice of a strategy, told made-up durations."""

from __future__ import annotations

import pytest

from hfta_tune.fusion.choice import BLOCKS, COMPILED, LANE_BY_LANE, RECORDED, VMAP, StrategyChoice
from hfta_tune.fusion.compile_notes import UNKNOWN, Expected


def settle(choice: StrategyChoice, lanes: int, seconds: dict[str, float]) -> list[str]:
    """Run steps of these durations until nothing is measured any more; return what ran."""
    ran = []
    while choice.measuring(strategy := choice.strategy(lanes)):
        ran.append(strategy)
        choice.record(strategy, seconds[strategy])
        assert len(ran) < 20
    return ran


def test_the_fastest_goes_on() -> None:
    for fast, slow in ((VMAP, LANE_BY_LANE), (LANE_BY_LANE, VMAP)):
        choice = StrategyChoice()
        ran = settle(choice, 8, {fast: 0.1, slow: 0.2})
        assert set(ran) == {VMAP, LANE_BY_LANE}
        assert choice.strategy(8) == fast


def test_the_first_step_of_a_strategy_does_not_count() -> None:
    choice = StrategyChoice()
    for strategy, durations in ((VMAP, [9.0, 0.1, 0.1, 0.1]), (LANE_BY_LANE, [0.2, 0.2, 0.2])):
        for duration in durations:
            assert choice.strategy(8) == strategy
            choice.record(strategy, duration)
    assert choice.strategy(8) == VMAP


def test_one_lane_is_plain_pytorch() -> None:
    choice = StrategyChoice()
    assert choice.strategy(1) == LANE_BY_LANE
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    assert choice.strategy(1) == LANE_BY_LANE


def test_it_measures_again_when_it_is_told_to() -> None:
    choice = StrategyChoice()
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    choice.measure_again()
    assert set(settle(choice, 8, {VMAP: 0.2, LANE_BY_LANE: 0.1})) == {VMAP, LANE_BY_LANE}
    assert choice.strategy(8) == LANE_BY_LANE


def test_it_measures_again_when_the_lanes_halve_or_double() -> None:
    choice = StrategyChoice()
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    assert not choice.measuring(choice.strategy(5)) and not choice.measuring(choice.strategy(15))
    assert choice.measuring(choice.strategy(4))
    settle(choice, 4, {VMAP: 0.1, LANE_BY_LANE: 0.05})
    assert choice.strategy(4) == LANE_BY_LANE
    assert choice.measuring(choice.strategy(8))


def test_what_cannot_train_the_array_is_dropped() -> None:
    choice = StrategyChoice([VMAP])
    choice.drop(VMAP)
    assert choice.strategy(8) == LANE_BY_LANE


def test_compiling_must_pay() -> None:
    choice = StrategyChoice()
    assert not choice.could_compile(8)  # nothing is measured yet
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    assert choice.could_compile(8) and not choice.could_compile(1)
    assert not choice.compiling_pays(100, Expected(seconds=30.0, gain=0.5))
    assert choice.compiling_pays(10_000, Expected(seconds=30.0, gain=0.5))
    assert choice.compiling_pays(100, Expected(seconds=3.0, gain=0.5))
    assert not choice.compiling_pays(10_000, Expected(seconds=3.0, gain=0.0))
    never = StrategyChoice(may_compile=False)
    settle(never, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    assert not never.could_compile(8)


def test_a_long_run_of_unknown_length_compiles() -> None:
    choice = StrategyChoice()
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    for _ in range(5_000):  # 500 s, of which 5% are less than compiling is thought to take
        choice.count_step()
    assert not choice.compiling_pays(0, UNKNOWN)
    for _ in range(1_500):
        choice.count_step()
    assert choice.compiling_pays(0, UNKNOWN)


def test_a_compiled_step_is_measured_like_the_others() -> None:
    for seconds, expected in ((0.03, COMPILED), (0.3, VMAP)):
        choice = StrategyChoice()
        settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
        choice.compiled(there=True)
        assert choice.gain_of_compiling is None
        assert choice.strategy(8) == COMPILED
        settle(choice, 8, {COMPILED: seconds})
        assert choice.strategy(8) == expected
        assert choice.gain_of_compiling == pytest.approx(1 - seconds / 0.1)
        assert not choice.could_compile(8)


def test_blocks_of_lanes_are_measured_where_there_are_lanes_for_two() -> None:
    for lanes, sizes in ((12, []), (16, [8]), (63, [8]), (64, [8, 32])):
        choice = StrategyChoice(by_blocks=True)
        settle(choice, lanes, {VMAP: 0.1, LANE_BY_LANE: 0.2})
        choice.compiled(there=True)
        names = [name for name, size in BLOCKS.items() if size in sizes]
        for name in (COMPILED, *names):
            assert choice.strategy(lanes) == name
            while name not in choice.seconds:
                choice.record(name, 0.05 if name == COMPILED else 0.04)
        assert choice.strategy(lanes) == (names or [COMPILED])[0]
        assert choice.gain_of_compiling == pytest.approx(0.6 if names else 0.5)
        if lanes == 16:
            assert choice.strategy(15) == COMPILED  # a lane has left


def test_what_did_not_compile_is_not_tried_again() -> None:
    choice = StrategyChoice()
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
    choice.compiled(there=False)
    assert choice.strategy(8) == VMAP and not choice.could_compile(8)


def test_recording_must_pay() -> None:
    choice = StrategyChoice()
    assert not choice.could_record(8)  # nothing is measured yet
    settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.12})
    assert choice.could_record(8) and not choice.could_record(1)
    assert choice.recording_pays(100, Expected(seconds=1.0, gain=0.2))
    assert not choice.recording_pays(40, Expected(seconds=1.0, gain=0.2))
    assert not choice.recording_pays(10_000, Expected(seconds=1.0, gain=0.05))  # that sure is no estimate
    choice.recorded(there=False)
    assert not choice.could_record(8) and choice.strategy(8) == VMAP


def test_what_vmap_makes_much_slower_is_not_recorded() -> None:
    choice = StrategyChoice()
    settle(choice, 8, {VMAP: 0.3, LANE_BY_LANE: 0.1})
    assert not choice.could_record(8)


def test_a_recorded_step_is_measured_like_the_others() -> None:
    for seconds, expected in ((0.05, RECORDED), (0.3, VMAP)):
        choice = StrategyChoice()
        settle(choice, 8, {VMAP: 0.1, LANE_BY_LANE: 0.2})
        choice.recorded(there=True)
        assert choice.strategy(8) == RECORDED
        settle(choice, 8, {RECORDED: seconds})
        assert choice.strategy(8) == expected
        assert choice.could_compile(8)  # on top of it, if that pays
