"""Batches: nested containers of tensors and other values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.comparison import comparable

__all__ = ["clone_batch", "constants_of_batch", "copy_changes", "form_of_batch"]


def _structures_have_hashes() -> bool:
    """In torch 2.6 they do not; their text takes 10 to 25 µs, so it serves only there."""
    try:
        hash(pytree.tree_flatten((0, 1))[1])
    except TypeError:
        return False
    return True


_STRUCTURES_HAVE_HASHES = _structures_have_hashes()


def form_of_batch(batch: Any) -> Hashable:
    """Return the structure of a batch and the shapes and dtypes of its tensors."""
    leaves, structure = pytree.tree_flatten(batch)
    of_leaves = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return structure if _STRUCTURES_HAVE_HASHES else repr(structure), of_leaves


def constants_of_batch(batch: Any) -> Hashable:
    """Return the values in a batch that are no tensors."""
    return tuple(comparable(leaf) for leaf in pytree.tree_leaves(batch) if not isinstance(leaf, Tensor))


def clone_batch(batch: Any) -> Any:
    """Copy the tensors of a batch."""
    return pytree.tree_map_only(Tensor, torch.clone, batch)


def copy_changes(tried: Any, batch: Any) -> bool:
    """Do to `batch` what a step did to its copy; return whether that was anything."""
    changed = False
    for new, old in zip(pytree.tree_leaves(tried), pytree.tree_leaves(batch), strict=True):
        if isinstance(new, Tensor) and new._version:
            old.copy_(new)
            changed = True
    return changed
