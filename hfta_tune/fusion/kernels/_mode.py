"""The function mode that puts the lane kernels in place of torch's operations during a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hfta_tune.fusion.kernels._linear import linear
from hfta_tune.fusion.kernels._loss import cross_entropy
from hfta_tune.fusion.kernels._norm import batch_norm
from hfta_tune.fusion.kernels._pool import POOLS
from hfta_tune.fusion.kernels._recurrent import RECURRENT

__all__ = ["LaneKernels"]

_KERNELS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    F.cross_entropy: cross_entropy,
    torch._C._nn.linear: linear,
    **POOLS,
    **RECURRENT,
}


class LaneKernels(TorchFunctionMode):
    """While active, operations on stacked tensors under vmap use the kernels of this package.

    An operation that a kernel does not serve goes on to torch's own batching rule.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kernel = _KERNELS.get(func)
        if kernel is not None:
            result = kernel(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))
