"""The Grafana dashboard of runs under Ray Tune, and the command that writes it: `hfta-tune grafana --out DIR`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfta_tune.monitor._metric_table import exported_name

__all__ = ["FILE", "Panel", "add_arguments", "dashboard", "panels", "provisioned_directory", "run", "write"]

FILE = "hfta_tune_grafana_dashboard.json"
"""The name of the dashboard's file."""

_WIDTH, _HEIGHT, _PANELS_A_ROW = 12, 8, 2
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CHOSEN = 'SessionName=~"$session",experiment=~"$experiment"'
_EXPERIMENT, _WORKER, _ARRAY = "experiment", "experiment, worker", "experiment, worker, array"
_LEGENDS = {
    _EXPERIMENT: "{{experiment}}",
    _WORKER: "{{experiment}}, worker {{worker}}",
    _ARRAY: "{{experiment}}, worker {{worker}}, array {{array}}",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time.

    Attributes:
        title: Its title.
        unit: The unit's id in Grafana.
        queries: (PromQL expression, legend), each a group of lines.
        stacked: Whether the lines are drawn one upon the other.
    """

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    stacked: bool = False


def panels() -> list[Panel]:
    """The panels, in the order in which they are shown."""
    return [
        Panel(
            "Lanes and waiting trials",
            "short",
            [
                _sum(_now("lanes_in_use"), _EXPERIMENT, "in use"),
                _sum(_now("lanes_free"), _EXPERIMENT, "free"),
                _sum(_now("trials_waiting"), _EXPERIMENT, "trials waiting"),
            ],
        ),
        Panel(
            "Trials ended so far", "short", [(f"sum by (reason) ({_now('trials_ended_total')})", "{{reason}}")], True
        ),
        Panel("Rounds of single models", "ops", [_sum(_rate("model_rounds_total"), _EXPERIMENT)], True),
        Panel("Speed-up over one trial at a time", "none", [_mean(_now("speed_up_ratio"), _EXPERIMENT)]),
        Panel("Training steps of single models", "ops", [_sum(_rate("model_steps_total"), _WORKER)], True),
        Panel("Training samples", "ops", [_sum(_rate("training_samples_total"), _WORKER)], True),
        Panel("Arrays", "short", [_sum(_now("arrays"), _WORKER)]),
        Panel("Lanes an array", "short", [_sum(_now("array_lanes"), _ARRAY)], True),
        Panel("Arrays by strategy", "short", [(f"sum by (strategy) ({_now('array_strategy')})", "{{strategy}}")], True),
        Panel("Refills so far", "short", [_sum(_now("refills_total"), _WORKER)]),
        Panel("Rounds", "ops", [_sum(_rate("rounds_total"), _WORKER)]),
        Panel(
            "Time a round",
            "s",
            [
                _ratio(_rate("round_seconds", "_sum"), _rate("round_seconds", "_count"), _WORKER, "mean"),
                (
                    f"histogram_quantile(0.95, sum by (le, {_WORKER}) ({_rate('round_seconds', '_bucket')}))",
                    f"{_LEGENDS[_WORKER]}: 95%",
                ),
            ],
        ),
        Panel("Share of time computing", "percentunit", [_mean(_now("computing_ratio"), _WORKER)]),
        Panel("Time for compilations so far", "s", [_sum(_now("compile_seconds_total"), _WORKER)]),
        Panel(
            "Device memory",
            "bytes",
            [
                _sum(_now("device_memory_used_bytes"), _WORKER, "used"),
                _sum(_now("device_memory_size_bytes"), _WORKER, "size"),
            ],
        ),
        Panel(
            "Driver's CPU time a result",
            "s",
            [_ratio(_rate("driver_cpu_seconds_total"), _rate("results_total"), _EXPERIMENT)],
        ),
    ]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana (8 or newer) reads it; its variables choose data source, Ray session and experiment."""
    return {
        "title": "hfta_tune",
        "uid": "hftaTune",
        "tags": ["hfta_tune", "ray"],
        "schemaVersion": 36,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": _variables()},
        "panels": [_drawn(number, panel) for number, panel in enumerate(panels())],
    }


def provisioned_directory() -> Path:
    """Where the Grafana that Ray sets up reads dashboards: in the newest session of this machine, by default."""
    chosen = os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
    if chosen:
        return Path(chosen)
    newest = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "session_latest", "metrics")
    return Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT", newest), "grafana", "dashboards")


def write(directory: Path) -> Path:
    """Write the dashboard into a directory, which is made if it is not there; returns the file.

    Raises:
        OSError: if it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    file.write_text(json.dumps(dashboard(), indent=2) + "\n")
    return file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write it; by default where the Grafana that Ray sets up reads it, once Ray runs",
    )


def run(args: argparse.Namespace) -> int:
    """Write the dashboard; returns the exit code."""
    directory = args.out or provisioned_directory()
    if args.out is None and not directory.is_dir():
        print(f"There is no {directory}: start Ray with its dashboard first, or give --out DIR.", file=sys.stderr)
        return 1
    try:
        file = write(directory)
    except OSError as error:
        print(f"Could not write the dashboard: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {file}")
    return 0


def _now(name: str) -> str:
    return f"{exported_name(f'hfta_tune_{name}')}{{{_CHOSEN}}}"


def _rate(name: str, part: str = "") -> str:
    return f"rate({exported_name(f'hfta_tune_{name}')}{part}{{{_CHOSEN}}}[$window])"


def _sum(expression: str, labels: str, what: str = "") -> tuple[str, str]:
    return f"sum by ({labels}) ({expression})", _LEGENDS[labels] + (what and f": {what}")


def _mean(expression: str, labels: str) -> tuple[str, str]:
    """Of a ratio: runs of the same name in several Ray sessions have one each, which do not add up."""
    return f"avg by ({labels}) ({expression})", _LEGENDS[labels]


def _ratio(above: str, below: str, labels: str, what: str = "") -> tuple[str, str]:
    (dividend, legend), (divisor, _) = _sum(above, labels, what), _sum(below, labels)
    return f"{dividend} / {divisor}", legend


def _variables() -> list[dict[str, Any]]:
    known = exported_name("hfta_tune_trials_waiting")
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _choice("session", "Ray session", f"label_values({known}, SessionName)"),
        _choice("experiment", "Experiment", f'label_values({known}{{SessionName=~"$session"}}, experiment)'),
        {
            "name": "window",
            "label": "Rates over",
            "type": "interval",
            "query": "1m,5m,15m,1h",
            "current": {"text": "1m", "value": "1m"},
        },
    ]


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # whenever the time range changes
        "sort": 2,  # newest session first
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _drawn(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _PANELS_A_ROW)
    drawing = {
        "fillOpacity": 20 if panel.stacked else 0,
        "lineWidth": 1,
        "spanNulls": 60_000,  # milliseconds
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawing}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }
