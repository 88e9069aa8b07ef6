"""torch.autocast under vmap: batching rules hide from it the operations whose precision it would choose.

Source of the lists: torch's documentation of torch.amp ("Op-specific behavior"), for CPUs and CUDA.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

__all__ = ["any_autocast", "autocast_dtype", "cast_arguments", "cast_result"]


def _functions(places: Iterable[Any], names: Iterable[str]) -> frozenset[Any]:
    return frozenset(getattr(place, name) for place in places for name in names if callable(getattr(place, name, None)))


def _public(module: Any, *, but: Container[str] = ()) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_") and name.islower() and name not in but]


_TORCH = (torch, Tensor, F, torch._C._nn)
_IN_LOWER_PRECISION = _functions(
    _TORCH,
    (
        *("addbmm", "addmm", "baddbmm", "bmm", "chain_matmul", "einsum", "matmul", "mm", "__matmul__", "__rmatmul__"),
        *(f"conv{spatial}d" for spatial in (1, 2, 3)),
        *(f"conv_transpose{spatial}d" for spatial in (1, 2, 3)),
        *("conv_tbc", "linear", "prelu", "scaled_dot_product_attention"),
    ),
) | {torch.linalg.multi_dot}
_IN_FLOAT32 = _functions(
    _TORCH,
    (
        *("binary_cross_entropy_with_logits", "cdist", "cosine_embedding_loss", "cross_entropy", "ctc_loss"),
        *("hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "poisson_nll_loss", "prod", "smooth_l1_loss"),
        *("soft_margin_loss", "triplet_margin_loss"),
    ),
)
_IN_FLOAT32_ON_CPU = _functions(
    _TORCH,
    (
        *("adaptive_avg_pool3d", "avg_pool3d", "binary_cross_entropy", "cholesky", "cholesky_inverse"),
        *("cholesky_solve", "grid_sample", "inverse", "lu_solve", "max_pool3d", "max_unpool2d", "max_unpool3d"),
        *("nanquantile", "orgqr", "ormqr", "pinverse", "polar", "quantile", "stft", "trace"),
    ),
)
_IN_FLOAT32_ON_CPU |= _functions((torch.fft,), _public(torch.fft))
_IN_FLOAT32_ON_CPU |= _functions(
    (torch.linalg,), _public(torch.linalg, but=("cross", "matmul", "multi_dot", "norm", "vecdot", "vector_norm"))
)
# On CPUs these compute in float32 of themselves, and their result has the input's dtype.
_AS_THEIR_INPUT_ON_CPU = _functions(_TORCH, ("group_norm", "instance_norm", "layer_norm"))
_ON_CPU = _IN_FLOAT32_ON_CPU | _AS_THEIR_INPUT_ON_CPU


def any_autocast() -> bool:
    """Whether autocast is on now, for any device."""
    return torch._C._is_any_autocast_enabled()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The lower precision that autocast has operations on this tensor run in now, or None."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast the arguments of an operation as autocast would."""
    if func in _IN_LOWER_PRECISION:
        lower = True
    elif func in _IN_FLOAT32 or func in _ON_CPU:
        lower = False
    else:
        return args, kwargs
    tensor = _first_tensor(args)
    dtype = None if tensor is None else autocast_dtype(tensor)
    if tensor is None or dtype is None or (func in _ON_CPU and tensor.device.type != "cpu"):
        return args, kwargs
    to = dtype if lower else torch.float32

    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(to) if leaf.is_floating_point() and leaf.dtype != torch.float64 else leaf

    return pytree.tree_map_only(Tensor, cast, (args, kwargs))  # type: ignore[no-any-return]


def cast_result(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Cast what an operation returned to the dtype that it has under autocast."""
    if func in _AS_THEIR_INPUT_ON_CPU and args and args[0].device.type == "cpu" and autocast_dtype(args[0]) is not None:
        return result.to(args[0].dtype)
    return result


def _first_tensor(args: tuple[Any, ...]) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), None)
