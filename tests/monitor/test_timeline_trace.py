"""The Chrome trace of a timeline, by the trace event format (its address is in _timeline_trace.py)."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from hfta_tune.monitor._timeline_trace import chrome_trace
from hfta_tune.monitor.timeline import Compilation, LaneStay, Timeline, WorkerRound, WorkerSpan
from hfta_tune.rounds import ArrayRound


def event(phase: str, needed: list[str], **properties: Any) -> dict[str, Any]:
    """The schema of the events of a phase."""
    numbers = {name: {"type": "integer", "minimum": 0} for name in ("ts", "dur", "pid", "tid")}
    common = {"name": {"type": "string"}, "cat": {"type": "string"}, "args": {"type": "object"}, **numbers}
    return {
        "properties": {"ph": {"const": phase}, **common, **properties},
        "required": ["name", "ph", "pid", *needed],
        "additionalProperties": False,
    }


def metadata(key: str, kind: str, needed: list[str], *names: str) -> dict[str, Any]:
    args = {"properties": {key: {"type": kind}}, "required": [key], "additionalProperties": False}
    return event("M", ["args", *needed], name={"enum": names}, args=args)


SCHEMA = {
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event("X", ["ts", "dur", "tid"]),
                    event("i", ["ts", "tid", "s"], s={"enum": ["g", "p", "t"]}),
                    event("C", ["ts", "args"], args={"additionalProperties": {"type": "number"}, "minProperties": 1}),
                    metadata("name", "string", [], "process_name"),
                    metadata("name", "string", ["tid"], "thread_name"),
                    metadata("sort_index", "integer", ["tid"], "thread_sort_index"),
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}


def array(*trials: str) -> ArrayRound:
    return ArrayRound(0, trials, "vmap", steps=3, samples=96)


# Thirds of a second: their microseconds are no integers, and a begin plus a length is not always the end.
TIMELINE = Timeline(
    "digits",
    (WorkerSpan("worker 0", 2, 0.0, 3.0), WorkerSpan("worker 1", 1, 1 / 3, 3.0)),
    (
        LaneStay("a", "worker 0", 0, 0.1, 1 / 3, "pruned", 1),
        LaneStay("b", "worker 0", 1, 0.1, 3.0, "running", 2),
        LaneStay("c", "worker 0", 0, 1 / 3, 2 / 3, "nan", 1),
        LaneStay("d", "worker 0", 0, 2 / 3, 7 / 3, "done", 1),
        LaneStay("e", "worker 1", 0, 1 / 3, 2.9, "error", 0),
        LaneStay("f", "no lane", None, 1.0, 1.1, "error", 0),
    ),
    (
        WorkerRound("worker 0", 0.2, 1 / 3, (array("a", "b"),)),
        WorkerRound("worker 0", 1 / 3, 7 / 3, (array("c", "b"),)),
    ),
    (Compilation("worker 0", 2.0, 7 / 3),),
    waiting=((0.0, 4), (2 / 3, 0)),
)


@pytest.fixture
def events() -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(TIMELINE)))
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    own: list[dict[str, Any]] = trace["traceEvents"]
    return own


def names_of(events: list[dict[str, Any]], key: str) -> dict[Any, str]:
    return {(own["pid"], own.get("tid")): own["args"]["name"] for own in events if own["name"] == key}


def test_each_process_is_named_and_none_is_number_0(events: list[dict[str, Any]]) -> None:
    processes = names_of(events, "process_name")
    assert sorted(processes.values()) == ["digits", "no lane", "worker 0", "worker 1"]
    assert {own["pid"] for own in events} == {pid for pid, _ in processes} and min(processes)[0] > 0
    (run,) = {own["pid"] for own in events if own["ph"] == "C"}
    assert processes[run, None] == "digits"


def test_spans_of_a_thread_neither_overlap_nor_leave_a_gap_of_rounding(events: list[dict[str, Any]]) -> None:
    spans: dict[Any, list[tuple[int, int]]] = {}
    for own in events:
        if own["ph"] == "X":
            spans.setdefault((own["pid"], own["tid"]), []).append((own["ts"], own["ts"] + own["dur"]))
    gaps = [b[0] - a[1] for thread in spans.values() for a, b in itertools.pairwise(sorted(thread))]
    assert gaps == [0, 0, 0]  # a to c to d, and the two rounds


def test_ends_and_counts(events: list[dict[str, Any]]) -> None:
    threads = names_of(events, "thread_name")
    ends = [(own["name"], threads.get((own["pid"], own["tid"])), own["ts"]) for own in events if own["ph"] == "i"]
    assert ("pruned", "lane 0", 333_333) in ends and len(ends) == 5  # b runs
    assert [(own["ts"], own["args"]["trials"]) for own in events if own["ph"] == "C"] == [(0, 4), (666_667, 0)]
