"""Linear layers of all lanes: one GEMM where they share their input, else one batched GEMM with the bias in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._rule import by_rule, is_batched, lanes_at

__all__ = ["linear"]


def _linear_rule(
    lanes: int, in_dims: tuple[int | None, ...], input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, int]:
    weight = weight.movedim(in_dims[1], 0)  # type: ignore[arg-type]
    if bias is not None:
        bias = lanes_at(bias, in_dims[2], lanes, 0)
    if in_dims[0] is None:
        out = F.linear(input, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return out.unflatten(-1, (lanes, -1)), out.dim() - 1
    input = input.movedim(in_dims[0], 0)
    rows = input.reshape(lanes, -1, input.shape[-1])
    out = torch.bmm(rows, weight.transpose(1, 2))
    if bias is not None:
        out = out + bias.unsqueeze(1)
    return out.reshape(*input.shape[:-1], weight.shape[1]), 0


_linear = by_rule(F.linear, _linear_rule)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """F.linear, where the weight differs between lanes."""
    if not is_batched(weight) or weight.dim() != 2:
        return NotImplemented
    return _linear(input, weight, bias)
