"""The Grafana dashboard: its file, and what its queries ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hfta_tune import cli
from hfta_tune.monitor import grafana
from hfta_tune.monitor._metric_table import METRICS, Kind, exported_name

QUERIES = [expression for panel in grafana.panels() for expression, _ in panel.queries]


def written(directory: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / grafana.FILE).read_text())
    return told


def test_the_command_writes_the_dashboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "grafana" / "dashboards"
    assert cli.main(["grafana", "--out", str(directory)]) == 0
    assert str(directory / grafana.FILE) in capsys.readouterr().out
    own = written(directory)
    assert [panel["title"] for panel in own["panels"]] == [panel.title for panel in grafana.panels()]
    assert len({panel["id"] for panel in own["panels"]}) == len(own["panels"])
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in own["panels"]}
    assert len(corners) == len(own["panels"]) and {x for x, _ in corners} == {0, 12}
    for panel in own["panels"]:
        assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])


def test_where_ray_s_grafana_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", "RAY_METRICS_OUTPUT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    newest = tmp_path / "ray" / "session_latest" / "metrics" / "grafana" / "dashboards"
    assert grafana.provisioned_directory() == newest
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(tmp_path))
    assert grafana.provisioned_directory() == tmp_path / "grafana" / "dashboards"
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(tmp_path / "own"))
    assert grafana.provisioned_directory() == tmp_path / "own"
    assert cli.main(["grafana"]) == 1  # Ray has made no such directory
    (tmp_path / "own").mkdir()
    assert cli.main(["grafana"]) == 0 and written(tmp_path / "own")["title"] == "hfta_tune"


def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["grafana", "--out", str(tmp_path / "file")]) == 1
    assert "Could not write" in capsys.readouterr().err


def test_every_metric_is_drawn_and_nothing_else() -> None:
    parts = {Kind.HISTOGRAM: ("_sum", "_count", "_bucket")}
    known = {
        exported_name(metric.name) + part: metric.name
        for metric in METRICS.values()
        for part in parts.get(metric.kind, ("",))
    }
    drawn = set(re.findall(r"ray_hfta_tune_\w+", " ".join(QUERIES)))
    assert drawn <= known.keys()
    assert {known[name] for name in drawn} == METRICS.keys()


def test_what_counts_is_drawn_as_a_rate_or_as_it_is() -> None:
    for name in re.findall(r"rate\(ray_(hfta_tune_\w+?)(?:_sum|_count|_bucket)?\{", " ".join(QUERIES)):
        assert METRICS[name].kind is not Kind.GAUGE


def test_ratios_are_not_added_up() -> None:
    ratios = [query for query in QUERIES if re.search(r"_ratio\b", query)]
    assert len(ratios) == 2 and all(re.fullmatch(r"avg by \([\w, ]+\) \(\w+_ratio{[^}]*}\)", query) for query in ratios)


def test_labels_and_variables(tmp_path: Path) -> None:
    known = {label for metric in METRICS.values() for label in metric.labels} | {"SessionName", "le"}
    for panel in grafana.panels():
        for expression, legend in panel.queries:
            for labels in re.findall(r"by \(([^)]*)\)", expression):
                assert known >= set(labels.split(", "))
                assert set(re.findall(r"{{(\w+)}}", legend)) == set(labels.split(", ")) - {"le"}
    grafana.write(tmp_path)
    text = json.dumps(written(tmp_path))
    variables = {own["name"] for own in written(tmp_path)["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__all"} == variables


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_names_follow_prometheus(metric: Any) -> None:
    assert re.fullmatch(r"hfta_tune_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.labels[0] == "experiment" and "trial" not in metric.labels
    assert not re.search(r"_(ms|milliseconds|minutes|percent|kb|mb|gb)\b", metric.name)


def test_prometheus_parses_the_queries(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: Debian's package prometheus")
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$window", "1m")} for number, query in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.json"  # which is YAML too
    file.write_text(json.dumps({"groups": [{"name": "hfta_tune", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout
