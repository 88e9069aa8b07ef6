"""Linear layers of all lanes: one batched GEMM, or on an accelerator one wide GEMM where they share their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._rule import by_rule, is_batched, lanes_at

__all__ = ["LaneLinear", "linear"]


class LaneLinear(torch.autograd.Function):
    """[lanes, rows, in] times [lanes, out, in], whose gradient has the weight's own layout: nobody copies it."""

    # With a setup_context of its own, torch would inspect the signature of forward in every call.
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return torch.bmm(input, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        of_input = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        of_weight = torch.bmm(gradient.transpose(1, 2), input) if ctx.needs_input_grad[1] else None
        return of_input, of_weight


def _linear_rule(
    lanes: int, in_dims: tuple[int | None, ...], input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, int]:
    weight = weight.movedim(in_dims[1], 0)  # type: ignore[arg-type]
    if bias is not None:
        bias = lanes_at(bias, in_dims[2], lanes, 0)
    if in_dims[0] is None and input.device.type != "cpu":
        out = F.linear(input, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return out.unflatten(-1, (lanes, -1)), out.dim() - 1
    # On a CPU one wide GEMM is up to twice as slow as a batched one that reads the same input for each lane.
    input = lanes_at(input, in_dims[0], lanes, 0)
    rows = input.flatten(1, -2) if input.dim() > 2 else input.unsqueeze(1)
    out = LaneLinear.apply(rows, weight)
    if bias is not None:
        out = out + bias.unsqueeze(1)
    return out.reshape(*input.shape[:-1], weight.shape[1]), 0


_linear = by_rule(F.linear, _linear_rule)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """F.linear, where the weight differs between lanes."""
    if not is_batched(weight) or weight.dim() != 2:
        return NotImplemented
    return _linear(input, weight, bias)
