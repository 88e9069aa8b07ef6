"""What a worker tells of its rounds, and what `optimize` tells those who watch it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import optuna
import pytest
from lanes import Recorder
from trainables import Points

import hfta_tune
from hfta_tune.optuna import _optimize
from hfta_tune.rounds import Observer, Observers
from hfta_tune.worker import Worker


def worker_of(configs: list[dict[str, Any]]) -> Worker:
    worker = Worker(len(configs))
    for number, config in enumerate(configs):
        worker.add(str(number), Points._outside_tune(config), config)
    return worker


def test_a_round_says_what_each_array_did() -> None:
    worker = worker_of([{"lr": 0.01}, {"lr": 0.02}, {"lr": 0.01, "hidden": 4}, {"lr": 0.03}])
    assert worker.last_round is None
    before = time.time()
    worker.run_round()
    own = worker.last_round
    assert own is not None and before <= own.begin < own.end <= time.time()
    assert own.seconds == own.end - own.begin
    arrays = {array.trials: array for array in own.arrays}
    assert arrays.keys() == {("0", "1", "3"), ("2",)}
    for array in own.arrays:
        assert (array.steps, array.samples, array.compile_seconds) == (3, 96, 0.0)
    assert [arrays[trials].strategy for trials in (("0", "1", "3"), ("2",))] == ["vmap", "lane by lane"]
    assert len({array.number for array in own.arrays}) == 2


def test_a_round_of_some_of_the_trials() -> None:
    worker = worker_of([{"lr": 0.01}, {"lr": 0.02}, {"lr": 0.03}])
    worker.run_round()
    worker.remove("1")
    worker.run_round(["0"])
    own = worker.last_round
    assert own is not None and [array.trials for array in own.arrays] == [("0",)]


class FailsInStep(Points):
    """Its step reads a key that not every config has."""

    def training_step(self, model: Any, batch: Any, config: dict[str, Any]) -> Any:
        return super().training_step(model, batch, config) * config["scale"]


def test_trials_that_failed_are_in_no_array() -> None:
    worker = Worker(2)
    for name, config in {"sound": {"lr": 0.01, "scale": 1.0}, "broken": {"lr": 0.01}}.items():
        worker.add(name, FailsInStep._outside_tune(config), config)
    assert isinstance(worker.run_round()["broken"], KeyError)
    own = worker.last_round
    assert own is not None and [array.trials for array in own.arrays] == [("sound",)]


def test_an_observer_that_raises_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        told = 0

        def trials_wait(self, trials: int) -> None:
            self.told += 1
            raise RuntimeError("no space left")

    broken, sound = Broken(), Recorder()
    observers = Observers([broken, sound])
    with caplog.at_level(logging.ERROR):
        for trials in range(3):
            observers.trials_wait(trials)
    assert broken.told == 1 and sound.waiting == [0, 1, 2]
    assert [record.message for record in caplog.records] == ["Broken no longer watches the run, because of this error."]


def test_what_optimize_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(_optimize, "observers_of_study", lambda study: [recorder])

    class Space:
        def __call__(self, trial: optuna.Trial) -> dict[str, Any]:
            if trial.number == 3:
                raise KeyError("no such key")
            return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "hidden": trial.suggest_categorical("hidden", [4, 8])}

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    )
    hfta_tune.optimize(study, Points, Space(), n_trials=12, epochs=4, metric="accuracy", B=4, catch=KeyError)
    expected = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "error"}
    assert recorder.reasons == {str(trial.number): expected[trial.state.name] for trial in study.trials}
    assert set(recorder.reasons.values()) == {"done", "pruned", "error"}
    assert recorder.lanes == {0: 4} and recorder.over == 1 and not recorder.present
    for trial in study.trials:
        if trial.number != 3:
            assert recorder.places[str(trial.number)] == [(0, trial.system_attrs["hfta_tune"]["lane"])]
    rounds = Counter(name for _, own in recorder.rounds for array in own.arrays for name in array.trials)
    assert rounds == {str(trial.number): len(trial.intermediate_values) for trial in study.trials if trial.number != 3}


def test_what_optimize_tells_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(_optimize, "observers_of_study", lambda study: [recorder])

    class Interrupted(Points):
        def evaluate(self, model: Any, config: dict[str, Any]) -> dict[str, float]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hfta_tune.optimize(
            optuna.create_study(), Interrupted, lambda trial: {"lr": 0.1}, n_trials=4, epochs=2, metric="accuracy", B=2
        )
    assert recorder.reasons == {"0": "stopped", "1": "stopped"} and not recorder.present and recorder.over == 1
