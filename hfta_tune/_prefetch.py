"""Batches on their way to an accelerator: once for all lanes, while the batch before is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["on_device"]


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches with their tensors on `device`.

    On CUDA the next batch is copied from pinned memory on a stream of its own, ahead of its turn.
    """
    if device.type != "cuda":
        for batch in batches:
            yield pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
        return
    copying = torch.cuda.Stream(device)
    ahead: list[Any] = []
    for batch in batches:
        with torch.cuda.stream(copying):
            ahead.append(pytree.tree_map_only(Tensor, lambda tensor: _sent(tensor, device), batch))
        if len(ahead) > 1:
            yield _received(ahead.pop(0), copying)
    for batch in ahead:
        yield _received(batch, copying)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _received(batch: Any, copying: torch.cuda.Stream) -> Any:
    """Have the current stream wait for the copies, and keep their memory until it is done with them."""
    current = torch.cuda.current_stream(copying.device)
    current.wait_stream(copying)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(current)
    return batch
