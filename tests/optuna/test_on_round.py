"""The figures that `optimize` tells after each round."""

from __future__ import annotations

import logging
from typing import Any

import optuna
import pytest
from trainables import Points

import hfta_tune
from hfta_tune.monitor import RunFigures
from hfta_tune.optuna import _optimize

EPOCHS = 3


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "hidden": trial.suggest_categorical("hidden", [4, 8])}


def optimize(study: optuna.Study, **arguments: Any) -> None:
    hfta_tune.optimize(study, Points, space, epochs=EPOCHS, metric="accuracy", B=4, **arguments)


def random_study() -> optuna.Study:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())


def test_figures_after_each_round() -> None:
    told: list[RunFigures] = []
    optimize(random_study(), n_trials=6, on_round=told.append)
    assert [figures.rounds for figures in told] == list(range(1, 2 * EPOCHS + 1))
    assert [figures.lanes_in_use for figures in told] == [4, 4, 2, 2, 2, 0]  # freed lanes have been refilled
    assert [figures.refills for figures in told] == [0, 0, 2, 2, 2, 2]
    assert [figures.trials_ended.get("done", 0) for figures in told] == [0, 0, 4, 4, 4, 6]
    last = told[-1]
    assert last.model_rounds == 6 * EPOCHS
    # 96 points in batches of 32.
    assert (last.model_steps, last.training_samples) == (6 * EPOCHS * 3, 6 * EPOCHS * 96)
    assert last.driver_seconds_per_result > 0 and 0 < last.computing_ratio <= 1


def test_it_may_stop_the_study() -> None:
    study = random_study()
    optimize(study, n_trials=50, on_round=lambda figures: study.stop() if figures.rounds == EPOCHS else None)
    assert len(study.trials) == 8


def test_an_error_in_it_is_raised_when_the_running_trials_have_finished() -> None:
    def fail(figures: RunFigures) -> None:
        raise OSError("no space left")

    study = random_study()
    with pytest.raises(OSError, match="no space left"):
        optimize(study, n_trials=50, on_round=fail)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 2 * EPOCHS), (1e6, 0)])
def test_one_line_in_the_log_at_intervals(monkeypatch: pytest.MonkeyPatch, seconds: float, lines: int) -> None:
    monkeypatch.setattr(_optimize, "_SECONDS_BETWEEN_LOG_LINES", seconds)
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept(logging.INFO)
    logger = optuna.logging.get_logger("optuna.hfta_tune")
    logger.addHandler(handler)
    try:
        optimize(random_study(), n_trials=8)
    finally:
        logger.removeHandler(handler)
    shown = [line for line in said if "lanes in use" in line]
    assert len(shown) == lines
    if lines:
        assert shown[0].startswith("4 of 4 lanes in use, 2 arrays, ") and shown[0].endswith("trials ended: none.")
        assert shown[-1].endswith("trials ended: 8 done.")
