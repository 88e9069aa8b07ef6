"""What every optimizer of an array offers, and how it reads the lanes' numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FusedOptimizer", "LaneNumbers", "has_plain_steps"]


class FusedOptimizer(Protocol):
    """One optimizer step for all lanes of a stack.

    The lanes' own torch optimizers stay the place where numbers are read (so schedulers work on them)
    and where state is found (as views), so their `state_dict()` is always up to date.
    """

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the stacked parameters in place from {name: [lanes, ...]}, those that have a gradient."""


class LaneNumbers:
    """The numbers of one parameter group as [lanes, 1] tensors, sent to the device only when they change."""

    def __init__(self, optimizers: Sequence[Optimizer], group: int, device: torch.device) -> None:
        self._groups = [optimizer.param_groups[group] for optimizer in optimizers]
        self._optimizers = list(optimizers)
        self._index = group
        self._device = device
        # float64 keeps derived numbers (1 - beta ** step) as exact as torch's own Python floats.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sent: dict[tuple[str, torch.dtype], tuple[list[float], Tensor]] = {}

    def host(self, key: str, part: int | None = None) -> list[float]:
        """The number of each lane now, as Python floats; `part` picks from a tuple such as betas."""
        groups = [optimizer.param_groups[self._index] for optimizer in self._optimizers]
        if part is None:
            return [float(group[key]) for group in groups]
        return [float(group[key][part]) for group in groups]

    def device(self, name: str, numbers: list[float], dtype: torch.dtype | None = None) -> Tensor:
        """`numbers` as a [lanes, 1] tensor; `name` is under what it is remembered."""
        dtype = dtype or self._dtype
        sent = self._sent.get((name, dtype))
        if sent is not None and sent[0] == numbers:
            return sent[1]
        tensor = torch.tensor(numbers, dtype=dtype).unsqueeze(1).to(self._device, non_blocking=True)
        self._sent[name, dtype] = (numbers, tensor)
        return tensor


def has_plain_steps(optimizer: Optimizer) -> bool:
    """Whether a native update can stand in for `optimizer.step()`: no hooks, one dense real dtype a group."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    groups: list[dict[str, Any]] = optimizer.param_groups
    return not hooked and all(
        not group.get("differentiable")
        and len({p.dtype for p in group["params"]}) == 1
        and not any(p.is_complex() or p.is_sparse for p in group["params"])
        for group in groups
    )
