"""Which of the user's hooks runs now, and for which trials."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

__all__ = ["Running"]


class Running:
    """What a process that trains trials runs now; any of its threads may ask.

    Example:
        >>> running = Running()
        >>> with running.hook("evaluate", ["trial_1"]):
        ...     running.now
        ('evaluate', ['trial_1'])
    """

    def __init__(self) -> None:
        self.now: tuple[str, Iterable[Any]] | None = None

    def hook(self, name: str, trials: Iterable[Any]) -> _Hook:
        """Say so while a hook runs; afterwards, what ran around it runs again.

        A hook that calls sys.exit in a worker's thread fails as one that raises does: the process is not its own.
        In the main thread that is left alone, since there a signal may be what ends the process.
        """
        return _Hook(self, name, trials)


class _Hook:
    __slots__ = ("_before", "_now", "_running")

    def __init__(self, running: Running, name: str, trials: Iterable[Any]) -> None:
        self._running, self._now = running, (name, trials)

    def __enter__(self) -> None:
        self._before, self._running.now = self._running.now, self._now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.now = self._before
        if isinstance(error, SystemExit) and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{self._now[0]} called sys.exit({error.code!r}); raise an error instead.") from error
