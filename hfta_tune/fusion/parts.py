"""Parts of stacked tensors: what each lane's own code is handed of a call that was made for all lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Handed", "Part", "hand_out", "part_of", "shared", "stacked"]


# Of a tensor's storage. data_ptr() is for writing: it would end what tensors share until they are written to.
_address: Callable[[Tensor], int] = getattr(torch._C, "_data_address", Tensor.data_ptr)


_requires_grad = attrgetter("requires_grad")


@dataclass(eq=False, slots=True)
class Handed:
    """What was handed out: the rows of `whole`, [lanes, ...], to `lanes`."""

    whole: Tensor
    lanes: tuple[Any, ...]
    version: int


Part: TypeAlias = tuple[Handed, int]
"""That a tensor is a row of what was handed out, and which."""


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
    handed = Handed(whole, lanes, rows[0]._version)
    for number, row in enumerate(rows):
        row._hfta_tune_part = handed, number  # type: ignore[attr-defined]
    return rows


def part_of(tensor: Tensor) -> Part | None:
    """What a tensor is a part of, if it was handed out and nothing has been done to it since."""
    part: Part | None = getattr(tensor, "_hfta_tune_part", None)
    if part is None or part[0].version != tensor._version:
        return None
    return part if tensor._backward_hooks is None and not tensor.retains_grad else None


def shared(tensors: Sequence[Tensor]) -> bool:
    """Whether lanes were given one and the same data, such as the batch of a loader that they share.

    Args:
        tensors: What they were given: of one shape and dtype.
    """
    first = tensors[0]
    if all(map(is_, tensors, repeat(first))):
        return True
    if first.requires_grad or first.storage_offset() != tensors[-1].storage_offset():
        return False
    count = len(tensors)
    return (
        list(map(_address, tensors)).count(_address(first)) == count
        and list(map(Tensor.storage_offset, tensors)).count(first.storage_offset()) == count
        and list(map(Tensor.stride, tensors)).count(first.stride()) == count
        and not any(map(_requires_grad, tensors))
    )


def stacked(tensors: Sequence[Tensor], lanes: tuple[Any, ...]) -> Tensor:
    """Return [lanes, ...]: what the tensors were handed out from, where they are its parts in order."""
    part = part_of(tensors[0])
    if part is not None and part[0].lanes is lanes and len(tensors) == len(lanes):
        handed = part[0]
        if list(map(part_of, tensors)) == list(zip(repeat(handed), range(len(lanes)))):
            return handed.whole
    return torch.stack(list(tensors))
