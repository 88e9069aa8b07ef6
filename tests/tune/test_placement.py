"""Which worker a trial gets, when workers open and close, and how many lanes they have, in whole runs."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle, tune
from ray.tune.search import Searcher
from torch import nn
from trainables import Points

from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def workers_know_this_module() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


ONE_WORKER = {"cpu": 2}  # all that the tests' cluster has
LONG_ENOUGH = 5000


class Case(Points):
    """Its hyperparameters stand in config["case"], with a name."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return super().build_model(config["case"])

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> Any:
        return super().build_optimizer(model, config["case"])


class OtherCase(Case):
    """Another trainable."""


def case(name: str) -> dict[str, Any]:
    """Trials a0, a1, ... have equal signatures, and so have b0, b1, ...; the rest of the config differs."""
    return {"name": name, "hidden": 8 if name[0] == "a" else 16, "lr": 0.01 + 0.001 * int(name[1:])}


def cases(names: str) -> dict[str, Any]:
    return {"case": tune.grid_search([case(name) for name in names.split()])}


class Events(tune.Callback):
    """Which trials started, in their order; in which process each trained; and which trained together."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.process: dict[str, int] = {}
        self.rounds: dict[tuple[int, float], list[str]] = defaultdict(list)

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.started.append(trial.config["case"]["name"])

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        name = trial.config["case"]["name"]
        self.process[name] = result["pid"]
        self.rounds[result["pid"], result["time_this_iter_s"]].append(name)

    @property
    def sizes(self) -> list[int]:
        """How many trials trained in each round."""
        return [len(names) for names in self.rounds.values()]


def run(trainable: Any, storage: str, **arguments: Any) -> tune.ExperimentAnalysis:
    arguments = {"verbose": 0, "raise_on_failed_trial": False, "storage_path": storage, **arguments}
    analysis = tune.run(trainable, **arguments)
    assert {trial.status for trial in analysis.trials} == {"TERMINATED"}
    return analysis


def test_a_free_lane_is_taken_by_a_waiting_trial_that_fuses(storage: str) -> None:
    events = Events()

    def stop(trial_id: str, result: dict[str, Any]) -> bool:
        return result["training_iteration"] == (2 if result["config"]["case"]["name"] == "a2" else 6)

    run(
        Case,
        storage,
        config=cases("a0 a1 a2 b0 b1 a3 a4"),
        scheduler=HFTAPacker(B=3),
        resources_per_trial=ONE_WORKER,
        stop=stop,
        callbacks=[events],
    )
    assert events.started == ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]


def test_a_waiting_trial_goes_to_the_worker_that_trains_its_kind(storage: str) -> None:
    """With a searcher: two workers have a free lane each when the next trials come."""

    class Script(Searcher):
        """Suggests four trials, and the other two once two of them have ended."""

        def __init__(self) -> None:
            super().__init__(metric="accuracy", mode="max")
            self.names = ["a0", "a1", "b0", "b1", "b2", "a2"]
            self.suggested = self.ended = 0

        def suggest(self, trial_id: str) -> Any:
            if self.suggested == len(self.names):
                return Searcher.FINISHED
            if self.suggested == 4 and self.ended < 2:
                return None
            self.suggested += 1
            return {"case": case(self.names[self.suggested - 1])}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            self.ended += 1

        def save(self, checkpoint_path: str) -> None: ...

        def restore(self, checkpoint_path: str) -> None: ...

    events, script = Events(), Script()

    def stop(trial_id: str, result: dict[str, Any]) -> bool:
        assert result["training_iteration"] < LONG_ENOUGH
        if result["config"]["case"]["name"] in ("a0", "b0"):
            return script.ended >= 4
        return len(events.process) >= 4  # both workers train, so neither got what the other had room for

    run(
        Case,
        storage,
        search_alg=script,
        num_samples=6,
        scheduler=HFTAPacker(B=2),
        stop=stop,
        callbacks=[events],
    )
    process = events.process
    assert process["a0"] == process["a1"] != process["b0"] == process["b1"]
    assert process["b2"] == process["b0"] and process["a2"] == process["a0"]


def test_workers_open_while_trials_wait_and_close_when_nothing_does(storage: str) -> None:
    events = Events()
    free: list[float] = []

    def stop(trial_id: str, result: dict[str, Any]) -> bool:
        """All but a0 end once two workers train; a0 ends once one of them has given its CPU back."""
        if result["config"]["case"]["name"] != "a0":
            return len(set(events.process.values())) == 2
        free.append(ray.available_resources().get("CPU", 0))
        assert result["training_iteration"] < LONG_ENOUGH
        return len(events.process) == 8 and free[-1] >= 1

    run(
        Case,
        storage,
        config=cases("a0 a1 a2 a3 a4 a5 a6 a7"),
        scheduler=HFTAPacker(B=2),
        stop=stop,
        callbacks=[events],
    )
    assert len(set(events.process.values())) == 2, "for a third there are no resources"
    assert max(events.sizes) == 2


def test_several_trainables_in_one_run(storage: str) -> None:
    """Two FusedTrainables share a worker; a function runs as it always does."""

    def objective(config: dict[str, Any]) -> None:
        tune.report({"score": config["case"]["lr"]})

    events, stop = Events(), {"training_iteration": 3}
    runs: list[tuple[str, Any, str]] = [
        ("one", Case, "a0 a1 b0"),
        ("two", OtherCase, "a2 b1"),
        ("stock", objective, "c0"),
    ]
    trials = tune.run_experiments(
        [
            tune.Experiment(
                name,
                trainable,
                config=cases(names),
                storage_path=storage,
                resources_per_trial={"cpu": 1},
                stop=stop if trainable is not objective else None,
            )
            for name, trainable, names in runs
        ],
        scheduler=HFTAPacker(B=5),
        callbacks=[events],
        verbose=0,
    )
    assert [trial.status for trial in trials] == ["TERMINATED"] * 6
    process = events.process
    assert len({process[name] for name in ["a0", "a1", "b0", "a2", "b1"]}) == 1 and process["c0"] != process["a0"]
    assert ["a0", "a1", "a2", "b0", "b1"] in [sorted(names) for names in events.rounds.values()]
    iterations = {t.config["case"]["name"]: t.last_result["training_iteration"] for t in trials}
    assert iterations == {**dict.fromkeys(["a0", "a1", "b0", "a2", "b1"], 3), "c0": 1}
    assert {Path(trial.path).parent.name for trial in trials} == {"one", "two", "stock"}


ACCELERATORS = """
import collections, json, sys
import ray
from ray import cloudpickle, tune
import trainables
from hfta_tune import HFTAPacker

cloudpickle.register_pickle_by_value(trainables)


class Placed(trainables.Points):
    def evaluate(self, model, config):
        return {"gpu": float((ray.get_gpu_ids() or [-1])[0])}


class Events(tune.Callback):
    def __init__(self):
        self.placed, self.rounds, self.free = collections.defaultdict(set), collections.Counter(), []

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.placed[result["pid"]].add(result["gpu"])
        self.rounds[f'{result["pid"]} {result["time_this_iter_s"]}'] += 1
        if len(self.placed) == workers:
            self.free.append(ray.available_resources().get(name, 0))


ray.init(
    address="local", num_cpus=4, num_gpus=1, resources={"accelerator": 1}, include_dashboard=False, log_to_driver=False
)
found = []
for name, share, workers in (("GPU", 0.5, 2), ("GPU", 1, 1), ("accelerator", 0.5, 2)):
    events = Events()

    def stop(trial_id, result):
        assert result["training_iteration"] < 5000
        return len(events.placed) == workers and 0 in events.free

    resources = {"cpu": 1, name.replace("GPU", "gpu"): share}
    analysis = tune.run(
        tune.with_resources(Placed, resources),
        config={"lr": tune.grid_search([0.01 * number for number in range(1, 7)])},
        scheduler=HFTAPacker(B=2),
        stop=stop,
        storage_path=sys.argv[1],
        verbose=0,
        callbacks=[events],
    )
    found.append(
        {
            "statuses": sorted({trial.status for trial in analysis.trials}),
            "workers": len(events.placed),
            "gpus": sorted(set().union(*events.placed.values())),
            "most in a round": max(events.rounds.values()),
        }
    )
ray.shutdown()
print(json.dumps(found))
"""


def test_parts_of_accelerators_and_whole_ones(tmp_path: Path) -> None:
    """In a cluster of its own, which pretends to have a GPU: two workers share it, or one has it all."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", ACCELERATORS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    same = {"statuses": ["TERMINATED"], "most in a round": 2}
    assert json.loads(done.stdout.splitlines()[-1]) == [
        {**same, "workers": 2, "gpus": [0.0]},
        {**same, "workers": 1, "gpus": [0.0]},
        {**same, "workers": 2, "gpus": [-1.0]},
    ]


def with_made_up_rounds(change: Callable[[Any], Any]) -> type[Case]:
    """A trainable in whose workers' processes `change(report)` replaces what they tell of a round."""

    class MadeUp(Case):
        def build_model(self, config: dict[str, Any]) -> nn.Module:
            from hfta_tune.tune import _actor

            real = _actor.report_on
            if real.__module__ == "hfta_tune.tune._report":
                _actor.report_on = lambda *arguments: change(real(*arguments))
            return super().build_model(config)

    return MadeUp


def test_auto_doubles_the_lanes_while_throughput_rises(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    def up_to_eight(report: Any) -> Any:
        import dataclasses

        assert report.memory.at_start > 0 and report.memory.used < report.memory.total
        return dataclasses.replace(report, seconds=1.0 if len(report.signatures) <= 8 else 4.0)

    trainable, packer = with_made_up_rounds(up_to_eight), HFTAPacker(B="auto")
    arguments = {"scheduler": packer, "resources_per_trial": ONE_WORKER, "stop": {"training_iteration": 8}}
    events = Events()
    with caplog.at_level(logging.WARNING, logger="hfta_tune"):
        names = " ".join(f"a{number}" for number in range(40))
        run(trainable, storage, config=cases(names), callbacks=[events], **arguments)
    assert (packer.B, packer.lanes) == ("auto", 8)
    sizes = events.sizes
    assert sizes[0] <= 4 and max(sizes) == 16
    last_of_16 = max(number for number, size in enumerate(sizes) if size == 16)
    assert set(sizes[last_of_16 + 9 :]) <= set(range(9)) and 8 in sizes[last_of_16 + 9 :], "it goes back to 8"
    [said] = [record.message for record in caplog.records if 'B="auto"' in record.message]
    assert "stays at 8 lanes a worker" in said and "4 with 4, 8 with 8, 4 with 16" in said
    assert said.split(" stays at ")[1].rstrip(".") in packer.debug_string()

    events = Events()
    run(trainable, storage, config=cases("a0 a1 a2 a3 a4 a5 a6 a7 a8"), callbacks=[events], **arguments)
    assert max(events.sizes) == 8, "a worker that opens later begins with the number found"


def test_auto_stops_where_memory_ends(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    def nearly_full(report: Any) -> Any:
        import dataclasses

        memory = report.memory._replace(used=70 * 10**9, total=100 * 10**9, at_start=30 * 10**9)
        return dataclasses.replace(report, seconds=1.0, memory=memory)

    packer, events = HFTAPacker(B="auto"), Events()
    with caplog.at_level(logging.WARNING, logger="hfta_tune"):
        run(
            with_made_up_rounds(nearly_full),
            storage,
            config=cases("a0 a1 a2 a3 a4 a5 a6 a7 a8 a9"),
            scheduler=packer,
            resources_per_trial=ONE_WORKER,
            stop={"training_iteration": 8},
            callbacks=[events],
        )
    assert packer.lanes == max(events.sizes) == 4
    assert "8 lanes would need about 110.0 GB of the device's memory of 100.0 GB" in caplog.text


def test_auto_with_fewer_trials_than_lanes(storage: str) -> None:
    packer, events = HFTAPacker(B="auto"), Events()
    run(Case, storage, config=cases("a0 a1 b0"), scheduler=packer, stop={"training_iteration": 30}, callbacks=[events])
    assert packer.lanes == 4 and max(events.sizes) == 3
    assert "no full round was measured" in packer.debug_string()
