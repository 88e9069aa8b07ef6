"""Attention with the lanes folded into the samples: torch's kernels have no batching rule and run lane after lane."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._rule import by_rule, is_batched, lanes_at

__all__ = ["attention"]


def _one_lane(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, **options)


def _folded(
    lanes: int,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, int]:
    samples = query.shape[0 if in_dims[0] != 0 else 1]
    query, key, value = (
        lanes_at(tensor, dim, lanes, 0).flatten(0, 1)
        for tensor, dim in zip((query, key, value), in_dims[:3], strict=True)
    )
    if mask is not None and (in_dims[3] is not None or mask.dim() > 2):
        own = lanes_at(mask, in_dims[3], lanes, 0)
        while own.dim() <= query.dim():
            own = own.unsqueeze(1)
        mask = own.expand(-1, samples, *own.shape[2:]).flatten(0, 1)
    out = F.scaled_dot_product_attention(query, key, value, mask, **options)
    return out.unflatten(0, (lanes, samples)), 0


_attend = by_rule(_one_lane, _folded)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention of [samples, heads, tokens, features] a lane."""
    tensors = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    alike = query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    if not alike or dropout_p or not any(map(is_batched, tensors)):
        return NotImplemented
    return _attend(query, key, value, attn_mask, {"is_causal": is_causal, **options})
