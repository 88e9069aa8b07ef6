"""Forms of operations that inductor compiles badly, for the record of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMS"]

aten = torch.ops.aten

# Odd numbers of 15 bits; each multiplies 16 bits without an overflow.
_FACTORS = (0x6F4D, 0x5A2B, 0x7C19, 0x4E35, 0x6B43, 0x53A7)
# Above this, adding up rows one by one takes less time than a matrix multiplication.
_MOST_ROWS_OF_A_PRODUCT = 256


def _uniform(like: Tensor) -> Tensor:
    """Draw float32 in [0, 1), multiples of 2**-24, of the shape of `like`.

    Each is its own place, enciphered by a Feistel network (Luby and Rackoff, 1988) with keys that torch's generator
    draws anew for each call. A generator draws one number after the other; these 32-bit operations become vector
    instructions, fused with what reads the numbers.
    """
    place = torch.zeros((), dtype=torch.int32, device=like.device)
    stride: Any = 1
    for dim in reversed(range(like.dim())):
        index = torch.arange(like.shape[dim], dtype=torch.int32, device=like.device)
        place = place + (index * stride).reshape(-1, *(1,) * (like.dim() - 1 - dim))
        stride = stride * like.shape[dim]
    # Sums of uniform numbers, which are uniform too: a sum is computed once, where a draw would be for every number.
    keys = torch.randint(0, 1 << 16, (len(_FACTORS),), dtype=torch.int32, device=like.device).cumsum(0) & 0xFFFF
    keys = keys.to(torch.int32)
    left, right = place & 0xFFFF, (place >> 16) & 0xFFFF
    for number, factor in enumerate(_FACTORS):
        left, right = right ^ ((((left ^ keys[number]) * factor) >> 7) & 0xFFFF), left
    return ((left << 8) | (right >> 8)).to(torch.float32) * 2**-24


def _rand_like(self: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    wanted = dtype or self.dtype
    elsewhere = device is not None and torch.device(device) != self.device
    if self.device.type != "cpu" or elsewhere or wanted not in (torch.float32, torch.bfloat16):
        return NotImplemented
    return _uniform(self).to(wanted)


def _bernoulli_(self: Tensor, p: float = 0.5, generator: Any = None) -> Any:
    if self.device.type != "cpu" or generator is not None:
        return NotImplemented
    return self.copy_(_uniform(self) < p)


def _embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    if grad_output.device.type != "cpu" or scale_grad_by_freq or num_weights > _MOST_ROWS_OF_A_PRODUCT:
        return NotImplemented
    rows = torch.arange(num_weights, device=indices.device)
    chosen = indices.reshape(1, -1) == rows.unsqueeze(1)
    if padding_idx >= 0:
        chosen = chosen & (rows != padding_idx).unsqueeze(1)
    return chosen.to(grad_output.dtype) @ grad_output.reshape(-1, grad_output.shape[-1])


def _foreach_lerp_(self: list[Tensor], tensors1: list[Tensor], weights: list[Tensor]) -> None:
    """Of sums and products, which inductor fuses with the rest of an optimizer's step."""
    torch._foreach_addcmul_(self, torch._foreach_sub(tensors1, self), weights)


_LIBRARY = torch.library.Library("hfta_tune", "DEF")


def _as_it_is(operation: Any) -> Any:
    """An operation of ours that is one of torch's. Inductor calls it, where it would compile torch's for one size."""

    def call(*args: Any) -> Any:
        return operation(*args)

    name = operation.overloadpacket.__name__
    schema = str(operation._schema).replace("aten::", "")
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hfta_tune::{name}", call, lib=_LIBRARY)
    return getattr(torch.ops.hfta_tune, name).default


FORMS: dict[Any, Callable[..., Any]] = {
    # Lanes are a part of their weights' sizes, which inductor takes for constant.
    **{operation: _as_it_is(operation) for operation in (aten.convolution.default, aten.convolution_backward.default)},
    aten._foreach_lerp_.List: _foreach_lerp_,
    aten.rand_like.default: _rand_like,
    aten.bernoulli_.float: _bernoulli_,
    aten.embedding_dense_backward.default: _embedding_dense_backward,
}
"""What a step's record has in the place of an operation; each returns NotImplemented for what it does not serve."""
