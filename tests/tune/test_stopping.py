"""What ends a trial or a run, and when it goes on after a failure, as in stock Tune."""

from __future__ import annotations

import copy
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.stopper import CombinedStopper, FunctionStopper, MaximumIterationStopper, Stopper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


class AfterPeak(Stopper):
    """Stops each trial one round after its peak."""

    def __init__(self) -> None:
        self.fell: set[str] = set()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if trial_id in self.fell:
            return True
        if result["score"] == 0:
            self.fell.add(trial_id)
        return False

    def stop_all(self) -> bool:
        return False


class AfterResults(Stopper):
    """Stops everything after so many results of all trials together."""

    def __init__(self, most: int) -> None:
        self.left = most

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.left -= 1
        return False

    def stop_all(self) -> bool:
        return self.left <= 0


class Watcher(tune.Callback):
    """Notes results, and the most trials that ran at once."""

    def __init__(self, at_result: Callable[[int], None] = lambda number: None) -> None:
        self.results: dict[str, list[float]] = defaultdict(list)
        self.most_running = 0
        self.at_result = at_result

    def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
        self.most_running = max(self.most_running, sum(trial.status == "RUNNING" for trial in trials))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.results[trial.trial_id].append(result["height"])
        self.at_result(sum(map(len, self.results.values())))


def outcomes(analysis: tune.ExperimentAnalysis) -> dict[float, Any]:
    """What became of each trial, by its peak."""
    return {trial.config["peak"]: (trial.status, trial.last_result.get("height")) for trial in analysis.trials}


def past_the_peak_or_high(trial_id: str, result: dict[str, Any]) -> bool:
    return result["height"] > 2 or result["score"] == 0


@pytest.mark.parametrize(
    ("stop", "heights"),
    [
        ({"score": 0, "training_iteration": 2}, [1, 2, 2]),
        (past_the_peak_or_high, [1, 2, 3]),
        (AfterPeak(), [2, 3, 4]),
        (CombinedStopper(MaximumIterationStopper(2), FunctionStopper(past_the_peak_or_high)), [1, 2, 2]),
    ],
    ids=["dict", "function", "own Stopper", "stoppers of Tune"],
)
def test_stop(climb: Any, stop: Any, heights: list[int]) -> None:
    packed, stock = (outcomes(climb(packed=packed, stop=copy.deepcopy(stop))) for packed in (True, False))
    assert packed == stock == {p: ("TERMINATED", h) for p, h in zip([1, 2, 3], heights, strict=True)}


@pytest.mark.parametrize("packed", [True, False])
def test_a_stopper_of_the_whole_run(climb: Any, lines: Any, packed: bool) -> None:
    watcher = Watcher()
    analysis = climb(packed=packed, stop=AfterResults(9), callbacks=[watcher], num_samples=2)
    assert Counter(trial.status for trial in analysis.trials) == {"TERMINATED": 6}
    assert sum(map(len, watcher.results.values())) == 9
    for trial in analysis.trials:  # nothing says to a logger that these trials have ended, and yet all is written
        assert [line["height"] for line in lines(trial.path)] == watcher.results[trial.trial_id]


@pytest.mark.parametrize("packed", [True, False])
def test_time_budget(climb: Any, lines: Any, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(now=1.0, time=lambda: clock.now)
    monkeypatch.setattr("ray.tune.stopper.timeout.time", clock)

    def tick(results: int) -> None:
        clock.now = 102.0 if results >= 9 else 100.0

    watcher = Watcher(tick)
    analysis = climb(packed=packed, time_budget_s=100, callbacks=[watcher])
    assert Counter(trial.status for trial in analysis.trials) == {"TERMINATED": 3}
    assert sum(map(len, watcher.results.values())) == 9
    for trial in analysis.trials:
        assert [line["height"] for line in lines(trial.path)] == watcher.results[trial.trial_id]


def test_max_concurrent_trials(climb: Any) -> None:
    watcher = Watcher()
    analysis = climb(packed=True, max_concurrent_trials=2, stop={"training_iteration": 3}, callbacks=[watcher])
    assert [trial.last_result["height"] for trial in analysis.trials] == [3] * 3
    assert watcher.most_running == 2


@pytest.mark.parametrize("packed", [True, False])
def test_fail_fast_stops_the_others(climb: Any, packed: bool, tmp_path: Path) -> None:
    config = {"peak": tune.grid_search([1, 2, 3]), "fails_at": 2, "failures": 1, "marks": str(tmp_path)}
    config["fails_at"] = tune.sample_from(lambda spec: 2 if spec.config.peak == 2 else None)
    analysis = climb(packed=packed, config=config, fail_fast=True)  # without a stop the others would go on for ever
    statuses = {trial.config["peak"]: trial.status for trial in analysis.trials}
    assert statuses == {1: "TERMINATED", 2: "ERROR", 3: "TERMINATED"}
    [failed] = [trial for trial in analysis.trials if trial.status == "ERROR"]
    assert isinstance(failed.get_pickled_error(), ValueError)


@pytest.mark.parametrize("packed", [True, False])
def test_fail_fast_raises_the_trial_s_own_error(climb: Any, packed: bool, tmp_path: Path) -> None:
    config = {"peak": tune.grid_search([1, 2]), "fails_at": 2, "failures": 1, "marks": str(tmp_path)}
    with pytest.raises(ValueError, match=r"fell at 2\.0"):
        climb(packed=packed, config=config, fail_fast="raise")


def test_max_failures(climb: Any, tmp_path: Path) -> None:
    results = {}
    for packed in (True, False):
        watcher = Watcher()
        analysis = climb(
            packed=packed,
            config={"peak": 9, "fails_at": 4, "failures": tune.grid_search([0, 1, 2]), "marks": str(tmp_path)},
            stop={"training_iteration": 5},
            max_failures=1,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2),
            callbacks=[watcher],
        )
        ends = {trial.config["failures"]: (trial.status, trial.num_failures) for trial in analysis.trials}
        assert ends == {0: ("TERMINATED", 0), 1: ("TERMINATED", 1), 2: ("ERROR", 2)}
        results[packed] = {trial.config["failures"]: watcher.results[trial.trial_id] for trial in analysis.trials}
    assert results[True] == results[False]
    assert results[True][1] == [1, 2, 3, 3, 4, 5]  # went on from the checkpoint
