"""Which metric is the objective, and what happens when there is none of that name."""

from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hfta_tune
from hfta_tune.optuna._metric import choose_metrics, values_of

LOSS = {"train_loss": 1.0}
ONE = {"train_loss": 1.0, "accuracy": 0.5}
TWO = {"train_loss": 1.0, "accuracy": 0.5, "f1": 0.4}


@pytest.mark.parametrize(
    ("metric", "results", "names"),
    [
        (None, [LOSS], ("train_loss",)),
        (None, [ONE], ("accuracy",)),
        (None, [LOSS, ONE], ("accuracy",)),
        ("train_loss", [ONE], ("train_loss",)),
        ("f1", [LOSS, TWO], ("f1",)),
        (["f1", "train_loss"], [TWO], ("f1", "train_loss")),
    ],
)
def test_choose(metric: Any, results: Any, names: tuple[str, ...]) -> None:
    assert choose_metrics(metric, results) == names


def test_choose_refuses() -> None:
    with pytest.raises(ValueError, match=r"several metrics: 'accuracy', 'f1'\..*metric='accuracy'"):
        choose_metrics(None, [TWO])
    with pytest.raises(ValueError, match=r"No result has the metric 'acc'.*'train_loss', 'accuracy'"):
        choose_metrics("acc", [LOSS, ONE])
    with pytest.raises(ValueError, match="No result has the metric 'recall'"):
        choose_metrics(["f1", "recall"], [TWO])


def test_values() -> None:
    assert values_of(["f1", "train_loss"], TWO) == [0.4, 1.0]
    with pytest.raises(ValueError, match=r"lacks the metric 'f1'.*'train_loss', 'accuracy'"):
        values_of(["f1"], ONE)


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1), "number": trial.number}


def test_default_is_the_training_loss_when_alone(line: Any) -> None:
    default, named = (
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())
        for _ in range(2)
    )
    hfta_tune.optimize(default, line, suggest, n_trials=4, epochs=2, B=3)
    hfta_tune.optimize(named, line, suggest, n_trials=4, epochs=2, B=3, metric="train_loss")
    expected = [trial.value for trial in named.trials]
    assert [trial.value for trial in default.trials] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("acuracy", r"No result has the metric 'acuracy'.*'train_loss', 'val_loss', 'accuracy'"),
        (None, "several metrics: 'val_loss', 'accuracy'"),
    ],
)
def test_the_study_ends_at_once(digits: Any, metric: str | None, message: str) -> None:
    study = optuna.create_study()
    for config in digits.configs(5):
        study.enqueue_trial(config)
    with pytest.raises(ValueError, match=message):
        hfta_tune.optimize(
            study,
            digits.trainable,
            digits.suggest,
            n_trials=5,
            epochs=2,
            metric=metric,
            B=3,
            catch=ValueError,  # it is an argument that is wrong, not a trial
        )
    waiting, fail = TrialState.WAITING, TrialState.FAIL
    assert [trial.state for trial in study.trials] == [fail, fail, fail, waiting, waiting]


def test_metric_that_one_trial_lacks(digits: Any) -> None:
    class Forgetful(digits.trainable):  # type: ignore[misc,name-defined]
        def validation_step(self, model: Any, batch: Any, config: dict[str, Any]) -> Any:
            metrics = super().validation_step(model, batch, config)
            if config["forget"]:
                del metrics["accuracy"]
            return metrics

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return digits.suggest(trial) | {"forget": trial.number == 1}

    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    with pytest.raises(ValueError, match="lacks the metric 'accuracy'"):
        hfta_tune.optimize(study, Forgetful, space, n_trials=9, epochs=2, metric="accuracy", B=3)
    complete, fail = TrialState.COMPLETE, TrialState.FAIL
    assert [trial.state for trial in study.trials] == [complete, fail, complete]
