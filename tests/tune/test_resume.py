"""Runs that were interrupted, by a killed driver or by Ctrl-C, are restored to their end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from trainables import Climb

import hfta_tune
from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

HERE = Path(__file__).parent


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


class Results(tune.Callback):
    """The iterations that each trial reported, and by whom; calls `at_result` with their number."""

    def __init__(self, at_result: Callable[[int], None] = lambda number: None) -> None:
        self.iterations: dict[str, list[int]] = defaultdict(list)
        self.pids: set[int] = set()
        self.at_result = at_result

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.iterations[trial.trial_id].append(result["training_iteration"])
        self.pids.add(result["pid"])
        self.at_result(sum(map(len, self.iterations.values())))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Path:
    """The directory of a run whose driver was killed in its middle."""
    directory = tmp_path_factory.mktemp("killed")
    paths = [str(HERE.parent), str(Path(hfta_tune.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    driver = subprocess.Popen(
        [
            sys.executable,
            str(HERE / "killed_driver.py"),
            ray.get_runtime_context().gcs_address,
            str(directory),
            str(directory / "stuck"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.DEVNULL,
        stderr=(directory / "stderr").open("w"),
    )
    try:
        wait_until(lambda: (directory / "stuck").exists() or driver.poll() is not None)
        assert driver.poll() is None, (directory / "stderr").read_text()[-2000:]
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return directory / "killed"


def with_tuner_restore(directory: Path) -> None:
    results = tune.Tuner.restore(str(directory), tune.with_resources(Climb, {"cpu": 2})).fit()
    assert not results.errors


def with_resume(directory: Path) -> None:
    tune.run(
        Climb,
        name=directory.name,
        storage_path=str(directory.parent),
        resume=True,
        scheduler=HFTAPacker(B=3),
        verbose=0,
    )


@pytest.mark.parametrize("restore", [with_tuner_restore, with_resume])
def test_a_run_whose_driver_was_killed(killed: Path, tmp_path: Path, lines: Any, restore: Any) -> None:
    directory = tmp_path / restore.__name__
    shutil.copytree(killed, directory)
    before = {trial.trial_id: trial for trial in tune.ExperimentAnalysis(str(killed)).trials}
    finished = {name for name, trial in before.items() if trial.status == "TERMINATED"}
    assert len(before) == 5 and len(finished) >= 2

    restore(directory)
    after = {trial.trial_id: trial for trial in tune.ExperimentAnalysis(str(directory)).trials}
    assert set(after) == set(before)
    from_checkpoint = 0
    for name, trial in after.items():
        peak = trial.config["peak"]
        assert trial.status == "TERMINATED" and trial.last_result["height"] == peak
        written = [line["training_iteration"] for line in lines(str(directory / Path(trial.path).name))]
        if name in finished:
            assert trial.last_result == before[name].last_result
            assert written == list(range(1, peak + 1))
        else:
            assert set(written) == set(range(1, peak + 1))
            from_checkpoint += trial.last_result["iterations_since_restore"] < peak
    assert from_checkpoint


@pytest.mark.parametrize("packed", [True, False])
def test_ctrl_c(climb: Any, lines: Any, packed: bool) -> None:
    def interrupt(results: int) -> None:
        if results == 7:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    first, second = Results(interrupt), Results()
    common = {"packed": packed, "checkpoint_config": tune.CheckpointConfig(checkpoint_frequency=2)}
    interrupted = climb(**common, stop={"training_iteration": 12}, callbacks=[first])
    assert 7 <= sum(map(len, first.iterations.values())) < 12
    assert signal.getsignal(signal.SIGINT) == handler
    for trial in interrupted.trials:
        assert [line["training_iteration"] for line in lines(trial.path)] == first.iterations[trial.trial_id]
    wait_until(lambda: not any(map(alive, first.pids)))
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])

    resumed = climb(**common, resume=True, callbacks=[second])
    assert {trial.trial_id for trial in resumed.trials} == {trial.trial_id for trial in interrupted.trials}
    from_checkpoint = 0
    for trial in resumed.trials:
        assert trial.status == "TERMINATED" and trial.last_result["height"] == 12
        assert {line["training_iteration"] for line in lines(trial.path)} == set(range(1, 13))
        before, after = first.iterations[trial.trial_id], second.iterations[trial.trial_id]
        checkpoint = after[0] - 1  # a save that was under way is not waited for
        assert after == list(range(after[0], 13)) and checkpoint % 2 == 0 and checkpoint <= len(before)
        from_checkpoint += checkpoint > 0
    assert from_checkpoint or not packed  # in stock Tune, trials start one after another
