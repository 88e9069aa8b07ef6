"""The trial executor: gives each trial of a FusedTrainable a lane in a shared worker instead of a process.

Tune's controller talks to its actor manager. A subclass of that manager takes its place here and hands
out lane handles, so that every scheduler, searcher and callback goes on as before. This is the only
file that touches private names of Ray; tests/tune/test_private_names.py fails when Ray changes them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
import torch
from ray._private.utils import get_system_memory, get_used_memory
from ray.air.execution import ResourceManager, ResourceRequest
from ray.air.execution._internal import RayActorManager, TrackedActor
from ray.air.execution._internal.tracked_actor_task import TrackedActorTask
from ray.exceptions import RayActorError, RayTaskError
from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR
from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE
from ray.tune.experiment import Trial
from ray.tune.experimental.output import IS_NOTEBOOK, AirVerbosity, get_air_verbosity
from ray.tune.registry import _ParameterRegistry
from ray.tune.result import STDERR_FILE, STDOUT_FILE, TRAINING_ITERATION, TRIAL_INFO
from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler, TrialScheduler
from ray.tune.trainable import FunctionTrainable

from hfta_tune._doubling import LaneDoubling
from hfta_tune._kinds import Kinds
from hfta_tune.monitor import Figures, observers_of_experiment
from hfta_tune.packing import Packer, WorkerState
from hfta_tune.rounds import EndReason, Observer, Observers
from hfta_tune.trainable import HostedTrainable
from hfta_tune.tune._actor import WorkerActor
from hfta_tune.tune._logs import DeferredLogs
from hfta_tune.tune._names import named
from hfta_tune.tune._report import RoundReport
from hfta_tune.tune._sealed import Sealed
from hfta_tune.tune._watch import Overdue, UnansweredCalls, Watch

__all__ = ["LaneActorManager", "memory_in_use", "pack_trials_of", "prepare_worker_process"]

logger = logging.getLogger(__name__)

# Between them the driver looks whether a worker has news.
_LOGS_AT_A_TIME = 12
_MEMORY_EVERY_S = 10.0


def pack_trials_of(
    tune_controller: Any, lanes: int | LaneDoubling, *, audit: bool = False, round_timeout_s: float | None = None
) -> LaneActorManager:
    """Make a Tune controller give its FusedTrainable trials lanes; doing it again does nothing.

    Raises:
        TypeError: if the run's scheduler changes the resources of trials.
    """
    controller = getattr(tune_controller, "_tune_controller", tune_controller)
    if isinstance(controller._scheduler_alg, ResourceChangingScheduler):
        raise TypeError(
            "ResourceChangingScheduler cannot wrap HFTAPacker: the trials of a worker share its resources. "
            "Pass the HFTAPacker itself as the scheduler."
        )
    manager = controller._actor_manager
    if not isinstance(manager, LaneActorManager):
        manager = LaneActorManager(resource_manager=manager._resource_manager)
        controller._actor_manager = manager
        manager.pack(
            lanes,
            audit=audit,
            watch=Watch(round_timeout_s),
            trial_of=functools.partial(_trial_of, controller),
            on_trial_place=functools.partial(tell_searchers, controller, "on_trial_place"),
            more_trials_expected=functools.partial(_more_trials_expected, controller),
            pausing=functools.partial(_pausing, controller),
            stopping=functools.partial(_stopping, controller),
            iterations_left=functools.partial(_iterations_left, controller),
            ends_with_next=functools.partial(_ends_with_next, controller),
        )
        manager.observers = _observers_of(controller, manager.figures)
        manager.experiment = controller._storage.experiment_dir_name
        _show_summary(controller, manager)
        manager.upload_observations = functools.partial(_upload_observations, controller)
        controller._callbacks = manager.logs = DeferredLogs(
            controller._callbacks._callbacks, on_trial_end=functools.partial(_tell_end, controller)
        )
    return manager


def _trial_of(controller: Any, tracked: TrackedActor) -> str | None:
    trial = controller._actor_to_trial.get(tracked)
    return None if trial is None else trial.trial_id


def tell_searchers(controller: Any, hook: str, trial_id: str, *arguments: Any) -> None:
    """Call a hook that Tune does not have on the run's searcher, or on the first one inside it that has the hook.

    There are `on_trial_place(trial_id, {"worker": number, "signature": text})`, after a trial's first round in a place,
    and `on_trial_early_stop(trial_id)`, before `on_trial_complete` of a trial that the scheduler stops.
    """
    searcher = getattr(controller._search_alg, "searcher", None)
    while searcher is not None:
        if hasattr(searcher, hook):
            getattr(searcher, hook)(trial_id, *arguments)
            return  # it forwards to the searcher inside it
        searcher = getattr(searcher, "searcher", None)


def _observers_of(controller: Any, figures: Figures) -> Observers:
    storage = controller._storage
    directory = storage.experiment_driver_staging_path
    return Observers([figures, *observers_of_experiment(storage.experiment_dir_name, Path(directory))])


def _show_summary(controller: Any, manager: LaneActorManager) -> None:
    """Add the packer's line to Tune's newer progress reports: they show resources, but no scheduler's debug_string."""
    if get_air_verbosity(AirVerbosity.DEFAULT) is None or IS_NOTEBOOK:
        return
    updater = controller._resource_updater
    resources = updater.debug_string

    def debug_string(total_allocated_resources: dict[str, Any]) -> str:
        return f"{resources(total_allocated_resources)}\n{manager.summary()}"

    updater.debug_string = debug_string


def _upload_observations(controller: Any) -> None:
    """Copy what observers have written to the experiment's storage: Tune does so before it stops the last trials."""
    storage = controller._storage
    for file in Path(storage.experiment_driver_staging_path).glob("hfta_tune_*"):
        destination = f"{storage.experiment_fs_path}/{file.name}"
        try:
            pyarrow.fs.copy_files(str(file), destination, destination_filesystem=storage.storage_filesystem)
        except OSError as error:
            logger.warning("%s lacks the end of the run, because of this error: %s", destination, error)


def tell_early_stop(controller: Any, trial: Trial) -> None:
    """The scheduler stops a trial before its end."""
    controller._actor_manager.stopped_early.add(trial.trial_id)
    tell_searchers(controller, "on_trial_early_stop", trial.trial_id)


def _tell_end(controller: Any, trial: Trial, *, error: bool) -> None:
    manager = controller._actor_manager
    early = trial.trial_id in manager.stopped_early
    manager.stopped_early.discard(trial.trial_id)
    reason: EndReason = "done"
    if error:
        reason = "error"
    elif any(isinstance(value, float) and math.isnan(value) for value in (trial.last_result or {}).values()):
        reason = "nan"
    elif _stopping(controller):
        reason = "stopped"
    elif early:
        reason = "pruned"
    manager.note_end(trial.trial_id, reason)


def _more_trials_expected(controller: Any) -> bool:
    return bool(not controller._search_alg.is_finished() or controller._pending_trials or controller._paused_trials)


def _iterations_left(controller: Any) -> float | None:
    """How many training iterations all trials have before them, if their stopping criteria say so."""
    scheduler = controller._scheduler_alg
    if not isinstance(getattr(scheduler, "base_scheduler", scheduler), FIFOScheduler):
        return None
    left = 0.0
    limits = []
    for trial in controller._trials:
        if not trial.is_finished():
            limits.append(trial.stopping_criterion.get(TRAINING_ITERATION, math.inf))
            left += limits[-1] - trial.run_metadata.last_result.get(TRAINING_ITERATION, 0)
    to_come = controller._search_alg.total_samples - len(controller._trials)
    left += max(0, to_come) * max(limits, default=math.inf)
    return left if math.isfinite(left) else None


def _ends_with_next(controller: Any, tracked: TrackedActor) -> bool:
    """Whether a trial's next result is the last one that its stopping criteria allow."""
    trial = controller._actor_to_trial.get(tracked)
    if trial is None:
        return False
    done = trial.run_metadata.last_result.get(TRAINING_ITERATION, 0)
    return bool(done + 1 >= trial.stopping_criterion.get(TRAINING_ITERATION, math.inf))


def _pausing(controller: Any) -> bool:
    """Whether a trial waits for the save that precedes its pause; schedulers still count it as running."""
    pausing = {t for t, d in controller._cached_trial_decisions.items() if d == TrialScheduler.PAUSE}
    return bool(pausing) and any(trial.trial_id in pausing and trial.is_saving for trial in controller._running_trials)


def _stopping(controller: Any) -> bool:
    """Whether the controller is about to stop the whole experiment, or single trials at somebody's request."""
    return bool(controller._should_stop_experiment or controller._stop_queue or controller._stopper.stop_all())


def memory_in_use(on_gpu: bool) -> tuple[int, int]:
    """Return how many bytes are in use of how many: of the GPU, or of the machine or container."""
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        return total - free, total
    return get_used_memory(), get_system_memory()


def prepare_worker_process() -> None:
    """Adapt Tune's Trainable to a process that hosts many: keep the working directory, share parameters."""
    os.environ[RAY_CHDIR_TO_TRIAL_DIR] = "0"
    os.environ["PL_DISABLE_FORK"] = "1"  # Lightning must not fork in a Ray worker: ray issue 28197
    # tune.with_parameters fetches anew for each trial; lanes share one copy, and so one data set.
    fetch = _ParameterRegistry.get
    fetched: dict[Any, Any] = {}

    def get(self: _ParameterRegistry, key: Any) -> Any:
        place = (key, self.references.get(key))
        if place not in fetched:
            fetched[place] = fetch(self, key)
        return fetched[place]

    setattr(_ParameterRegistry, "get", get)  # noqa: B010 - mypy forbids assigning to a method


@dataclass(eq=False)
class _Worker:
    """A worker as the driver sees it.

    Attributes:
        number: Its number in the packer.
        tracked: The base manager's record of its actor.
        lanes: How many lanes it was told to have.
        actor: The actor's handle, once it has resources.
        ready: Whether its process has started.
        in_round: The train requests of the round that it trains now.
        death: What it died of.
        spared: Those of its trials that are known not to be to blame for that.
        unanswered: The calls that it has not answered, if there is a limit on how long it may take over one.
    """

    number: int
    tracked: TrackedActor
    lanes: int
    actor: Any = None
    ready: bool = False
    in_round: dict[TrackedActor, TrackedActorTask] = field(default_factory=dict)
    death: RayActorError | None = None
    spared: set[TrackedActor] = field(default_factory=set)
    unanswered: UnansweredCalls | None = None
    _calls: int = 0
    _classes: set[int] = field(default_factory=set)

    def send(self, method: str, *arguments: Any, label: str | None = None) -> ray.ObjectRef:
        """Call the worker; it carries out its calls in the order in which they were sent.

        Args:
            method: What it is to do.
            arguments: With what.
            label: What Ray's pages call this; by default the method's name. Ray keeps a series of its metrics for
                each, in the driver's memory and in Prometheus, so it must not name the trial.
        """
        future = self.actor.submit.options(name=label or method).remote(self._calls, method, *arguments)
        self._calls += 1
        if self.unanswered is not None:
            self.unanswered.sent(future)
        return future

    def resize(self, lanes: int) -> None:
        """Send how many lanes it has, where that has changed."""
        if lanes != self.lanes:
            self.lanes = lanes
            self.send("resize", lanes)

    def death_of(self, tracked: TrackedActor) -> RayActorError | None:
        """What a trial's calls fail with if the worker is dead. Tune counts no failure where one was preempted."""
        if self.death is None or tracked not in self.spared:
            return self.death
        return RayActorError(error_msg=str(self.death), preempted=True)

    def define(self, key: int, reference: ray.ObjectRef) -> None:
        """Send a trainable class, once."""
        if key not in self._classes:
            self._classes.add(key)
            self.send("define", key, reference)


@dataclass(eq=False)
class _Lane:
    """A trial's lane: its worker, once it is placed."""

    number: int
    trainable: type
    trial_id: str
    worker: _Worker | None = None
    slot: int | None = None
    place: dict[str, Any] | None = None


class _LaneMethod:
    def __init__(self, lane: _Lane, name: str) -> None:
        self._lane = lane
        self._name = name

    def remote(self, *arguments: Any, **keywords: Any) -> ray.ObjectRef:
        assert self._lane.worker is not None
        given = Sealed((arguments, keywords), f"an argument of {self._name}")
        return self._lane.worker.send("call", self._lane.number, self._name, given, label=self._name)


class _NoMetrics:
    """Answers at once: Tune waits in the driver for the metrics of a trial that has no result yet."""

    def __init__(self, reference: ray.ObjectRef) -> None:
        self._reference = reference

    def remote(self, **keywords: Any) -> ray.ObjectRef:
        return self._reference


class LaneHandle:
    """Stands for a trial's actor handle: `handle.method.remote(...)` calls the trial's own trainable."""

    def __init__(self, lane: _Lane, no_metrics: ray.ObjectRef) -> None:
        self._lane = lane
        self.get_auto_filled_metrics = _NoMetrics(no_metrics)

    def __getattr__(self, name: str) -> _LaneMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return _LaneMethod(self._lane, name)


class _NoResources:
    """What a lane has of its own; its worker holds the resources."""

    class resource_request:
        bundles: tuple[dict[str, float], ...] = ()


class LaneActorManager(RayActorManager):
    """An actor manager that places FusedTrainable trials in lanes of shared workers.

    One call a worker trains a round of all its lanes that ask for it; its results are then handed out
    one by one, as if each trial had had an actor of its own. Other trainables get actors as usual.
    """

    def __init__(self, resource_manager: ResourceManager) -> None:
        super().__init__(resource_manager=resource_manager)
        self._packer = Packer(1)
        self._doubling: LaneDoubling | None = None
        self._kinds = Kinds()
        self._audit = False
        self._watch = Watch()
        self._trial_of: Callable[[TrackedActor], str | None] = lambda tracked: None
        self._on_trial_place: Callable[[str, dict[str, Any]], None] = lambda trial_id, place: None
        self._more_trials_expected: Callable[[], bool] = lambda: False
        self._pausing: Callable[[], bool] = lambda: False
        self._stopping: Callable[[], bool] = lambda: False
        self._iterations_left: Callable[[], float | None] = lambda: None
        self._ends_with_next: Callable[[TrackedActor], bool] = lambda tracked: False
        self._workers: dict[int, _Worker] = {}
        self._worker_actors: set[TrackedActor] = set()
        self._lanes: dict[TrackedActor, _Lane] = {}
        self._lane_numbers = itertools.count()
        self._classes: dict[type, tuple[int, ray.ObjectRef]] = {}
        self._requests: dict[TrackedActor, TrackedActorTask] = {}
        self._started: deque[TrackedActor] = deque()
        self._outcomes: deque[tuple[TrackedActorTask, Any]] = deque()
        self.logs = DeferredLogs([])
        self.figures = Figures()
        self.observers: Observer = self.figures
        self.experiment = ""
        self.upload_observations: Callable[[], None] = lambda: None
        self._said: set[str] = set()
        self._told_waiting = 0
        self._unended: set[str] = set()
        self.stopped_early: set[str] = set()
        self._no_metrics: ray.ObjectRef | None = None
        self._given = 0
        self._driver_seconds = time.thread_time()
        self._told_time = 0.0

    def pack(
        self,
        lanes: int | LaneDoubling,
        *,
        audit: bool,
        watch: Watch,
        trial_of: Callable[[TrackedActor], str | None],
        on_trial_place: Callable[[str, dict[str, Any]], None],
        more_trials_expected: Callable[[], bool],
        pausing: Callable[[], bool],
        stopping: Callable[[], bool],
        iterations_left: Callable[[], float | None],
        ends_with_next: Callable[[TrackedActor], bool],
    ) -> None:
        """Say how many lanes a worker has, or what finds that, and how to ask the controller what is to come."""
        if isinstance(lanes, LaneDoubling):
            self._doubling = lanes
            self._doubling.begin()
        self._packer = Packer(lanes.lanes if isinstance(lanes, LaneDoubling) else lanes)
        self._audit = audit
        self._watch = watch
        self._trial_of = trial_of
        self._on_trial_place = on_trial_place
        self._more_trials_expected = more_trials_expected
        self._pausing = pausing
        self._stopping = stopping
        self._iterations_left = iterations_left
        self._ends_with_next = ends_with_next

    def summary(self) -> str:
        """One line on the workers, for Tune's progress reports."""
        figures = self.figures.now()
        workers = "1 worker" if figures.workers == 1 else f"{figures.workers} workers"
        return f"HFTAPacker: {workers}, {figures}, {self._packer.waiting} trials waiting for a lane"

    # Trials come and go

    def add_actor(
        self,
        cls: Any,
        kwargs: dict[str, Any],
        resource_request: ResourceRequest,
        *,
        on_start: Callable[[TrackedActor], None] | None = None,
        on_stop: Callable[[TrackedActor], None] | None = None,
        on_error: Callable[[TrackedActor, Exception], None] | None = None,
    ) -> TrackedActor:
        kind = _trainable_class(cls)
        if not issubclass(kind, HostedTrainable):
            remedy = "; make it one with hfta_tune.fusible" if issubclass(kind, FunctionTrainable) else ""
            self._say_once(
                f"{kind.__name__} is no FusedTrainable, so each of its trials runs in a process of its own{remedy}."
            )
            return super().add_actor(
                cls, kwargs, resource_request, on_start=on_start, on_stop=on_stop, on_error=on_error
            )
        tracked = TrackedActor(uuid.uuid4().int, on_start=on_start, on_stop=on_stop, on_error=on_error)
        self._lanes[tracked] = _Lane(next(self._lane_numbers), kind, kwargs["config"][TRIAL_INFO].trial_id)
        self._pending_actors_to_attrs[tracked] = kind, kwargs, resource_request
        self._note_config(tracked, kind, kwargs["config"])
        self._packer.add(tracked, resource_request)
        return tracked

    def remove_actor(
        self, tracked_actor: TrackedActor, kill: bool = False, stop_future: ray.ObjectRef | None = None
    ) -> bool:
        if tracked_actor in self._lanes:
            # The worker keeps the order of its calls, so the lane can be given away before it is empty.
            self._packer.remove(tracked_actor)
            self._note_left(self._lanes[tracked_actor])
            if tracked_actor in self._started:
                self._started.remove(tracked_actor)
            if tracked_actor in self._pending_actors_to_attrs:
                del self._pending_actors_to_attrs[tracked_actor]
                self._pending_actors_to_enqueued_actor_tasks.pop(tracked_actor, None)
                self._kinds.remove(tracked_actor)
                del self._lanes[tracked_actor]
                return False
        return super().remove_actor(tracked_actor, kill=kill, stop_future=stop_future)

    def schedule_actor_task(
        self,
        tracked_actor: TrackedActor,
        method_name: str,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        on_result: Callable[[TrackedActor, Any], None] | None = None,
        on_error: Callable[[TrackedActor, Exception], None] | None = None,
        _return_future: bool = False,
    ) -> ray.ObjectRef | None:
        lane = self._lanes.get(tracked_actor)
        if lane is not None and method_name == "reset" and args:
            self._note_config(tracked_actor, lane.trainable, args[0])
            self._note_reuse(lane, args[0][TRIAL_INFO].trial_id)
        trains = lane is not None and method_name in ("train", "train_buffered")
        if not trains or tracked_actor.actor_id in self._failed_actor_ids:
            return super().schedule_actor_task(
                tracked_actor, method_name, args, kwargs, on_result, on_error, _return_future
            )
        assert lane is not None and lane.worker is not None
        task = TrackedActorTask(tracked_actor, on_result=on_result, on_error=on_error)
        death = lane.worker.death_of(tracked_actor)
        if death is not None:
            self._outcomes.append((task, death))
        else:
            self._requests[tracked_actor] = task
        return None

    def clear_actor_task_futures(self, tracked_actor: TrackedActor) -> None:
        lane = self._lanes.get(tracked_actor)
        if lane is not None:
            self._requests.pop(tracked_actor, None)
            if lane.worker is not None:
                lane.worker.in_round.pop(tracked_actor, None)
            kept = [(task, outcome) for task, outcome in self._outcomes if task._tracked_actor != tracked_actor]
            if len(kept) < len(self._outcomes):
                self._outcomes = deque(kept)
        super().clear_actor_task_futures(tracked_actor)

    # Events

    def next(self, timeout: float | None = None) -> bool:
        if time.monotonic() > self._told_time + 1:
            self._told_time = time.monotonic()
            self.observers.time_passed()
        if self._try_kill_actor():
            return True
        self._try_start_actors()
        for worker, overdue in self._watch.overdue(self._workers.values()):
            self._give_up(worker, overdue)
        if self._started:
            tracked = self._started.popleft()
            if tracked._on_start:
                tracked._on_start(tracked)
            return True
        if self._outcomes and not self._pausing():
            self._hand_out_some()
            return True
        # The controller had its chance to fill free lanes: it is asked before each call of next().
        self._send_rounds()
        if self.logs.waiting:
            self.logs.write(most=_LOGS_AT_A_TIME)
            return super().next(0) or True
        return super().next(timeout)

    def _hand_out_some(self) -> None:
        """Hand out results until one changes more than its own trial, which the controller is to see first.

        As long as trials simply train on, a step of the controller for each result would find nothing to do.
        """
        while self._outcomes:
            task, outcome = self._outcomes.popleft()
            self._hand_out(task, outcome)
            if task._tracked_actor not in self._requests or self._stopping():
                return

    def _hand_out(self, task: TrackedActorTask, outcome: Any) -> None:
        if isinstance(outcome, RayTaskError):
            self._actor_task_failed(task, outcome.as_instanceof_cause())
        elif isinstance(outcome, RayActorError):
            self._actor_task_failed(task, outcome)
        else:
            self._given += 1
            self._actor_task_resolved(task, outcome)

    def _try_start_actors(self, max_actors: int | None = None) -> int:
        started = super()._try_start_actors(max_actors=max_actors)
        for worker in self._workers.values():
            if worker.actor is None and worker.tracked in self._live_actors_to_ray_actors_resources:
                worker.actor = self._live_actors_to_ray_actors_resources[worker.tracked][0]
                self._packer.opened(worker.number)
                self.observers.worker_opened(worker.number, self._packer.lanes)
        plan = self._packer.schedule(keep_idle=self._more_trials_expected(), kind_of=self._kinds.kind_of)
        for number in plan.close:
            self._close_worker(self._workers.pop(number))
        for number, resource_request in plan.open:
            self._open_worker(number, resource_request)
        for placement in plan.place:
            self._start_lane(placement.trial, self._workers[placement.worker])
        if self._packer.waiting != self._told_waiting:
            self._told_waiting = self._packer.waiting
            self.observers.trials_wait(self._told_waiting)
        return started

    def _send_rounds(self) -> None:
        asking: dict[_Worker, list[TrackedActor]] = {}
        for tracked in self._requests:
            worker = self._lanes[tracked].worker
            assert worker is not None
            asking.setdefault(worker, []).append(tracked)
        if not asking:
            return
        busy = {
            self._lanes[tracked].worker
            for tracked, futures in self._tracked_actors_to_task_futures.items()
            if tracked in self._lanes and any(f in self._actor_task_events._tracked_futures for f in futures)
        }
        busy.update(self._lanes[task._tracked_actor].worker for task, _ in self._outcomes)
        for worker, lanes in asking.items():
            if worker.ready and not worker.in_round and worker not in busy:
                self._send_round(worker, lanes)

    def _send_round(self, worker: _Worker, lanes: list[TrackedActor]) -> None:
        worker.in_round = {tracked: self._requests.pop(tracked) for tracked in lanes}

        def on_result(outcome: tuple[list[Any], RoundReport]) -> None:
            results, report = outcome
            tasks, worker.in_round = worker.in_round, {}
            self._learn_from(report, worker, lanes, tasks)
            self._note_round(worker, report)
            for tracked, result in zip(lanes, results, strict=True):
                if tracked not in tasks:  # it was stopped in the meantime
                    continue
                if result is None:  # it joined while the others were in the middle of a round
                    self._requests[tracked] = tasks[tracked]
                else:
                    self._outcomes.append((tasks[tracked], result))

        def on_error(error: Exception) -> None:
            if not isinstance(error, RayTaskError):
                self._lose_worker(worker, error)
                return
            tasks, worker.in_round = worker.in_round, {}
            self._outcomes.extend((task, error) for task in tasks.values())

        iterations = self._iterations_left()
        rounds = None if iterations is None else iterations / max(1, self._packer.lanes_in_use)
        numbers = {tracked: self._lanes[tracked].number for tracked in lanes}
        ending = [number for tracked, number in numbers.items() if self._ends_with_next(tracked)]
        future = worker.send("round", list(numbers.values()), rounds, ending)
        self._actor_task_events.track_future(future, on_result=on_result, on_error=on_error)

    # What a worker tells

    def _note_config(self, tracked: TrackedActor, trainable: type, config: dict[str, Any]) -> None:
        of_tune = (TRIAL_INFO, STDOUT_FILE, STDERR_FILE)
        self._kinds.add(tracked, trainable, {key: value for key, value in config.items() if key not in of_tune})

    def _learn_from(
        self,
        report: RoundReport,
        worker: _Worker,
        lanes: list[TrackedActor],
        tasks: dict[TrackedActor, TrackedActorTask],
    ) -> None:
        """Let a round show which trials belong together and how many lanes a worker should have."""
        for tracked, signature in zip(lanes, report.signatures, strict=True):
            if tracked in tasks and signature is not None:  # else its lane may have another config by now
                self._kinds.learn(tracked, (worker.number, signature))
                self._note_place(tracked, {"worker": worker.number, "signature": f"{signature % 2**64:016x}"})
        if report.fitting_lanes is not None:
            self._packer.limit(worker.number, report.fitting_lanes)
        if self._doubling is not None and self._doubling.record(
            worker.number,
            report.lanes,
            report.seconds,
            memory=report.memory,
            fitting=report.fitting_lanes,
            waiting=self._packer.waiting > 0,
        ):
            self._packer.resize(self._doubling.lanes)
            for number, state in self._packer.workers.items():
                if state is WorkerState.OPEN:
                    self.observers.worker_opened(number, self._packer.lanes)
            if self._doubling.stopped:
                logger.warning('HFTAPacker(B="auto") stays at %s.', self._doubling)

    def _note_round(self, worker: _Worker, report: RoundReport) -> None:
        self._note_results()
        if worker.death is None and report.memory is not None:
            self.observers.memory_measured(worker.number, report.memory.used, report.memory.total)
        if report.round is not None:
            self.observers.round_ended(worker.number, report.round)

    def _note_results(self) -> None:
        seconds, self._driver_seconds = self._driver_seconds, time.thread_time()
        results, self._given = self._given, 0
        self.observers.results_given(results, self._driver_seconds - seconds)

    def _note_place(self, tracked: TrackedActor, place: dict[str, Any]) -> None:
        lane = self._lanes[tracked]
        if place != lane.place:
            lane.place = place
            self._on_trial_place(lane.trial_id, place)

    def _note_reuse(self, lane: _Lane, trial_id: str) -> None:
        """A lane is reset; with reuse_actors, another trial may have it then."""
        if trial_id != lane.trial_id and lane.worker is not None and lane.slot is not None:
            self.observers.trial_left(lane.trial_id)
            lane.trial_id, lane.place = trial_id, None
            self._note_joined(lane)

    def note_end(self, trial_id: str, reason: EndReason) -> None:
        """A trial is over."""
        self._unended.discard(trial_id)
        self.observers.trial_ended(trial_id, reason)

    def _note_closed(self, worker: _Worker) -> None:
        if worker.actor is not None:  # else it was asked for, but never there
            self.observers.worker_closed(worker.number)

    def _note_joined(self, lane: _Lane) -> None:
        assert lane.worker is not None and lane.slot is not None
        self._unended.add(lane.trial_id)
        self.observers.trial_joined(lane.trial_id, lane.worker.number, lane.slot)

    def _note_left(self, lane: _Lane) -> None:
        if lane.slot is not None:
            lane.slot = None
            self.observers.trial_left(lane.trial_id)

    # Lanes

    def _start_lane(self, tracked: TrackedActor, worker: _Worker) -> None:
        kind, kwargs, _ = self._pending_actors_to_attrs.pop(tracked)
        if kind not in self._classes:
            self._classes[kind] = (len(self._classes), ray.put(Sealed(kind, f"The class {kind.__name__}")))
        key, reference = self._classes[kind]
        lane = self._lanes[tracked]
        lane.worker = worker
        taken = {other.slot for other in self._lanes.values() if other.worker is worker}
        lane.slot = next(slot for slot in itertools.count() if slot not in taken)
        self._note_joined(lane)
        config = dict(kwargs["config"])
        if config.get(STDOUT_FILE) or config.get(STDERR_FILE):
            self._say_once("log_to_file has no effect under HFTAPacker: the trials of a worker share its output.")
        config[STDOUT_FILE] = config[STDERR_FILE] = None
        worker.resize(self._packer.lanes)
        worker.define(key, reference)
        sealed = Sealed(
            (config, kwargs["storage"]), f"The config or the storage of trial {config[TRIAL_INFO].trial_id}"
        )
        worker.send("create", lane.number, key, sealed)
        if self._no_metrics is None:
            self._no_metrics = ray.put({})
        handle = LaneHandle(lane, self._no_metrics)
        self._live_actors_to_ray_actors_resources[tracked] = (handle, _NoResources())
        self._enqueue_cached_actor_tasks(tracked)
        self._started.append(tracked)

    def _cleanup_actor(self, tracked_actor: TrackedActor) -> None:
        if tracked_actor not in self._lanes:
            super()._cleanup_actor(tracked_actor)
            return
        self._cleanup_actor_futures(tracked_actor)
        self._live_actors_to_ray_actors_resources.pop(tracked_actor, None)
        self._packer.remove(tracked_actor)
        self._kinds.remove(tracked_actor)
        self._note_left(self._lanes.pop(tracked_actor))

    def _try_kill_actor(self) -> bool:
        for tracked in [tracked for tracked in self._live_actors_to_kill if tracked in self._lanes]:
            self._live_actors_to_kill.remove(tracked)
            handle, _ = self._live_actors_to_ray_actors_resources[tracked]
            handle.stop.remote()
            self._actor_stop_resolved(tracked)
            return True
        return super()._try_kill_actor()

    # Workers

    def _open_worker(self, number: int, resource_request: ResourceRequest) -> None:
        propagated = {name: os.environ[name] for name in ENV_VARS_TO_PROPAGATE if name in os.environ}
        # Without an environment of its own, a worker takes one of the processes that Ray keeps ready.
        remote: Any = ray.remote(runtime_env={"env_vars": propagated}) if propagated else ray.remote
        name = f"hfta_tune:{self.experiment}:{number}"
        head = {} if resource_request.head_bundle_is_empty else resource_request.bundles[0]
        kwargs = {
            "lanes": self._packer.lanes,
            "cpus": head.get("CPU", 0),
            "gpus": head.get("GPU", 0),
            "audit": self._audit,
            "run_ahead": os.environ.get("HFTA_TUNE_RUN_AHEAD", "1") != "0",
            "memory_every_s": 0.0 if self._doubling else _MEMORY_EVERY_S if self.observers.wants_memory else None,
            "name": name,
        }

        def on_start(tracked: TrackedActor) -> None:
            worker.ready = True

        def on_error(tracked: TrackedActor, error: Exception) -> None:
            self._lose_worker(worker, error)

        worker_class = named(remote(WorkerActor), name)
        tracked = super().add_actor(worker_class, kwargs, resource_request, on_start=on_start, on_error=on_error)
        worker = _Worker(number, tracked, self._packer.lanes, unanswered=self._watch.calls())
        self._workers[number] = worker
        self._worker_actors.add(tracked)

    def _close_worker(self, worker: _Worker) -> None:
        if self._doubling is not None:
            self._doubling.lost(worker.number)
        self._note_closed(worker)
        super().remove_actor(worker.tracked)
        if worker.actor is None:
            self._worker_actors.discard(worker.tracked)

    def _lose_worker(self, worker: _Worker, error: Exception) -> None:
        """A worker died: each of its trials fails once, and none is placed there again."""
        if worker.death is not None:
            return
        worker.death = error if isinstance(error, RayActorError) else RayActorError(error_msg=str(error))
        self._packer.lost(worker.number)
        self._note_closed(worker)
        if self._doubling is not None:
            self._doubling.lost(worker.number)
        self._workers.pop(worker.number, None)
        self._failed_actor_ids.add(worker.tracked.actor_id)
        if worker.tracked in self._live_actors_to_ray_actors_resources:
            super()._cleanup_actor(worker.tracked)
        tasks = list(worker.in_round.values())
        worker.in_round = {}
        tasks += [task for tracked, task in self._requests.items() if self._lanes[tracked].worker is worker]
        for task in tasks:
            self._requests.pop(task._tracked_actor, None)
            self._outcomes.append((task, worker.death_of(task._tracked_actor)))

    def _give_up(self, worker: _Worker, overdue: Overdue) -> None:
        """Kill a worker that hangs: it costs only the trials a failure that it hangs in, if that is known."""
        trials = {tracked: self._trial_of(tracked) for tracked, lane in self._lanes.items() if lane.worker is worker}
        others = {tracked: name for tracked, name in trials.items() if name not in overdue.trials}
        if len(others) < len(trials):
            worker.spared = set(others)
        logger.warning("%s", overdue.warning([name for name in others.values() if name], spared=bool(worker.spared)))
        ray.kill(worker.actor)
        self._lose_worker(worker, RayActorError(error_msg=str(overdue)))

    def _actor_task_failed(self, tracked_actor_task: TrackedActorTask, exception: Exception) -> None:
        lane = self._lanes.get(tracked_actor_task._tracked_actor)
        if lane is not None and lane.worker is not None and isinstance(exception, RayActorError):
            self._lose_worker(lane.worker, exception)
            exception = lane.worker.death_of(tracked_actor_task._tracked_actor) or exception
        super()._actor_task_failed(tracked_actor_task, exception)

    # What the controller counts: trials, not workers

    @property
    def live_actors(self) -> list[TrackedActor]:
        return [a for a in self._live_actors_to_ray_actors_resources if a not in self._worker_actors]

    @property
    def pending_actors(self) -> list[TrackedActor]:
        return [a for a in self._pending_actors_to_attrs if a not in self._worker_actors]

    @property
    def num_pending_actors(self) -> int:
        requested = sum(worker.actor is None for worker in self._workers.values())
        return len(self._pending_actors_to_attrs) - requested

    def cleanup(self) -> None:
        self.logs.write()
        for trial_id in sorted(self._unended):
            self.note_end(trial_id, "stopped")
        self._note_results()
        self.observers.run_ended()
        self.upload_observations()
        for tracked in self._lanes:
            self._live_actors_to_ray_actors_resources.pop(tracked, None)
            self._pending_actors_to_attrs.pop(tracked, None)
        super().cleanup()

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message)


def _trainable_class(cls: Any) -> type:
    """The class that the user wrote, of a Ray actor class."""
    if isinstance(cls, ray.actor.ActorClass):
        cls = cls.__ray_metadata__.modified_class
    return getattr(cls, "__ray_actor_class__", cls)
