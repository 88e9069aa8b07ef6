"""What compiling a step cost and gained on this machine before, kept beside inductor's own cache on disk."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["UNKNOWN", "CompileNotes", "Expected"]


@dataclass(frozen=True)
class Expected:
    """What compiling is expected to cost and to gain.

    Attributes:
        seconds: How long it takes.
        gain: The part of a step's time that it saves.
    """

    seconds: float
    gain: float


# Seen on two CPU cores: 10 to 45 s for a first compilation, 2 to 6 s from inductor's cache.
UNKNOWN = Expected(seconds=30.0, gain=0.5)
_FROM_CACHE = 6.0


class CompileNotes:
    """Notes of compiled steps, one small file each. They only help to choose; nobody's results depend on them."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = _default_folder() if folder is None else folder

    def expected(self, form: Any, lanes: int) -> Expected:
        """What to expect of a step of so many lanes, given all that tells it from others as text."""
        seconds, gains = self._read(form)
        if seconds is None:
            return UNKNOWN
        nearest = min(gains, key=lambda size: abs(size - lanes.bit_length()), default=None)
        return Expected(seconds, UNKNOWN.gain if nearest is None else gains[nearest])

    def compiled(self, form: Any, seconds: float) -> None:
        """Note that a step was compiled. The first time inductor had to do it all; the next time it will not."""
        known, gains = self._read(form)
        self._write(form, min(seconds, _FROM_CACHE) if known is None else seconds, gains)

    def measured(self, form: Any, lanes: int, gain: float) -> None:
        """Note the part of a step's time that compiling has saved; the step was compiled before.

        It counts as much as all that was expected until now, so that one bad measurement does not rule out compiling.
        """
        seconds, gains = self._read(form)
        if seconds is not None:
            size = lanes.bit_length()
            expected = (gains.get(size, UNKNOWN.gain) + max(gain, 0.0)) / 2
            self._write(form, seconds, {**gains, size: expected})

    def _read(self, form: Any) -> tuple[float | None, dict[int, float]]:
        try:
            read = json.loads(self._file(form).read_text())
            return float(read["seconds"]), {int(size): float(gain) for size, gain in read["gains"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # there is none, or it is not ours
            return None, {}

    def _file(self, form: Any) -> Path:
        return self._folder / f"{hashlib.sha256(repr((torch.__version__, form)).encode()).hexdigest()}.json"

    def _write(self, form: Any, seconds: float, gains: dict[int, float]) -> None:
        # Another worker may read or write it at this moment. Where the disk is full or closed, there is no note.
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                json.dump({"seconds": seconds, "gains": gains}, file)
            os.replace(file.name, self._file(form))


def _default_folder() -> Path:
    # As torch places inductor's cache; importing torch._inductor only to ask for it takes a second.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return Path(cache) / "hfta_tune"
