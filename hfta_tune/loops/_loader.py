"""Prepared loaders: lanes that read the same data together read it once."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, TensorDataset

from hfta_tune.fusion.comparison import comparable, first_incomparable
from hfta_tune.loops._hub import LoopLane, Request, current_lane

__all__ = ["PreparedLoader"]

_END: Any = object()
_NOT_COMPARED = {"_iterator", "_DataLoader__initialized", "dataset", "sampler", "batch_sampler", "generator"}


class PreparedLoader:
    """A loader whose batches lanes share that begin an epoch of the same data at the same time.

    Everything else is the user's own loader's: its length, dataset, sampler.

    Args:
        loader: The user's loader, any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        lane = current_lane()
        if lane is None or lane.trial is None or lane.trial.obstacle is not None:
            yield from self._loader
            return
        lane.trial.check()
        device = lane.trial.device
        outer = lane.company, lane.in_epoch, lane.batch
        trains = torch.is_grad_enabled()
        key = self._key(), device, trains
        request = Request(_begin, key, 0, (self._loader, device), opens=True, trains=trains, length=self._length())
        epoch: _Epoch = lane.wait(request)
        try:
            yield from epoch.read(lane)
        finally:
            lane.company, lane.in_epoch, lane.batch = outer

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
            return tuple(_key_of_batch(batch) for batch in loader)
        return id(loader)


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
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, SequentialSampler):
        return None
    generators = loader.generator, getattr(loader.sampler, "generator", None)
    states = [None if generator is None else bytes(generator.get_state().numpy()) for generator in generators]
    return (*states, None if random_state is None else bytes(random_state.numpy()))


def _begin(lanes: list[LoopLane]) -> None:
    """Lanes begin an epoch of the same data: together, though each in the order that its own code has seeded."""
    hub = lanes[0].hub
    hub.join(lanes)
    lanes[0].trial.interrupted()
    alike: dict[Hashable, list[LoopLane]] = {}
    for lane in lanes:
        assert lane.request is not None
        loader, _ = lane.request.payload
        alike.setdefault(_order_of(loader, lane.random_state), []).append(lane)
    for own in alike.values():
        epoch = _open(own)
        for lane in own:
            hub.answer(lane, epoch)


def _open(lanes: list[LoopLane]) -> _Epoch:
    payloads = [lane.request.payload for lane in lanes if lane.request is not None]
    loader, device = payloads[0]
    epoch = _Epoch(lanes, device)
    own, shared = lanes[0].random_state, torch.get_rng_state()
    if own is not None:
        torch.set_rng_state(own)
    try:
        epoch.open(loader)
    finally:
        if own is not None:
            drawn = torch.get_rng_state()
            for lane in lanes:
                if lane.random_state is not None and torch.equal(lane.random_state, own):
                    lane.random_state = drawn
            torch.set_rng_state(shared)
    for other, _ in payloads[1:]:
        _follow(loader, other)
    return epoch


def _follow(leader: Any, other: Any) -> None:
    """Bring the generators of a loader that was not read to where those are that was."""
    for name in ("generator", "sampler"):
        ours, theirs = getattr(leader, name, None), getattr(other, name, None)
        if name == "sampler":
            ours, theirs = getattr(ours, "generator", None), getattr(theirs, "generator", None)
        if ours is not None and theirs is not None and ours is not theirs:
            theirs.set_state(ours.get_state())


class _Epoch:
    """The batches of one pass over data, kept until all of the lanes have read them."""

    def __init__(self, lanes: list[LoopLane], device: torch.device) -> None:
        self._device = device
        self._places = dict.fromkeys(lanes, 0)
        self._kept: deque[Any] = deque()
        self._first = 0
        self._batches: Iterator[Any] | None = None
        self._error: Exception | None = None

    def open(self, loader: Any) -> None:
        """Begin to read: with the random numbers that are in force now."""
        try:
            self._batches = iter(loader)
            self._kept.append(self._to_device(next(self._batches, _END)))
        except Exception as error:
            self._error = error

    def read(self, lane: LoopLane) -> Iterator[Any]:
        """The batches, for one lane."""
        try:
            while (batch := self._get(self._places[lane])) is not _END:
                self._places[lane] += 1
                self._drop()
                lane.next_batch()
                yield batch
        finally:
            del self._places[lane]
            self._drop()

    def _get(self, place: int) -> Any:
        while place >= self._first + len(self._kept):
            if self._error is not None:
                raise self._error
            if self._kept and self._kept[-1] is _END:
                return _END
            try:
                assert self._batches is not None
                self._kept.append(self._to_device(next(self._batches, _END)))
            except Exception as error:
                self._error = error
        return self._kept[place - self._first]

    def _to_device(self, batch: Any) -> Any:
        if batch is _END or self._device.type == "cpu":
            return batch
        return pytree.tree_map_only(Tensor, lambda t: t.to(self._device, non_blocking=True), batch)

    def _drop(self) -> None:
        """Forget what all lanes have read."""
        behind = min(self._places.values(), default=self._first + len(self._kept))
        while self._first < behind and len(self._kept) > 1:
            self._kept.popleft()
            self._first += 1
