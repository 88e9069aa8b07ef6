"""The hub: the lanes' own loops, each in a greenlet, brought together where they ask for the same thing."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import logging
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from hfta_tune.loops._errors import copy_of_error
from hfta_tune.loops._modes import Modes
from hfta_tune.loops._threads import release_threads

__all__ = ["Ended", "Hub", "LoopLane", "Request", "current_lane"]

logger = logging.getLogger(__name__)

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_SECONDS_OF_SILENCE = 60.0
_seed = torch.default_generator.initial_seed
# A lane at the beginning of an epoch waits for the others to come there, but not for ever.
_MOST_PASSES = 16
_MOST_REFUSALS = 100


class _LaneGreenlet(greenlet):
    lane: LoopLane | None = None


def current_lane() -> LoopLane | None:
    """The lane whose own code runs now, or None outside fused runs."""
    return getattr(getcurrent(), "lane", None)


@dataclass(slots=True)
class Request:
    """What a lane waits for.

    Attributes:
        kind: Who carries it out.
        key: Lanes with equal kind and key are served together.
        stage: Of several, those of a lower stage are served first.
        payload: What the lane gives.
        opens: Whether lanes begin an epoch with it: so they wait for others that may come.
        trains: Whether gradients are on in that epoch.
        length: How long that epoch is, in batches, as far as is known.
    """

    kind: Callable[[list[LoopLane]], None]
    key: Hashable
    stage: int
    payload: Any
    opens: bool = False
    trains: bool = True
    length: float = 0.0


class _Raise:
    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class Ended:
    """How a lane's function ended: with its value, or with what it raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class _Company:
    """Lanes that go through an epoch together."""

    turns: int = 0


@dataclass(eq=False)
class LoopLane:
    """A lane whose trial has a loop of its own.

    Attributes:
        name: The trial's name, for messages.
        hub: Whose lane it is.
        function: What it runs.
        context: The context variables that it begins with.
        greenlet: In what it runs, once it has begun.
        request: What it waits for.
        modes: The modes of torch in which it waits.
        parked: What it was parked with; it goes on only when it is told to.
        ended: How its function ended.
        trial: What the lane trains, once its code has prepared something.
        session: What a front end keeps with it.
        company: With whom it goes through an epoch.
        in_epoch: Whether it is in the middle of one.
        has_epochs: Whether it has ever begun one.
        batch: How many batches of the epoch it has read, or how often its optimizers have stepped.
        operations: What it has asked for since the last batch.
        passes: How often others were served while it waited to begin an epoch.
        random_state: torch's random state as the lane's own code has seeded it, or None.
    """

    name: str
    hub: Hub
    function: Callable[[], Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    greenlet: greenlet | None = None
    request: Request | None = None
    modes: Modes | None = None
    parked: Any = None
    is_parked: bool = False
    ended: Ended | None = None
    trial: Any = None
    session: Any = None
    company: _Company = field(default_factory=_Company)
    in_epoch: bool = False
    has_epochs: bool = False
    batch: int = 0
    operations: int = 0
    passes: int = 0
    random_state: torch.Tensor | None = None
    _epochs: list[tuple[Any, _Company, int]] = field(default_factory=list)
    _result: Any = None

    def wait(self, request: Request) -> Any:
        """Let the hub carry out a request together with those of other lanes; return its result.

        Raises:
            Exception: what the hub raises in this lane.
        """
        hub = self.hub
        hub.keep_random_state(self)
        self.request = request
        self.operations += 1
        self.modes = modes = Modes.set_aside(hub.function_modes, hub.dispatch_modes)
        if modes is None:
            result = hub.go_on()
        else:
            try:
                result = hub.go_on()
            finally:
                self.modes = None
                modes.take_up()
        if type(result) is _Raise:
            raise result.error
        return result

    def park(self, value: Any) -> Any:
        """Stop here until `Hub.wake`, and return what that gives."""
        self.parked, self.is_parked = value, True
        self.hub.stopped.append(self)
        return self.wait(_PARKED)

    def next_batch(self) -> None:
        """Its code has gone on to the next batch, or its optimizers have stepped."""
        self.batch += 1
        self.operations = 0

    def begin_epoch(self, epoch: Any, company: _Company) -> None:
        """It goes through an epoch with others, perhaps in the middle of another one."""
        self._epochs.append((epoch, self.company, self.batch))
        self.company, self.in_epoch, self.has_epochs = company, True, True
        self.batch = self.operations = self.passes = 0

    def end_epoch(self, epoch: Any) -> None:
        """It has left an epoch; which is not always the one that it began last."""
        for number, (own, company, batch) in enumerate(self._epochs):
            if own is epoch:
                del self._epochs[number]
                if number < len(self._epochs):
                    inner, _, its_batch = self._epochs[number]
                    self._epochs[number] = inner, company, its_batch
                else:
                    self.company, self.batch = company, batch
                break
        self.in_epoch = bool(self._epochs)

    def place(self) -> str:
        """Where its own code is: file, line and function."""
        if self.greenlet is None:
            return "not begun"
        frame: FrameType | None = self.greenlet.gr_frame
        if frame is None:  # it is the one that runs
            frame = sys._current_frames().get(self.hub.thread)
        return place_in_own_code(frame)


def place_in_own_code(frame: FrameType | None) -> str:
    """The innermost frame that is neither of this package nor of torch."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, _TORCH)) and "/greenlet/" not in name:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "no line of its own code"


class _Surroundings:
    """What torch keeps for each thread, of the thread that makes this."""

    def __init__(self) -> None:
        self._device = torch.get_default_device()
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def take_over(self) -> None:
        """Give it to this thread."""
        if self._device != torch.get_default_device():
            torch.set_default_device(self._device)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)


def _nothing(lanes: list[LoopLane]) -> None:
    raise AssertionError("a parked lane is not served")


_PARKED = Request(_nothing, "parked", 0, None)


class Hub:
    """Runs the lanes' functions in greenlets of a thread of its own, and serves what they ask for.

    When all of them wait, those that ask for the same thing are served together. Nobody waits for ever: where lanes
    ask for different things, one group after the other is served, such that those behind catch up.

    An error of torch notes the C++ stack that it comes from. Below a greenlet's own stack lies that of the thread, so
    each greenlet is begun and resumed from the same depth of it: in a thread that does nothing else.

    Args:
        silence: Seconds without a sign of any lane after which a log line says where the lanes are.
    """

    def __init__(self, *, silence: float = _SECONDS_OF_SILENCE) -> None:
        self.greenlet: Any = None
        self.thread = 0
        self.lanes: list[LoopLane] = []
        self.served = 0
        self.running: LoopLane | None = None
        self.stopped: list[LoopLane] = []
        self.function_modes = self.dispatch_modes = 0
        self.fusion: Any = None
        self._ready: deque[LoopLane] = deque()
        # Two hubs have two streams, and the same seed of the caller gives the same ones.
        self._seeds = int(torch.randint(2**62, ()))
        self._mark_seed = -1
        self._stream: torch.Tensor | None = None
        self._watch = _Watch(weakref.ref(self), silence)
        self._commands: queue.SimpleQueue[tuple[bool, Future[list[LoopLane]]] | None] | None = None

    def start(self, name: str, function: Callable[[], Any]) -> LoopLane:
        """Give a trial a lane; its function begins with the next `run`."""
        lane = LoopLane(name, self, function)
        # It is as far as those that are least far.
        lane.company.turns = min((other.company.turns for other in self.lanes), default=0)
        lane.batch = min((other.batch for other in self.lanes if not other.in_epoch), default=0)
        self.lanes.append(lane)
        self._ready.append(lane)
        return lane

    def wake(self, lane: LoopLane, value: Any = None) -> None:
        """Let a parked lane go on."""
        lane.is_parked, lane.parked = False, None
        self.answer(lane, value)

    def run(self) -> list[LoopLane]:
        """Run until at least one lane has ended or is parked, or none is left to run; return those."""
        return self._in_thread(serve=True)

    def stop(self, lane: LoopLane) -> None:
        """End a lane's function where it waits, as if it had been killed there; its finally clauses run."""
        others, self._ready = self._ready, deque()
        if lane.ended is None and lane.greenlet is not None:
            lane.is_parked = False
            # What it asks for in its finally clauses is refused, too.
            for _ in range(_MOST_REFUSALS):
                self.answer_error(lane, GreenletExit())
                self._in_thread(serve=False)
                if lane.ended is not None:
                    break
        self._ready = deque(own for own in others if own is not lane)
        if lane in self.stopped:
            self.stopped.remove(lane)
        self._forget(lane)

    def close(self) -> None:
        """Stop all lanes."""
        for lane in list(self.lanes):
            self.stop(lane)
        self._watch.stop()
        if self._commands is not None:
            self._commands.put(None)
            self._commands = None

    # The thread

    def _in_thread(self, *, serve: bool) -> list[LoopLane]:
        """Let the hub's thread give the lanes their turns; Ctrl-C ends the function of the lane that runs."""
        if self._commands is None:
            self._commands = queue.SimpleQueue()
            work = functools.partial(self._work, self._commands, _Surroundings())
            thread = threading.Thread(target=work, name="hfta_tune loops", daemon=True)
            thread.start()
            self.thread = thread.ident or 0
        done: Future[list[LoopLane]] = Future()
        release_threads()
        self._commands.put((serve, done))
        while True:
            try:
                return done.result()
            except KeyboardInterrupt:
                if done.done():
                    raise
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread), ctypes.py_object(KeyboardInterrupt)
                )

    def _work(self, commands: Any, surroundings: _Surroundings) -> None:
        self.greenlet = getcurrent()
        surroundings.take_over()
        self.function_modes = torch._C._len_torch_function_stack()
        self.dispatch_modes = torch._C._len_torch_dispatch_stack()
        while True:
            try:
                command = commands.get()
                if command is None:
                    return
                serve, done = command
                try:
                    stopped = self._turns(serve)
                    release_threads()
                    done.set_result(stopped)
                except BaseException as error:
                    done.set_exception(error)
            except KeyboardInterrupt:
                continue  # it came too late for any lane

    def _turns(self, serve: bool) -> list[LoopLane]:
        outside = torch.get_rng_state()
        if self._stream is None:
            self._mark()
        else:
            torch.set_rng_state(self._stream)
        try:
            while True:
                while self._ready:
                    self._resume_next()
                self.running = None
                if self.stopped:
                    return self._take_stopped()
                waiting = [lane for lane in self.lanes if not lane.is_parked]
                if not waiting or not serve:
                    return []
                self._serve(waiting)
        finally:
            self._stream = torch.get_rng_state()
            torch.set_rng_state(outside)

    def _resume_next(self) -> None:
        lane = self._ready.popleft()
        if lane.greenlet is None:
            lane.greenlet = _LaneGreenlet(functools.partial(self._run_lane, lane), self.greenlet)
            lane.greenlet.gr_context = lane.context
            lane.greenlet.lane = lane
        result, lane._result, lane.request = lane._result, None, None
        self.running = lane
        lane.greenlet.switch(result)

    def _run_lane(self, lane: LoopLane, _: Any) -> None:
        try:
            lane.ended = Ended(value=lane.function())
        except BaseException as error:
            lane.ended = Ended(error=error)
        self.stopped.append(lane)

    def go_on(self) -> Any:
        """Let the next lane run that has what it asked for, else the hub; returns when the caller's turn comes."""
        if not self._ready or self._ready[0].greenlet is None:
            return self.greenlet.switch()
        lane = self._ready.popleft()
        result, lane._result, lane.request = lane._result, None, None
        self.running = lane
        assert lane.greenlet is not None
        return lane.greenlet.switch(result)

    def _take_stopped(self) -> list[LoopLane]:
        stopped = list(self.stopped)
        self.stopped.clear()
        for lane in stopped:
            if lane.ended is not None:
                self.keep_random_state(lane)
                self._forget(lane)
        return stopped

    def answer(self, lane: LoopLane, value: Any) -> None:
        """Give a waiting lane its result."""
        lane._result = value
        self._ready.append(lane)

    def answer_error(self, lane: LoopLane, error: BaseException) -> None:
        """Raise an error in a waiting lane."""
        self.answer(lane, _Raise(error))

    def _serve(self, waiting: Sequence[LoopLane]) -> None:
        group = self._choose(waiting)
        request = group[0].request
        assert request is not None
        self.served += 1
        for company in {lane.company for lane in group}:
            company.turns += 1
        try:
            request.kind(group)
        except Exception as error:
            for lane in group:
                if lane not in self._ready:
                    self.answer_error(lane, copy_of_error(error))

    def _choose(self, waiting: Sequence[LoopLane]) -> list[LoopLane]:
        kind, key = _request_of(waiting[0]).kind, _request_of(waiting[0]).key
        for lane in waiting:
            request = lane.request
            if request.kind != kind or request.key != key:  # type: ignore[union-attr]
                break
        else:
            return list(waiting)
        groups: dict[Hashable, list[LoopLane]] = {}
        for lane in waiting:
            assert lane.request is not None
            groups.setdefault((lane.request.kind, lane.request.key), []).append(lane)
        opening = [group for group in groups.values() if _request_of(group[0]).opens]
        others = [group for group in groups.values() if not _request_of(group[0]).opens]
        # Who is in the middle of an epoch, or between two, will come here too; who has none need not be waited for.
        if opening and (not any(lane.has_epochs for group in others for lane in group) or _patience_is_over(opening)):
            chosen = min(opening, key=_rank_of_opening)
        else:
            chosen = min(others, key=_rank)
        for group in opening:
            if group is not chosen:
                for lane in group:
                    lane.passes += 1
        return chosen

    def _forget(self, lane: LoopLane) -> None:
        if lane in self.lanes:
            self.lanes.remove(lane)
        if lane.trial is not None:
            lane.trial.leave()

    def join(self, epochs: Mapping[LoopLane, Any]) -> None:
        """These lanes begin their epochs together."""
        company = _Company(min(lane.company.turns for lane in epochs))
        for lane, epoch in epochs.items():
            lane.begin_epoch(epoch, company)

    def where(self) -> str:
        """Where every lane's own code is, a line each."""
        return "\n".join(f"  {lane.name}: {lane.place()}" for lane in list(self.lanes))

    # Random numbers

    def random_state_of(self, lane: LoopLane) -> torch.Tensor | None:
        """The random state of torch as a running lane's own code has seeded it, or None."""
        self.keep_random_state(lane)
        return lane.random_state

    def keep_random_state(self, lane: LoopLane) -> None:
        """Keep what a lane's own code has seeded as the lane's, and go on with the stream that all lanes share."""
        if _seed() != self._mark_seed:
            lane.random_state = torch.get_rng_state()
            self._mark()

    def _mark(self) -> None:
        """Seed the shared stream such that a seed of the lanes' own code shows."""
        self._seeds += 1
        self._mark_seed = self._seeds
        torch.default_generator.manual_seed(self._mark_seed)


def _request_of(lane: LoopLane) -> Request:
    assert lane.request is not None
    return lane.request


def _rank(group: Sequence[LoopLane]) -> tuple[int, int, int, int]:
    behind = min(group, key=lambda lane: (lane.company.turns, lane.batch, lane.operations))
    return behind.company.turns, behind.batch, behind.operations, _request_of(group[0]).stage


def _rank_of_opening(group: Sequence[LoopLane]) -> tuple[int, bool, float]:
    """Who has waited long comes first; else who validates, to train with the others then."""
    return -(_passes(group) // _MOST_PASSES), _request_of(group[0]).trains, _length(group)


def _passes(group: Sequence[LoopLane]) -> int:
    return max(lane.passes for lane in group)


def _length(group: Sequence[LoopLane]) -> float:
    return _request_of(group[0]).length


def _patience_is_over(opening: Sequence[Sequence[LoopLane]]) -> bool:
    """Whether lanes have waited to begin an epoch for longer than others can be expected to need for theirs."""
    longest = max(map(_length, opening))
    most = 64 + 16 * longest
    return any(lane.passes > most for group in opening for lane in group)


class _Watch:
    """Says in the log where the lanes are when nothing has gone on for long."""

    def __init__(self, hub: weakref.ref[Hub], silence: float) -> None:
        self._hub = hub
        self._silence = silence
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="hfta_tune watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        seen, since, said = -1, time.monotonic(), False
        while not self._stopped.wait(self._silence / 10):
            hub = self._hub()
            if hub is None:
                return
            if hub.served != seen or hub.running is None:
                seen, since, said = hub.served, time.monotonic(), False
            elif not said and time.monotonic() - since > self._silence:
                said = True
                self._say(hub, time.monotonic() - since)
            del hub

    @staticmethod
    def _say(hub: Hub, seconds: float) -> None:
        running = hub.running
        name = "a lane" if running is None else running.name
        logger.warning(
            "For %.0f s, %s has been running its own code, and %d other lanes wait: they share a thread, so code "
            "that waits for another trial waits for ever. Where they are:\n%s",
            seconds,
            name,
            max(0, len(hub.lanes) - 1),
            hub.where(),
        )
