"""What Ray's pages and exporter show of a run, in a session with a dashboard, and Prometheus where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

from hfta_tune.monitor._metric_table import METRICS, Kind, exported_name
from hfta_tune.monitor.grafana import panels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None, reason="needs ray[default]: the extra `dashboard`"
    ),
]

SECONDS = 120


class Run:
    """A finished run whose Ray session is still there.

    Attributes:
        dashboard, exporter: Addresses of Ray's pages and of what Prometheus scrapes.
        during: The lines of the exporter while trials trained.
        trials, actors, tasks, log: As the script gives them.
        prometheus: Where a Prometheus answers that scrapes the exporter; None where it is not installed.
    """

    prometheus: str | None = None

    def __init__(self, directory: Path) -> None:
        script = Path(__file__).parent / "scripts" / "tune_with_dashboard.py"
        paths = [str(script.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "HFTA_TUNE_RUN_AHEAD": "0",  # it trains rounds that no trial reports
            "HFTA_TUNE_STRATEGY": "vmap",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": str(SECONDS),
            "RAY_PROMETHEUS_HOST": "http://127.0.0.1:1",
            "RAY_GRAFANA_HOST": "http://127.0.0.1:1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        addresses = self.read("dashboard")
        self.dashboard, self.exporter = addresses["dashboard"], addresses["exporter"]

    def finish(self) -> None:
        self.during: list[str] = self.read("exported")["exported"]
        told = self.read("trials")
        self.trials, self.actors = told["trials"], told["actors"]
        self.tasks, self.log = told["tasks"], told["log"]

    def read(self, key: str) -> dict[str, Any]:
        """The next line of the script that has this key; Ray may print others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                told: dict[str, Any] = json.loads(line)
                assert key in told
                return told
        raise AssertionError(f"the script ended, with exit code {self.process.wait()}")

    def exported(self) -> list[str]:
        with urllib.request.urlopen(self.exporter, timeout=30) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return [line for line in lines if line.startswith("ray_hfta_tune")]

    def close(self) -> None:
        self.process.communicate("\n", timeout=SECONDS)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Starts a Prometheus that scrapes an exporter; gives its address."""
    directory = tmp_path_factory.mktemp("prometheus")
    started: list[subprocess.Popen[bytes]] = []

    def start(exporter: str) -> str:
        address = "127.0.0.1:19099"
        target = urllib.parse.urlsplit(exporter).netloc
        job = {"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
        (directory / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
        with (directory / "log").open("wb") as log:
            command = ["prometheus", f"--web.listen-address={address}", f"--storage.tsdb.path={directory / 'data'}"]
            started.append(
                subprocess.Popen([*command, f"--config.file={directory / 'prometheus.yml'}"], stdout=log, stderr=log)
            )
        return f"http://{address}"

    yield start
    for process in started:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prometheus: Callable[[str], str]) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("results"))
    run.prometheus = prometheus(run.exporter) if shutil.which("prometheus") else None
    try:
        run.finish()
        yield run
    finally:
        run.close()


def until(expected: Callable[[], bool]) -> bool:
    """Whether something comes true in time: Ray exports once a second here."""
    end = time.monotonic() + SECONDS
    while not expected():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def values(lines: list[str], name: str, label: str | None = None) -> dict[str, float]:
    """{value of a label: value of the metric}, of the lines of an exporter; without a label under ""."""
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"{name}{{"):
            labels, value = line.rsplit(" ", 1)
            key = "" if label is None else labels.split(f'{label}="')[1].split('"')[0]
            assert 'experiment="climbs"' in labels
            found[key] = found.get(key, 0.0) + float(value)
    return found


def test_counts_are_those_of_the_trials(run: Run) -> None:
    reasons = {1: "done", 2: "error", 3: "nan", 4: "pruned"}
    expected: dict[str, float] = {}
    for trial in run.trials:
        reason = reasons[trial["peak"]]
        expected[reason] = expected.get(reason, 0) + 1
        assert trial["status"] == ("ERROR" if reason == "error" else "TERMINATED")
    assert until(lambda: values(run.exported(), "ray_hfta_tune_trials_ended_total", "reason") == expected)

    lines = run.exported()
    rounds = sum(trial["rounds"] for trial in run.trials)
    for name in ("model_rounds_total", "model_steps_total", "training_samples_total", "results_total"):
        # One batch of one sample a round; the trial that failed in its first round has no result.
        assert values(lines, f"ray_hfta_tune_{name}") == {"": rounds}, name
    assert values(lines, "ray_hfta_tune_rounds_total") == values(lines, "ray_hfta_tune_round_seconds_count")
    assert values(lines, "ray_hfta_tune_refills_total") == {"": len(run.trials) - 2}
    assert 0 < values(lines, "ray_hfta_tune_round_seconds_sum")[""] < SECONDS
    assert 0 < values(lines, "ray_hfta_tune_driver_cpu_seconds_total")[""] < SECONDS


def test_gauges_while_trials_train(run: Run) -> None:
    lines = run.during
    in_use = values(lines, "ray_hfta_tune_lanes_in_use", "worker")
    assert in_use.keys() == {"0"} and in_use["0"] + values(lines, "ray_hfta_tune_lanes_free")[""] == 2
    assert values(lines, "ray_hfta_tune_arrays")[""] == len(values(lines, "ray_hfta_tune_array_lanes", "array"))
    assert 1 <= values(lines, "ray_hfta_tune_array_lanes")[""] <= 2
    assert set(values(lines, "ray_hfta_tune_array_strategy", "strategy")) <= {"vmap", "lane by lane"}
    assert 0 < values(lines, "ray_hfta_tune_trials_waiting")[""] <= len(run.trials) - 2
    assert 0 < values(lines, "ray_hfta_tune_computing_ratio")[""] <= 1
    used = values(lines, "ray_hfta_tune_device_memory_used_bytes")[""]
    assert 0 < used < values(lines, "ray_hfta_tune_device_memory_size_bytes")[""]


def test_types_and_labels(run: Run) -> None:
    with urllib.request.urlopen(run.exporter, timeout=30) as answer:
        text = answer.read().decode()
    ids = [trial["id"] for trial in run.trials]
    assert not [line for line in text.splitlines() if line.startswith("ray_hfta_tune") and any(i in line for i in ids)]
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE ray_hfta_tune"))
    for metric in METRICS.values():
        if metric.kind is not Kind.GAUGE:  # what is over has none
            shown = types.get(exported_name(metric.name))
            assert shown == metric.kind.value or metric.name == "hfta_tune_compile_seconds_total", metric.name


def test_names_in_the_state_api(run: Run) -> None:
    assert run.actors == [{"name": "hfta_tune:climbs:0", "repr": "hfta_tune:climbs:0", "class": "WorkerActor"}]
    assert {"create", "round", "stop"} <= set(run.tasks)
    # Ray's metrics have a series for each name.
    assert not [task for task in run.tasks if any(trial["id"] in task for trial in run.trials)]
    for trial in run.trials:
        assert f"Trial {trial['id']} takes a lane." in run.log and f"Trial {trial['id']} leaves its lane." in run.log


def test_pages(run: Run, browser: webdriver.Chrome, tmp_path: Path) -> None:
    def shows(text: str) -> None:
        wait = WebDriverWait(browser, SECONDS)
        wait.until(lambda browser: text in browser.execute_script("return document.body.innerText"))

    browser.get(f"{run.dashboard}/#/actors")
    shows("hfta_tune:climbs:0")
    assert browser.save_screenshot(str(tmp_path / "actors.png"))
    browser.get(f"{run.dashboard}/#/metrics")
    shows("Set up Prometheus and Grafana")  # there is no Grafana
    assert browser.save_screenshot(str(tmp_path / "metrics.png"))
    browser.get(f"{run.dashboard}/#/jobs/01000000")
    shows("Actor Table")
    browser.find_element("xpath", "//*[text()='Actor Table']").click()
    shows("hfta_tune:climbs:0")
    assert browser.save_screenshot(str(tmp_path / "job.png"))


def ask(address: str, query: str) -> list[Any]:
    with urllib.request.urlopen(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as answer:
        told = json.loads(answer.read())
    assert told["status"] == "success"
    result: list[Any] = told["data"]["result"]
    return result


def test_prometheus_answers_the_queries_of_the_grafana_dashboard(run: Run) -> None:
    address = run.prometheus
    if address is None:
        pytest.skip("needs Prometheus: Debian's package prometheus")
    ended = [str(len(run.trials))]
    assert until(lambda: [own["value"][1] for own in ask(address, "sum(ray_hfta_tune_trials_ended_total)")] == ended)
    for panel in panels():
        for expression, _ in panel.queries:
            chosen = expression.replace("$session", ".+").replace("$experiment", "climbs").replace("$window", "1m")
            if panel.title not in ("Speed-up over one trial at a time", "Time for compilations so far"):
                # A rate is there once its counter was scraped twice.
                assert until(lambda query=f"last_over_time(({chosen})[10m:1s])": bool(ask(address, query))), expression
            else:  # nothing was measured in two ways, nor compiled
                ask(address, chosen)
