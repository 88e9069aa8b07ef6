"""What people see of a run: metrics, dashboards and timelines. All of it only listens; a run is the same without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfta_tune.monitor._figures import Figures, RunFigures
from hfta_tune.monitor._timeline_log import StudyRounds, TimelineLog
from hfta_tune.rounds import Observer

__all__ = ["Figures", "RunFigures", "observers_of_experiment", "observers_of_study"]


def observers_of_experiment(name: str, directory: Path | None) -> list[Observer]:
    """What watches an experiment of Tune by default.

    Args:
        name: The experiment's name.
        directory: Where the driver may write files of the experiment; Tune copies them to its storage. None for none.
    """
    observers: list[Observer] = []
    if directory is not None:
        observers.append(TimelineLog(directory, name))
    from hfta_tune.monitor._metrics import RayMetrics, metrics_are_exported  # optimize has no Ray

    if metrics_are_exported():
        observers.append(RayMetrics(name))
    return observers


def observers_of_study(study: Any) -> list[Observer]:
    """What watches a study of Optuna by default, as long as `optimize` runs."""
    return [StudyRounds(study)]
