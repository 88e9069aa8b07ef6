"""Whole runs of tune.run and tune.Tuner with the packer, beside stock Tune where it is the reference."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import tune
from ray.exceptions import RayActorError
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch
from ray.util import placement_group, remove_placement_group
from trainables import Batch, FailsToBuild, Lacking, Points, Watched, WithData

from hfta_tune import FusionError, HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


class Recorder(tune.Callback):
    """Notes the events of a run in their order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, Any]] = []

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.events.append(("start", trial.trial_id, None))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.events.append(("result", trial.trial_id, dict(result)))

    def results_of(self, trial_id: str) -> list[dict[str, Any]]:
        return [result for kind, name, result in self.events if kind == "result" and name == trial_id]

    def rounds_between_start_and_first_result(self) -> dict[str, int]:
        """How many rounds of others ended after a trial had its lane and before it had a result."""
        waits: dict[str, int] = {}
        waiting: dict[str, set[float]] = {}
        for kind, name, result in self.events:
            if kind == "start":
                waiting[name] = set()
            elif kind == "result":
                if name in waiting:
                    waits[name] = len(waiting.pop(name) - {result["time_this_iter_s"]})
                for ended in waiting.values():
                    ended.add(result["time_this_iter_s"])
        return waits

    def rounds(self) -> dict[tuple[int, float], set[str]]:
        """The trials of each round: results of one round carry its process and its duration."""
        rounds: dict[tuple[int, float], set[str]] = defaultdict(set)
        for kind, name, result in self.events:
            if kind == "result":
                rounds[result["pid"], result["time_this_iter_s"]].add(name)
        return rounds


def run(trainable: Any, storage: str, **arguments: Any) -> tune.ExperimentAnalysis:
    arguments = {"verbose": 0, "raise_on_failed_trial": False, "storage_path": storage, **arguments}
    return tune.run(trainable, **arguments)


def kinds_of_files(directory: Path) -> set[str]:
    """File names, less the time and host in those of TensorBoard."""
    return {"events" if path.name.startswith("events.") else path.name for path in directory.iterdir()}


def test_each_trial_has_results_and_files_of_its_own_as_in_stock_tune(storage: str) -> None:
    config = {"lr": tune.grid_search([0.003, 0.01, 0.03, 0.1]), "hidden": 16}
    packed = run(Points, storage, config=config, scheduler=HFTAPacker(B=2), stop={"training_iteration": 3})
    stock = run(Points, storage, config={"lr": 0.003, "hidden": 16}, stop={"training_iteration": 3})
    assert [trial.status for trial in packed.trials] == ["TERMINATED"] * 4
    assert len({trial.last_result["pid"] for trial in packed.trials}) <= 2

    reference = Path(stock.trials[0].path)
    for trial in packed.trials:
        directory = Path(trial.path)
        assert kinds_of_files(directory) == kinds_of_files(reference)
        lines = [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]
        expected = [json.loads(line) for line in (reference / "result.json").read_text().splitlines()]
        assert [line["training_iteration"] for line in lines] == [1, 2, 3]
        assert all(set(own) == set(other) for own, other in zip(lines, expected, strict=True))
        assert all(line["trial_id"] == trial.trial_id for line in lines)
        assert json.loads((directory / "params.json").read_text()) == trial.config
        assert (directory / "progress.csv").read_text().count("\n") == 4
        assert trial.trial_id.split("_")[0] in directory.name and directory.name.startswith("Points_")


def test_packed_trials_train_as_alone(storage: str) -> None:
    config = {"lr": tune.grid_search([0.001, 0.01, 0.1]), "hidden": tune.grid_search([8, 16]), "seed": 3}
    recorders = {}
    for name, scheduler in (("packed", HFTAPacker(B=6)), ("stock", None)):
        recorders[name] = Recorder()
        analysis = run(
            Points,
            storage,
            config=config,
            scheduler=scheduler,
            stop={"training_iteration": 20},
            callbacks=[recorders[name]],
            reuse_actors=True,
        )
        recorders[name].by_tag = {t.experiment_tag.split("_", 1)[1]: t.trial_id for t in analysis.trials}  # type: ignore[attr-defined]
    packed, stock = recorders["packed"], recorders["stock"]
    assert len(packed.by_tag) == 6  # type: ignore[attr-defined]
    for tag, trial_id in packed.by_tag.items():  # type: ignore[attr-defined]
        own = packed.results_of(trial_id)
        alone = stock.results_of(stock.by_tag[tag])  # type: ignore[attr-defined]
        assert len(own) == len(alone) == 20
        for name in ("train_loss", "accuracy"):
            torch.testing.assert_close(
                torch.tensor([r[name] for r in own]),
                torch.tensor([r[name] for r in alone]),
                rtol=1e-4,
                atol=1e-6,
            )


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_freed_lane_is_taken_within_one_round(
    runs_ahead: bool, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 trials under ASHA. A worker that waits for the driver has 90% of the lane-rounds in use while trials wait.

    One that runs ahead also trains while it would wait, which are rounds of those lanes alone that stay. There a
    trial that comes while a round's results are handed out may miss the round that runs by then, and no other.
    """
    monkeypatch.setenv("HFTA_TUNE_RUN_AHEAD", str(int(runs_ahead)))
    recorder = Recorder()
    asha = ASHAScheduler(metric="accuracy", mode="max", max_t=9, grace_period=1, reduction_factor=3)
    analysis = run(
        Points,
        storage,
        config={"lr": tune.loguniform(1e-4, 1.0), "seed": tune.randint(0, 100)},
        num_samples=64,
        scheduler=HFTAPacker(base_scheduler=asha, B=8),
        callbacks=[recorder],
        resources_per_trial={"cpu": 2},  # one worker
    )
    assert Counter(trial.status for trial in analysis.trials) == {"TERMINATED": 64}
    iterations = {trial.last_result["training_iteration"] for trial in analysis.trials}
    assert 1 in iterations and 9 in iterations  # some were stopped early, some went on to the end

    members = recorder.rounds()
    assert max(len(trials) for trials in members.values()) == 8
    if runs_ahead:
        waits = recorder.rounds_between_start_and_first_result()
        assert len(waits) == 64 and max(waits.values()) <= 2
        return
    last_start = max(number for number, event in enumerate(recorder.events) if event[0] == "start")
    rounds: dict[Any, int] = {}
    for number, (kind, _, result) in enumerate(recorder.events):
        if kind == "result":
            rounds.setdefault((result["pid"], result["time_this_iter_s"]), number)
    before = [len(members[key]) for key, number in rounds.items() if number < last_start]
    assert sum(before) / (8 * len(before)) >= 0.9


def test_a_searcher_learns_from_results_before_it_goes_on(storage: str) -> None:
    class Counting(OptunaSearch):
        """Counts the results it has when it makes each suggestion."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.results = 0
            self.at_suggestion: list[int] = []

        def suggest(self, trial_id: str) -> Any:
            suggestion = super().suggest(trial_id)
            if isinstance(suggestion, dict):
                self.at_suggestion.append(self.results)
            return suggestion

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            self.results += 1
            super().on_trial_complete(trial_id, result, error)

    recorder, searcher = Recorder(), Counting(metric="accuracy", mode="max")
    analysis = run(
        Points,
        storage,
        config={"lr": tune.loguniform(1e-4, 1e-1)},
        num_samples=32,
        search_alg=searcher,
        scheduler=HFTAPacker(B=8),
        stop={"training_iteration": 3},
        callbacks=[recorder],
    )
    assert Counter(trial.status for trial in analysis.trials) == {"TERMINATED": 32}
    assert len(searcher.at_suggestion) == 32
    assert searcher.at_suggestion[19] > 0
    assert max(len(trials) for trials in recorder.rounds().values()) == 8


def test_a_killed_worker_costs_each_trial_at_most_one_failure(storage: str) -> None:
    class Killer(Recorder):
        killed: int | None = None

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            super().on_trial_result(iteration, trials, trial, result)
            if self.killed is None and result["training_iteration"] == 5:
                self.killed = result["pid"]
                os.kill(self.killed, signal.SIGKILL)

    killer = Killer()
    analysis = run(
        Points,
        storage,
        config={"lr": tune.grid_search([0.01 * i for i in range(1, 7)])},
        scheduler=HFTAPacker(B=6),
        stop={"training_iteration": 9},
        max_failures=2,
        checkpoint_freq=2,
        callbacks=[killer],
    )
    assert Counter(trial.status for trial in analysis.trials) == {"TERMINATED": 6}
    failures = [trial.num_failures for trial in analysis.trials]
    assert max(failures) == 1 and sum(failures) >= 1
    for trial in analysis.trials:
        results = killer.results_of(trial.trial_id)
        assert trial.last_result["training_iteration"] == 9 and trial.last_result["pid"] != killer.killed
        if trial.num_failures:
            restart = next(i for i, r in enumerate(results) if r["pid"] != killer.killed)
            assert results[restart]["training_iteration"] == 5  # from the checkpoint of iteration 4
        # Training goes on exactly from the checkpoint: what was trained twice came out the same.
        by_iteration: dict[int, set[float]] = defaultdict(set)
        for result in results:
            by_iteration[result["training_iteration"]].add(round(result["train_loss"], 5))
        assert set(by_iteration) == set(range(1, 10)) and all(len(v) == 1 for v in by_iteration.values())


def test_without_retries_a_killed_worker_fails_its_trials(storage: str) -> None:
    class Killer(tune.Callback):
        killed = False

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            if not self.killed:
                self.killed = True
                os.kill(result["pid"], signal.SIGKILL)

    analysis = run(
        Points,
        storage,
        config={"lr": tune.grid_search([0.01, 0.02, 0.03, 0.04])},
        scheduler=HFTAPacker(B=2),
        stop={"training_iteration": 4},
        callbacks=[Killer()],
    )
    statuses = Counter(trial.status for trial in analysis.trials)
    assert statuses == {"ERROR": 2, "TERMINATED": 2}
    for trial in analysis.trials:
        if trial.status == "ERROR":
            assert trial.num_failures == 1 and isinstance(trial.get_pickled_error(), RayActorError)


def test_a_trial_whose_hook_raises_fails_alone_with_its_own_error(storage: str) -> None:
    config = {"lr": 0.01, "fails": tune.grid_search([False, True, False, False])}
    analysis = run(FailsToBuild, storage, config=config, scheduler=HFTAPacker(B=4), stop={"training_iteration": 3})
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "ERROR", "TERMINATED", "TERMINATED"]
    failed = analysis.trials[1]
    assert isinstance(failed.get_pickled_error(), ValueError)
    assert "no such model" in Path(failed.error_file).read_text()


def test_a_missing_hook_is_one_error_before_anything_runs(storage: str) -> None:
    with pytest.raises(FusionError, match=r"Lacking lacks a required hook; define training_step"):
        run(Lacking, storage, config={"lr": 0.1}, num_samples=4, scheduler=HFTAPacker(B=4))


def test_a_metric_that_no_result_has(storage: str) -> None:
    with pytest.raises(tune.TuneError, match="nonsense"):
        run(
            Points,
            storage,
            config={"lr": 0.1},
            num_samples=2,
            metric="nonsense",
            mode="max",
            scheduler=HFTAPacker(B=2),
            stop={"training_iteration": 2},
        )


def test_a_diverging_trial_is_reported_and_leaves_the_others_alone(storage: str) -> None:
    config = {"lr": tune.grid_search([0.01, 1e30])}
    analysis = run(Points, storage, config=config, scheduler=HFTAPacker(B=2), stop={"training_iteration": 4})
    sound, diverged = analysis.trials
    assert sound.status == diverged.status == "TERMINATED"
    assert not torch.tensor(diverged.last_result["train_loss"]).isfinite()
    assert sound.last_result["train_loss"] < 1.0


@pytest.mark.parametrize("resources", [{"cpu": 2}, {"cpu": 1}])
def test_a_worker_computes_on_the_cpus_of_a_trial(storage: str, resources: dict[str, float]) -> None:
    analysis = run(
        Watched,
        storage,
        config={"lr": tune.grid_search([0.01, 0.02])},
        scheduler=HFTAPacker(B=2),
        resources_per_trial=resources,
        stop={"training_iteration": 1},
    )
    for trial in analysis.trials:
        assert trial.last_result["threads"] == resources["cpu"]
        assert not trial.last_result["in_trial_directory"]  # lanes share a process, so it stays where it is


def test_tuner_with_resources_and_parameters(storage: str) -> None:
    trainable = tune.with_resources(tune.with_parameters(WithData, data=Batch()), {"cpu": 2})
    tuner = tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search([0.01, 0.02, 0.03])},
        tune_config=tune.TuneConfig(scheduler=HFTAPacker(B=3), metric="accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=storage, stop={"training_iteration": 2}, verbose=0),
    )
    results = tuner.fit()
    assert len(results) == 3 and not results.errors
    assert {result.metrics["training_iteration"] for result in results} == {2}
    assert len({result.metrics["data"] for result in results}) == 1  # one copy of the data for all lanes
    assert results.get_best_result().metrics["accuracy"] > 0.3


def test_checkpoints_and_stop_at_the_end(storage: str) -> None:
    analysis = run(
        Points,
        storage,
        config={"lr": tune.grid_search([0.01, 0.1])},
        scheduler=HFTAPacker(B=2),
        stop=lambda trial_id, result: result["training_iteration"] == 3,
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True),
    )
    for trial in analysis.trials:
        names = sorted(path.name for path in Path(trial.path).glob("checkpoint_*"))
        assert names == ["checkpoint_000000", "checkpoint_000001"]
        state = torch.load(Path(trial.path) / names[-1] / "checkpoint.pt", weights_only=True)
        assert state["epoch"] == 3
        model = Points._outside_tune(trial.config).build_model(trial.config)
        model.load_state_dict(state["model"])


def test_another_trainable_runs_the_stock_way_with_one_warning(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    def objective(config: dict[str, Any]) -> None:
        tune.report({"score": config["x"], "pid": os.getpid()})

    with caplog.at_level(logging.WARNING, logger="hfta_tune"):
        analysis = run(objective, storage, config={"x": tune.grid_search([1, 2, 3])}, scheduler=HFTAPacker(B=3))
    assert [trial.last_result["score"] for trial in analysis.trials] == [1, 2, 3]
    assert len({trial.last_result["pid"] for trial in analysis.trials}) == 3
    said = [record.message for record in caplog.records if "is no FusedTrainable" in record.message]
    assert len(said) == 1


def test_without_the_packer_a_fused_trainable_is_an_ordinary_trainable(storage: str) -> None:
    analysis = run(Points, storage, config={"lr": tune.grid_search([0.01, 0.1])}, stop={"training_iteration": 2})
    assert len({trial.last_result["pid"] for trial in analysis.trials}) == 2
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 2


def test_nothing_is_left_behind(storage: str) -> None:
    run(
        Points,
        storage,
        config={"lr": 0.1},
        num_samples=3,
        scheduler=HFTAPacker(B=2),
        stop={"training_iteration": 1},
    )
    everything = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    ray.get(everything.ready(), timeout=60)
    remove_placement_group(everything)
