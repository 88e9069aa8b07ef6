"""Checks of what a trial's hooks are and return. Each error names the trial, the value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hfta_tune.fusion import (
    ONLY,
    PRECISIONS,
    Clipping,
    FusionError,
    Options,
    obstacle_of_optimizers,
    optimizer_split,
)
from hfta_tune.fusion.clipping import ALGORITHMS

__all__ = [
    "check_closures",
    "check_hooks",
    "check_own_parameters",
    "check_schedule",
    "checked_clipping",
    "checked_evaluation",
    "checked_optimizers",
    "checked_options",
    "checked_schedulers",
    "checked_split",
    "checked_steps_per_round",
    "overrides",
]

_REQUIRED_HOOKS = {
    "build_model": "(self, config)",
    "build_optimizer": "(self, model, config)",
    "train_dataloader": "(self, config)",
    "training_step": "(self, model, batch, config)",
}


def check_hooks(kind: type) -> None:
    """Check that a FusedTrainable class has the hooks that it must have.

    Raises:
        FusionError: with the missing hooks.
    """
    missing = [
        f"{hook}{arguments}"
        for hook, arguments in _REQUIRED_HOOKS.items()
        if getattr(kind, hook, None) is None or getattr(getattr(kind, hook), "__isabstractmethod__", False)
    ]
    if missing:
        raise FusionError(f"{kind.__name__} lacks a required hook; define {', '.join(missing)}.")


def overrides(kind: type, hook: str) -> bool:
    """Whether a class defines an optional hook itself, rather than inherits FusedTrainable's."""
    defined = [vars(base)[hook] for base in kind.__mro__ if hook in vars(base)]
    return len(defined) > 1


def check_own_parameters(name: str, model: nn.Module, others: Mapping[str, nn.Module]) -> None:
    """Check that no other trial of the worker trains a parameter of `model`."""
    trained = {
        id(parameter): other
        for other, theirs in others.items()
        for parameter in theirs.parameters()
        if parameter.requires_grad
    }
    for path, parameter in model.named_parameters():
        if id(parameter) in trained:
            raise FusionError(
                f"trial {name}: build_model returned a model whose parameter {path!r} trial "
                f"{trained[id(parameter)]} trains already. Build a new model, or a copy.deepcopy, for each trial."
            )


def checked_clipping(name: str, trainable: Any, config: Mapping[Any, Any]) -> Clipping | None:
    """Return how a trial's gradients are clipped: config["gradient_clip_val"] wins over the class attribute."""
    limit = config.get("gradient_clip_val", trainable.gradient_clip_val)
    algorithm = trainable.gradient_clip_algorithm
    if algorithm not in ALGORITHMS:
        raise FusionError(f'trial {name}: gradient_clip_algorithm is {algorithm!r}; set it to "norm" or "value".')
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise FusionError(
            f"trial {name}: gradient_clip_val is {limit!r}; set it to a positive number, or to None for no clipping."
        )
    return Clipping(float(limit), algorithm)


def checked_options(name: str, trainable: Any, config: Mapping[Any, Any]) -> Options:
    """Return how a trial is trained: entries of config win over the class attributes of the same names."""
    precision = config.get("precision", trainable.precision)
    precision = str(precision) if precision == 32 else precision
    if precision not in PRECISIONS:
        raise FusionError(f'trial {name}: precision is {precision!r}; set it to "32" or "bf16".')
    accumulate = config.get("accumulate_grad_batches", trainable.accumulate_grad_batches)
    return Options(precision, _checked_count(name, "accumulate_grad_batches", accumulate))


def checked_steps_per_round(name: str, trainable: Any, config: Mapping[Any, Any]) -> int | None:
    """Return how many batches a trial's round has, or None for one pass over the data."""
    steps = config.get("steps_per_round", trainable.steps_per_round)
    return None if steps is None else _checked_count(name, "steps_per_round", steps)


def _checked_count(name: str, what: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise FusionError(f"trial {name}: {what} is {value!r}; set it to a positive integer.")
    return int(value)


def checked_optimizers(name: str, optimizers: Any) -> dict[str, Optimizer]:
    """Return what build_optimizer returned by name; ONLY names a single one."""
    if isinstance(optimizers, Optimizer):
        return {ONLY: optimizers}
    named = isinstance(optimizers, Mapping) and optimizers
    if not named or not all(isinstance(k, str) and k and isinstance(o, Optimizer) for k, o in optimizers.items()):
        raise FusionError(
            f"trial {name}: build_optimizer returned {optimizers!r:.80}; return a torch.optim.Optimizer "
            "over model.parameters(), or a dict of several by name."
        )
    trained: dict[int, str] = {}
    for key, optimizer in optimizers.items():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if trained.setdefault(id(parameter), key) != key:
                raise FusionError(
                    f"trial {name}: the optimizers {trained[id(parameter)]!r} and {key!r} hold the same parameter of "
                    f"shape {list(parameter.shape)}. Give each parameter to one optimizer."
                )
    return dict(optimizers)


def check_closures(name: str, optimizers: Mapping[str, Optimizer], options: Options) -> None:
    """Check that an optimizer that evaluates the loss itself is alone, and steps on every batch."""
    obstacle = obstacle_of_optimizers(optimizers)
    if obstacle is not None and (len(optimizers) > 1 or options.accumulate > 1):
        raise FusionError(
            f"trial {name}: {obstacle}, so it must be the only optimizer and accumulate_grad_batches must "
            "be 1. Use an optimizer that needs no closure."
        )


def checked_schedulers(name: str, optimizers: Mapping[str, Optimizer], schedulers: Any) -> dict[str, Any]:
    """Return what build_lr_scheduler returned, by the names of the optimizers."""
    if schedulers is None:
        return {}
    if list(optimizers) == [ONLY]:
        return {ONLY: schedulers}
    if not isinstance(schedulers, Mapping) or not schedulers.keys() <= optimizers.keys():
        raise FusionError(
            f"trial {name}: build_lr_scheduler returned {schedulers!r:.80}; build_optimizer returned the optimizers "
            f"{', '.join(map(repr, optimizers))}, so return a dict with schedulers for some of them, or None."
        )
    return {key: scheduler for key, scheduler in schedulers.items() if scheduler is not None}


def checked_split(name: str, model: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters in each group of an optimizer that build_optimizer returned."""
    try:
        return optimizer_split(model, optimizer)
    except KeyError as error:
        foreign = error.args[0]
        raise FusionError(
            f"trial {name}: build_optimizer's optimizer holds a parameter of shape {list(foreign.shape)} that "
            "is not the model's. Build it over the parameters of the model that it is handed."
        ) from None


def check_schedule(name: str, trainable: Any, optimizer: Optimizer, scheduler: Any) -> None:
    """Check what build_lr_scheduler returned, and the class attributes about it."""
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise FusionError(
            f"trial {name}: build_lr_scheduler returned {scheduler!r:.80}; return a scheduler of "
            "torch.optim.lr_scheduler, or None."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise FusionError(
            f"trial {name}: build_lr_scheduler returned a scheduler on another optimizer. Build it on the "
            "optimizer that it is handed."
        )
    interval = trainable.lr_scheduler_interval
    if interval not in ("epoch", "step"):
        raise FusionError(f'trial {name}: lr_scheduler_interval is {interval!r}; set it to "epoch" or "step".')
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if trainable.lr_scheduler_monitor is None:
        raise FusionError(
            f"trial {name}: ReduceLROnPlateau needs a metric to watch but lr_scheduler_monitor is None. "
            'Set lr_scheduler_monitor to a result, such as "train_loss".'
        )
    if interval == "step":
        raise FusionError(
            f"trial {name}: ReduceLROnPlateau watches a round's results but lr_scheduler_interval is "
            '"step"; set it to "epoch".'
        )


def checked_evaluation(name: str, metrics: Any) -> dict[str, float]:
    """Return what evaluate returned as a dict of floats."""
    try:
        return {str(metric): float(value) for metric, value in ({} if metrics is None else metrics).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise FusionError(
            f"trial {name}: evaluate returned {metrics!r:.200}; return a dict of numbers such as "
            '{"accuracy": 0.9}, or None.'
        ) from None
