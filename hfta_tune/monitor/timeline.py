"""A run's lanes over time: which trial had which lane when, with rounds, compilations and idle lanes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hfta_tune.rounds import ArrayRound, EndReason

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "Compilation",
    "Ending",
    "Idle",
    "LaneStay",
    "Timeline",
    "TimelineError",
    "WorkerRound",
    "WorkerSpan",
    "plot_timeline",
]

Ending: TypeAlias = EndReason | Literal["paused", "running"]
"""How a stay in a lane ended: as the trial did, or it left to come back, or it had not left when the data end."""


class TimelineError(ValueError):
    """There is nothing to draw a timeline of; it says where it looked and what to do."""


@dataclass(frozen=True, slots=True)
class LaneStay:
    """A trial's time in a lane. All times are in seconds since the start of the timeline.

    Attributes:
        trial: The trial's id, or its number in a study.
        worker: The worker's name.
        lane: The lane's number in the worker; None where the trial ended before it had trained, in a study.
        begin: When the trial was given the lane.
        end: When it gave it up.
        ending: Why.
        rounds: How many rounds it was trained for meanwhile.
    """

    trial: str
    worker: str
    lane: int | None
    begin: float
    end: float
    ending: Ending
    rounds: int


@dataclass(frozen=True, slots=True)
class WorkerRound:
    """A round of a worker.

    Attributes:
        worker: The worker's name.
        begin: When it began.
        end: When it ended.
        arrays: What each array did, with the trials that kept their lanes; empty for a study.
    """

    worker: str
    begin: float
    end: float
    arrays: tuple[ArrayRound, ...]


@dataclass(frozen=True, slots=True)
class Compilation:
    """A time in which a worker compiled; it is taken to be the last of its round, as only its length is known."""

    worker: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """A time in which a worker was there with so many lanes."""

    worker: str
    lanes: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Idle:
    """A time in which no trial had a lane of a worker that was there."""

    worker: str
    lane: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Who had which lane when. All times are in seconds since the start.

    Time in which nothing ran, between a run and its restoration or between two `optimize` calls, is left out.

    Attributes:
        name: The experiment's or the study's name.
        workers: When each worker was there, in the order in which they were opened.
        stays: Trials in lanes, by their begin.
        rounds: The rounds of all workers, by their begin; of very long studies, several are kept as one.
        compilations: When workers compiled, by their begin.
        waiting: How many trials wait for a lane, from when on; empty for a study, which asks for them one by one.
        resumed: When the run was taken up again.
    """

    name: str
    workers: tuple[WorkerSpan, ...]
    stays: tuple[LaneStay, ...]
    rounds: tuple[WorkerRound, ...]
    compilations: tuple[Compilation, ...] = ()
    waiting: tuple[tuple[float, int], ...] = ()
    resumed: tuple[float, ...] = ()

    @classmethod
    def read(cls, source: Any, *, study_name: str | None = None) -> Timeline:
        """Read what a run has written, of Tune or of `hfta_tune.optimize`.

        Args:
            source: The directory of an experiment of Tune, or what a run of Tune returns; a study, the URL of its
                storage, or the file of its journal.
            study_name: The study's name, for a storage that holds several.

        Raises:
            TimelineError: There are no data in it, or the storage holds several studies and no name is given.
        """
        import optuna
        from optuna.storages.journal import JournalFileBackend

        from hfta_tune.monitor._timeline_sources import of_directory, of_study, study_in

        if isinstance(source, optuna.Study):
            return of_study(source)
        source = getattr(source, "experiment_path", source)
        path = Path(source).expanduser()
        if path.is_dir():
            return of_directory(path)
        if "://" in str(source):
            return of_study(study_in(optuna.storages.get_storage(str(source)), str(source), study_name))
        if path.is_file():
            journal = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
            return of_study(study_in(journal, str(path), study_name))
        raise TimelineError(
            f"{source} is neither a directory nor a file. Give the directory of an experiment of Tune, "
            "such as ~/ray_results/NAME, or the URL of a study's storage, such as sqlite:///study.db."
        )

    @property
    def seconds(self) -> float:
        """How long it is."""
        spans: list[WorkerSpan | LaneStay | WorkerRound] = [*self.workers, *self.stays, *self.rounds]
        return max((span.end for span in spans), default=0.0)

    @property
    def idle(self) -> list[Idle]:
        """The times in which a lane had no trial."""
        taken: dict[tuple[str, int | None], list[LaneStay]] = {}
        for stay in self.stays:
            taken.setdefault((stay.worker, stay.lane), []).append(stay)
        return [
            Idle(span.worker, lane, begin, end)
            for span in self.workers
            for lane in range(span.lanes)
            for begin, end in _gaps(span.begin, span.end, taken.get((span.worker, lane), []))
        ]

    @property
    def lanes_in_use(self) -> float:
        """The share of the lanes' time in which trials had them, 0 to 1."""
        there = sum(span.lanes * (span.end - span.begin) for span in self.workers)
        return 1 - sum(idle.end - idle.begin for idle in self.idle) / there if there else 0.0

    @property
    def between_rounds(self) -> list[tuple[str, float, float]]:
        """The times (worker, begin, end) in which a worker was there and in no round."""
        rounds: dict[str, list[WorkerRound]] = {}
        for own in self.rounds:
            rounds.setdefault(own.worker, []).append(own)
        return [
            (span.worker, begin, end)
            for span in self.workers
            for begin, end in _gaps(span.begin, span.end, rounds.get(span.worker, []))
        ]

    @property
    def in_rounds(self) -> float:
        """The share of the workers' time in which they were in a round, 0 to 1."""
        there = sum(span.end - span.begin for span in self.workers)
        return 1 - sum(end - begin for _, begin, end in self.between_rounds) / there if there else 0.0


def _gaps(begin: float, end: float, spans: Sequence[LaneStay] | Sequence[WorkerRound]) -> Iterator[tuple[float, float]]:
    """The parts of a time that none of the spans covers; they are in their order and do not overlap."""
    for span in spans:
        if span.begin > begin and begin < end:
            yield begin, min(span.begin, end)
        begin = max(begin, span.end)
    if begin < end:
        yield begin, end


def plot_timeline(source: Any, *, study_name: str | None = None) -> Figure:
    """Draw which trial had which lane when: a row a lane, a bar a trial, coloured by how it ended.

    Above the lanes of each worker is a strip with its rounds. Across its lanes, compilations are shaded, and bars are
    pale where the worker was in no round. Hovering over a bar tells the trial, its rounds and its end.
    `figure.write_html("timeline.html")` saves it as one file that needs no network.

    Args:
        source: The directory of an experiment of Tune, or what `tune.run` or `Tuner.fit` returns; a study, the URL of
            its storage, or the file of its journal.
        study_name: The study's name, for a storage that holds several.

    Returns:
        A `plotly.graph_objects.Figure`; its x axis is in seconds since the start.

    Raises:
        TimelineError: There is nothing to draw.
        ImportError: plotly is missing; `pip install 'hfta-tune[plot]'` brings it.

    Example:
        >>> hfta_tune.plot_timeline("~/ray_results/digits").write_html("timeline.html")  # doctest: +SKIP
    """
    from hfta_tune.monitor._timeline_figure import figure_of

    return figure_of(Timeline.read(source, study_name=study_name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hfta-tune timeline`."""
    parser.add_argument(
        "source",
        help="the directory of an experiment of Tune, or a study's storage: its URL, or the file of a journal",
    )
    parser.add_argument("--study-name", help="the study, where the storage holds several")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("timeline.html"),
        help="the file to write: .html for a page that needs no network, .json for a trace that "
        "https://ui.perfetto.dev and chrome://tracing open (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the timeline that `add_arguments` describes."""
    from hfta_tune.monitor._timeline_trace import chrome_trace

    output: Path = args.output
    try:
        if output.suffix not in (".html", ".json"):
            raise TimelineError(f"--output must end in .html or .json but is {output}.")
        timeline = Timeline.read(args.source, study_name=args.study_name)
        if output.suffix == ".json":
            output.write_text(json.dumps(chrome_trace(timeline)))
        else:
            from hfta_tune.monitor._timeline_figure import figure_of

            figure_of(timeline).write_html(output)
    except (TimelineError, ImportError, OSError) as error:
        print(f"hfta-tune timeline: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {output}: {len({stay.trial for stay in timeline.stays})} trials in {timeline.seconds:.1f} s.")
    return 0
