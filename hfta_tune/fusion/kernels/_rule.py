"""A batching rule as a function of the stacked tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

__all__ = ["LANES_FIRST", "Rule", "by_rule", "is_batched", "lanes_at", "lanes_into"]

Rule: TypeAlias = Callable[..., tuple[Any, Any]]
"""rule(lanes, in_dims, *arguments) -> (result, out_dims): in_dims and out_dims as in torch.vmap."""

LANES_FIRST = 0


def by_rule(operation: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """Return `operation` with `rule` as its batching rule; its result is a tensor or a tuple of tensors.

    The rule computes with ordinary differentiable operations on the stacked tensors, so autograd needs
    nothing else. This is what torch does for an autograd.Function with a rule of its own, less a good part
    of a millisecond a call.
    """

    @functools.wraps(operation)
    def batched(*arguments: Any) -> Any:
        interpreter = _current_vmap()
        if interpreter is None:
            return operation(*arguments)
        level = interpreter.level()
        unwrapped, in_dims = zip(*(_unwrapped(argument, level) for argument in arguments), strict=True)
        if all(dim is None for dim in in_dims):
            with interpreter.lower():
                return operation(*arguments)
        with interpreter.lower():
            result, out_dims = rule(interpreter.batch_size(), in_dims, *unwrapped)
        if isinstance(result, tuple):
            return tuple(_add_batch_dim(part, dim, level) for part, dim in zip(result, out_dims, strict=True))
        return _add_batch_dim(result, out_dims, level)

    return batched


def _current_vmap() -> Any:
    """The innermost transform of torch.func that is active now, if it is a vmap."""
    stack = torch._C._functorch.peek_interpreter_stack()
    if stack is None or stack.key() != torch._C._functorch.TransformType.Vmap:
        return None
    return retrieve_current_functorch_interpreter()


def _unwrapped(value: Any, level: int) -> tuple[Any, int | None]:
    if isinstance(value, Tensor):
        return torch._C._functorch._unwrap_batched(value, level)
    return value, None


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
