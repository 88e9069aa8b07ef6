"""What goes wrong in a run costs the trials that it befalls at most one failure, and nobody a result."""

from __future__ import annotations

import errno
import functools
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty
import pyarrow.fs
import pytest
import ray
from faulty import Faulty, FaultySteps, RaisesAnywhere, Recorder, assert_nothing_lost, logged
from ray import cloudpickle, tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.util import placement_group, remove_placement_group
from trainables import Points

from hfta_tune import HFTAPacker
from hfta_tune.tune import _executor, _watch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

SCRIPTS = Path(__file__).parent / "scripts"
ONE_WORKER = {"cpu": 2}


@pytest.fixture(autouse=True)
def by_value(cluster: None) -> None:
    cloudpickle.register_pickle_by_value(faulty)


@pytest.fixture
def markers(tmp_path: Path) -> Path:
    directory = tmp_path / "markers"
    directory.mkdir()
    return directory


def run(trainable: Any, storage: str, **arguments: Any) -> tune.ExperimentAnalysis:
    arguments = {"verbose": 0, "raise_on_failed_trial": False, "storage_path": storage, **arguments}
    return tune.run(trainable, resources_per_trial=ONE_WORKER, **arguments)


def faults_of(faults: list[str], how: str, markers: Path) -> dict[str, Any]:
    """A trial for each of the faults; "" is a trial without one."""
    lrs = {(index, fault): 0.01 * (index + 1) for index, fault in enumerate(faults)}
    return {
        "number": tune.grid_search(list(range(len(faults)))),
        "fault": tune.sample_from(lambda spec: faults[spec.config.number]),
        "lr": tune.sample_from(lambda spec: lrs[spec.config.number, faults[spec.config.number]]),
        "seed": 1,
        "how": how,
        "markers": str(markers),
    }


def until(happens: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if outcome := happens():
            return outcome
        time.sleep(0.05)
    raise AssertionError(f"{happens} did not happen within {seconds} s")


def assert_nothing_runs() -> None:
    """No actor and no placement group is left behind: all the resources are there."""
    everything = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    ray.get(everything.ready(), timeout=120)
    remove_placement_group(everything)


@pytest.mark.parametrize(
    ("hook", "restart"), [("build_model", 1), ("evaluate", 3), ("save_checkpoint", 3)], ids=["start", "round", "save"]
)
def test_a_worker_that_is_killed(
    storage: str, markers: Path, monkeypatch: pytest.MonkeyPatch, hook: str, restart: int
) -> None:
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0.2")  # so a retry finds older copies of its logs in storage
    recorder = Recorder()
    analysis = run(
        Faulty,
        storage,
        config=faults_of(["", hook, "", ""], "kill", markers),
        scheduler=HFTAPacker(B=4),
        stop={"training_iteration": 5},
        max_failures=1,
        checkpoint_freq=2,
        callbacks=[recorder],
    )
    for trial in analysis.trials:
        results = recorder.results[trial.trial_id]
        assert_nothing_lost(trial, results, rounds=5)
        assert trial.num_failures == 1 if trial.config["fault"] else trial.num_failures <= 1
        iterations = [result["training_iteration"] for result in results]
        if trial.config["fault"]:  # from the last whole checkpoint
            second = next(i for i, result in enumerate(results) if result["pid"] == results[-1]["pid"])
            assert iterations[second:] == list(range(restart, 6))
    assert len(list(markers.iterdir())) == 1


def test_hooks_that_raise(storage: str, markers: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each fails its own trial, with its own error, whatever it raises; its lane serves the next trial."""
    hooks = ["setup", "build_model", "build_optimizer", "build_lr_scheduler", "train_dataloader", "val_dataloader"]
    hooks += ["training_step", "validation_step", "evaluate", "save_checkpoint", "cleanup"]
    faults = [
        *hooks,
        "unportable evaluate",
        "exit in evaluate",
        "unportable save_checkpoint",
        "stop in save_checkpoint",
    ]
    recorder = Recorder()
    analysis = run(
        RaisesAnywhere,
        storage,
        config=faults_of(["", *faults, "", ""], "raise", markers),
        scheduler=HFTAPacker(B=3),
        stop={"training_iteration": 2},
        checkpoint_freq=1,
        callbacks=[recorder],
    )
    assert len({trial.last_result["pid"] for trial in analysis.trials if "pid" in trial.last_result}) == 1
    for trial in analysis.trials:
        fault = trial.config["fault"]
        sound = fault in ("", "cleanup")
        assert_nothing_lost(trial, recorder.results[trial.trial_id], rounds=2 if sound else None)
        assert trial.num_failures == (0 if sound else 1), fault
        if not sound:
            assert trial.status == "ERROR"
            assert f"{fault.split()[-1]} is faulty" in trial.get_error().replace("\n", " "), trial.get_error()
            assert len(recorder.results[trial.trial_id]) == (1 if "save_checkpoint" in fault else 0)


def test_a_class_that_the_worker_cannot_import(
    storage: str, markers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_the_driver_has_it.py").write_text(
        "from trainables import Points\nclass There(Points): pass\nclass Thing: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_the_driver_has_it")
    config = {"lr": tune.grid_search([0.01, 0.02]), "seed": 1}
    analysis = run(module.There, storage, config=config, scheduler=HFTAPacker(B=2), max_failures=1)
    for trial in analysis.trials:
        assert trial.status == "ERROR" and trial.num_failures == 2
        assert "The class There cannot be loaded in the worker's process" in trial.get_error()
        assert "No module named 'only_the_driver_has_it'" in trial.get_error()

    recorder = Recorder()
    config["thing"] = tune.sample_from(lambda spec: module.Thing() if spec.config.lr == 0.02 else None)
    analysis = run(
        Points,
        storage,
        config=config,
        scheduler=HFTAPacker(B=2),
        max_failures=1,
        stop={"training_iteration": 2},
        callbacks=[recorder],
    )
    sound, faulty = analysis.trials
    assert_nothing_lost(sound, recorder.results[sound.trial_id], rounds=2)
    assert sound.num_failures == 0
    assert faulty.status == "ERROR" and faulty.num_failures == 2
    message = f"The config or the storage of trial {faulty.trial_id} cannot be loaded in the worker's process"
    assert message in faulty.get_error() and "No module named 'only_the_driver_has_it'" in faulty.get_error()


def test_workers_that_cannot_start(storage: str, markers: Path) -> None:
    """What a driver gives all its workers: an environment that fails, one in which they raise, one that kills them."""
    address = ray.get_runtime_context().gcs_address
    script = subprocess.run(
        [sys.executable, str(SCRIPTS / "bad_environments.py"), address, storage, str(markers)],
        capture_output=True,
        text=True,
        timeout=300,
        env=faulty.environment(),
    )
    assert script.returncode == 0, script.stderr
    failing, raising, killed = json.loads(script.stdout.splitlines()[-1])
    for trial in failing:
        assert (trial["status"], trial["failures"]) == ("ERROR", 2)
        assert "runtime environment" in trial["error"] and "/no/such/environment.zip" in trial["error"]
    for trial in raising:
        assert (trial["status"], trial["failures"]) == ("ERROR", 1)
        assert "strategy must be" in trial["error"] and "'no such strategy'" in trial["error"]
    for trial in killed:
        assert trial["status"] == "TERMINATED" and trial["failures"] == 1
        assert [result["training_iteration"] for result in logged(trial["path"])] == [1, 2]


def test_a_disk_that_is_full_for_one_save(storage: str, markers: Path) -> None:
    recorder = Recorder()
    full = faulty.FullOnce(markers / "full", "checkpoint_000001", "_00001_")
    analysis = run(
        Faulty,
        storage,
        config=faults_of(["", "save", ""], "raise", markers),
        scheduler=HFTAPacker(B=3),
        stop={"training_iteration": 5},
        checkpoint_freq=2,
        max_failures=1,
        callbacks=[recorder],
        storage_filesystem=pyarrow.fs.PyFileSystem(full),
    )
    for trial in analysis.trials:
        results = recorder.results[trial.trial_id]
        iterations = [result["training_iteration"] for result in results]
        if trial.config["fault"]:
            assert trial.num_failures == 1 and os.strerror(errno.ENOSPC) in trial.get_error()
            assert iterations == [1, 2, 3, 4, 3, 4, 5]
        else:
            assert trial.num_failures == 0 and iterations == [1, 2, 3, 4, 5]
        assert_nothing_lost(trial, results, rounds=5)


def test_a_checkpoint_that_cannot_be_read(storage: str, markers: Path) -> None:
    """Three trials pause and resume: one from half a file, one with a load_checkpoint that raises."""

    class PausesAll(FIFOScheduler):
        def __init__(self) -> None:
            super().__init__()
            self.paused: set[str] = set()

        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            if result["training_iteration"] == 2 and trial.trial_id not in self.paused:
                self.paused.add(trial.trial_id)
                return TrialScheduler.PAUSE
            return super().on_trial_result(tune_controller, trial, result)

    class Truncates(Recorder):
        whole: bytes | None = None

        def on_checkpoint(self, iteration: int, trials: Any, trial: Any, checkpoint: Any, **info: Any) -> None:
            if trial.config["fault"] == "truncate" and self.whole is None:
                self.file = Path(checkpoint.path) / "checkpoint.pt"
                self.whole = self.file.read_bytes()
                self.file.write_bytes(self.whole[: len(self.whole) // 2])

        def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            if trial.config["fault"] == "truncate":
                self.file.write_bytes(self.whole)

    recorder = Truncates()
    analysis = run(
        Faulty,
        storage,
        config=faults_of(["", "truncate", "load_checkpoint"], "raise", markers),
        scheduler=HFTAPacker(PausesAll(), B=3),
        stop={"training_iteration": 4},
        max_failures=1,
        callbacks=[recorder],
    )
    for trial in analysis.trials:
        results = recorder.results[trial.trial_id]
        assert_nothing_lost(trial, results, rounds=4)
        assert [result["training_iteration"] for result in results] == [1, 2, 3, 4]
        assert trial.num_failures == (1 if trial.config["fault"] else 0)
        if trial.config["fault"] == "truncate":
            assert f"trial {trial.trial_id}: the checkpoint" in trial.get_error()
            assert str(recorder.file) in trial.get_error()
        elif trial.config["fault"]:
            assert "load_checkpoint is faulty" in trial.get_error()


def test_a_driver_that_is_killed(storage: str, markers: Path) -> None:
    """In mid-round: what was reported is on disk, and neither processes nor actors are left."""
    address = ray.get_runtime_context().gcs_address
    script = [sys.executable, str(SCRIPTS / "endless_round.py"), address, storage, str(markers)]
    with subprocess.Popen(script, env=faulty.environment()) as driver:
        try:
            until(lambda: driver.poll() is not None or len(list(markers.glob("*.hang"))) == 3)
            assert driver.poll() is None

            def all_logged() -> Any:
                directories = [file.parent for file in Path(storage).glob("*/*/result.json")]
                results = [logged(directory) for directory in directories]
                return len(results) == 3 and all(len(own) == Faulty.at_iteration for own in results) and results

            results = until(all_logged)
        finally:
            driver.send_signal(signal.SIGKILL)
    assert [[r["training_iteration"] for r in own] for own in results] == [[1, 2, 3]] * 3
    for pid in {result["pid"] for own in results for result in own}:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
    assert_nothing_runs()
    assert all_logged() == results


class Clock:
    """Goes on only while a hook hangs."""

    def __init__(self, markers: Path) -> None:
        self._markers = markers
        self._seconds = 0.0

    def __call__(self) -> float:
        if any(file.read_bytes() == b"" for file in self._markers.glob("*.hang")):
            self._seconds += 500.0
        return self._seconds


class Ends(Recorder):
    """Stops the clock once a trial that hung has failed."""

    def __init__(self, markers: Path) -> None:
        super().__init__()
        self._markers = markers

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        marker = self._markers / f"{trial.trial_id}.hang"
        if marker.exists():
            marker.write_text("failed")


def test_hooks_that_hang(
    storage: str, markers: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each costs its own trial one failure, with an error that names it; the others go on."""
    monkeypatch.setattr(_executor, "Watch", functools.partial(_watch.Watch, clock=Clock(markers)))
    hooks = ["build_model", "training_step", "save_checkpoint"]
    recorder = Ends(markers)
    with caplog.at_level(logging.WARNING, logger="hfta_tune"):
        analysis = run(
            FaultySteps,
            storage,
            config=faults_of(["", *hooks, ""], "hang", markers),
            scheduler=HFTAPacker(B=5, round_timeout_s=1000),
            stop={"training_iteration": 5},
            checkpoint_freq=2,
            max_failures=1,
            callbacks=[recorder],
        )
    for trial in analysis.trials:
        assert_nothing_lost(trial, recorder.results[trial.trial_id], rounds=5)
        hook = trial.config["fault"]
        assert trial.num_failures == (1 if hook else 0), hook
        said = f"within round_timeout_s=1000 s. It was in {hook} of trial {trial.trial_id}."
        assert not hook or said in trial.get_error()
        assert sum(said in record.getMessage() for record in caplog.records) == (1 if hook else 0)


def test_a_hook_that_lets_no_other_thread_run(
    storage: str, markers: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can say what hangs: the trials of the worker are charged one failure each."""
    monkeypatch.setattr(_executor, "Watch", functools.partial(_watch.Watch, clock=Clock(markers)))
    monkeypatch.setattr(_watch, "_PATIENCE_S", 1.0)
    recorder = Ends(markers)
    with caplog.at_level(logging.WARNING, logger="hfta_tune"):
        analysis = run(
            faulty.KeepsPythonToItself,
            storage,
            config=faults_of(["", "evaluate"], "hang", markers),
            scheduler=HFTAPacker(B=2, round_timeout_s=1000),
            stop={"training_iteration": 4},
            max_failures=1,
            callbacks=[recorder],
        )
    for trial in analysis.trials:
        assert_nothing_lost(trial, recorder.results[trial.trial_id], rounds=4)
        assert trial.num_failures == 1 and "does not let other threads run" in trial.get_error()
    assert len([record for record in caplog.records if "costs each a failure" in record.getMessage()]) == 1
