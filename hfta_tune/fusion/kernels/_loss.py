"""Cross entropy of all lanes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._rule import by_rule, is_batched, lanes_at

__all__ = ["cross_entropy"]


def _cross_entropy_rule(
    lanes: int, in_dims: tuple[int | None, ...], input: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, int]:
    logits = input.movedim(in_dims[0], 0)  # type: ignore[arg-type]
    counted = (target != ignore_index).sum(-1 if in_dims[1] is None else 1 - in_dims[1])
    target = lanes_at(target, in_dims[1], lanes, 0)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=ignore_index, reduction="none")
    return losses.unflatten(0, target.shape).sum(-1) / counted, 0


def _plain(input: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(input, target, ignore_index=ignore_index)


_cross_entropy = by_rule(_plain, _cross_entropy_rule)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """F.cross_entropy of logits [samples, classes] and class indices [samples], averaged."""
    usual = weight is None and size_average is None and reduce is None and reduction == "mean"
    if not usual or not is_batched(input) or input.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    if not isinstance(label_smoothing, float) or label_smoothing != 0.0:
        return NotImplemented
    return _cross_entropy(input, target, ignore_index)
