"""Parts of stacked tensors: what each lane's own code is handed of a call that was made for all lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Part", "hand_out", "part_of", "shared", "stacked"]


# Of a tensor's storage. data_ptr() is for writing: it would end what tensors share until they are written to.
_address: Callable[[Tensor], int] = getattr(torch._C, "_data_address", Tensor.data_ptr)


class Part(NamedTuple):
    """That a tensor is row `row` of `whole`, [lanes, ...], whose rows are those of `lanes`."""

    whole: Tensor
    row: int
    lanes: tuple[Any, ...]
    version: int


def hand_out(whole: Tensor, lanes: tuple[Any, ...], check: Callable[[Tensor], None]) -> tuple[Tensor, ...]:
    """Return each lane's row of a stacked tensor. Their gradients meet again in one stack.

    Args:
        whole: [lanes, ...].
        lanes: Whose rows they are.
        check: Called with the gradient of `whole` when it is computed; may raise.
    """
    if whole.requires_grad:
        whole.register_hook(check)
    rows = whole.unbind()
    version = rows[0]._version
    for number, row in enumerate(rows):
        row._hfta_tune_part = Part(whole, number, lanes, version)  # type: ignore[attr-defined]
    return rows


def part_of(tensor: Tensor) -> Part | None:
    """What a tensor is a part of, if it was handed out and nothing has been done to it since."""
    part: Part | None = getattr(tensor, "_hfta_tune_part", None)
    if part is None or part.version != tensor._version or tensor._backward_hooks is not None or tensor.retains_grad:
        return None
    return part


def shared(tensors: Sequence[Tensor]) -> bool:
    """Whether lanes were given one and the same data, such as the batch of a loader that they share."""
    first = tensors[0]
    if all(tensor is first for tensor in tensors):
        return True
    address = _address(first)
    return not first.requires_grad and all(
        not tensor.requires_grad
        and tensor.dtype == first.dtype
        and _address(tensor) == address
        and tensor.shape == first.shape
        and tensor.stride() == first.stride()
        and tensor.storage_offset() == first.storage_offset()
        for tensor in tensors
    )


def stacked(tensors: Sequence[Tensor], lanes: tuple[Any, ...]) -> Tensor:
    """Return [lanes, ...]: what the tensors were handed out from, where they are its parts in order."""
    part = part_of(tensors[0])
    if part is not None and part.lanes is lanes and len(tensors) == len(lanes):
        parts = map(part_of, tensors)
        if all(p is not None and p.whole is part.whole and p.row == row for row, p in enumerate(parts)):
            return part.whole
    return torch.stack(list(tensors))
