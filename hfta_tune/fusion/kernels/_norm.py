"""Batch norm of all lanes in one call, over lanes * channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._rule import by_rule, is_batched, lanes_into

__all__ = ["batch_norm"]


def _batch_norm_rule(
    lanes: int,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, int]:
    folded = lanes_into(input, in_dims[0], lanes, 1)
    channels = [
        None if tensor is None else lanes_into(tensor, lane_dim, lanes, 0)
        for tensor, lane_dim in zip((running_mean, running_var, weight, bias), in_dims[1:5], strict=True)
    ]
    out = F.batch_norm(folded, channels[0], channels[1], channels[2], channels[3], training, momentum, eps)
    return out.unflatten(1, (lanes, -1)), 1


_batch_norm = by_rule(F.batch_norm, _batch_norm_rule)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """F.batch_norm; the running statistics must be a stack of their own, for they change in place."""
    statistics = [tensor for tensor in (running_mean, running_var) if tensor is not None]
    if not all(map(is_batched, statistics)) or not any(map(is_batched, (input, weight, bias))):
        return NotImplemented
    if any(torch._C._functorch.maybe_get_bdim(tensor) != 0 for tensor in statistics):
        return NotImplemented  # folding would copy them, and the copy would be updated
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
