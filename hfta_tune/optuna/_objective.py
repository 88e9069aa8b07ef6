"""The trials of a study whose objective has a training loop of its own, B at a time in one hub."""

from __future__ import annotations

import functools
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optuna

from hfta_tune.loops import LaneRuns
from hfta_tune.optuna._session import RunningTrial, StudySession

Objective = Callable[[optuna.Trial], float | Sequence[float]]


def run_objective(session: StudySession, objective: Objective, B: int, directions: int, *, audit: bool) -> None:
    """Run the objective of every trial that the session asks for, B at a time.

    Args:
        session: The study's side.
        objective: What `study.optimize` takes.
        B: How many trials run at once.
        directions: How many values a trial has.
        audit: Whether the first calls of every array are audited.
    """
    host = f"{socket.gethostname()}:{os.getpid()}"
    with LaneRuns(audit=audit) as runs:
        while True:
            while len(runs) < B and session.may_ask:
                try:
                    running = session.ask()
                except Exception as error:
                    session.keep(error)
                    break
                runs.start(str(running.trial.number), functools.partial(_call, session, objective, running.trial))
            if not len(runs):
                return
            for name, ended, place in runs.wait():
                running = session.running[name]
                if ended.error is not None and not isinstance(ended.error, Exception):
                    raise ended.error  # Ctrl-C
                if place is not None:
                    session.note(running, {"worker": host, "lane": running.lane, **place})
                session.finish(running, ended.error or _values(running, ended.value, directions))


def _call(session: StudySession, objective: Objective, trial: optuna.Trial) -> float | Sequence[float]:
    session.allow_stop()
    return objective(trial)


def _values(running: RunningTrial, value: Any, directions: int) -> Sequence[float]:
    """The values of a trial; NaN, which fails it, where the objective returned something else."""
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    try:
        values = [float(own) for own in given]
    except (TypeError, ValueError):
        values = []
    if len(values) == directions:
        return values
    wanted = "a number" if directions == 1 else f"{directions} numbers"
    warnings.warn(
        f"Trial {running.trial.number} fails: its objective returned {value!r:.80}, not {wanted}.", stacklevel=2
    )
    return [float("nan")]
