"""A timeline as a Chrome trace, which Perfetto opens: a process a worker, a thread a lane.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from hfta_tune.monitor.timeline import Timeline

__all__ = ["chrome_trace"]

_LANES, _ROUNDS, _COMPILATIONS = 1, 1_000_001, 1_000_002
"""Thread numbers: of lane 0, of a worker's rounds, of its compilations."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the object that the trace's JSON file holds; its times are in microseconds since the start.

    They are integers, so that a trial's end is the next one's begin and no two spans of a lane overlap by rounding.
    """
    names = [span.worker for span in timeline.workers] + [stay.worker for stay in timeline.stays]
    processes = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    events = [*_names(timeline, processes)]
    for stay in timeline.stays:
        thread = {"pid": processes[stay.worker], "tid": _LANES + (stay.lane or 0)}
        args = {"trial": stay.trial, "rounds": stay.rounds, "ending": stay.ending}
        events.append(_span(f"trial {stay.trial}", "trial", stay.begin, stay.end, args) | thread)
        if stay.ending != "running":
            end = {"name": stay.ending, "cat": "end", "ph": "i", "s": "t", "ts": _microseconds(stay.end), "args": args}
            events.append(end | thread)
    for number, own in enumerate(timeline.rounds):
        arrays = {
            f"array {array.number}": f"{len(array.trials)} trials, {array.strategy}, {array.steps} steps"
            for array in own.arrays
        }
        thread = {"pid": processes[own.worker], "tid": _ROUNDS}
        events.append(_span("round", "round", own.begin, own.end, {"number": number, **arrays}) | thread)
    for compilation in timeline.compilations:
        thread = {"pid": processes[compilation.worker], "tid": _COMPILATIONS}
        events.append(_span("compile", "compilation", compilation.begin, compilation.end, {}) | thread)
    if timeline.waiting:
        run = len(processes) + 1  # not 0, which is no process to viewers
        events.append({"name": "process_name", "ph": "M", "pid": run, "args": {"name": timeline.name}})
        counts = ((_microseconds(time), trials) for time, trials in timeline.waiting)
        events.extend(
            {"name": "waiting trials", "ph": "C", "ts": time, "pid": run, "args": {"trials": trials}}
            for time, trials in counts
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": timeline.name}}


def _span(name: str, category: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    """A complete event."""
    time = _microseconds(begin)
    return {"name": name, "cat": category, "ph": "X", "ts": time, "dur": _microseconds(end) - time, "args": args}


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


def _names(timeline: Timeline, processes: dict[str, int]) -> list[dict[str, Any]]:
    """The metadata: what processes and threads are called, and their order."""
    events: list[dict[str, Any]] = []
    for worker, pid in processes.items():
        threads = {_ROUNDS: "rounds", _COMPILATIONS: "compilations"}
        lanes = max((span.lanes for span in timeline.workers if span.worker == worker), default=0)
        threads |= {_LANES + lane: f"lane {lane}" for lane in range(lanes)}
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": worker}})
        for order, (tid, name) in enumerate(threads.items()):
            for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": order})):
                events.append({"name": key, "ph": "M", "pid": pid, "tid": tid, "args": value})
    return events
