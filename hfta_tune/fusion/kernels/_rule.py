"""A batching rule as a function of the stacked tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["LANES_FIRST", "Rule", "by_rule", "is_batched", "lanes_at", "lanes_into"]

Rule: TypeAlias = Callable[..., tuple[Any, Any]]
"""rule(lanes, in_dims, *arguments) -> (result, out_dims): in_dims and out_dims as in torch.vmap."""

LANES_FIRST = 0


def by_rule(operation: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """Return `operation` with `rule` as its batching rule.

    The rule computes with ordinary differentiable operations on the stacked tensors, so autograd needs
    nothing else.
    """

    class Batched(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operation(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            raise AssertionError("a lane kernel is called under vmap only")

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
            return rule(info.batch_size, in_dims, *arguments)

    Batched.__name__ = Batched.__qualname__ = getattr(operation, "__name__", "operation")
    return Batched.apply


def is_batched(value: Any) -> bool:
    """Whether a tensor has lanes behind its shape."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


def lanes_at(tensor: Tensor, lane_dim: int | None, lanes: int, position: int) -> Tensor:
    """Return `tensor` with the lanes at `position`, repeated for each lane if it has none."""
    if lane_dim is None:
        shape = list(tensor.shape)
        shape.insert(position, lanes)
        return tensor.unsqueeze(position).expand(shape)
    return tensor.movedim(lane_dim, position)


def lanes_into(tensor: Tensor, lane_dim: int | None, lanes: int, dim: int) -> Tensor:
    """Return `tensor` with the lanes folded into its dimension `dim`, as lanes * size."""
    return lanes_at(tensor, lane_dim, lanes, dim).flatten(dim, dim + 1)
