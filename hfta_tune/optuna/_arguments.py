"""Checks of the arguments of `optimize`: each wrong one ends in one error that names value and remedy."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import optuna

from hfta_tune.trainable import FusedTrainable


def check_arguments(
    *,
    study: Any,
    trainable: Any,
    space: Any,
    n_trials: Any,
    timeout: Any,
    epochs: Any,
    metric: Any,
    B: Any,
    device: Any,
    on_round: Any,
) -> None:
    """Raises TypeError or ValueError for the first argument that is wrong, before any trial is asked for."""
    if not isinstance(study, optuna.Study):
        raise TypeError(f"study must be an optuna.Study but got {study!r}. Make one with optuna.create_study().")
    is_objective = callable(trainable) and not isinstance(trainable, (type, FusedTrainable))
    if not is_objective and not (isinstance(trainable, type) and issubclass(trainable, FusedTrainable)):
        raise TypeError(
            "trainable must be a subclass of hfta_tune.FusedTrainable, or an objective, a function of one trial, but "
            f"got {trainable!r}. Pass the class itself, not an instance."
        )
    if is_objective:
        unused = {"space": space, "epochs": epochs, "metric": metric, "device": device, "on_round": on_round}
        for name, value in unused.items():
            if value is not None:
                raise TypeError(
                    f"{name} is for a FusedTrainable but got {value!r} with the objective {trainable!r}. Leave it out: "
                    "the objective itself suggests, counts epochs and returns its value."
                )
    elif not callable(space):
        raise TypeError(
            f"space must be a function of one trial that returns the config dict but got {space!r}. "
            'Write, for example, lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}.'
        )
    if n_trials is not None:
        _check_integer("n_trials", n_trials, at_least=0, remedy="Pass None to go on until study.stop().")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or not float(timeout) >= 0):
        raise ValueError(
            f"timeout must be a number of seconds that is not negative but got {timeout!r}. Pass None for no limit."
        )
    if not is_objective:
        _check_integer("epochs", epochs, at_least=1, remedy="It is the number of epochs that each trial trains.")
    _check_integer("B", B, at_least=1, remedy="It is the number of trials that train at once.")
    if not is_objective:
        _check_metric(study, metric)
    if on_round is not None and not callable(on_round):
        raise TypeError(
            f"on_round must be a function of one hfta_tune.monitor.RunFigures but got {on_round!r}. "
            "Write, for example, on_round=print."
        )


def exception_classes(catch: Any) -> tuple[type[Exception], ...]:
    """The argument `catch`, one class or several, as the tuple that isinstance takes."""
    classes = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise TypeError(
                f"catch must be an exception class or several of them but got {each!r}. "
                "Pass, for example, catch=(ValueError,)."
            )
    return classes


def plain_config(config: Any) -> dict[str, Any]:
    """A copy of what `space` returned, with dicts, lists and tuples of its own.

    Many trials are alive at once, so a space that fills one shared dict again and again would otherwise
    change the config of trials that already train. The leaves stay the same objects: a data set in the
    config is neither copied nor does it look different in each lane.
    """
    if not isinstance(config, dict):
        raise TypeError(
            f"space must return the config as a dict but returned {config!r}. "
            'Return, for example, {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}.'
        )
    return {key: _own_containers(value) for key, value in config.items()}


def _own_containers(value: Any) -> Any:
    # Exact types only: a subclass may carry more than its items.
    if type(value) is dict:
        return {key: _own_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [_own_containers(item) for item in value]
    if type(value) is tuple:
        return tuple(_own_containers(item) for item in value)
    return value


def _check_integer(name: str, value: Any, *, at_least: int, remedy: str) -> None:
    # bool is an int to Python, but B=True is a slip.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer of at least {at_least} but got {value!r}. {remedy}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least} but got {value!r}. {remedy}")


def _check_metric(study: optuna.Study, metric: Any) -> None:
    n_objectives = len(study.directions)
    if metric is None:
        if n_objectives > 1:
            raise ValueError(
                f"The study has {n_objectives} directions, so metric must name one metric for each of them."
            )
        return
    if isinstance(metric, str):
        n_metrics = 1
    elif isinstance(metric, Sequence) and metric and all(isinstance(name, str) for name in metric):
        n_metrics = len(metric)
    else:
        raise TypeError(
            f"metric must be a name, a sequence of names or None but got {metric!r}. "
            'Pass, for example, metric="accuracy".'
        )
    if n_metrics != n_objectives:
        raise ValueError(
            f"metric names {n_metrics} metric(s), {metric!r}, but the study has {n_objectives} direction(s). "
            "Name one metric for each direction."
        )
