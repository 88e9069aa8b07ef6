"""Objectives with loops of their own: optimize against study.optimize."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import hfta_tune

GRID = {"lr": [0.02, 0.05, 0.1, 0.2, 0.3, 0.5], "width": [8, 12]}


def batches() -> list[Any]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return list(zip(x.split(32), (x.sum(1) > 0).long().split(32), strict=True))


BATCHES = batches()


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    width = trial.suggest_categorical("width", GRID["width"])
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 1))
    model, optimizer, loader, criterion = hfta_tune.prepare(model, optimizer, BATCHES, nn.CrossEntropyLoss())
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            hfta_tune.backward(loss)
            optimizer.step()
        trial.report(loss.item(), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss.item()


def studies(pruner: Callable[[], Any] = optuna.pruners.NopPruner, **options: Any) -> list[optuna.Study]:
    return [
        optuna.create_study(sampler=optuna.samplers.GridSampler(GRID, seed=0), pruner=pruner(), **options)
        for _ in range(2)
    ]


def seen(study: optuna.Study) -> dict[str, Any]:
    return {str(sorted(trial.params.items())): (trial.state, trial.intermediate_values) for trial in study.trials}


def assert_same(fused: optuna.Study, plain: optuna.Study) -> None:
    ours, theirs = seen(fused), seen(plain)
    assert ours.keys() == theirs.keys() and len(theirs) == 12
    for key, (state, values) in theirs.items():
        assert ours[key][0] == state
        assert ours[key][1] == pytest.approx(values, rel=1e-4)


def test_values_and_intermediate_values() -> None:
    fused, plain = studies()
    hfta_tune.optimize(fused, objective, n_trials=12, B=5)
    plain.optimize(objective, n_trials=12)
    assert_same(fused, plain)
    assert fused.best_params == plain.best_params and fused.best_value == pytest.approx(plain.best_value, rel=1e-4)
    places = [trial.system_attrs["hfta_tune"] for trial in fused.trials]
    assert {place["lane"] for place in places} == set(range(5))
    assert len({place["signature"] for place in places}) == 2
    assert {(t.params["width"], p["signature"]) for t, p in zip(fused.trials, places, strict=True)} == {
        (width, next(p["signature"] for t, p in zip(fused.trials, places, strict=True) if t.params["width"] == width))
        for width in GRID["width"]
    }


def test_a_pruner_that_looks_at_one_trial_alone() -> None:
    fused, plain = studies(lambda: optuna.pruners.ThresholdPruner(upper=0.6, n_warmup_steps=1))
    hfta_tune.optimize(fused, objective, n_trials=12, B=12)
    plain.optimize(objective, n_trials=12)
    assert_same(fused, plain)
    assert {trial.state for trial in plain.trials} == {TrialState.COMPLETE, TrialState.PRUNED}


def test_several_directions_and_bad_values() -> None:
    def two(trial: optuna.Trial) -> Any:
        loss = objective(trial)
        return (loss, trial.params["width"]) if trial.number else "bad"

    study = optuna.create_study(directions=["minimize", "minimize"], sampler=optuna.samplers.GridSampler(GRID, seed=0))
    study.enqueue_trial({"lr": 0.1, "width": 8})

    def without_report(trial: optuna.Trial) -> Any:
        trial.report = lambda *given: None  # type: ignore[method-assign]
        trial.should_prune = lambda: False  # type: ignore[method-assign]
        return two(trial)

    with pytest.warns(UserWarning, match="Trial 0 fails: its objective returned 'bad', not 2 numbers"):
        hfta_tune.optimize(study, without_report, n_trials=4, B=4)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] + [TrialState.COMPLETE] * 3
    assert all(trial.values[1] in GRID["width"] for trial in study.trials[1:])


def test_errors_are_caught_or_raised_once_all_is_told() -> None:
    def fails(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise ValueError("as asked")
        return objective(trial)

    caught, raised = studies()
    hfta_tune.optimize(caught, fails, n_trials=4, B=4, catch=ValueError)
    assert [trial.state for trial in caught.trials] == [TrialState(1), TrialState.FAIL, TrialState(1), TrialState(1)]
    with pytest.raises(ValueError, match="as asked"):
        hfta_tune.optimize(raised, fails, n_trials=8, B=4)
    assert raised.trials[1].state == TrialState.FAIL
    assert not [trial for trial in raised.trials if trial.state == TrialState.RUNNING]


def test_callbacks_stop_and_timeout() -> None:
    study, other = studies()
    told: list[int] = []

    def callback(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        told.append(trial.number)
        if len(told) == 3:
            study.stop()

    hfta_tune.optimize(study, objective, n_trials=12, B=3, callbacks=[callback])
    assert len(told) == len(study.trials) < 8
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}

    def slow(trial: optuna.Trial) -> float:
        time.sleep(0.1)
        return objective(trial)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GridSampler repeats points")
        hfta_tune.optimize(other, slow, timeout=0.3, B=2)
    assert 2 <= len(other.trials) < 12 and {trial.state for trial in other.trials} == {TrialState.COMPLETE}


def test_stop_in_an_objective() -> None:
    def stops(trial: optuna.Trial) -> float:
        value = objective(trial)
        if trial.number == 3:
            trial.study.stop()
        return value

    study, _ = studies()
    hfta_tune.optimize(study, stops, n_trials=12, B=2)
    assert 4 <= len(study.trials) <= 6 and {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    with pytest.raises(RuntimeError, match="inside an objective function or a callback"):
        study.stop()


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_storages(storage: str, tmp_path: Path) -> None:
    made: Any = f"sqlite:///{tmp_path}/study.db"
    if storage == "journal":
        file = optuna.storages.journal.JournalFileBackend(f"{tmp_path}/study.log")
        made = optuna.storages.JournalStorage(file)
    study = optuna.create_study(storage=made, study_name="s", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    hfta_tune.optimize(study, objective, n_trials=4, B=2)
    again = optuna.load_study(storage=made, study_name="s")
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 4
    assert all(len(t.intermediate_values) == 4 and "hfta_tune" in t.system_attrs for t in again.trials)


VALUES = [None, "x", [1.0], (1.0, 2.0), torch.tensor(1.5), float("inf"), float("nan"), True, torch.ones(2)]


@pytest.mark.parametrize("value", VALUES)
def test_what_objectives_return(value: Any) -> None:
    fused, plain = optuna.create_study(), optuna.create_study()
    for optimize in (functools.partial(hfta_tune.optimize, fused, B=1), plain.optimize):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimize(lambda trial: value, n_trials=1)
    assert (fused.trials[0].state, fused.trials[0].values) == (plain.trials[0].state, plain.trials[0].values)


def test_ctrl_c_leaves_no_trial_running() -> None:
    cleaned: list[int] = []

    def interrupted(trial: optuna.Trial) -> float:
        try:
            value = objective(trial)
            if trial.number == 2:
                raise KeyboardInterrupt
            time.sleep(0)
            return value
        finally:
            cleaned.append(trial.number)

    study, _ = studies()
    with pytest.raises(KeyboardInterrupt):
        hfta_tune.optimize(study, interrupted, n_trials=9, B=3)
    assert sorted(cleaned) == list(range(len(study.trials)))
    assert not [trial for trial in study.trials if trial.state == TrialState.RUNNING]


def test_arguments_of_a_fused_trainable_are_refused() -> None:
    study, _ = studies()
    for argument in ({"epochs": 3}, {"metric": "loss"}, {"device": "cpu"}, {"on_round": print}):
        with pytest.raises(TypeError, match="is for a FusedTrainable"):
            hfta_tune.optimize(study, objective, n_trials=1, **argument)  # type: ignore[arg-type]
    assert study.trials == []


def test_audit_of_an_objective() -> None:
    fused, plain = studies()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hfta_tune.fusion.FusionWarning)
        hfta_tune.optimize(fused, objective, n_trials=12, B=6, audit=True)
    plain.optimize(objective, n_trials=12)
    assert_same(fused, plain)
