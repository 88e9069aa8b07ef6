"""What a run of Tune tells those who watch it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lanes import Recorder
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining
from trainables import Climb

from hfta_tune.tune import _executor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(_executor, "observers_of_experiment", lambda name, directory: [recorder])
    return recorder


def trained(recorder: Recorder) -> Counter[str]:
    """In how many rounds each trial was."""
    return Counter(name for _, own in recorder.rounds for array in own.arrays for name in array.trials)


@pytest.mark.parametrize("reuse_actors", [False, True])
def test_trials_that_end_in_every_way(climb: Any, recorder: Recorder, reuse_actors: bool) -> None:
    asha = ASHAScheduler(metric="score", mode="max", max_t=8, grace_period=2, reduction_factor=2)
    config = {"peak": tune.grid_search([1, 8, 2, 7, 3, 6, 5, 4]), "number": tune.grid_search([0, 1])}
    analysis = climb(packed=True, B=4, base=asha, config=config, stop={"height": 8}, reuse_actors=reuse_actors)
    ends = {trial.trial_id: trial.last_result["training_iteration"] for trial in analysis.trials}
    assert recorder.reasons == {trial: "done" if ends[trial] == 8 else "pruned" for trial in ends}
    assert set(recorder.reasons.values()) == {"done", "pruned"}
    assert all(len(places) == 1 and places[0][1] < 4 for places in recorder.places.values())
    assert recorder.places.keys() == ends.keys() and not recorder.present
    assert recorder.lanes.keys() == set(recorder.closed) and set(recorder.lanes.values()) == {4}
    assert recorder.over == 1 and max(recorder.waiting) > 0 == recorder.waiting[-1]
    # A worker that runs ahead has trained some rounds that Tune did not want.
    rounds = trained(recorder)
    assert all(ends[trial] <= rounds[trial] for trial in ends)


def test_trials_that_pause_leave_their_lanes(climb: Any, recorder: Recorder) -> None:
    band = HyperBandScheduler(metric="score", mode="max", max_t=4, reduction_factor=2)
    config = {"peak": tune.grid_search([1, 2, 3, 4, 5, 6])}
    analysis = climb(packed=True, B=3, base=band, config=config, stop={"training_iteration": 4})
    ends = {trial.trial_id: trial.last_result["training_iteration"] for trial in analysis.trials}
    assert recorder.reasons == {trial: "done" if ends[trial] == 4 else "pruned" for trial in ends}
    assert max(map(len, recorder.places.values())) > 1 and not recorder.present


def test_trials_that_fail_or_have_a_nan(climb: Any, recorder: Recorder) -> None:
    class Breaks(Climb):
        def evaluate(self, model: Any, config: dict[str, Any]) -> dict[str, float]:
            if config["peak"] == 2:
                raise ValueError("peak 2 cannot be climbed")
            return {"height": 1.0, "score": float("nan") if config["peak"] == 3 else 1.0}

    analysis = climb(
        packed=True,
        run_or_experiment=Breaks,
        stop={"training_iteration": 2},
        config={"peak": tune.grid_search([1, 2, 3])},
    )
    reasons = [recorder.reasons[trial.trial_id] for trial in analysis.trials]
    assert reasons == ["done", "error", "nan"]


def test_a_run_out_of_time_has_stopped_its_trials(climb: Any, recorder: Recorder) -> None:
    climb(packed=True, stop={"training_iteration": 10**6}, time_budget_s=8)
    assert set(recorder.reasons.values()) == {"stopped"} and len(recorder.reasons) == 3


def test_exploits_move_no_trial(climb: Any, recorder: Recorder) -> None:
    pbt = PopulationBasedTraining(
        metric="score", mode="max", perturbation_interval=2, hyperparam_mutations={"peak": [1, 2, 3, 4]}
    )
    climb(packed=True, base=pbt, config={"peak": tune.grid_search([1, 2, 3, 4])}, stop={"training_iteration": 8})
    assert set(recorder.reasons.values()) == {"done"} and len(recorder.places) == 4 and not recorder.present


def test_an_observer_that_raises_costs_no_trial(climb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Recorder):
        def round_ended(self, worker: int, own: Any) -> None:
            raise OSError("no space left")

    monkeypatch.setattr(_executor, "observers_of_experiment", lambda name, directory: [Broken()])
    analysis = climb(packed=True, stop={"training_iteration": 3})
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
