"""What lanes print: each line says whose it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from hfta_tune.loops._hub import LoopLane, current_lane

__all__ = ["lines_name_trials"]


class _Lines:
    """A text stream that begins each line of a lane with its trial's name."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._unfinished: dict[LoopLane, str] = {}

    def write(self, text: str) -> int:
        lane = current_lane()
        if lane is None:
            return int(self._stream.write(text) or 0)
        *lines, rest = (self._unfinished.pop(lane, "") + text).split("\n")
        # Lanes take turns in the middle of a line, too: it is written when it is whole.
        self._stream.write("".join(f"(trial {lane.name}) {_last(line)}\n" for line in lines))
        if rest:
            self._unfinished[lane] = _last(rest)
        return len(text)

    def finish(self) -> None:
        """Write the lines that were not ended."""
        for lane, rest in self._unfinished.items():
            self._stream.write(f"(trial {lane.name}) {_last(rest)}\n")
        self._unfinished.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last(line: str) -> str:
    """What is left to see of a line that was written anew, as progress bars do."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]


@contextlib.contextmanager
def lines_name_trials() -> Iterator[None]:
    """Meanwhile what lanes write to stdout and stderr, warnings included, says which trial wrote it."""
    before = sys.stdout, sys.stderr
    out, err = _Lines(sys.stdout), _Lines(sys.stderr)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        out.finish()
        err.finish()
        if sys.stdout is out:
            sys.stdout = before[0]
        if sys.stderr is err:
            sys.stderr = before[1]
