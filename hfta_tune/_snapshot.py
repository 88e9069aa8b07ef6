"""The state of trials at one moment, kept while they train on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune._checkpoint import BuiltNumbers, has_entries_of, live_state_of, put_state
from hfta_tune.fusion import Lane

__all__ = ["Snapshot"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a trial; its tensors only say where in the copied storage they lie.

    Attributes:
        state: As in a checkpoint.
        buffers: Those that are not in it.
        attributes: What the modules' own code may count or switch.
    """

    state: dict[str, Any]
    buffers: dict[str, Tensor]
    attributes: list[tuple[nn.Module, dict[str, Any]]]


class Snapshot:
    """The state of trials at one moment.

    What is copied is the storage that tensors lie in. Lanes of an array share theirs, so a snapshot of all of
    them takes as many copies as one model and its optimizer have tensors.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def keep(self, trial: str, lane: Lane, epoch: int, built: BuiltNumbers, *, attributes: bool) -> None:
        """Note a trial's state; `copy` copies its tensors.

        Args:
            trial: Its name.
            lane: Its lane.
            epoch: How many rounds it has trained.
            built: Its optimizers' numbers as built.
            attributes: Whether the lane's own model runs, so that its attributes may change.
        """
        state = live_state_of(lane, epoch, built)
        buffers = {name: buffer.detach() for name, buffer in lane.buffers() if name not in state["model"]}
        counting = lane.model.modules() if attributes else ()
        own = [(m, {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)}) for m in counting]
        self._kept[trial] = _Kept(state, buffers, own)
        for storage in map(Tensor.untyped_storage, (*_tensors_in(state), *buffers.values())):
            self._storages.setdefault(storage.data_ptr(), storage)

    def copy(self) -> None:
        """Copy the storage of all tensors."""
        self._copies = {address: storage.clone() for address, storage in self._storages.items()}

    @property
    def nbytes(self) -> int:
        """How many bytes the copies take."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def state(self, trial: str) -> dict[str, Any]:
        """Return the trial's checkpoint as of then; its tensors are copies on the CPU."""
        state: dict[str, Any] = self._as_of(self._kept[trial].state, lambda tensor: tensor.cpu().clone())
        return state

    def fits_in_place(self, trial: str, lane: Lane) -> bool:
        """Whether the lane's optimizers have the same entries of state as then."""
        return has_entries_of(lane, self._kept[trial].state)

    def put_back(self, trial: str, lane: Lane, built: BuiltNumbers, *, in_place: bool) -> int:
        """Put a lane into the state of then; return its epoch.

        Args:
            trial: Its name.
            lane: Its lane.
            built: Its optimizers' numbers as built.
            in_place: Write into the tensors that it has, which may be those of an array.
        """
        kept = self._kept[trial]
        with torch.no_grad():
            for name, buffer in self._as_of(kept.buffers).items():
                lane.model.get_buffer(name).copy_(buffer)
        for module, attributes in kept.attributes:
            vars(module).update(attributes)
        return put_state(lane, self._as_of(kept.state), built, in_place=in_place)

    def _as_of(self, tree: Any, then: Any = lambda tensor: tensor) -> Any:
        def placed(tensor: Tensor) -> Any:
            copy = self._copies[tensor.untyped_storage().data_ptr()]
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return then(empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride()))

        return pytree.tree_map_only(Tensor, placed, tree)


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) is dict:
        for own in value.values():
            yield from _tensors_in(own)
    elif type(value) in (list, tuple):
        for own in value:
            yield from _tensors_in(own)
    elif value is not None and type(value) not in (int, float, bool, str):
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
