"""The gradients of an array's losses: each optimizer's parameters get those of its own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hfta_tune.fusion.clipping import Clipping, clip_lanes
from hfta_tune.fusion.contract import without_metrics

__all__ = ["Trains", "clipped_by_optimizer", "gradients_by_optimizer"]

Trains = Mapping[str, Sequence[str]]
"""{optimizer: the names of the parameters that it trains}."""


def gradients_by_optimizer(
    losses: Mapping[str, Tensor], leaves: Mapping[str, Tensor], trains: Trains, accumulate: int
) -> dict[str, Tensor]:
    """Return {name: gradient [lanes, ...]} of those parameters that have one.

    Args:
        losses: {optimizer: losses [lanes]}, maybe metrics. Their sum over lanes has each lane's own gradient.
        leaves: {name: parameter [lanes, ...]}.
        trains: Which parameters each optimizer trains.
        accumulate: Of how many batches the gradients are averaged.
    """
    gradients: dict[str, Tensor] = {}
    losses = without_metrics(losses)
    for number, (optimizer, loss) in enumerate(losses.items(), 1):
        names = trains[optimizer]
        inputs = [leaves[name] for name in names]
        if inputs:
            of_loss = torch.full_like(loss, 1 / accumulate)
            found = torch.autograd.grad(loss, inputs, of_loss, allow_unused=True, retain_graph=number < len(losses))
            gradients.update({name: g for name, g in zip(names, found, strict=True) if g is not None})
    return gradients


def clipped_by_optimizer(
    gradients: dict[str, Tensor], limits: Tensor | None, clipping: Clipping | None, trains: Trains
) -> dict[str, Tensor]:
    """Return gradients [lanes, ...] clipped to the lanes' `limits`, each optimizer's for themselves."""
    if clipping is None or limits is None:
        return gradients
    clipped: dict[str, Tensor] = {}
    for names in trains.values():
        own = {name: gradients[name] for name in names if name in gradients}
        if own:
            clipped.update(clip_lanes(own, limits, clipping.algorithm))
    return clipped
