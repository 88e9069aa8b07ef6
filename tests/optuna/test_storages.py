"""Studies in storages: where trials trained, resuming, two processes on one study, and one that was killed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import hfta_tune

SCRIPT = """
    import sys, time
    import optuna, torch
    from torch.nn import functional as F
    import hfta_tune

    class Line(hfta_tune.FusedTrainable):
        def build_model(self, config):
            return torch.nn.Linear(1, 1)

        def build_optimizer(self, model, config):
            return torch.optim.SGD(model.parameters(), lr=config["lr"])

        def train_dataloader(self, config):
            x = torch.linspace(-1, 1, 4).unsqueeze(1)
            return [(x, 3 * x)]

        def training_step(self, model, batch, config):
            x, y = batch
            return F.mse_loss(model(x), y)

        def evaluate(self, model, config):
            time.sleep(float(sys.argv[2]))
            return {"slope": model.weight.item()}

    from optuna.storages.journal import JournalFileBackend

    where = sys.argv[1]
    storage = (
        optuna.storages.RDBStorage(where, heartbeat_interval=1, grace_period=2)
        if "://" in where
        else optuna.storages.JournalStorage(JournalFileBackend(where))
    )
    study = optuna.load_study(study_name="study", storage=storage, pruner=optuna.pruners.NopPruner())
    hfta_tune.optimize(
        study, Line, lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.1)},
        n_trials=8, epochs=3, metric="train_loss", B=4,
    )
"""


def storage_at(kind: str, folder: Path) -> tuple[str, Any]:
    """The storage's address for a script, and the storage."""
    if kind == "journal":
        return str(folder / "log"), optuna.storages.JournalStorage(JournalFileBackend(str(folder / "log")))
    url = f"sqlite:///{folder}/study.db"
    return url, optuna.storages.RDBStorage(
        url,
        heartbeat_interval=1,
        grace_period=2,
        failed_trial_callback=optuna.storages.RetryFailedTrialCallback(max_retry=1),
    )


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Optuna says that heartbeats and retries are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def new_study(storage: Any) -> optuna.Study:
    return optuna.create_study(
        study_name="study",
        storage=storage,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.NopPruner(),
    )


def start(tmp_path: Path, address: str, seconds: float) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, str(script), address, str(seconds)], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["journal", "rdb"])
def test_two_processes_on_one_study_and_resuming_it(kind: str, tmp_path: Path, line: Any) -> None:
    address, storage = storage_at(kind, tmp_path)
    study = new_study(storage)
    study.enqueue_trial({"lr": 0.05}, user_attrs={"from": "me"})
    processes = [start(tmp_path, address, 0.0) for _ in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 16
    assert study.trials[0].params == {"lr": 0.05} and study.trials[0].user_attrs == {"from": "me"}
    places = [trial.system_attrs["hfta_tune"] for trial in study.trials]
    assert sorted(Counter(place["worker"] for place in places).values()) == [8, 8]
    assert {place["lane"] for place in places} <= {0, 1, 2, 3}

    hfta_tune.optimize(study, line, space, n_trials=4, epochs=3, B=4)
    assert [trial.number for trial in study.trials] == list(range(20))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 20


@pytest.mark.slow
def test_trials_of_a_killed_process_fail_and_are_tried_again(tmp_path: Path, line: Any) -> None:
    address, storage = storage_at("rdb", tmp_path)
    study = new_study(storage)
    process = start(tmp_path, address, 0.2)
    deadline = time.monotonic() + 120
    while sum(bool(trial.intermediate_values) for trial in study.trials) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    left = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
    assert left
    time.sleep(3.5)  # longer than the grace period
    hfta_tune.optimize(study, line, space, n_trials=len(left) + 2, epochs=3, B=4)
    trials = study.trials
    assert not any(trial.state == TrialState.RUNNING for trial in trials)
    assert [trials[number].state for number in left] == [TrialState.FAIL] * len(left)
    again = {trial.system_attrs.get("failed_trial"): trial for trial in trials}
    for number in left:
        assert again[number].state == TrialState.COMPLETE
        assert again[number].params == trials[number].params


def test_where_a_trial_trained(line: Any) -> None:
    class Wide(line):  # type: ignore[misc]
        """Two kinds of optimizers do not share an array."""

        def build_optimizer(self, model: Any, config: dict[str, Any]) -> Any:
            kind = torch.optim.Adam if config["adam"] else torch.optim.SGD
            return kind(model.parameters(), lr=0.01)

    study = optuna.create_study()
    hfta_tune.optimize(study, Wide, lambda trial: {"adam": trial.number % 2 == 0}, n_trials=8, epochs=2, B=4)
    places = [trial.system_attrs["hfta_tune"] for trial in study.trials]
    assert len({place["worker"] for place in places}) == 1
    assert [place["lane"] for place in places] == [0, 1, 2, 3] * 2
    for key in ("array", "signature"):
        even, odd = {place[key] for place in places[::2]}, {place[key] for place in places[1::2]}
        assert even.isdisjoint(odd)
    assert len({place["signature"] for place in places}) == 2


def test_garbage_is_collected_after_each_trial(line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for collect, expected in ((False, 0), (True, 3)):
        calls: list[int] = []
        monkeypatch.setattr("hfta_tune.optuna._session.gc.collect", lambda calls=calls: calls.append(1))
        study = optuna.create_study()
        hfta_tune.optimize(study, line, space, n_trials=3, epochs=1, B=2, gc_after_trial=collect)
        assert len(calls) == expected
