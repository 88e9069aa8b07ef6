"""What a run writes down for its timeline: a file in an experiment's directory, an attribute of a study."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from hfta_tune.rounds import EndReason, Observer, Round

__all__ = ["LOG_FILES", "ROUNDS", "StudyRounds", "TimelineLog", "spans_of_text"]

LOG_FILES = "hfta_tune_timeline-*.jsonl"
"""The files of an experiment's runs: a run that is restored adds one of its own, as Tune does with its state."""

ROUNDS = "hfta_tune:rounds:"
"""What the study's system attributes with the rounds of `optimize` calls begin with."""

# One attribute is to fit into the 64 KB of a text column of MySQL with room to spare.
_MOST_ROUNDS = 1024
_FIRST_WRITE_S = 10.0

_encode = json.JSONEncoder(separators=(",", ":")).encode


class TimelineLog(Observer):
    """Writes the events of a run of Tune as lines of JSON, each as it happens.

    A line has the event's name, its time in seconds since the epoch, and the event's arguments. Rounds name the lanes
    of the trials that still have theirs; a trial that has left since is no longer said to have been in them.

    Args:
        directory: The directory of the experiment; it is created with the first event if it is not there.
        name: The experiment's name.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / LOG_FILES.replace("*", datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))
        self._name = name
        self._file: TextIO | None = None
        self._lanes: dict[str, int] = {}

    def _write(self, event: str, **arguments: Any) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Line by line: what a driver that is killed has seen is in the file, and a line costs only microseconds.
            self._file = self._path.open("a", buffering=1)
            self._write("run_began", name=self._name, version=1)
        line = {"event": event, "time": round(time.time(), 6), **arguments}
        self._file.write(_encode(line) + "\n")

    def worker_opened(self, worker: int, lanes: int) -> None:
        self._write("worker_opened", worker=worker, lanes=lanes)

    def worker_closed(self, worker: int) -> None:
        self._write("worker_closed", worker=worker)

    def trial_joined(self, trial_id: str, worker: int, lane: int) -> None:
        self._lanes[trial_id] = lane
        self._write("trial_joined", trial=trial_id, worker=worker, lane=lane)

    def trial_left(self, trial_id: str) -> None:
        self._lanes.pop(trial_id, None)
        self._write("trial_left", trial=trial_id)

    def trial_ended(self, trial_id: str, reason: EndReason) -> None:
        self._write("trial_ended", trial=trial_id, reason=reason)

    def round_ended(self, worker: int, own: Round) -> None:
        arrays = [
            {
                "number": array.number,
                "lanes": [self._lanes[trial] for trial in array.trials if trial in self._lanes],
                "strategy": array.strategy,
                "steps": array.steps,
                "samples": array.samples,
                "compile_seconds": array.compile_seconds,
            }
            for array in own.arrays
        ]
        self._write("round_ended", worker=worker, begin=round(own.begin, 6), end=round(own.end, 6), arrays=arrays)

    def trials_wait(self, trials: int) -> None:
        self._write("trials_wait", trials=trials)

    def run_ended(self) -> None:
        self._write("run_ended")
        assert self._file is not None
        self._file.close()


class StudyRounds(Observer):
    """Keeps the rounds of one `optimize` call as one system attribute of its study.

    Which trial had which lane when is in the study anyway: its trials' times, and their attribute "hfta_tune". The
    rounds of all lanes are the same, so they are kept once and not in each trial, which would cost a transaction a
    trial. The attribute is written after 10, 30, 70, ... seconds and at the end; an hour costs nine transactions.
    Optuna reads a study's attributes at the end of each trial, so their size is bounded: beyond 1,024 rounds, every
    second one is kept, then every fourth, and so on. Rounds are one string, which is copied faster than a list.

    Args:
        study: The study.
    """

    def __init__(self, study: Any) -> None:
        self._study = study
        now = datetime.now()  # a study's clock, without a time zone, is that of its trials' times
        self._began = now.timestamp()
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self._key = f"{ROUNDS}{self._worker}:{now.isoformat()}"
        self._kept: dict[str, Any] = {"worker": self._worker, "began": now.isoformat(), "lanes": 0, "every": 1}
        self._rounds: list[tuple[int, int]] = []
        self._compilations: list[tuple[int, int]] = []
        self._stopped: list[int] = []
        self._told = 0
        self._wait = _FIRST_WRITE_S
        self._next_write = time.monotonic() + self._wait

    def worker_opened(self, worker: int, lanes: int) -> None:
        self._kept["lanes"] = lanes

    def round_ended(self, worker: int, own: Round) -> None:
        end = self._milliseconds(own.end)
        if compiling := sum(array.compile_seconds for array in own.arrays):
            self._compilations.append((self._milliseconds(own.end - compiling), end))
        self._told += 1
        if self._told % self._kept["every"] == 0:
            self._rounds.append((self._milliseconds(own.begin), end))
        if len(self._rounds) > _MOST_ROUNDS:
            self._rounds = self._rounds[1::2]
            self._kept["every"] *= 2
        if time.monotonic() >= self._next_write:
            self._write()
            self._wait *= 2
            self._next_write = time.monotonic() + self._wait

    def trial_ended(self, trial_id: str, reason: EndReason) -> None:
        if reason == "stopped":  # all other reasons can be seen from the trial
            self._stopped.append(int(trial_id))

    def run_ended(self) -> None:
        if self._told:
            self._write()

    def _milliseconds(self, seconds: float) -> int:
        return round(1e3 * (seconds - self._began))

    def _write(self) -> None:
        kept = {
            **self._kept,
            "rounds": _text_of_spans(self._rounds),
            "compilations": _text_of_spans(self._compilations[-_MOST_ROUNDS:]),
            "stopped": self._stopped,
        }
        self._study._storage.set_study_system_attr(self._study._study_id, self._key, kept)


def spans_of_text(text: str) -> Iterator[tuple[int, int]]:
    """Undo what StudyRounds does to spans of time: "0 120 130 250" is [(0, 120), (130, 250)], in milliseconds."""
    numbers = map(int, text.split())
    return zip(numbers, numbers, strict=True)


def _text_of_spans(spans: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"{begin} {end}" for begin, end in spans)
