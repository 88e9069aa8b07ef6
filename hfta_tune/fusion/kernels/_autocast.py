"""torch.autocast under vmap: batching rules hide from it the operations that it would run in lower precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

__all__ = ["autocast_dtype", "cast_arguments"]

# Source: torch's documentation of torch.amp, "CPU Ops that can autocast to bfloat16" and those of CUDA.
_NAMES = ("addbmm", "addmm", "baddbmm", "bmm", "matmul", "mm", "__matmul__", "__rmatmul__")
_IN_LOWER_PRECISION = frozenset(
    {
        *(getattr(torch, name) for name in _NAMES if hasattr(torch, name)),
        *(getattr(Tensor, name) for name in _NAMES),
        *(getattr(torch, f"conv{spatial}d") for spatial in (1, 2, 3)),
        *(getattr(torch, f"conv_transpose{spatial}d") for spatial in (1, 2, 3)),
        torch.conv_tbc,
        torch.einsum,
        torch.prelu,
        Tensor.prelu,
        F.linear,
        F.scaled_dot_product_attention,
        torch.linalg.multi_dot,
        torch.chain_matmul,
    }
)
_IN_FLOAT32 = frozenset({F.cross_entropy})


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The lower precision that autocast has operations on this tensor run in now, or None."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast the arguments of an operation as autocast would."""
    if func in _IN_LOWER_PRECISION:
        lower = True
    elif func in _IN_FLOAT32:
        lower = False
    else:
        return args, kwargs
    tensor = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), None)
    dtype = None if tensor is None else autocast_dtype(tensor)
    if dtype is None:
        return args, kwargs
    to = dtype if lower else torch.float32

    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(to) if leaf.is_floating_point() and leaf.dtype != torch.float64 else leaf

    return pytree.tree_map_only(Tensor, cast, (args, kwargs))  # type: ignore[no-any-return]
