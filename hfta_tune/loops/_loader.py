"""Prepared loaders: lanes that read the same data together read it once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, TensorDataset

from hfta_tune.fusion.comparison import comparable, first_incomparable
from hfta_tune.loops._batches import Epoch, drawing, same_state
from hfta_tune.loops._hub import LoopLane, Request, current_lane

__all__ = ["PreparedLoader"]

_NO_DATA: DataLoader[Any] = DataLoader(())  # type: ignore[arg-type]
_NOT_COMPARED = {"_iterator", "_DataLoader__initialized", "dataset", "sampler", "batch_sampler", "generator"}


class PreparedLoader:
    """A loader whose batches lanes share that begin an epoch of the same data at the same time.

    Everything else is the user's own loader's: its length, dataset, sampler.

    Args:
        loader: The user's loader, any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._keyed: tuple[tuple[Any, ...], Hashable] = (), ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_loader", "_keyed"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        lane = current_lane()
        if lane is None or lane.trial is None:
            return iter(self._loader)
        lane.trial.check()
        if lane.trial.obstacle is not None:
            return _open([lane], [self._loader]).read(lane, self._loader)
        key = self._key(), _order_of(self._loader, lane.hub.random_state_of(lane))
        # Lanes that read other data begin together, too: what they do with it may be one call.
        together = lane.trial.device, torch.is_grad_enabled(), self._length()
        request = Request(_begin, together, 0, (self._loader, key), opens=True, trains=together[1], length=together[2])
        epoch: Epoch = lane.wait(request)
        return epoch.read(lane, self._loader)

    def _length(self) -> float:
        try:
            return len(self._loader)
        except TypeError:
            return math.inf

    def _key(self) -> Hashable:
        """What lanes' loaders must have in common to give the same batches."""
        loader = self._loader
        if type(loader) is DataLoader and type(loader.batch_sampler).__name__ in ("BatchSampler", "NoneType"):
            rest = {name: value for name, value in vars(loader).items() if name not in _NOT_COMPARED}
            key = (_key_of_data(loader.dataset), _key_of_sampler(loader.sampler), comparable(rest))
            if first_incomparable(key) is None:
                return key
        if isinstance(loader, (list, tuple)):
            return self._key_of_batches(loader)
        return id(loader)

    def _key_of_batches(self, batches: Sequence[Any]) -> Hashable:
        known, key = self._keyed
        if len(known) != len(batches) or not all(map(is_, batches, known)):
            key = tuple(map(_key_of_batch, batches))
            # Lists may come to hold other tensors.
            self._keyed = tuple(batches) if all(map(_is_fixed, batches)) else (), key
        return key


def _key_of_data(data: Dataset[Any]) -> Hashable:
    if type(data) is TensorDataset:
        return ("TensorDataset", *map(_key_of_tensor, data.tensors))
    return id(data)


def _key_of_tensor(tensor: Tensor) -> Hashable:
    """The contents of a tensor; of one that is large, where they are."""
    form = (tensor.shape, tensor.dtype, tensor.device)
    place = (tensor.data_ptr(), tensor.stride(), tensor._version)
    key = getattr(tensor, "_hfta_tune_contents", None)
    if key is not None and key[0] == place:
        return (*form, key[1])
    if tensor.device.type != "cpu":
        return (*form, place)
    digest = hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
    tensor._hfta_tune_contents = (place, digest)  # type: ignore[attr-defined]
    return (*form, digest)


def _key_of_batch(batch: Any) -> Hashable:
    leaves, structure = pytree.tree_flatten(batch)
    return (repr(structure), *(id(leaf) for leaf in leaves))


def _is_fixed(batch: Any) -> bool:
    """Whether a batch always has the same tensors."""
    return isinstance(batch, Tensor) or (type(batch) is tuple and all(isinstance(part, Tensor) for part in batch))


def _key_of_sampler(sampler: Any) -> Hashable:
    if type(sampler) in (SequentialSampler, RandomSampler):
        own = {name: value for name, value in vars(sampler).items() if name not in ("data_source", "generator")}
        return (type(sampler), comparable(own))
    if isinstance(sampler, Sampler):
        key = comparable(vars(sampler))
        return (type(sampler), key) if first_incomparable(key) is None else id(sampler)
    return id(sampler)


def _order_of(loader: Any, random_state: Tensor | None) -> Hashable:
    """What the order of a loader's next epoch comes from, besides what tells it from other loaders."""
    if not _is_shuffled(loader):
        return None
    generators = loader.generator, getattr(loader.sampler, "generator", None)
    states = [None if generator is None else bytes(generator.get_state().numpy()) for generator in generators]
    return (*states, None if random_state is None else bytes(random_state.numpy()))


def _is_shuffled(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.sampler, SequentialSampler)


def _begin(lanes: list[LoopLane]) -> None:
    """Lanes begin an epoch together: one and the same those for whom it would be the same alone."""
    hub = lanes[0].hub
    lanes[0].trial.interrupted()
    alike: dict[Hashable, list[LoopLane]] = {}
    for lane in lanes:
        assert lane.request is not None
        alike.setdefault(lane.request.payload[1], []).append(lane)
    epochs: dict[LoopLane, Epoch] = {}
    for own in alike.values():
        epochs |= dict.fromkeys(own, _open(own, [lane.request.payload[0] for lane in own if lane.request is not None]))
    hub.join(epochs)
    for lane, epoch in epochs.items():
        hub.answer(lane, epoch)


def _open(lanes: list[LoopLane], loaders: list[Any]) -> Epoch:
    first, loader = lanes[0], loaders[0]
    before = first.hub.random_state_of(first)
    epoch = Epoch(lanes, first.trial.device, loader, is_shuffled=_is_shuffled(loader))
    for lane, other in zip(lanes[1:], loaders[1:], strict=True):
        _follow(loader, other)
        if same_state(lane.random_state, before):
            lane.random_state = first.random_state
        elif isinstance(loader, DataLoader) and loader.generator is None:
            drawing(lane, lambda: iter(_NO_DATA))  # what the beginning of any epoch draws
    return epoch


def _follow(leader: Any, other: Any) -> None:
    """Bring the generators of a loader that was not read to where those are that was."""
    for name in ("generator", "sampler"):
        ours, theirs = getattr(leader, name, None), getattr(other, name, None)
        if name == "sampler":
            ours, theirs = getattr(ours, "generator", None), getattr(theirs, "generator", None)
        if ours is not None and theirs is not None and ours is not theirs:
            theirs.set_state(ours.get_state())
