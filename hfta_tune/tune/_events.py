"""TensorBoard's event files, written where the result is: no thread, no pipe and no disk sync a result."""

from __future__ import annotations

import functools
import os
from typing import Any

__all__ = ["write_events_directly"]


class _DirectEvents:
    """Stands for tensorboardX's EventFileWriter, whose thread and pipe cost more than what they write.

    That one waits for the disk at each flush, milliseconds a result. Here a flush hands the events to the
    operating system, where TensorBoard sees them; the disk is waited for when the file is closed.
    """

    def __init__(self, logdir: str, suffix: str) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._logdir = logdir
        self._events = EventsWriter(os.path.join(logdir, "events"), suffix)
        self._closed = False

    def get_logdir(self) -> str:
        return self._logdir

    def add_event(self, event: Any) -> None:
        if not self._closed:
            self._events.write_event(event)

    def flush(self) -> None:
        if not self._closed:
            self._events._py_recordio_writer._writer.flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._events.close()


@functools.cache
def _direct(writer: Any) -> type:
    from tensorboardX.writer import FileWriter

    class DirectFileWriter(FileWriter):
        def __init__(self, logdir: str, suffix: str) -> None:
            self.event_writer = _DirectEvents(logdir, suffix)
            self._default_metadata: dict[str, Any] = {}

    class DirectSummaryWriter(writer):
        """A SummaryWriter that writes in the calling thread."""

        def _get_file_writer(self) -> Any:
            mine: Any = self
            if mine._write_to_disk and mine.purge_step is None and not (mine.all_writers and mine.file_writer):
                mine.file_writer = DirectFileWriter(str(mine.logdir), mine._filename_suffix)
                mine.all_writers = {mine.file_writer.get_logdir(): mine.file_writer}
            return super()._get_file_writer()

    return DirectSummaryWriter


def write_events_directly(callback: Any) -> None:
    """Make the summary writers that a TBXLoggerCallback opens from now on write directly."""
    callback._summary_writer_cls = _direct(callback._summary_writer_cls)
