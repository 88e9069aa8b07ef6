"""Reads a timeline from what runs have written: the logs of an experiment of Tune, a study of Optuna."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hfta_tune.monitor._timeline_log import LOG_FILES, ROUNDS, spans_of_text
from hfta_tune.monitor.timeline import Compilation, Ending, LaneStay, Timeline, TimelineError, WorkerRound, WorkerSpan
from hfta_tune.rounds import ArrayRound

__all__ = ["of_directory", "of_study", "study_in"]

PLACE = "hfta_tune"

# Optuna does not say where an `optimize` call ends; nothing for so long is no part of any.
_LONGEST_PAUSE_S = 60.0

Section = tuple[float, float]
"""A time in which a run was going on, in seconds since the epoch."""


def of_directory(directory: Path) -> Timeline:
    """Read the logs in an experiment's directory.

    Raises:
        TimelineError: There are none.
    """
    logs = [_LogReader(path) for path in sorted(directory.glob(LOG_FILES))]
    logs = sorted((log for log in logs if log.events), key=lambda log: log.section[0])
    if not logs:
        raise TimelineError(
            f"{directory} has no {LOG_FILES}. A run with HFTAPacker writes it into its experiment's directory, "
            "storage_path/name, when it ends and every 10 seconds or so before. For a study, give its storage's URL."
        )
    for log in logs:
        log.finish(last=log is logs[-1])
    name = next((log.name for log in reversed(logs) if log.name), directory.name)
    return _since_start(
        Timeline(
            name=name,
            workers=tuple(itertools.chain.from_iterable(log.workers for log in logs)),
            stays=tuple(itertools.chain.from_iterable(log.stays for log in logs)),
            rounds=tuple(itertools.chain.from_iterable(log.rounds for log in logs)),
            compilations=tuple(itertools.chain.from_iterable(log.compilations for log in logs)),
            waiting=tuple(itertools.chain.from_iterable(log.waiting for log in logs)),
        ),
        [log.section for log in logs],
    )


class _LogReader:
    """What one run of Tune has logged; times are in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self.events = [event for event in map(_event_of, path.read_text().splitlines()) if event is not None]
        self.name = ""
        self.workers: list[WorkerSpan] = []
        self.stays: list[LaneStay] = []
        self.rounds: list[WorkerRound] = []
        self.compilations: list[Compilation] = []
        self.waiting: list[tuple[float, int]] = []
        self._open: dict[int, tuple[int, float]] = {}
        self._present: dict[str, LaneStay] = {}
        self._last_stay: dict[str, int] = {}
        self._ends: dict[str, Ending] = {}
        self._over = False
        for event in self.events:
            # A newer version's events are not ours to understand.
            getattr(self, f"_{event['event']}", lambda event: None)(event)

    @property
    def section(self) -> Section:
        return self.events[0]["time"], self.events[-1]["time"]

    def finish(self, *, last: bool) -> None:
        """End what the log leaves open: it still runs in the last log, else its driver was killed."""
        now = self.section[1]
        for number in list(self._open):
            self._worker_closed({"worker": number, "time": now})
        for trial in list(self._present):
            self._leave(trial, now, "running" if last and not self._over else "stopped")
        for trial, ending in self._ends.items():
            if trial in self._last_stay:
                index = self._last_stay[trial]
                self.stays[index] = replace(self.stays[index], ending=ending)

    def _leave(self, trial: str, time: float, ending: Ending) -> None:
        stay = self._present.pop(trial, None)
        if stay is not None:
            self._last_stay[trial] = len(self.stays)
            self.stays.append(replace(stay, end=time, ending=ending))

    def _run_began(self, event: dict[str, Any]) -> None:
        self.name = event["name"]

    def _run_ended(self, event: dict[str, Any]) -> None:
        self._over = True

    def _worker_opened(self, event: dict[str, Any]) -> None:
        self._worker_closed(event)
        self._open[event["worker"]] = event["lanes"], event["time"]

    def _worker_closed(self, event: dict[str, Any]) -> None:
        lanes, begin = self._open.pop(event["worker"], (0, 0.0))
        if lanes:
            self.workers.append(WorkerSpan(_worker_name(event), lanes, begin, event["time"]))

    def _trial_joined(self, event: dict[str, Any]) -> None:
        trial, time = event["trial"], event["time"]
        self._present[trial] = LaneStay(trial, _worker_name(event), event["lane"], time, time, "running", 0)

    def _trial_left(self, event: dict[str, Any]) -> None:
        self._leave(event["trial"], event["time"], "paused")

    def _trial_ended(self, event: dict[str, Any]) -> None:
        self._ends[event["trial"]] = event["reason"]

    def _round_ended(self, event: dict[str, Any]) -> None:
        worker, end = _worker_name(event), event["end"]
        here = {stay.lane: trial for trial, stay in self._present.items() if stay.worker == worker}
        arrays = []
        for array in event["arrays"]:
            trials = tuple(here[lane] for lane in array.pop("lanes") if lane in here)
            arrays.append(ArrayRound(trials=trials, **array))
            for trial in trials:
                self._present[trial] = replace(self._present[trial], rounds=self._present[trial].rounds + 1)
        self.rounds.append(WorkerRound(worker, event["begin"], end, tuple(arrays)))
        if compiling := sum(array.compile_seconds for array in arrays):
            self.compilations.append(Compilation(worker, end - compiling, end))

    def _trials_wait(self, event: dict[str, Any]) -> None:
        self.waiting.append((event["time"], event["trials"]))


def _event_of(line: str) -> dict[str, Any] | None:
    """A line's event; None for one that a killed driver has not written to its end."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event


def _worker_name(event: dict[str, Any]) -> str:
    return f"worker {event['worker']}"


def study_in(storage: optuna.storages.BaseStorage, where: str, name: str | None) -> optuna.Study:
    """Load a study.

    Raises:
        TimelineError: There is none of that name, or there are several and no name is given.
    """
    names = [summary.study_name for summary in optuna.get_all_study_summaries(storage, include_best_trial=False)]
    if name is None and len(names) == 1:
        (name,) = names
    if name not in names:
        known = f"It holds {', '.join(map(repr, names))}." if names else "It holds no study."
        wanted = "Give study_name, one of those." if name is None and names else f"There is no study {name!r} in it."
        raise TimelineError(f"Which study of {where}? {known} {wanted}")
    return optuna.load_study(study_name=name, storage=storage)


def of_study(study: optuna.Study) -> Timeline:
    """Read the trials of a study, and the rounds of the `optimize` calls that trained them.

    Raises:
        TimelineError: None of its trials was trained by `hfta_tune.optimize`.
    """
    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.datetime_start is not None]
    if not any(PLACE in trial.system_attrs for trial in trials):
        raise TimelineError(
            f"No trial of study {study.study_name!r} says which lane it had. "
            "Train its trials with hfta_tune.optimize(study, ...), which notes that in each."
        )
    kept = study._storage.get_study_system_attrs(study._study_id)
    calls = sorted((_Call(value) for key, value in kept.items() if key.startswith(ROUNDS)), key=lambda call: call.began)
    stopped = {str(number) for call in calls for number in call.stopped}
    stays = [
        _stay_of(trial, calls, stopped)
        for trial in trials
        if PLACE in trial.system_attrs or trial.state in (TrialState.FAIL, TrialState.PRUNED)
    ]
    workers: list[WorkerSpan] = []
    for name in dict.fromkeys(stay.worker for stay in stays if stay.lane is not None):
        of_worker = [call for call in calls if call.worker == name]
        begins = [call.began for call in of_worker[1:]]
        for index in range(len(begins) + 1):
            call = of_worker[index] if of_worker else None
            here = [stay for stay in stays if stay.worker == name and bisect.bisect(begins, stay.begin) == index]
            if here:
                workers.append(_span_of(name, call, here))
    ends = {span.worker: span.end for span in workers}
    stays = [
        replace(stay, end=max(stay.end, ends[stay.worker])) if stay.ending == "running" else stay for stay in stays
    ]
    rounds = [WorkerRound(call.worker, begin, end, ()) for call in calls for begin, end in call.rounds]
    compilations = [Compilation(call.worker, begin, end) for call in calls for begin, end in call.compilations]
    timeline = Timeline(study.study_name, tuple(workers), tuple(stays), tuple(rounds), tuple(compilations))
    times = [(stay.begin, stay.end) for stay in stays] + [(own.begin, own.end) for own in rounds]
    return _since_start(timeline, _sections_of(times))


def _span_of(worker: str, call: _Call | None, stays: Sequence[LaneStay]) -> WorkerSpan:
    """When a worker was there; of a call that was killed early, only the stays are known."""
    lanes = call.lanes if call else 1 + max(stay.lane or 0 for stay in stays)
    ends = [stay.end for stay in stays] + [end for _, end in (call.rounds if call else [])]
    return WorkerSpan(worker, lanes, min(stay.begin for stay in stays), max(ends))


class _Call:
    """What one `optimize` call has kept of its rounds; times are in seconds since the epoch."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.worker: str = kept["worker"]
        self.lanes: int = kept["lanes"]
        self.every: int = kept["every"]
        self.stopped: list[int] = kept["stopped"]
        self.began = datetime.fromisoformat(kept["began"]).timestamp()
        self.rounds = self._spans(kept["rounds"])
        if self.every > 1:  # each stands for those since the one before it
            ends = [end for _, end in self.rounds]
            self.rounds = list(zip([self.began, *ends[:-1]], ends, strict=True))
        self.compilations = self._spans(kept["compilations"])

    def _spans(self, text: str) -> list[Section]:
        return [(self.began + begin / 1e3, self.began + end / 1e3) for begin, end in spans_of_text(text)]


def _begin_of(trial: FrozenTrial) -> float:
    assert trial.datetime_start is not None
    return trial.datetime_start.timestamp()


def _stay_of(trial: FrozenTrial, calls: Iterable[_Call], stopped: set[str]) -> LaneStay:
    place = trial.system_attrs.get(PLACE, {"worker": "no lane", "lane": None})
    begin = _begin_of(trial)
    end = begin if trial.datetime_complete is None else trial.datetime_complete.timestamp()
    # A study with several directions has no intermediate values; its rounds are counted as they were kept.
    rounds = len(trial.intermediate_values) or sum(
        call.every * sum(begin <= round_end <= end + 1e-3 for _, round_end in call.rounds)
        for call in calls
        if call.worker == place["worker"]
    )
    ending = _ending_of(trial, stopped)
    return LaneStay(str(trial.number), place["worker"], place["lane"], begin, end, ending, rounds)


def _ending_of(trial: FrozenTrial, stopped: set[str]) -> Ending:
    if trial.state == TrialState.COMPLETE:
        return "done"
    if trial.state == TrialState.PRUNED:
        return "pruned"
    if trial.state != TrialState.FAIL:
        return "running"
    if str(trial.number) in stopped:
        return "stopped"
    last = trial.last_step
    return "nan" if last is not None and math.isnan(trial.intermediate_values[last]) else "error"


def _sections_of(spans: Iterable[Section]) -> list[Section]:
    """Join spans to sections; nothing happens between two of them for over a minute."""
    sections: list[Section] = []
    for begin, end in sorted(spans):
        if sections and begin - sections[-1][1] <= _LONGEST_PAUSE_S:
            sections[-1] = sections[-1][0], max(sections[-1][1], end)
        else:
            sections.append((begin, end))
    return sections


def _since_start(timeline: Timeline, sections: Sequence[Section]) -> Timeline:
    """The timeline in seconds since the first section's begin, without the time between sections."""
    elapsed = _clock_of(sections)

    def moved(spans: Iterable[Any]) -> tuple[Any, ...]:
        changed = [replace(span, begin=elapsed(span.begin), end=elapsed(span.end)) for span in spans]
        return tuple(sorted(changed, key=lambda span: span.begin))

    return replace(
        timeline,
        workers=moved(timeline.workers),
        stays=moved(timeline.stays),
        rounds=moved(timeline.rounds),
        compilations=moved(timeline.compilations),
        waiting=tuple((elapsed(time), trials) for time, trials in timeline.waiting),
        resumed=tuple(elapsed(begin) for begin, _ in sections[1:]),
    )


def _clock_of(sections: Sequence[Section]) -> Callable[[float], float]:
    begins = [begin for begin, _ in sections]
    before = [0.0, *itertools.accumulate(end - begin for begin, end in sections)]

    def elapsed(time: float) -> float:
        index = max(0, bisect.bisect(begins, time) - 1)
        return before[index] + min(time, sections[index][1]) - begins[index]

    return elapsed
