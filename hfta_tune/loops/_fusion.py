"""Which lanes of a hub share an array, and what is done when they ask for the same thing."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_tune.fusion import LANE_BY_LANE, VMAP, FusionError, FusionWarning, VmapFailed, first_line
from hfta_tune.fusion.audit import Difference, NotAuditable
from hfta_tune.fusion.audit_calls import audit_call, audit_function
from hfta_tune.fusion.calls import CalledArray, call_function
from hfta_tune.fusion.choice import StrategyChoice
from hfta_tune.fusion.gradient_rows import newest_first
from hfta_tune.fusion.parts import part_of
from hfta_tune.loops._classes import make_bare
from hfta_tune.loops._errors import note
from hfta_tune.loops._hub import Hub, LoopLane, current_lane
from hfta_tune.loops._trial import ON_ITS_OWN, LoopTrial

__all__ = ["Fusion"]

_MOST_SPLITS_COUNTED = 8
_STRATEGIES = {"auto": (VMAP, LANE_BY_LANE), VMAP: (VMAP,), LANE_BY_LANE: (LANE_BY_LANE,)}


class _Differs(Exception):
    """What the audit found to be wrong."""


class Fusion:
    """Serves the lanes of a hub: calls of models and criteria, backward passes, optimizer steps.

    Lanes of equal signature that ask for the same thing make an array. Where only some of an array's lanes ask, they
    leave it for an array of their own, and meet the others again where they ask together.

    Args:
        hub: The hub.
        strategy: "auto" measures on each array whether calls for all lanes are faster than each lane's own. "vmap" or
            "lane by lane" keeps to that one where it can.
        audit: Whether the first call of every kind, of every array, is compared with each lane's own.
        numbers: Numbers the arrays; by default from 0.
    """

    def __init__(
        self, hub: Hub, *, strategy: str = "auto", audit: bool = False, numbers: Iterator[int] | None = None
    ) -> None:
        self.hub = hub
        self._audit = audit
        self._audited: set[Hashable] = set()
        self._strategies = _STRATEGIES[strategy]
        self._keys: dict[Hashable, int] = {}
        self._functions: dict[Hashable, int] = {}
        self._hopeless: set[int] = set()
        self._most: dict[int, int] = {}
        self._choices: dict[int, dict[int, StrategyChoice]] = {}
        self._numbers = itertools.count() if numbers is None else numbers
        self._trials: dict[Any, LoopTrial] = {}
        self._said: set[str] = set()
        self._functions_alone: set[int] = set()
        self.criteria: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._in_backward = False
        self._stepped: tuple[CalledArray, float] | None = None
        self._calls = 0

    def close(self) -> None:
        """Criteria, which may outlive their trials, are ordinary modules again."""
        for criterion in self.criteria:
            make_bare(criterion)
        self.criteria.clear()

    # Trials and arrays

    def key_of(self, signature: Hashable) -> int:
        """A number for a signature."""
        return self._keys.setdefault(signature, len(self._keys))

    def function_key(self, function: Hashable) -> int:
        """A number for a function by what tells it from others."""
        return self._functions.setdefault(function, len(self._functions))

    def is_hopeless(self, key: int) -> bool:
        """Whether lanes of a signature turned out not to run under vmap."""
        return key in self._hopeless

    def take_out(self, trial: LoopTrial) -> None:
        """A lane leaves its array, with its state."""
        array, trial.array = trial.array, None
        if array is not None:
            array.change_lanes(leave=[trial.lane])
        self._trials.pop(trial.lane, None)

    def warn_once(self, message: str, trial: str | None = None) -> None:
        """Say something that the user should know, once; of several trials, for the first."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message if trial is None else f"{trial} and its like {message}", FusionWarning, stacklevel=2)

    def _settle(self, array: CalledArray) -> None:
        alone = array.strategy == LANE_BY_LANE
        for lane in array.lanes:
            self._trials[lane].alone = alone

    def _arrays(self, lanes: Sequence[LoopLane]) -> list[tuple[CalledArray, list[LoopLane]]]:
        """Arrange lanes that ask for the same thing such that each array has no others."""
        first = lanes[0].trial.array
        if first is not None and len(first.lanes) == len(lanes):
            for lane in lanes:
                if lane.trial.array is not first:
                    break
            else:
                return [(first, self._in_order(first, lanes))]
        trials = [lane.trial for lane in lanes]
        self._part([trial for trial in trials if trial.array is not None])
        most = self._most.get(trials[0].key, len(trials))
        joining = [trial for trial in trials if trial.array is None]
        arrays = {id(trial.array): trial.array for trial in trials if trial.array is not None}
        ripe = [a for a in arrays.values() if all(self._trials[lane].settled_until <= self._calls for lane in a.lanes)]
        if not ripe or len(ripe[0].lanes) >= most:
            ripe.append(self._new_array(trials[0]))
        home, *others = sorted(ripe, key=lambda array: -len(array.lanes))
        moving = [self._trials[lane] for array in others for lane in array.lanes]
        for array in others:
            array.change_lanes(leave=list(array.lanes))
        for trial in (*moving, *joining):
            if len(home.lanes) >= most:
                self._settle(home)
                home = self._new_array(trial)
            self._trials[trial.lane] = trial
            trial.array = home
            home.change_lanes(join=[trial.lane])
        self._settle(home)
        return [(array, self._in_order(array, own)) for array, own in _by_array(lanes)]

    def _new_array(self, trial: LoopTrial) -> CalledArray:
        strategies = (LANE_BY_LANE,) if trial.key in self._hopeless else self._strategies
        return CalledArray(
            trial.device,
            number=next(self._numbers),
            strategies=strategies,
            choices=self._choices.setdefault(trial.key, {}),
            check=self._check,
        )

    def _part(self, trials: Sequence[LoopTrial]) -> None:
        """Give those of an array's lanes that ask an array without the others."""
        asking: dict[int, list[LoopTrial]] = {}
        for trial in trials:
            asking.setdefault(id(trial.array), []).append(trial)
        for own in asking.values():
            array = own[0].array
            assert array is not None
            if len(own) == len(array.lanes):
                continue
            lanes = {trial.lane for trial in own}
            others = [self._trials[lane] for lane in array.lanes if lane not in lanes]
            leaving = own if len(own) <= len(others) else others
            part = self._new_array(leaving[0])
            array.change_lanes(leave=[trial.lane for trial in leaving])
            for trial in leaving:
                trial.array = part
                # Who parts again and again is brought together less and less often.
                trial.splits += 1
                trial.settled_until = self._calls + 2 ** min(trial.splits, _MOST_SPLITS_COUNTED)
            part.change_lanes(join=[trial.lane for trial in leaving])
            self._settle(array)
            self._settle(part)

    @staticmethod
    def _in_order(array: CalledArray, lanes: Sequence[LoopLane]) -> list[LoopLane]:
        for lane, own in zip(lanes, array.lanes, strict=True):
            if lane.trial.lane is not own:
                break
        else:
            return list(lanes)
        by_lane = {lane.trial.lane: lane for lane in lanes}
        return [by_lane[lane] for lane in array.lanes]

    # What lanes ask for

    def serve_call(self, lanes: list[LoopLane]) -> None:
        """Lanes call their models."""
        self._calls += 1
        if not _payload(lanes[0])[1][3]:
            lanes = self._without_parts(lanes)
        for array, own in self._arrays(lanes) if lanes else ():
            self._call(array, own)

    def _without_parts(self, lanes: Sequence[LoopLane]) -> list[LoopLane]:
        """Serve those who evaluate while others of their array do not, which is no reason to part; return the rest."""
        rest = []
        for array, own in _by_array(lanes):
            modes = _payload(own[0])[1][2]
            if array is None or len(own) == len(array.lanes):
                rest += own
            elif 2 * len(own) > len(array.lanes) and not any(modes):
                self._call(array, own)
            else:
                self._each_on_its_own(own)
        return rest

    def _call(self, array: CalledArray, lanes: list[LoopLane]) -> None:
        if array.strategy == LANE_BY_LANE:
            self._each_on_its_own(lanes)
            return
        given = {lane.trial.lane: _payload(lane) for lane in lanes}
        first, (slot, form, modes, grad, options) = _payload(lanes[0])
        # Of lanes that do not ask, nobody sees what the call returns.
        calls = [given[own][0] if own in given else first for own in array.lanes]
        try:
            if self._audit:
                device = lanes[0].trial.device
                key = lanes[0].trial.key, (slot, form, modes, grad, options)
                self._audit_once(key, lanes, lambda: audit_call(array.lanes, slot, calls, modes, options, device), grad)
            with torch.set_grad_enabled(grad):
                values = array.call(slot, calls, modes, options, (slot, form, modes, grad))
        except VmapFailed as failure:
            if isinstance(failure.cause, FusionError):
                raise failure.cause from None
            self._give_up(array, lanes)
            self.warn_once(f"train lane by lane: vmap stopped at {failure}", lanes[0].trial.name)
            return
        except _Differs as differs:
            self._give_up(array, lanes)
            self.warn_once(f"audit of {lanes[0].trial.name} and its like: {differs}; they go on lane by lane.")
            return
        except torch.OutOfMemoryError as error:
            self._halve(array, lanes, error)
            return
        if grad:
            graph = array.gradient_rows().graph
            for lane in lanes if graph is not None else ():
                lane.trial.has_called(graph)
        of_lane = dict(zip(array.lanes, values, strict=True))
        for lane in lanes:
            self.hub.answer(lane, of_lane[lane.trial.lane])

    def _give_up(self, array: CalledArray, lanes: Sequence[LoopLane]) -> None:
        """Lanes of this signature call their models themselves, now and in future."""
        array.give_up_vmap()
        self._hopeless.add(lanes[0].trial.key)
        self._settle(array)
        self._each_on_its_own(lanes)

    def _audit_once(
        self, key: Hashable, lanes: Sequence[LoopLane], audit: Callable[[], Difference | None], grad: bool
    ) -> None:
        """Audit what has not been audited.

        Raises:
            _Differs: with what differs from the lanes' own.
        """
        if key in self._audited:
            return
        self._audited.add(key)
        devices = [lanes[0].trial.device] if lanes[0].trial.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(grad):
                difference = audit()
        except NotAuditable as error:
            self.warn_once(f"audit of {lanes[0].trial.name} and its like: {error}, so it could not be audited.")
            return
        if difference is not None and difference.is_wrong:
            raise _Differs(difference)

    def _halve(self, array: CalledArray, lanes: Sequence[LoopLane], error: torch.OutOfMemoryError) -> None:
        """Call again what did not fit into memory, in smaller arrays."""
        if len(array.lanes) == 1:
            raise error
        count = len(array.lanes)
        self._say_what_fits(count, self._shrink([array]), error)
        for part, own in _by_array(lanes):
            self._call(part, self._in_order(part, own) if len(own) == len(part.lanes) else own)

    def _say_what_fits(self, count: int, most: int, error: torch.OutOfMemoryError) -> None:
        self.warn_once(
            f"{count} lanes do not fit into memory ({first_line(error)}). They train on in arrays of {most}. "
            "Set B to that."
        )

    @contextlib.contextmanager
    def _failing_for_want_of_memory(self, lanes: Sequence[LoopLane]) -> Iterator[None]:
        """Where what was computed is lost, lanes get the error; those that go on, and all to come, are fewer."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            arrays = [array for array, _ in _by_array(lanes) if array is not None and len(array.lanes) > 1]
            if arrays:
                count = max(len(array.lanes) for array in arrays)
                most = self._shrink(arrays)
                self.warn_once(
                    f"{count} lanes do not fit into memory ({first_line(error)}), and what they had computed for this "
                    f"step is lost. From now on they train in arrays of {most}. Set B to that."
                )
                note(error, f"{count} trials trained together. Set B to {most}.")
            raise

    def _shrink(self, arrays: Sequence[CalledArray]) -> int:
        """Make arrays half as large, and those of their signatures that are to come."""
        most = 1
        for array in arrays:
            trials = [self._trials[lane] for lane in array.lanes]
            half = self._most[trials[0].key] = -(-len(trials) // 2)
            most = max(most, half)
            for first in range(half, len(trials), half):
                self._part(trials[first : first + half])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return most

    def _each_on_its_own(self, lanes: Sequence[LoopLane]) -> None:
        for lane in lanes:
            self.hub.answer(lane, ON_ITS_OWN)

    def serve_function(self, lanes: list[LoopLane]) -> None:
        """Lanes call a criterion."""
        for array, own in _by_array(lanes):  # so that the outputs of its models need not be copied
            if len(own) == 1 or array is None:
                self._each_on_its_own(own)
                continue
            whole = len(own) == len(array.lanes)
            in_order = self._in_order(array, own) if whole else own
            self._call_function(in_order, array.lanes if whole else tuple(lane.trial.lane for lane in own))

    def _call_function(self, lanes: list[LoopLane], of: tuple[Any, ...]) -> None:
        payloads = [_payload(lane) for lane in lanes]
        _, function, (key, _, grad, options) = payloads[0]
        if key in self._functions_alone:
            self._each_on_its_own(lanes)
            return
        calls = [call for call, _, _ in payloads]
        try:
            if self._audit:
                self._audit_once(payloads[0][2], lanes, lambda: audit_function(function, calls, of, options), grad)
            with torch.set_grad_enabled(grad):
                values = call_function(function, calls, of, options, self._check)
        except VmapFailed as failure:
            self._functions_alone.add(key)
            self.warn_once(f"A prepared criterion is called lane by lane: vmap stopped at {failure}")
            self._each_on_its_own(lanes)
            return
        except _Differs as differs:
            self._functions_alone.add(key)
            self.warn_once(f"audit of a prepared criterion: {differs}; it is called lane by lane from now on.")
            self._each_on_its_own(lanes)
            return
        except torch.OutOfMemoryError as error:
            most = self._shrink([array for array, _ in _by_array(lanes)])
            self._say_what_fits(len(lanes), most, error)
            self._each_on_its_own(lanes)
            return
        for lane, value in zip(lanes, values, strict=True):
            self.hub.answer(lane, value)

    def serve_backward(self, lanes: list[LoopLane]) -> None:
        """Lanes give their losses to backward()."""
        graphs = [graph for lane in lanes for graph in lane.trial.live_graphs()]
        rows = newest_first(graph.rows for graph in graphs)
        claimed: set[int] | None = set() if len(rows) > 1 else None
        for own in rows:
            own.collect(claimed)
        asking = {lane.trial.lane for lane in lanes}
        retain = _payload_key(lanes[0]) or any(
            lane not in asking and lane in self._trials for own in rows for lane in own.lanes
        )
        roots, weights = _roots([_payload(lane) for lane in lanes])
        self._in_backward = True
        try:
            with self._failing_for_want_of_memory(lanes):
                torch.autograd.backward(roots, weights, retain_graph=retain)
        finally:
            self._in_backward = False
        for own in rows:
            own.deal_out([lane for lane in own.lanes if lane in asking])
        for lane in lanes:
            self.hub.answer(lane, None)

    def serve_clip(self, lanes: list[LoopLane]) -> None:
        """Lanes clip their gradients."""
        for array, own in self._arrays(lanes):
            limits = [_payload(lane)[0] for lane in own]
            _, how, names = _payload(own[0])
            norms = None if array.strategy == LANE_BY_LANE else array.clip(names, limits, how)
            if norms is None:
                self._each_on_its_own(own)
                continue
            for lane, norm in zip(own, norms, strict=True):
                self.hub.answer(lane, norm)

    def serve_step(self, lanes: list[LoopLane]) -> None:
        """Lanes step an optimizer."""
        self._calls += 1
        arrays = self._arrays(lanes)
        for array, own in arrays:
            payloads = [_payload(lane) for lane in own]
            with self._failing_for_want_of_memory(own):
                array.step(payloads[0][0], [bare for _, bare in payloads])
            for lane in own:
                trial = lane.trial
                error, trial.lane.error = trial.lane.error, None
                if error is not None:
                    self.hub.answer_error(lane, error)
                else:
                    self.hub.answer(lane, None)
        self._measure(arrays[0][0] if len(arrays) == 1 else None)
        for array, _ in arrays:
            self._settle(array)

    def _measure(self, array: CalledArray | None) -> None:
        """Record the time since the last step, if nothing but steps of one array came between."""
        now = time.perf_counter()
        if array is not None and array.measuring:
            if array.lanes and self._trials[array.lanes[0]].device.type == "cuda":
                torch.cuda.synchronize()
                now = time.perf_counter()
            if self._stepped is not None and self._stepped[0] is array:
                array.record(now - self._stepped[1])
        self._stepped = None if array is None else (array, now)

    def interrupted(self) -> None:
        """What follows is no part of a step: an epoch begins, say."""
        self._stepped = None

    def _check(self, gradient: Tensor) -> None:
        """Called when a backward pass comes to what lanes were handed out."""
        if self._in_backward:
            return
        lane = current_lane()
        if (
            torch.is_grad_enabled()
            and lane is not None
            and not any(graph.rows.are_computed_now() for graph in lane.trial.live_graphs())
        ):
            return  # torch.autograd.grad(..., create_graph=True), which leaves the graph as it is
        raise FusionError(
            "loss.backward() was called on what a prepared model returned. Call hfta_tune.backward(loss) instead: "
            "other trials share the graph."
        )


def _by_array(lanes: Sequence[LoopLane]) -> list[tuple[Any, list[LoopLane]]]:
    """The arrays of lanes, each with those of the lanes that it has."""
    found: dict[int, tuple[Any, list[LoopLane]]] = {}
    for lane in lanes:
        found.setdefault(id(lane.trial.array), (lane.trial.array, []))[1].append(lane)
    return list(found.values())


def _payload(lane: LoopLane) -> Any:
    assert lane.request is not None
    return lane.request.payload


def _payload_key(lane: LoopLane) -> bool:
    assert lane.request is not None
    return bool(lane.request.key)


def _roots(losses: Sequence[tuple[Tensor, float]]) -> tuple[list[Tensor], list[Tensor]]:
    """Where backward passes begin, and with what gradients: losses that were handed out of one tensor begin there."""
    roots: list[Tensor] = []
    weights: list[Tensor] = []
    wholes: dict[int, tuple[Tensor, dict[int, float]]] = {}
    for loss, scale in losses:
        handed, row = part_of(loss) or (None, 0)
        if handed is not None and handed.whole.dim() == 1 and row not in wholes.get(id(handed), (None, ()))[1]:
            wholes.setdefault(id(handed), (handed.whole, {}))[1][row] = scale
        else:
            roots.append(loss)
            weights.append(torch.full_like(loss, scale))
    for whole, rows in wholes.values():
        roots.append(whole)
        if len(rows) == len(whole) and len(set(rows.values())) == 1:
            weights.append(torch.full_like(whole, next(iter(rows.values()))))
        else:
            weight = [rows.get(row, 0.0) for row in range(len(whole))]
            weights.append(torch.tensor(weight, dtype=whole.dtype, device=whole.device))
    return roots, weights
