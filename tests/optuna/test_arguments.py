"""Bad arguments: one clear error each, that names the value, before any trial starts."""

import doctest
import warnings
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hfta_tune
from hfta_tune.optuna import _optimize
from hfta_tune.optuna._arguments import plain_config
from hfta_tune.worker import Worker


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


class NotFused:
    """A class that is no FusedTrainable."""


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("on_round", "print", TypeError, "on_round must be a function of one .*RunFigures but got 'print'"),
        ("B", 0, ValueError, "B must be at least 1 but got 0"),
        ("B", -3, ValueError, "B must be at least 1 but got -3"),
        ("B", 2.0, TypeError, "B must be an integer of at least 1 but got 2.0"),
        ("B", True, TypeError, "B must be an integer of at least 1 but got True"),
        ("B", None, TypeError, "B must be an integer of at least 1 but got None"),
        ("epochs", 0, ValueError, "epochs must be at least 1 but got 0"),
        ("epochs", 1.5, TypeError, "epochs must be an integer of at least 1 but got 1.5"),
        ("epochs", False, TypeError, "epochs must be an integer of at least 1 but got False"),
        ("epochs", "3", TypeError, "epochs must be an integer of at least 1 but got '3'"),
        ("n_trials", -1, ValueError, "n_trials must be at least 0 but got -1.*None"),
        ("n_trials", 3.0, TypeError, "n_trials must be an integer of at least 0 but got 3.0"),
        ("n_trials", True, TypeError, "n_trials must be an integer of at least 0 but got True"),
        ("timeout", -0.5, ValueError, "timeout must be .* not negative but got -0.5.*None"),
        ("timeout", float("nan"), ValueError, "timeout must be .* but got nan"),
        ("timeout", "60", ValueError, "timeout must be .* but got '60'"),
        ("trainable", NotFused, TypeError, "subclass of hfta_tune.FusedTrainable, or .* but got <class .*NotFused"),
        ("trainable", space, TypeError, "space is for a FusedTrainable but got .* with the objective <function space"),
        ("space", {"lr": 0.1}, TypeError, r"space must be a function .* but got \{'lr': 0.1\}"),
        ("study", "study", TypeError, "study must be an optuna.Study but got 'study'"),
        ("metric", 3, TypeError, "metric must be a name, .* but got 3"),
        ("metric", [], TypeError, r"metric must be a name, .* but got \[\]"),
        ("metric", ["train_loss", "accuracy"], ValueError, r"2 metric\(s\).* 1 direction\(s\)"),
        ("catch", "ValueError", TypeError, "catch must be an exception class or several .* but got 'V'"),
        ("catch", [KeyboardInterrupt], TypeError, "catch must be an exception class .*KeyboardInterrupt"),
    ],
)
def test_bad_argument(line: Any, argument: str, value: Any, error: type[Exception], message: str) -> None:
    study = optuna.create_study()
    arguments = {"study": study, "trainable": line, "space": space, "n_trials": 1, "epochs": 1}
    with pytest.raises(error, match=message):
        hfta_tune.optimize(**(arguments | {argument: value}))
    assert study.trials == []


def test_instance_is_no_class(line: Any) -> None:
    with pytest.raises(TypeError, match="Pass the class itself, not an instance"):
        hfta_tune.optimize(optuna.create_study(), object(), space, n_trials=1, epochs=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", [None, "train_loss"])
def test_two_directions_need_two_metrics(line: Any, metric: str | None) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match=r"2 direction"):
        hfta_tune.optimize(study, line, space, n_trials=1, epochs=1, metric=metric)
    assert study.trials == []


@pytest.mark.parametrize("returned", [None, 0.1, ["lr"]])
def test_space_that_returns_no_dict(line: Any, returned: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(TypeError, match="space must return the config as a dict but returned"):
        hfta_tune.optimize(study, line, lambda trial: returned, n_trials=5, epochs=1)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]


def test_config_is_the_trials_own() -> None:
    data = object()
    shared: dict[str, Any] = {"optimizer": {"lr": 0.1}, "layers": [[1, 2], (3, [4])], "data": data}
    config = plain_config(shared)
    assert config == shared
    shared["optimizer"]["lr"] = 0.2
    shared["layers"][0].append(9)
    shared["layers"][1][1].append(9)
    assert config == {"optimizer": {"lr": 0.1}, "layers": [[1, 2], (3, [4])], "data": data}
    assert config["data"] is data


def test_space_that_fills_one_dict_again_and_again(line: Any) -> None:
    """As it may under study.optimize, where one trial runs at a time."""
    values = [0.0, 0.1, 0.3]

    def losses(shared: dict[str, Any] | None, B: int) -> list[float | None]:
        study = optuna.create_study(pruner=optuna.pruners.NopPruner())
        for lr in values:
            study.enqueue_trial({"lr": lr})

        def nested_space(trial: optuna.Trial) -> dict[str, Any]:
            config = {"optimizer": {}} if shared is None else shared
            config["optimizer"]["lr"] = trial.suggest_float("lr", 0, 1)
            return config

        hfta_tune.optimize(study, NestedLine, nested_space, n_trials=3, epochs=2, B=B)
        return [trial.value for trial in study.trials]

    class NestedLine(line):  # type: ignore[misc]
        def build_optimizer(self, model: Any, config: dict[str, Any]) -> Any:
            return super().build_optimizer(model, config["optimizer"])

    assert losses({"optimizer": {}}, B=3) == pytest.approx(losses(None, B=1), rel=1e-5)
    assert len(set(losses({"optimizer": {}}, B=3))) == 3


@pytest.mark.parametrize("device", [None, "cpu", torch.device("meta")])
def test_device(line: Any, monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    devices = []

    class OnCPU(Worker):
        def __init__(self, lanes: int = 1, *, device: Any = None, audit: bool = False) -> None:
            devices.append(device)
            super().__init__(lanes, device="cpu")

    monkeypatch.setattr(_optimize, "Worker", OnCPU)
    hfta_tune.optimize(optuna.create_study(), line, space, n_trials=1, epochs=1, device=device)
    assert devices == [device]


def test_docstring_example() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Before Optuna 5, constant_liar is off where nothing is said.
        results = doctest.testmod(_optimize)
    assert results.attempted > 5
    assert results.failed == 0
