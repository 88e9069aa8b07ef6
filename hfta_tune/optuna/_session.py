"""Our share of a study while `optimize` runs: the trials that run, how they end, and what the user sees.

This file, `_samplers.py` and the timeline's StudyRounds and of_study are all that uses private names of Optuna
(tried with 4.0 and 5.0).
Some of what a study needs in order to behave as under `study.optimize` has no public name: the flags that
make `study.stop()` work and forbid nesting, the progress bar, the heartbeat and system attributes.
"""

import copy
import gc
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.progress_bar import _ProgressBar
from optuna.storages._heartbeat import BaseHeartbeatThread, get_heartbeat_thread, is_heartbeat_enabled
from optuna.trial import FrozenTrial, TrialState

from hfta_tune.monitor import RunFigures
from hfta_tune.rounds import EndReason, Observer

Callback = Callable[[optuna.Study, FrozenTrial], None]

PLACE = "hfta_tune"
"""The system attribute that says where a trial trained."""

# Below Optuna's root logger, so that optuna.logging.set_verbosity governs these lines as well.
_logger = optuna.logging.get_logger("optuna.hfta_tune")


@dataclass(slots=True)
class RunningTrial:
    """A trial that was asked for and not told yet."""

    trial: optuna.Trial
    heartbeat: BaseHeartbeatThread
    lane: int
    place: dict[str, Any] | None = None
    epochs_done: int = 0


class StudySession:
    """Asks and tells the trials of one `optimize` call.

    Leaving the context with an exception tells FAIL to every trial that still runs, so that none stays
    RUNNING. An exception of a single trial does not leave it: the first one is kept in `error`, no trial
    is asked for any more, and those that run may finish.

    Args:
        study: The study.
        n_trials: How many trials to ask for. None is no limit.
        timeout: Seconds after which no trial is asked for. None is no limit.
        catch: Exceptions that fail their trial but do not end the study.
        callbacks: Called with the study and the finished trial.
        gc_after_trial: Whether to collect garbage after each trial.
        show_progress_bar: Whether to draw Optuna's progress bar.
        observer: Is told which trial has which lane, and how trials end.
    """

    def __init__(
        self,
        study: optuna.Study,
        *,
        n_trials: int | None,
        timeout: float | None,
        catch: tuple[type[Exception], ...],
        callbacks: Sequence[Callback],
        gc_after_trial: bool,
        show_progress_bar: bool,
        observer: Observer,
    ) -> None:
        self.running: dict[str, RunningTrial] = {}
        self.error: Exception | None = None
        self._study = study
        self._n_trials = n_trials
        self._timeout = timeout
        self._catch = catch
        self._callbacks = callbacks
        self._gc_after_trial = gc_after_trial
        self._show_progress_bar = show_progress_bar
        self.observer = observer
        self._n_asked = 0

    def __enter__(self) -> "StudySession":
        if self._study._thread_local.in_optimize_loop:
            raise RuntimeError(
                "optimize was called inside an optimization of the same study. "
                "Call it after that one has returned, or with a study of its own."
            )
        self._progress_bar = _ProgressBar(self._show_progress_bar, self._n_trials, self._timeout)
        self._start = time.monotonic()
        self._study._stop_flag = False
        self._study._thread_local.in_optimize_loop = True
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._abandon(error)
        finally:
            self._study._thread_local.in_optimize_loop = False
            self._progress_bar.close()
            self.observer.run_ended()
            self._study._storage.remove_session()

    @property
    def may_ask(self) -> bool:
        """Whether another trial may start."""
        return (
            self.error is None
            and not self._study._stop_flag
            and (self._n_trials is None or self._n_asked < self._n_trials)
            and (self._timeout is None or self._elapsed() < self._timeout)
        )

    @property
    def trials_left(self) -> int | None:
        """How many trials are yet to be asked for; None without a limit."""
        return None if self._n_trials is None else self._n_trials - self._n_asked

    @property
    def pruner(self) -> optuna.pruners.BasePruner:
        """The study's pruner."""
        return self._study.pruner

    def ask(self) -> RunningTrial:
        """Takes the next trial of the study: an enqueued one, or a new one."""
        storage = self._study._storage
        self._n_asked += 1
        if is_heartbeat_enabled(storage):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                optuna.storages.fail_stale_trials(self._study)
        trial = self._study.ask()
        taken = {other.lane for other in self.running.values()}
        lane = next(lane for lane in itertools.count() if lane not in taken)
        running = RunningTrial(trial, get_heartbeat_thread(trial._trial_id, storage), lane)
        self.running[str(trial.number)] = running
        running.heartbeat.start()
        self.observer.trial_joined(str(trial.number), 0, lane)
        return running

    def allow_stop(self) -> None:
        """Let `study.stop()` work in the thread that calls this: one that runs objectives."""
        self._study._thread_local.in_optimize_loop = True

    def note(self, running: RunningTrial, place: dict[str, Any]) -> None:
        """Write where a trial trains into its system attributes, if that has changed."""
        if place != running.place:
            running.place = place
            self._study._storage.set_trial_system_attr(running.trial._trial_id, PLACE, place)

    def finish(self, running: RunningTrial, outcome: Sequence[float] | Exception) -> None:
        """Ends a trial: tells the study, logs it, then calls the callbacks and moves the progress bar.

        Args:
            running: The trial.
            outcome: Its final values, or what ended it early. Values that hold a NaN end it as FAIL,
                TrialPruned as PRUNED, and any other exception as FAIL. An exception that is not in `catch` is
                kept, as is one that a callback raises.
        """
        caught = isinstance(outcome, (optuna.TrialPruned, *self._catch))
        self.observer.trial_left(str(running.trial.number))
        self.observer.trial_ended(str(running.trial.number), _end_reason(outcome))
        try:
            self._tell(running, outcome)
            if isinstance(outcome, Exception) and not caught:
                self.keep(outcome)
            else:
                self._after_tell(running.trial)
        except Exception as error:
            self.keep(error)

    def log(self, figures: RunFigures) -> None:
        """Writes how the run goes on, in one line."""
        ended = ", ".join(f"{number} {reason}" for reason, number in figures.trials_ended.items())
        _logger.info(f"{figures}; trials ended: {ended or 'none'}.")

    def keep(self, error: Exception) -> None:
        """Lets the running trials finish and asks for no more. The first error kept is the one to raise."""
        if self.error is not None:
            _logger.warning(f"Another error while the last trials finish: {error!r}")
            return
        self.error = error
        if self.running:
            _logger.warning(
                f"No more trials start, because of {error!r}. "
                f"It is raised when the {len(self.running)} trial(s) that still run have finished."
            )

    def _tell(self, running: RunningTrial, outcome: Sequence[float] | Exception) -> None:
        trial = running.trial
        state, values = _state_and_values(outcome)
        running.heartbeat.join()
        try:
            self._study.tell(trial, values, state)
        except Exception:
            del self.running[str(trial.number)]
            raise
        # Only now, and not in a finally: an interrupted tell leaves the trial to _abandon.
        del self.running[str(trial.number)]
        if values is not None:
            self._log_completed(trial, values)
        elif state == TrialState.PRUNED:
            message = str(outcome)
            _logger.info(f"Trial {trial.number} was pruned{': ' if message else '.'}{message}")
        elif isinstance(outcome, Exception):
            _logger.warning(
                f"Trial {trial.number} failed, with the parameters {trial.params}: {outcome!r}",
                exc_info=outcome,
            )
        else:
            _logger.warning(
                f"Trial {trial.number} failed, with the parameters {trial.params}: "
                f"its final value is {', '.join(map(str, outcome))}."
            )

    def _log_completed(self, trial: optuna.Trial, values: list[float]) -> None:
        if not _logger.isEnabledFor(logging.INFO):
            return  # Looking up the best trial costs something.
        names = self._study.metric_names
        shown = values if names is None else dict(zip(names, values, strict=True))
        if len(values) > 1:
            _logger.info(f"Trial {trial.number} finished with values {shown} and parameters {trial.params}.")
            return
        best = ""
        try:
            best_trial = self._study.best_trial
            best = f" Best is trial {best_trial.number} with value {best_trial.value}."
        except ValueError:
            pass  # No trial that is complete meets the study's constraints.
        _logger.info(
            f"Trial {trial.number} finished with value {values[0] if names is None else shown} "
            f"and parameters {trial.params}.{best}"
        )

    def _after_tell(self, trial: optuna.Trial) -> None:
        if self._callbacks:
            frozen = self._study._storage.get_trial(trial._trial_id)
            for callback in self._callbacks:
                callback(self._study, copy.deepcopy(frozen))
        if self._gc_after_trial:
            gc.collect()
        elapsed = self._elapsed()
        if self._n_trials is None and self._timeout is not None:
            # Several lanes may finish after the timeout, and the bar would run backwards.
            elapsed = min(elapsed, self._timeout)
        self._progress_bar.update(elapsed, self._study)

    def _abandon(self, error: BaseException) -> None:
        abandoned = list(self.running.values())
        if not abandoned:
            return
        numbers = ", ".join(str(running.trial.number) for running in abandoned)
        _logger.warning(f"Trial(s) {numbers} failed, because {error!r} ended the run.")
        for running in abandoned:
            self.observer.trial_left(str(running.trial.number))
            self.observer.trial_ended(str(running.trial.number), "stopped")
            try:
                self._study.tell(running.trial, state=TrialState.FAIL, skip_if_finished=True)
            except Exception as tell_error:
                # The others must not stay RUNNING because of this one; the caller sees the first error.
                _logger.warning(f"Trial {running.trial.number} could not be told: {tell_error!r}")
            running.heartbeat.join()
        self.running.clear()

    def _elapsed(self) -> float:
        return time.monotonic() - self._start


def _end_reason(outcome: Sequence[float] | Exception) -> EndReason:
    if isinstance(outcome, optuna.TrialPruned):
        return "pruned"
    if isinstance(outcome, Exception):
        return "error"
    return "nan" if any(map(math.isnan, outcome)) else "done"


def _state_and_values(outcome: Sequence[float] | Exception) -> tuple[TrialState, list[float] | None]:
    if isinstance(outcome, optuna.TrialPruned):
        return TrialState.PRUNED, None
    # A NaN must not reach tell: it warns of one among values, and raises when the state is COMPLETE.
    if isinstance(outcome, Exception) or any(math.isnan(value) for value in outcome):
        return TrialState.FAIL, None
    return TrialState.COMPLETE, list(outcome)
