"""What a user's steps must return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_tune.fusion.errors import FusionError
from hfta_tune.fusion.lane import ONLY

__all__ = ["LastOfRound", "MetricName", "check_losses", "check_metrics", "no_graph", "without_metrics"]


class MetricName(str):
    """Among the losses of a training step by optimizer: the name of a metric that it returned besides."""

    __slots__ = ()


class LastOfRound(MetricName):
    """The name of a metric of which a round reports the last value and not the mean."""

    __slots__ = ()


def without_metrics(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The losses alone."""
    return {name: loss for name, loss in losses.items() if not isinstance(name, MetricName)}


def check_losses(losses: Any, optimizers: Sequence[str], trial: str) -> dict[str, Tensor]:
    """Return a training step's losses as 0-d tensors by optimizer, and the metrics that it returned besides.

    Where build_optimizer returned several optimizers, the step returns a dict with a loss for those that
    are to step; else the one loss. Or it returns that and a dict of metrics, as a tuple.

    Raises:
        FusionError: if they are something else.
    """
    if isinstance(losses, tuple) and len(losses) == 2 and isinstance(losses[1], Mapping):
        found = check_losses(losses[0], optimizers, trial)
        device = next(iter(found.values())).device
        metrics = check_metrics(losses[1], trial, device, "training_step")
        if both := metrics.keys() & found.keys():
            raise FusionError(
                f"{trial}: training_step returned the metric {min(both)!r}, which is the name of an optimizer, too. "
                "Rename the metric."
            )
        named = {name if isinstance(name, MetricName) else MetricName(name): value for name, value in metrics.items()}
        return {**found, **{name: value.detach() for name, value in named.items()}}
    if list(optimizers) == [ONLY]:
        return {ONLY: _check_loss(losses, trial)}
    if not isinstance(losses, Mapping) or not losses or not losses.keys() <= set(optimizers):
        shown = f"the losses {', '.join(map(repr, losses))}" if isinstance(losses, Mapping) else _say(losses)
        raise FusionError(
            f"{trial}: training_step returned {shown}; build_optimizer returned the optimizers "
            f"{', '.join(map(repr, optimizers))}, so return a dict with a loss for each of them that is to step."
        )
    return {name: _check_loss(losses[name], trial) for name in optimizers if name in losses}


def _check_loss(loss: Any, trial: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise FusionError(
            f"{trial}: training_step returned {_say(loss)}; return the loss, a 0-d tensor "
            "such as F.cross_entropy(model(x), y)."
        )
    if loss.numel() != 1:
        raise FusionError(
            f"{trial}: training_step returned a tensor of shape {list(loss.shape)}; "
            "return one number, such as loss.mean()."
        )
    return loss.reshape(())


def check_metrics(metrics: Any, trial: str, device: torch.device, hook: str = "validation_step") -> dict[str, Tensor]:
    """Return a step's metrics as 0-d tensors.

    Raises:
        FusionError: if they are no dict of scalars.
    """
    if not isinstance(metrics, Mapping):
        raise FusionError(
            f'{trial}: {hook} returned {_say(metrics)}; return a dict of scalars such as {{"accuracy": ...}}.'
        )
    checked = {}
    for name, value in metrics.items():
        scalar = value if isinstance(value, Tensor) else None
        if scalar is None and isinstance(value, (bool, int, float)):
            scalar = torch.tensor(float(value), device=device)
        if scalar is None or scalar.numel() != 1:
            raise FusionError(
                f"{trial}: {hook} returned {_say(value)} as {name!r}; "
                "each metric is one number, such as correct.float().mean()."
            )
        checked[name if isinstance(name, str) else str(name)] = scalar.reshape(()).to(torch.get_default_dtype())
    return checked


def _say(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:80]!r}"


def no_graph(trial: str, loss: Tensor) -> FusionError:
    """The error for a loss that gradients cannot be computed of."""
    return FusionError(
        f"{trial}: training_step returned a loss without a graph (requires_grad is False); "
        "compute it from model(...) without detach(), item() or no_grad()."
    )
