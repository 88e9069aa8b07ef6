"""The worker process: hosts trials as Tune trainables whose rounds are trained as fused arrays."""

from __future__ import annotations

import asyncio
import functools
import heapq
import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from ray.air.constants import TIME_THIS_ITER_S
from ray.exceptions import RayTaskError
from ray.tune.result import TRIAL_INFO

from hfta_tune.trainable import FusedTrainable
from hfta_tune.tune._sealed import Sealed, portable, portably
from hfta_tune.worker import Worker

__all__ = ["WorkerActor"]

_HOOKS = {"save": "save_checkpoint", "restore": "load_checkpoint", "reset": "reset_config"}


def _make_optimizers_quickly() -> None:
    """Spare the first optimizer of the process an import of torch._dynamo, 1.5 s, only to switch it off.

    Optimizer.add_param_group is wrapped so that dynamo does not trace it; as long as nothing has imported dynamo,
    nothing can.
    """
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is not None and "torch._dynamo" not in sys.modules and not hasattr(function, "__dynamo_disable"):
        setattr(function, "__dynamo_disable", function)


class WorkerActor:
    """Owns one accelerator, or some CPU cores, and hosts up to `lanes` trials.

    Each trial is an instance of its own trainable class, so that Tune's bookkeeping of results and
    checkpoints is Tune's own code. Calls are numbered and carried out one by one in that order, in a
    thread of their own; so the process answers `describe` while a round runs.

    Args:
        lanes: B.
        cpus: CPUs that the worker was given; it computes on as many threads.
        gpus: GPUs that the worker was given.
        audit: Whether the first step of every array is audited.
    """

    def __init__(self, lanes: int, cpus: float, gpus: float, audit: bool = False) -> None:
        from hfta_tune.tune._executor import prepare_worker_process

        prepare_worker_process()
        _make_optimizers_quickly()
        torch.set_num_threads(max(1, int(cpus)))
        on_gpu = gpus > 0 and torch.cuda.is_available()
        self._worker = Worker(lanes, device="cuda" if on_gpu else "cpu", audit=audit)
        self._trainables: dict[int, FusedTrainable] = {}
        self._errors: dict[int, Exception] = {}
        self._sealed: dict[int, Sealed] = {}
        self._classes: dict[int, type[FusedTrainable]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hfta_tune")
        self._early: list[tuple[int, str, tuple[Any, ...], asyncio.Future[Any]]] = []
        self._next = 0

    async def submit(self, number: int, method: str, *arguments: Any) -> Any:
        """Carry out call `number`, after all calls with lower numbers."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        heapq.heappush(self._early, (number, method, arguments, outcome))
        while self._early and self._early[0][0] == self._next:
            _, name, own, waiting = heapq.heappop(self._early)
            self._next += 1
            running = loop.run_in_executor(self._thread, portably(getattr(self, f"_{name}")), *own)
            running.add_done_callback(functools.partial(_hand_over, waiting))
        return await outcome

    async def describe(self) -> dict[str, Any]:
        """Return what the worker does now; answered at once, also in the middle of a round."""
        return {"pid": os.getpid(), "threads": torch.get_num_threads(), **self._worker.describe()}

    def _define(self, key: int, kind: Sealed) -> None:
        self._sealed[key] = kind

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
        except Exception as error:
            self._errors[lane] = error

    def _call(self, lane: int, method: str, given: Sealed) -> Any:
        """Call a method of a lane's trainable; `stop` also frees the lane."""
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

    def _stop(self, trainable: FusedTrainable) -> None:
        try:
            with self._worker.running.hook("cleanup", [trainable._lane_name]):
                trainable.stop()
        finally:
            trainable._leave()  # also when a cleanup of the user's raises, or does not call this class's

    def _round(
        self, lanes: Sequence[int], rounds_left: float | None
    ) -> tuple[list[dict[str, Any] | RayTaskError], int]:
        """Train one round of the lanes' trials.

        Returns:
            For each its result, or what its own code raised; and how many trials fit into the worker.
        """
        begin = time.perf_counter()
        sound = [lane for lane in lanes if lane not in self._errors]
        names = [self._trainables[lane]._lane_name for lane in sound]
        outcomes = self._worker.run_round(names, rounds_left=rounds_left)
        seconds = time.perf_counter() - begin
        results: list[dict[str, Any] | RayTaskError] = []
        for lane in lanes:
            error = self._errors.get(lane)
            if error is None:
                trainable = self._trainables[lane]
                outcome = outcomes[trainable._lane_name]
                if isinstance(outcome, dict):
                    trainable._lane_round = {TIME_THIS_ITER_S: seconds, **outcome}
                    results.append(trainable.train())
                    continue
                self._errors[lane] = error = outcome
            results.append(RayTaskError("train", "".join(traceback.format_exception(error)), portable(error)))
        return results, self._worker.fitting_lanes


def _hand_over(waiting: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
    if waiting.cancelled():
        return
    error = done.exception()
    if error is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(done.result())
