"""When a run is published as metrics of Ray, and what is recorded of made-up events."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import ray

from hfta_tune.monitor import _metrics, observers_of_experiment
from hfta_tune.monitor._metric_table import Kind
from hfta_tune.monitor._metrics import RayMetrics
from hfta_tune.monitor._timeline_log import TimelineLog
from hfta_tune.rounds import ArrayRound, Round


class Here:
    """Stands for Ray's context of this process."""

    def get_node_id(self) -> str:
        return "here"


@pytest.mark.parametrize(
    ("nodes", "installed", "initialized", "expected"),
    [
        ([{"NodeID": "here", "MetricsExportPort": 8080}], True, True, True),
        ([{"NodeID": "here", "MetricsExportPort": 8080}], False, True, False),  # no ray[default]
        ([{"NodeID": "here", "MetricsExportPort": 8080}], True, False, False),
        ([{"NodeID": "here", "MetricsExportPort": -1}], True, True, False),
        ([{"NodeID": "here"}], True, True, False),
        ([{"NodeID": "there", "MetricsExportPort": 8080}], True, True, False),
    ],
)
def test_a_run_is_published_where_its_node_exports(
    nodes: list[dict[str, Any]],
    installed: bool,
    initialized: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "is_initialized", lambda: initialized)
    monkeypatch.setattr(ray, "get_runtime_context", Here)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(_metrics, "_made", lambda metric: None)
    kinds = [TimelineLog, RayMetrics] if expected else [TimelineLog]
    assert [type(own) for own in observers_of_experiment("digits", tmp_path)] == kinds


class Series:
    """Stands for a metric of Ray: the last value of each gauge, the sum of each counter."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.values: dict[tuple[str, ...], float] = {}

    def _put(self, kind: Kind, value: float, labels: dict[str, str]) -> None:
        assert self.metric.kind is kind and tuple(labels) == self.metric.labels
        assert labels.pop("experiment") == "digits"
        key = tuple(labels.values())
        self.values[key] = value + (0 if kind is Kind.GAUGE else self.values.get(key, 0))

    def set(self, value: float, labels: dict[str, str]) -> None:
        self._put(Kind.GAUGE, value, labels)

    def inc(self, value: float, labels: dict[str, str]) -> None:
        self._put(Kind.COUNTER, value, labels)

    def observe(self, value: float, labels: dict[str, str]) -> None:
        self._put(Kind.HISTOGRAM, value, labels)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> RayMetrics:
    monkeypatch.setattr(_metrics, "_made", Series)
    monkeypatch.setattr(_metrics, "_SECONDS_BETWEEN_RECORDS", 0.0)
    return RayMetrics("digits")


def values(metrics: RayMetrics, name: str) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = metrics._metrics[f"hfta_tune_{name}"].values
    return found


def array(*trials: str, strategy: str) -> ArrayRound:
    seconds = {"vmap": 0.01, "lane by lane": 0.03}
    return ArrayRound(0, trials, strategy, steps=10, samples=80, compile_seconds=2.0, seconds_a_step=seconds)


def test_what_is_recorded_of_a_worker(metrics: RayMetrics) -> None:
    metrics.worker_opened(0, 4)
    for lane, trial in enumerate("abc"):
        metrics.trial_joined(trial, 0, lane)
    metrics.round_ended(0, Round(0.0, 2.0, (array("a", "b", "c", strategy="vmap"),)))
    assert values(metrics, "lanes_in_use") == {("0",): 3} and values(metrics, "lanes_free") == {("0",): 1}
    assert values(metrics, "array_lanes") == {("0", "0"): 3}
    assert values(metrics, "model_rounds_total") == {("0", "0"): 3}
    assert values(metrics, "model_steps_total") == {("0", "0"): 30}
    assert values(metrics, "training_samples_total") == {("0", "0"): 240}
    assert values(metrics, "compile_seconds_total") == {("0", "0"): 2}  # once for all lanes
    assert values(metrics, "round_seconds") == {("0",): 2}
    assert values(metrics, "speed_up_ratio") == {(): pytest.approx(3)}
    metrics.trial_left("a")
    metrics.trial_joined("d", 0, 0)
    metrics.round_ended(0, Round(2.0, 3.0, (array("b", "c", "d", strategy="vmap"),)))
    assert values(metrics, "refills_total") == {("0",): 1} and values(metrics, "rounds_total") == {("0",): 2}
    assert values(metrics, "model_rounds_total") == {("0", "0"): 6}


def test_what_is_gone_is_0_once(metrics: RayMetrics) -> None:
    metrics.worker_opened(0, 2)
    metrics.trial_joined("a", 0, 0)
    metrics.round_ended(0, Round(0.0, 1.0, (array("a", strategy="vmap"),)))
    metrics.round_ended(0, Round(1.0, 2.0, (array("a", strategy="lane by lane"),)))
    assert values(metrics, "array_strategy") == {("0", "0", "vmap"): 0, ("0", "0", "lane by lane"): 1}
    metrics.run_ended()
    shown = [own.values for own in metrics._metrics.values() if own.metric.kind is Kind.GAUGE]
    assert not any(value for own in shown for value in own.values())
