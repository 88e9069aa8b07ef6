"""Tune's own file loggers, which write while the workers train instead of before they may go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback

from hfta_tune.tune._events import write_events_directly

__all__ = ["DeferredLogs"]

_LOGGERS = (CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback)
_EVENTS = ("log_trial_start", "log_trial_restore", "log_trial_save", "log_trial_end")


class DeferredLogs:
    """Results that are to be written to result.json, progress.csv and the event files.

    Writing a result takes milliseconds, and a worker waits for the decisions on all its lanes' results before
    its next round. Nothing but files depends on these loggers, so their results wait until that round has
    been sent. Their other events find all earlier results written.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], Any]] = deque()
        self._known: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def take_over(self, callbacks: Iterable[Any]) -> None:
        """Have those of a run's callbacks write later that are Tune's own loggers; the others stay as they are."""
        for callback in callbacks:
            if type(callback) in _LOGGERS and id(callback) not in self._known:
                self._known.add(id(callback))
                if type(callback) is TBXLoggerCallback:
                    write_events_directly(callback)
                self._defer_results(callback)
                _keep_local_files(callback)
                for event in _EVENTS:
                    self._write_before(callback, event)

    def write(self, most: int | None = None) -> None:
        """Write what waits, at most so many results."""
        for _ in range(len(self._waiting) if most is None else min(most, len(self._waiting))):
            self._waiting.popleft()()

    def _defer_results(self, callback: Any) -> None:
        write = callback.log_trial_result

        def log_trial_result(iteration: int, trial: Any, result: dict[str, Any]) -> None:
            kept = {key: dict(value) if isinstance(value, dict) else value for key, value in result.items()}
            self._waiting.append(lambda: write(iteration, trial, kept))

        callback.log_trial_result = log_trial_result

    def _write_before(self, callback: Any, event: str) -> None:
        log = getattr(callback, event)

        def after_results(*arguments: Any, **keywords: Any) -> None:
            self.write()
            log(*arguments, **keywords)

        setattr(callback, event, after_results)


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
