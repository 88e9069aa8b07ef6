"""One pass over data that several lanes read: each is given every batch as if it had read it alone."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.loops._errors import copy_of_error
from hfta_tune.loops._hub import LoopLane

__all__ = ["Epoch", "drawing", "same_state"]

_END: Any = object()
_is_shared: Callable[[Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda tensor: False)
_CONSTANTS = (type(None), bool, int, float, str, bytes)


def drawing(lane: LoopLane, draw: Callable[[], Any]) -> Any:
    """Return `draw()`, made with the random numbers that the lane's own code has seeded, if it has."""
    if lane.random_state is None:
        return draw()
    shared = torch.get_rng_state()
    torch.set_rng_state(lane.random_state)
    try:
        return draw()
    finally:
        lane.random_state = torch.get_rng_state()
        torch.set_rng_state(shared)


class Epoch:
    """The batches of one pass over data, kept until all of the lanes have read them.

    Args:
        lanes: Who reads it.
        device: Where the batches go.
        loader: What is read: the first lane's.
        is_shuffled: Whether the order comes from torch's random numbers when the first batch is read.
    """

    def __init__(self, lanes: list[LoopLane], device: torch.device, loader: Any, *, is_shuffled: bool) -> None:
        self._device = device
        self._places = dict.fromkeys(lanes, 0)
        self._is_shared = len(lanes) > 1
        self._is_shuffled = is_shuffled
        self._has_begun = False
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._kept: deque[Any] = deque()
        self._first = 0
        self._batches: Iterator[Any] | None = None
        self._error: Exception | None = None
        try:
            self._batches = drawing(lanes[0], lambda: iter(loader))
        except Exception as error:
            self._error = error

    def read(self, lane: LoopLane, loader: Any) -> Iterator[Any]:
        """The batches, for one lane; `loader` is its own."""
        epoch = self
        try:
            if not self._begin(lane):
                # Its code has drawn since the epoch was opened, and the others' has not.
                epoch = Epoch([lane], self._device, loader, is_shuffled=True)
                epoch._begin(lane)
                self._leave(lane)
            while (batch := epoch._get(lane)) is not _END:
                lane.next_batch()
                yield batch
        finally:
            lane.end_epoch(self)
            self._leave(lane)

    def _begin(self, lane: LoopLane) -> bool:
        """Read the first batch if nobody has; return whether it is the one that the lane would have read alone."""
        state = lane.hub.random_state_of(lane)
        if not self._has_begun:
            self._has_begun, self._before = True, state
            drawing(lane, self._read)
            self._after = lane.random_state
            return True
        if not self._is_shuffled:
            return True
        same = same_state(state, self._before)
        if same:
            lane.random_state = self._after
        return same

    def _get(self, lane: LoopLane) -> Any:
        place = self._places[lane]
        while place >= self._first + len(self._kept):
            if self._error is not None:
                raise copy_of_error(self._error)
            if self._kept and self._kept[-1] is _END:
                return _END
            self._read()
        batch = self._kept[place - self._first]
        if type(batch) is _SharedBatch:
            batch = batch.take()
        self._places[lane] += 1
        if place == self._first:
            self._drop()
        return batch

    def _read(self) -> None:
        if self._error is not None:
            return
        try:
            assert self._batches is not None
            batch = next(self._batches, _END)
            if batch is not _END and self._device.type != "cpu":
                batch = pytree.tree_map_only(Tensor, lambda t: t.to(self._device, non_blocking=True), batch)
            self._kept.append(_SharedBatch(batch) if self._is_shared and batch is not _END else batch)
        except Exception as error:
            self._error = error

    def _leave(self, lane: LoopLane) -> None:
        self._places.pop(lane, None)
        self._drop()

    def _drop(self) -> None:
        """Forget what all lanes have read."""
        behind = min(self._places.values(), default=self._first + len(self._kept))
        while self._first < behind and len(self._kept) > 1:
            self._kept.popleft()
            self._first += 1


class _SharedBatch:
    """A batch that several lanes take: each has tensors of its own, whose memory is shared until it is written to."""

    def __init__(self, batch: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(batch)
        self._leaves = [_base(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # The usual one takes no time.
        self._is_flat = (
            type(batch) in (list, tuple)
            and len(batch) == len(self._leaves)
            and all(isinstance(leaf, Tensor) and not leaf.requires_grad and _is_shared(leaf) for leaf in self._leaves)
        )
        self._kind = type(batch)

    def take(self) -> Any:
        """The batch, for one more lane."""
        if self._is_flat:
            return self._kind(map(torch._lazy_clone, self._leaves))
        with torch.no_grad():
            return pytree.tree_unflatten(list(map(_own, self._leaves)), self._structure)


def _base(tensor: Tensor) -> Tensor:
    """What lanes' tensors can share the memory of, until one of them is written to, which copies all that is stored."""
    alone = tensor.detach()
    try:
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
            return torch._lazy_clone(alone).requires_grad_(tensor.requires_grad)
    except RuntimeError:
        pass  # memory of NumPy's, of another process; sparse
    alone = alone.clone()
    with contextlib.suppress(RuntimeError):
        torch._lazy_clone(alone)  # from now on it can be shared
    return alone.requires_grad_(tensor.requires_grad)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        try:
            own = torch._lazy_clone(leaf)
        except RuntimeError:
            own = leaf.clone()
        return own.requires_grad_() if leaf.requires_grad else own
    if isinstance(leaf, _CONSTANTS):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf


def same_state(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two lanes would draw the same random numbers."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))
