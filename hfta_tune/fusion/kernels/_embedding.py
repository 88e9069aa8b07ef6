"""Embeddings of what all lanes look up: their tables side by side are one table."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._rule import by_rule, is_batched

__all__ = ["embedding"]


def _one_lane(input: Tensor, weight: Tensor, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
    return F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)


def _side_by_side(
    lanes: int,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
) -> tuple[Tensor, int]:
    lane_dim = in_dims[1]
    assert lane_dim is not None
    # torch's own rule does this, too, for one number of lanes only once it is recorded.
    table = weight.movedim(lane_dim, 1).flatten(1)
    rows = F.embedding(input, table, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    return rows.unflatten(-1, (lanes, -1)), input.dim()


_look_up = by_rule(_one_lane, _side_by_side)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """torch.nn.functional.embedding of indices that lanes share; [...] -> [..., features] a lane."""
    if max_norm is not None or sparse or not is_batched(weight) or is_batched(input):
        return NotImplemented
    return _look_up(input, weight, padding_idx, scale_grad_by_freq)
