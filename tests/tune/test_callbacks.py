"""What a user's callbacks and loggers see, as in stock Tune."""

from __future__ import annotations

import csv
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from trainables import Climb, PlainClimb

from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

OF_A_TRIAL = (
    "on_trial_start",
    "on_trial_restore",
    "on_trial_save",
    "on_trial_result",
    "on_trial_complete",
    "on_trial_recover",
    "on_trial_error",
    "on_checkpoint",
)


class Listener(tune.Callback):
    """Notes every hook, and how many results each trial has in its result.json by then."""

    def __init__(self, lines: Callable[[str], Any]) -> None:
        self.lines = lines
        self.of_run: list[str] = []
        self.of_trial: dict[int, list[Any]] = defaultdict(list)

    def setup(self, **info: Any) -> None:
        self.of_run.append("setup")

    def on_step_begin(self, **info: Any) -> None:
        self.of_run.append("on_step_begin")

    def on_step_end(self, **info: Any) -> None:
        self.of_run.append("on_step_end")

    def on_experiment_end(self, **info: Any) -> None:
        self.of_run.append("on_experiment_end")

    def note(self, hook: str, trial: Any, result: dict[str, Any] | None = None, **info: Any) -> None:
        detail = sorted(result) if result is not None else sorted(info)
        # When a trial goes on after a failure, stock Tune fetches its files from the last copy in the storage.
        lines = len(self.lines(trial.local_path)) if trial.num_failures == 0 else None
        self.of_trial[trial.config["failures"]].append((hook, trial.status, lines, detail))


def _hook(name: str) -> Callable[..., None]:
    def call(self: Listener, **info: Any) -> None:
        self.note(name, **info)

    return call


for _name in OF_A_TRIAL:
    setattr(Listener, _name, _hook(_name))


def scalars(directory: Path) -> Iterator[tuple[str, int]]:
    """The tags and steps in a trial's TensorBoard file."""
    from tensorboardX.proto import event_pb2

    [file] = directory.glob("events.*")
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, event.step


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> dict[bool, Any]:
    """The same run with the packer and without: its listener, its trials and their directories."""
    found = {}
    for packed in (True, False):
        directory = tmp_path_factory.mktemp("packed" if packed else "stock")

        def lines(path: str) -> list[str]:
            file = Path(path) / "result.json"
            return file.read_text().splitlines() if file.exists() else []

        listener = Listener(lines)
        analysis = tune.run(
            Climb if packed else PlainClimb,
            # One trial fails and goes on, one fails for good, and one does not fail.
            config={
                "peak": 2,
                "fails_at": 4,
                "failures": tune.grid_search([0, 1, 2]),
                "marks": str(tmp_path_factory.mktemp("marks")),
            },
            stop={"training_iteration": 5},
            max_failures=1,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True),
            scheduler=HFTAPacker(B=3) if packed else None,
            resources_per_trial={"cpu": 2 if packed else 1},
            callbacks=[listener],
            storage_path=str(directory),
            raise_on_failed_trial=False,
            verbose=0,
        )
        found[packed] = listener, {trial.config["failures"]: trial for trial in analysis.trials}
    return found


def test_a_trial_s_hooks_come_in_the_order_of_stock_tune(heard: dict[bool, Any]) -> None:
    packed, stock = (
        {failures: [event[:3] for event in events] for failures, events in heard[packed][0].of_trial.items()}
        for packed in (True, False)
    )
    assert packed == stock
    assert {hook for events in packed.values() for hook, *_ in events} >= set(OF_A_TRIAL) - {"on_trial_restore"}


def test_hooks_get_what_stock_tune_gives_them(heard: dict[bool, Any]) -> None:
    def given(packed: bool) -> set[Any]:
        events = [event for events in heard[packed][0].of_trial.values() for event in events]
        return {(hook, *(key for key in detail if key != "train_loss")) for hook, _, _, detail in events}

    assert given(True) == given(False)


def test_the_hooks_of_the_run(heard: dict[bool, Any]) -> None:
    for packed in (True, False):
        first, *steps, last = heard[packed][0].of_run
        assert first == "setup" and last == "on_experiment_end"
        assert steps == ["on_step_begin", "on_step_end"] * (len(steps) // 2)


def test_csv_json_and_tensorboard_files(heard: dict[bool, Any]) -> None:
    def read(trial: Any) -> Any:
        directory = Path(trial.path)
        with open(directory / "progress.csv") as file:
            rows = list(csv.DictReader(file))
        results = [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]
        return {
            "csv": [(set(row) - {"train_loss"}, row["height"], row["training_iteration"]) for row in rows],
            "json": [(set(own) - {"train_loss"}, own["height"], own["training_iteration"]) for own in results],
            "tensorboard": sorted((step, tag) for tag, step in scalars(directory) if "train_loss" not in tag),
        }

    packed, stock = (read(heard[packed][1][0]) for packed in (True, False))
    assert packed == stock
    assert [step for step, tag in packed["tensorboard"] if tag == "ray/tune/height"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_files_of_a_trial(heard: dict[bool, Any], failures: int) -> None:
    packed, stock = (
        {path.name for path in Path(heard[packed][1][failures].path).iterdir() if "events" not in path.name}
        for packed in (True, False)
    )
    assert packed == stock and ("error.txt" in packed) == (failures > 0)


def test_mlflow(climb: Any, tmp_path: Path, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = {}
    for packed in (True, False):
        name = "packed" if packed else "stock"
        uri = (tmp_path / name).as_uri()
        analysis = climb(
            packed=packed,
            stop={"training_iteration": 3},
            config={
                "peak": tune.grid_search([1, 2]),
                "fails_at": tune.sample_from(lambda spec: 2 if spec.config.peak == 2 else None),
                "failures": 1,
                "marks": str(tmp_path),
            },
            callbacks=[MLflowLoggerCallback(tracking_uri=uri, experiment_name=name, save_artifact=True)],
        )
        client = mlflow.MlflowClient(uri)
        runs = client.search_runs([client.get_experiment_by_name(name).experiment_id])
        found[name] = {
            run.data.params["peak"]: (
                run.info.status,
                sorted(run.data.params),
                [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "height")],
                # Tune logs what float() reads as a metric, and so some trial_ids: 12345_00000, 1e234_00000
                sorted(set(run.data.metrics) - {"train_loss", "trial_id"}),
                sorted(file.path for file in client.list_artifacts(run.info.run_id) if "events" not in file.path),
            )
            for run in runs
        }
        assert len(analysis.trials) == len(runs) == 2
        for run in runs:  # what it uploads at the end of a trial is complete
            logged = lines(run.info.artifact_uri.removeprefix("file://"))
            assert len(logged) == len(client.get_metric_history(run.info.run_id, "height")) > 0
    assert found["packed"] == found["stock"]
    assert {peak: run[0] for peak, run in found["packed"].items()} == {"1": "FINISHED", "2": "FAILED"}
