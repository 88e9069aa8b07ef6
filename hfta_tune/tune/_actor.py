"""The worker process: hosts trials as Tune trainables whose rounds are trained as fused arrays."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from ray.air.constants import TIME_THIS_ITER_S
from ray.exceptions import RayTaskError
from ray.tune.result import TRIAL_INFO

from hfta_tune._doubling import Memory
from hfta_tune.rounds import Round
from hfta_tune.trainable import FusedTrainable, HostedTrainable
from hfta_tune.tune._calls import Call, CallQueue
from hfta_tune.tune._report import RoundReport, report_on
from hfta_tune.tune._sealed import Sealed, portable
from hfta_tune.worker import RoundAbandoned, Worker

__all__ = ["WorkerActor"]

logger = logging.getLogger(__name__)

Outcome: TypeAlias = dict[str, Any] | Exception
"""A trial's metrics of a round, or what its own code raised."""

_HOOKS = {"save": "save_checkpoint", "restore": "load_checkpoint", "reset": "reset_config"}


def _use_optimizers_quickly() -> None:
    """Spare the first optimizer of the process an import of torch._dynamo, 1.5 s, only to switch it off.

    Some methods of Optimizer are wrapped so that dynamo does not trace them; as long as nothing has imported
    dynamo, nothing can.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if function is not None and not hasattr(function, "__dynamo_disable"):
            setattr(function, "__dynamo_disable", function)


class WorkerActor:
    """Owns one accelerator, or some CPU cores, and hosts up to `lanes` trials.

    Each trial is an instance of its own trainable class, so that Tune's bookkeeping of results and
    checkpoints is Tune's own code. Calls are numbered and carried out one by one in that order, in a
    thread of their own; so the process answers `describe` while a round runs.

    A round's answer sent, its lanes train on as if Tune had said CONTINUE: the accelerator does not wait for the
    driver. Until the driver asks for that next round, the lanes' state of the last one is held, so that what is
    saved is the state of what was reported. Calls that arrive meanwhile are carried out between two steps.

    Args:
        lanes: B.
        cpus: CPUs that the worker was given; it computes on as many threads.
        gpus: GPUs that the worker was given.
        audit: Whether the first step of every array is audited.
        run_ahead: Whether it begins rounds before the driver asks for them.
        memory_every_s: How often to tell with a round how much of the device's memory is in use, in seconds: to
            measure takes about one millisecond. None for never.
        name: What it is called in Ray's logs and pages.
    """

    def __init__(
        self,
        lanes: int,
        cpus: float,
        gpus: float,
        audit: bool = False,
        run_ahead: bool = True,
        memory_every_s: float | None = None,
        name: str = "hfta_tune",
    ) -> None:
        from hfta_tune.tune._executor import memory_in_use, prepare_worker_process

        self._name = name
        prepare_worker_process()
        _use_optimizers_quickly()
        torch.set_num_threads(max(1, int(cpus)))
        on_gpu = gpus > 0 and torch.cuda.is_available()
        self._worker = Worker(lanes, device="cuda" if on_gpu else "cpu", audit=audit)
        self._memory_in_use = functools.partial(memory_in_use, on_gpu)
        self._memory_every_s = memory_every_s
        self._memory_due = 0.0
        self._at_start = 0 if memory_every_s is None else self._memory_in_use()[0]
        self._trainables: dict[int, HostedTrainable] = {}
        self._errors: dict[int, Exception] = {}
        self._sealed: dict[int, Sealed] = {}
        self._classes: dict[int, type[HostedTrainable]] = {}
        self._ahead = _Ahead() if run_ahead else None
        self._calls = CallQueue()
        threading.Thread(target=self._work, name="hfta_tune", daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    async def submit(self, number: int, method: str, *arguments: Any) -> Any:
        """Carry out call `number`, after all calls with lower numbers."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def answer(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the process is being shut down
                loop.call_soon_threadsafe(_hand_over, outcome, result, error)

        self._calls.put(number, Call(method, arguments, answer))
        return await outcome

    async def describe(self) -> dict[str, Any]:
        """Return what the worker does now; answered at once, also in the middle of a round."""
        return {"pid": os.getpid(), "threads": torch.get_num_threads(), **self._worker.describe()}

    # The thread that carries out the calls

    def _work(self) -> None:
        while True:
            self._carry_out(self._calls.take())
            if self._ahead is not None and self._ahead.next and self._calls.peek() is None:
                self._run_ahead(self._ahead)

    def _carry_out(self, call: Call) -> None:
        try:
            result = getattr(self, f"_{call.method}")(*call.arguments)
        except BaseException as error:
            call.answer(None, portable(error))
        else:
            call.answer(result, None)

    def _define(self, key: int, kind: Sealed) -> None:
        self._sealed[key] = kind

    def _resize(self, lanes: int) -> None:
        self._worker.resize(lanes)

    def _create(self, lane: int, key: int, arguments: Sealed) -> None:
        """Give a trial its lane. What goes wrong is told to the trial's first call that awaits an answer."""
        try:
            if key not in self._classes:
                self._classes[key] = self._sealed[key].open()
            config, storage = arguments.open()
            with self._worker.running.hook("setup", [config[TRIAL_INFO].trial_id]):
                trainable = self._classes[key](config=config, storage=storage)
            self._trainables[lane] = trainable
            trainable._join(self._worker, trainable.trial_id)
            logger.info("Trial %s takes a lane.", trainable.trial_id)
        except Exception as error:
            self._errors[lane] = error

    def _call(self, lane: int, method: str, given: Sealed) -> Any:
        """Call a method of a lane's trainable; `stop` also frees the lane."""
        if self._ahead is not None and method in _CHANGING:
            self._ahead.withdraw(lane)
        if method == "stop":
            self._errors.pop(lane, None)
            trainable = self._trainables.pop(lane, None)
            return self._stop(trainable) if trainable is not None else None
        if method == "reset":
            self._errors.pop(lane, None)
        elif lane in self._errors:
            raise self._errors[lane]
        trainable = self._trainables[lane]
        arguments, keywords = given.open()
        with self._worker.running.hook(_HOOKS.get(method, method), [trainable._lane_name]):
            return getattr(trainable, method)(*arguments, **keywords)

    def _stop(self, trainable: HostedTrainable) -> None:
        logger.info("Trial %s leaves its lane.", trainable._lane_name)
        try:
            with self._worker.running.hook("cleanup", [trainable._lane_name]):
                trainable.stop()
        finally:
            trainable._leave()  # also when a cleanup of the user's raises, or does not call this class's

    # Rounds

    def _round(
        self, lanes: Sequence[int], rounds_left: float | None, ending: Collection[int] = ()
    ) -> tuple[list[dict[str, Any] | RayTaskError | None], RoundReport]:
        """Give the results of the next round of the lanes' trials.

        Args:
            lanes: The lanes.
            rounds_left: About how many rounds the worker has before it, where that is known.
            ending: Those of the lanes that end with this result.

        Returns:
            For each lane its result, what its own code raised, or None if it takes part in the next round
            only; and what the driver needs to know of the round.
        """
        ready = {} if self._ahead is None else self._ahead.take(lanes)
        own: Round | None = None
        if ready:
            assert self._ahead is not None
            own = self._ahead.round
            self._worker.release(self._trainables[lane]._lane_name for lane in ready)
            seconds = max(own for _, own in ready.values())
        else:
            begin = time.perf_counter()
            sound = [lane for lane in lanes if lane not in self._errors]
            outcomes = self._train(sound, rounds_left)
            own = self._worker.last_round if sound else None
            seconds = time.perf_counter() - begin
            ready = {lane: (outcomes[lane], seconds) for lane in sound}
            if self._ahead is not None:
                self._ahead.seconds = seconds
        results = [
            self._report(lane, ready.get(lane)) if lane in ready or lane in self._errors else None for lane in lanes
        ]
        if self._ahead is not None and self._may_run_ahead():
            reported = [lane for lane, result in zip(lanes, results, strict=True) if isinstance(result, dict)]
            owed = [lane for lane, result in zip(lanes, results, strict=True) if result is None]
            self._ahead.plan(reported, owed, ending, rounds_left)
        hosted = [
            self._trainables[lane]._lane_name if lane in ready and lane not in self._errors else None for lane in lanes
        ]
        return results, report_on(self._worker, hosted, len(ready), seconds, own, self._memory())

    def _memory(self) -> Memory | None:
        """The memory of the device, where it is time to tell it."""
        if self._memory_every_s is None or time.monotonic() < self._memory_due:
            return None
        self._memory_due = time.monotonic() + self._memory_every_s
        return Memory(*self._memory_in_use(), self._at_start)

    def _train(self, lanes: Iterable[int], rounds_left: float | None, **more: Any) -> dict[int, Outcome]:
        names = {self._trainables[lane]._lane_name: lane for lane in lanes}
        outcomes = self._worker.run_round(list(names), rounds_left=rounds_left, **more)
        return {names[name]: outcome for name, outcome in outcomes.items()}

    def _report(self, lane: int, trained: tuple[Outcome, float] | None) -> dict[str, Any] | RayTaskError:
        """A lane's result; or an error, of this round if it was trained, else of an earlier one."""
        error = self._errors.get(lane)
        if error is None:
            assert trained is not None
            outcome, seconds = trained
            if isinstance(outcome, dict):
                trainable = self._trainables[lane]
                trainable._lane_round = {TIME_THIS_ITER_S: seconds, **outcome}
                return trainable.train()
            self._errors[lane] = error = outcome
            logger.info("Trial %s failed: %r", self._trainables[lane]._lane_name, error)
        return RayTaskError("train", "".join(traceback.format_exception(error)), portable(error))

    def _may_run_ahead(self) -> bool:
        """Whether what a trainable saves is the worker's state alone, which can be held."""
        return all(
            getattr(type(trainable), method) is getattr(FusedTrainable, method)  # of FusedTrainables only
            for trainable in self._trainables.values()
            for method in ("save_checkpoint", "load_checkpoint", "step", "train", "save", "restore")
        )

    def _run_ahead(self, ahead: _Ahead) -> None:
        """Train the next round before the driver asks for it."""
        lanes = ahead.begin()
        held = {lane: self._trainables[lane]._lane_name for lane in lanes}
        if not self._worker.hold(held.values()):
            self._ahead = None
            return
        rounds_left = None if ahead.rounds_left is None else max(0.0, ahead.rounds_left - 1)
        try:
            outcomes = self._train(lanes, rounds_left, between_steps=functools.partial(self._attend_to_calls, ahead))
        except RoundAbandoned:
            left = ahead.abandon()
            self._worker.rewind(held[lane] for lane in left)
        except Exception as error:  # not of one trial: all of the round have it
            ahead.end(dict.fromkeys(lanes, error))
        else:
            ahead.end(outcomes, self._worker.last_round)

    def _attend_to_calls(self, ahead: _Ahead) -> None:
        """Carry out what the driver asks for, between two steps of a round that it has not asked for yet."""
        while (call := self._calls.peek()) is not None:
            if call.method == "round":
                if self._worker.can_rewind and ahead.is_better_begun_anew(call.arguments[0]):
                    raise RoundAbandoned
                return
            self._carry_out(self._calls.take())
            if not ahead.running:
                raise RoundAbandoned


_CHANGING = frozenset({"stop", "reset", "restore", "load_checkpoint"})
"""Calls after which a lane's trial is no longer in the state that its round began with."""


class _Ahead:
    """The round that a worker runs before it is asked for: whose it is and what came of it.

    Attributes:
        next: The lanes that train on if the driver has nothing else to say.
        running: The lanes of the round that runs now.
        seconds: How long a round takes.
        rounds_left: About how many rounds the worker has before it, where that is known.
        round: What it did in the round, once that has been trained.
    """

    def __init__(self) -> None:
        self.next: set[int] = set()
        self.running: set[int] = set()
        self.seconds = 0.0
        self.rounds_left: float | None = None
        self.round: Round | None = None
        self._ready: dict[int, tuple[Outcome, float]] = {}
        self._begin = 0.0

    def withdraw(self, lane: int) -> None:
        """A lane's trial changes: what it has trained since its last result is void."""
        self.next.discard(lane)
        self.running.discard(lane)
        self._ready.pop(lane, None)

    def take(self, lanes: Iterable[int]) -> dict[int, tuple[Outcome, float]]:
        """Return the outcomes, with the round's seconds, of those of the lanes that have trained ahead."""
        return {lane: self._ready.pop(lane) for lane in lanes if lane in self._ready}

    def plan(
        self, reported: Collection[int], owed: Collection[int], ending: Collection[int], rounds_left: float | None
    ) -> None:
        """Say which lanes have just given their results, which wait for a round, and which end now."""
        staying = set(reported).difference(ending)
        # Trials of the lanes that end make room for others, which join where a round begins.
        self.next = staying.union(owed) if len(staying) > len(ending) else set()
        self.rounds_left = rounds_left

    def begin(self) -> set[int]:
        """The round begins; return its lanes."""
        self.running, self.next = self.next, set()
        self._begin = time.perf_counter()
        return set(self.running)

    def end(self, outcomes: dict[int, Outcome], own: Round | None = None) -> None:
        """The round has been trained to its end."""
        self.round = own
        self.seconds = time.perf_counter() - self._begin
        self._ready.update((lane, (outcomes[lane], self.seconds)) for lane in self.running)
        self.running = set()

    def abandon(self) -> set[int]:
        """The round was given up; return the lanes that are still its."""
        left, self.running = self.running, set()
        return left

    def is_better_begun_anew(self, asked: Collection[int]) -> bool:
        """Whether less is lost if the lanes that join need not wait for the end of this round.

        Going on leaves the joining lanes idle for the rest of it; beginning anew trains the others twice for
        what has gone of it.
        """
        gone = min(1.0, (time.perf_counter() - self._begin) / self.seconds) if self.seconds else 1.0
        joining = len(set(asked) - self.running - self._ready.keys())
        return joining * (1 - gone) > len(self.running) * gone


def _hand_over(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.cancelled():
        return
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
