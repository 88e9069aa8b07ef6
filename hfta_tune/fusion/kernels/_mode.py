"""The function mode that puts the lane kernels in place of torch's operations during a step."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hfta_tune.fusion.kernels._attention import attention
from hfta_tune.fusion.kernels._autocast import any_autocast, cast_arguments, cast_result
from hfta_tune.fusion.kernels._embedding import embedding
from hfta_tune.fusion.kernels._linear import linear
from hfta_tune.fusion.kernels._loss import cross_entropy
from hfta_tune.fusion.kernels._norm import batch_norm
from hfta_tune.fusion.kernels._pool import POOLS
from hfta_tune.fusion.kernels._recurrent import RECURRENT

__all__ = ["LaneKernels"]

_KERNELS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    F.cross_entropy: cross_entropy,
    F.embedding: embedding,
    torch._C._nn.linear: linear,
    F.scaled_dot_product_attention: attention,
    **POOLS,
    **RECURRENT,
}


def _inlined(function: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that shows the mode the operations that it is made of, not itself."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(checks, lambda *tensors: False)}
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


_INLINED: dict[Any, Callable[..., Any]] = {
    function: _inlined(function)
    for name in ("multi_head_attention_forward", "linear_cross_entropy")
    if (function := getattr(F, name, None)) is not None  # older versions lack the latter
}


class LaneKernels(TorchFunctionMode):
    """While active, operations on stacked tensors under vmap use the kernels of this package.

    An operation that a kernel does not serve goes on to torch's own batching rule.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, kwargs = args, kwargs or {}
        casts = any_autocast()
        if casts:
            args, kwargs = cast_arguments(func, args, kwargs)
        kernel = _KERNELS.get(func)
        if kernel is not None:
            result = kernel(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inlined = _INLINED.get(func)
        if inlined is not None:
            with self:
                return inlined(*args, **kwargs)
        result = func(*args, **kwargs)
        return cast_result(func, given, result) if casts else result
