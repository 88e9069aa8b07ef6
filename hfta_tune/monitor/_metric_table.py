"""The metrics that a run under Ray Tune publishes; what records them and what draws them reads this table."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["METRICS", "Kind", "Metric", "exported_name"]

# Ray puts this before every name.
_PREFIX = "ray_"


class Kind(enum.Enum):
    """What Prometheus calls a metric's type."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: names and units are by Prometheus's conventions (https://prometheus.io/docs/practices/naming/).

    Attributes:
        name: Without the prefix that Ray gives it.
        kind: Its type.
        help: What it counts or measures.
        labels: By what it is told apart. "array" is a place among the arrays of a worker, which the next array takes
            when one is gone; so no label has more values than there are lanes, and none is a trial.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]


_RUN = ("experiment",)
_WORKER = ("experiment", "worker")
_ARRAY = ("experiment", "worker", "array")

METRICS = {
    metric.name: metric
    for metric in (
        Metric("hfta_tune_lanes_in_use", Kind.GAUGE, "Lanes that have a trial.", _WORKER),
        Metric("hfta_tune_lanes_free", Kind.GAUGE, "Lanes that have no trial.", _WORKER),
        Metric("hfta_tune_trials_waiting", Kind.GAUGE, "Trials that wait for a lane.", _RUN),
        Metric("hfta_tune_arrays", Kind.GAUGE, "Arrays of the worker.", _WORKER),
        Metric("hfta_tune_array_lanes", Kind.GAUGE, "Lanes of the array.", _ARRAY),
        Metric(
            "hfta_tune_array_strategy",
            Kind.GAUGE,
            "1 for the strategy by which the array trains, 0 for one by which it trained before.",
            (*_ARRAY, "strategy"),
        ),
        Metric("hfta_tune_rounds_total", Kind.COUNTER, "Rounds of the worker.", _WORKER),
        Metric("hfta_tune_round_seconds", Kind.HISTOGRAM, "How long a round took.", _WORKER),
        Metric(
            "hfta_tune_computing_ratio",
            Kind.GAUGE,
            "Part of the time of its last 10 rounds that the worker spent in them.",
            _WORKER,
        ),
        Metric("hfta_tune_model_rounds_total", Kind.COUNTER, "Rounds of single models.", _ARRAY),
        Metric("hfta_tune_model_steps_total", Kind.COUNTER, "Training steps of single models.", _ARRAY),
        Metric("hfta_tune_training_samples_total", Kind.COUNTER, "Samples that models were trained on.", _ARRAY),
        Metric(
            "hfta_tune_compile_seconds_total",
            Kind.COUNTER,
            "Time for recordings and compilations of training steps.",
            _ARRAY,
        ),
        Metric("hfta_tune_refills_total", Kind.COUNTER, "Trials that took a lane that another one had had.", _WORKER),
        Metric(
            "hfta_tune_trials_ended_total",
            Kind.COUNTER,
            "Trials that ended, by the reason: done, stopped, pruned, error or nan.",
            (*_RUN, "reason"),
        ),
        Metric("hfta_tune_device_memory_used_bytes", Kind.GAUGE, "Memory in use on the worker's device.", _WORKER),
        Metric("hfta_tune_device_memory_size_bytes", Kind.GAUGE, "Memory of the worker's device.", _WORKER),
        Metric("hfta_tune_results_total", Kind.COUNTER, "Results that the driver has given to Tune.", _RUN),
        Metric(
            "hfta_tune_driver_cpu_seconds_total",
            Kind.COUNTER,
            "CPU time of the driver's thread in which Tune handles them.",
            _RUN,
        ),
        Metric(
            "hfta_tune_speed_up_ratio",
            Kind.GAUGE,
            "How many times as fast as one trial at a time the arrays train, where steps were measured both ways.",
            _RUN,
        ),
    )
}


def exported_name(name: str) -> str:
    """The name by which Prometheus knows a metric."""
    return f"{_PREFIX}{METRICS[name].name}"
