"""Tune's own file loggers, which write while the workers train instead of before they may go on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from ray.tune.callback import Callback, CallbackList
from ray.tune.experiment import Trial
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback

from hfta_tune.tune._events import write_events_directly

__all__ = ["DeferredLogs"]

_LOGGERS = (CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback)


def _after_its_results(event: str) -> Callable[..., None]:
    """A trial's event that finds the trial's results written."""

    def call(self: DeferredLogs, *, trial: Trial, **info: Any) -> None:
        self._write_of(trial)
        getattr(CallbackList, event)(self, trial=trial, **info)

    return call


class DeferredLogs(CallbackList):
    """A run's callbacks, of which Tune's own loggers write results to their files later.

    Writing a result takes milliseconds, and a worker waits for the decisions on all its lanes' results before
    its next round. So results wait until that round has been sent, at most one of each trial. Only loggers that
    no other callback follows are put off, and whatever else happens to a trial finds its results written: so
    every other callback sees the files as it would without this.
    """

    def __init__(
        self, callbacks: list[Callback], *, on_trial_end: Callable[..., None] = lambda trial, error: None
    ) -> None:
        super().__init__(callbacks)
        self._on_trial_end = on_trial_end
        self._deferred = list(takewhile(lambda callback: type(callback) in _LOGGERS, reversed(callbacks)))[::-1]
        self._at_once = callbacks[: len(callbacks) - len(self._deferred)]
        self._waiting: dict[Trial, Callable[[], None]] = {}
        for callback in callbacks:
            if type(callback) in _LOGGERS:
                _keep_local_files(callback)
            if type(callback) is TBXLoggerCallback:
                write_events_directly(callback)

    @property
    def waiting(self) -> bool:
        """Whether there are results to write."""
        return bool(self._waiting)

    def write(self, most: int | None = None) -> None:
        """Write what waits, at most so many results."""
        for trial in list(self._waiting)[:most]:
            self._write_of(trial)

    def _write_of(self, trial: Trial) -> None:
        write = self._waiting.pop(trial, None)
        if write is not None:
            write()

    def on_trial_result(self, *, trial: Trial, result: dict[str, Any], **info: Any) -> None:
        self._write_of(trial)
        for callback in self._at_once:
            callback.on_trial_result(trial=trial, result=result, **info)
        if self._deferred:
            kept = {key: dict(value) if isinstance(value, dict) else value for key, value in result.items()}

            def write() -> None:
                for callback in self._deferred:
                    callback.on_trial_result(trial=trial, result=kept, **info)

            self._waiting[trial] = write

    on_trial_start = _after_its_results("on_trial_start")
    on_trial_restore = _after_its_results("on_trial_restore")
    on_trial_save = _after_its_results("on_trial_save")
    on_trial_recover = _after_its_results("on_trial_recover")
    on_checkpoint = _after_its_results("on_checkpoint")

    def on_trial_complete(self, *, trial: Trial, **info: Any) -> None:
        self._write_of(trial)
        super().on_trial_complete(trial=trial, **info)
        self._on_trial_end(trial, error=False)

    def on_trial_error(self, *, trial: Trial, **info: Any) -> None:
        self._write_of(trial)
        super().on_trial_error(trial=trial, **info)
        self._on_trial_end(trial, error=True)

    def on_experiment_end(self, **info: Any) -> None:
        self.write()
        super().on_experiment_end(**info)

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Save the callbacks' state, which Tune does before it copies the files to the run's storage."""
        self.write()
        super().save_to_dir(checkpoint_dir, session_str)


def _keep_local_files(callback: Any) -> None:
    """Have a logger fetch a trial's file from storage only if it has none.

    Tune's loggers fetch it whenever a trial starts from a checkpoint. Where the driver itself wrote the file, that
    in storage is older, by the results since the last upload.
    """
    fetch = callback._restore_from_remote

    def restore_from_remote(file_name: str, trial: Any) -> None:
        if not Path(trial.local_path, file_name).exists():
            fetch(file_name, trial)

    callback._restore_from_remote = restore_from_remote
