"""Pooling without moving the lanes: they are folded into channels or samples, whichever they stand next to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_tune.fusion.kernels._rule import by_rule, is_batched

__all__ = ["POOLS"]


def _pool(operation: Callable[..., Any], spatial: int) -> Callable[..., Any]:
    def rule(lanes: int, in_dims: tuple[int | None, ...], input: Tensor, *arguments: Any) -> tuple[Tensor, int]:
        lane_dim = in_dims[0]
        assert lane_dim is not None
        into = 1 if lane_dim == 1 else 0
        out = operation(input.movedim(lane_dim, into).flatten(into, into + 1), *arguments)
        return out.unflatten(into, (lanes, -1)), into

    batched = by_rule(operation, rule)

    def pool(input: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not is_batched(input) or input.dim() != spatial + 2 or keywords:
            return NotImplemented
        return batched(input, *arguments)

    return pool


POOLS: dict[Any, Callable[..., Any]] = {
    torch.max_pool1d: _pool(torch.max_pool1d, 1),
    torch.max_pool2d: _pool(torch.max_pool2d, 2),
    torch.max_pool3d: _pool(torch.max_pool3d, 3),
    torch._C._nn.avg_pool2d: _pool(torch._C._nn.avg_pool2d, 2),
    torch._C._nn.avg_pool3d: _pool(torch._C._nn.avg_pool3d, 3),
    torch._C._nn.adaptive_avg_pool2d: _pool(torch._C._nn.adaptive_avg_pool2d, 2),
    torch.avg_pool1d: _pool(torch.avg_pool1d, 1),
    torch.adaptive_avg_pool1d: _pool(torch.adaptive_avg_pool1d, 1),
}
