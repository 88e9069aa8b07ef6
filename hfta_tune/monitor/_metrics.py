"""Publishes a run's figures through ray.util.metrics, from the driver."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from hfta_tune.monitor._figures import Figures, WorkerFigures
from hfta_tune.monitor._metric_table import METRICS, Kind, Metric
from hfta_tune.rounds import EndReason, Round

__all__ = ["RayMetrics", "metrics_are_exported"]

# Ray sends what is recorded to its exporter every 10 s, and forgets a gauge that is not set again for 20 s.
_SECONDS_BETWEEN_RECORDS = 2.0

_ROUND_SECONDS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]

_Series: TypeAlias = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels after the first, "experiment"."""


def metrics_are_exported() -> bool:
    """Whether something exports what this process records: the agent of its node, a part of ray[default]."""
    if importlib.util.find_spec("prometheus_client") is None or not ray.is_initialized():
        return False
    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node.get("MetricsExportPort", -1) > 0 for node in ray.nodes())


class RayMetrics(Figures):
    """Records a run's figures as metrics of Ray, every two seconds.

    Args:
        experiment: The experiment's name, the value of the label "experiment".
    """

    wants_memory = True

    def __init__(self, experiment: str) -> None:
        super().__init__()
        self._experiment = experiment
        self._metrics = {name: _made(metric) for name, metric in METRICS.items()}
        self._amounts: dict[_Series, float] = {}
        self._shown: set[_Series] = set()
        self._due = 0.0

    def trial_ended(self, trial_id: str, reason: EndReason) -> None:
        super().trial_ended(trial_id, reason)
        self._add("hfta_tune_trials_ended_total", 1, reason)

    def trial_joined(self, trial_id: str, worker: int, lane: int) -> None:
        before = self.workers[worker].refills
        super().trial_joined(trial_id, worker, lane)
        self._add("hfta_tune_refills_total", self.workers[worker].refills - before, worker)

    def results_given(self, results: int, driver_seconds: float) -> None:
        super().results_given(results, driver_seconds)
        self._add("hfta_tune_results_total", results)
        self._add("hfta_tune_driver_cpu_seconds_total", driver_seconds)

    def round_ended(self, worker: int, own: Round) -> None:
        super().round_ended(worker, own)
        self._add("hfta_tune_rounds_total", 1, worker)
        round_seconds = "hfta_tune_round_seconds"
        self._metrics[round_seconds].observe(own.seconds, self._labels(round_seconds, (str(worker),)))
        trained = {array.number for array in own.arrays}
        for place, array in self.workers[worker].arrays.items():
            if array.number in trained:
                models = len(array.trials)
                self._add("hfta_tune_model_rounds_total", models, worker, place)
                self._add("hfta_tune_model_steps_total", models * array.steps, worker, place)
                self._add("hfta_tune_training_samples_total", models * array.samples, worker, place)
                self._add("hfta_tune_compile_seconds_total", array.compile_seconds, worker, place)
        self.time_passed()

    def time_passed(self) -> None:
        if time.monotonic() >= self._due:
            self._record()

    def run_ended(self) -> None:
        super().run_ended()
        self._record()

    def _add(self, name: str, amount: float, *labels: Any) -> None:
        if amount > 0:
            series = name, tuple(map(str, labels))
            self._amounts[series] = self._amounts.get(series, 0) + amount

    def _record(self) -> None:
        for (name, labels), amount in self._amounts.items():
            self._metrics[name].inc(amount, self._labels(name, labels))
        self._amounts.clear()
        shown = dict(self._gauges())
        for name, labels in self._shown - shown.keys():  # once 0, what is gone is left to be forgotten
            self._metrics[name].set(0, self._labels(name, labels))
        for (name, labels), value in shown.items():
            self._metrics[name].set(value, self._labels(name, labels))
        self._shown = set(shown)
        self._due = time.monotonic() + _SECONDS_BETWEEN_RECORDS

    def _gauges(self) -> Iterator[tuple[_Series, float]]:
        yield ("hfta_tune_trials_waiting", ()), self.trials_waiting
        speed_up = self.now().speed_up
        if speed_up is not None:
            yield ("hfta_tune_speed_up_ratio", ()), speed_up
        for number, worker in self.workers.items():
            if worker.lanes:
                yield from _gauges_of(str(number), worker)

    def _labels(self, name: str, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(METRICS[name].labels, (self._experiment, *values), strict=True))


def _gauges_of(number: str, worker: WorkerFigures) -> Iterator[tuple[_Series, float]]:
    yield ("hfta_tune_lanes_in_use", (number,)), worker.lanes_in_use
    yield ("hfta_tune_lanes_free", (number,)), worker.lanes_free
    yield ("hfta_tune_arrays", (number,)), len(worker.arrays)
    if worker.rounds:
        yield ("hfta_tune_computing_ratio", (number,)), worker.computing_ratio
    if worker.memory_used is not None and worker.memory_size is not None:
        yield ("hfta_tune_device_memory_used_bytes", (number,)), worker.memory_used
        yield ("hfta_tune_device_memory_size_bytes", (number,)), worker.memory_size
    for place, array in worker.arrays.items():
        yield ("hfta_tune_array_lanes", (number, str(place))), len(array.trials)
        yield ("hfta_tune_array_strategy", (number, str(place), array.strategy)), 1


def _made(metric: Metric) -> Any:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(metric.name, metric.help, boundaries=_ROUND_SECONDS, tag_keys=metric.labels)
    return (Counter if metric.kind is Kind.COUNTER else Gauge)(metric.name, metric.help, tag_keys=metric.labels)
