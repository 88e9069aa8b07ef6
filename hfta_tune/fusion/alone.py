"""Lane by lane: a step of one lane in plain PyTorch, on the lane's own objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_tune.fusion.contract import check_losses, check_metrics, no_graph, without_metrics
from hfta_tune.fusion.failure import LanesDiffer
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import obstacle_of_optimizer
from hfta_tune.fusion.options import Options

__all__ = ["clip_lane", "evaluate_lane", "step_lane", "train_lane"]


def train_lane(
    call: Callable[[], Any], lane: Lane, options: Options, device: torch.device, *, update: bool
) -> dict[str, Tensor]:
    """Train a lane on one batch.

    Args:
        call: Calls the user's training step for this lane.
        lane: The lane. What its code raises is put into its `error`.
        options: How it is trained.
        device: Where its tensors are.
        update: Whether the optimizers step; else the gradients are only accumulated.

    Returns:
        {optimizer: loss}, and metrics; losses alone, NaN, if the lane's code raised, now or earlier.

    Raises:
        LanesDiffer: from the step.
    """
    losses: dict[str, Tensor] = {}
    if lane.error is None:
        try:
            _train(call, lane, options, device, losses, update=update)
            return losses
        except LanesDiffer:
            raise
        except Exception as error:
            lane.error = error
    return dict.fromkeys(lane.optimizers, torch.tensor(float("nan"), device=device))


def _train(
    call: Callable[[], Any],
    lane: Lane,
    options: Options,
    device: torch.device,
    losses: dict[str, Tensor],
    *,
    update: bool,
) -> None:
    def backward() -> Tensor:
        with options.autocast(device):
            both = check_losses(call(), list(lane.optimizers), lane.name)
        found = without_metrics(both)
        for number, (name, loss) in enumerate(found.items(), 1):
            if not loss.requires_grad:
                raise no_graph(lane.name, loss)
            inputs = lane.trained_by(name)
            if inputs:
                share = loss if options.accumulate == 1 else loss / options.accumulate
                share.backward(inputs=inputs, retain_graph=number < len(found))
        for name, loss in both.items():
            losses.setdefault(name, loss.detach())  # an optimizer may evaluate the loss again, at other weights
        return next(iter(found.values()))

    for optimizer in lane.optimizers.values():
        if obstacle_of_optimizer(optimizer) is None:
            continue

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = backward()
            clip_lane(lane)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        optimizer.zero_grad()
        return
    backward()
    if update:
        step_lane(lane)


def step_lane(lane: Lane) -> None:
    """Step a lane's own optimizers by its clipped gradients; what they raise is put into its `error`."""
    try:
        clip_lane(lane)
        for optimizer in lane.optimizers.values():
            optimizer.step()
    except Exception as error:
        lane.error = error
    lane.drop_gradients()


def clip_lane(lane: Lane) -> None:
    """Clip the gradients of a lane's own parameters in place, each optimizer's for themselves."""
    if lane.clipping is not None:
        for name in lane.optimizers:
            lane.clipping.clip(lane.trained_by(name))


def evaluate_lane(call: Callable[[], Any], lane: Lane, options: Options, device: torch.device) -> dict[str, Tensor]:
    """Evaluate a lane on one batch; return {metric: 0-d}, nothing if the lane's code raises.

    Raises:
        LanesDiffer: from the step.
    """
    if lane.error is None:
        try:
            with options.autocast(device):
                return check_metrics(call(), lane.name, device)
        except LanesDiffer:
            raise
        except Exception as error:
            lane.error = error
    return {}
