"""Tunes in a Ray session with a dashboard; prints what became of the trials and what Ray's state API says.

The session stays until a line is read. Trials go on until they see their experiment's lanes among Ray's metrics.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
import trainables
from ray import cloudpickle, tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.util.state import list_actors, list_tasks

from hfta_tune import HFTAPacker

cloudpickle.register_pickle_by_value(trainables)
storage = sys.argv[1]
seen = Path(storage, "seen")


class Ends(trainables.Climb):
    """Climbs until it is stopped, fails at peak 2 and has a NaN at peak 3."""

    def evaluate(self, model: Any, config: dict[str, Any]) -> dict[str, float]:
        if config["peak"] == 2:
            raise ValueError("peak 2 cannot be climbed")
        return {**super().evaluate(model, config), "share": float("nan") if config["peak"] == 3 else 1.0}


class Stops4(FIFOScheduler):
    """Stops the trials of peak 4 early."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        early = trial.config["peak"] == 4 and result["training_iteration"] == 2
        return str(TrialScheduler.STOP if early else TrialScheduler.CONTINUE)


def wait_for_lanes(url: str) -> None:
    while True:
        time.sleep(0.5)
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        shown = [
            line for line in lines if line.startswith(("ray_hfta_tune_array_lanes", "ray_hfta_tune_trials_waiting"))
        ]
        if {line.split("{")[0] for line in shown if not line.endswith(" 0.0")} == {
            "ray_hfta_tune_array_lanes",
            "ray_hfta_tune_trials_waiting",
        }:
            print(json.dumps({"exported": [line for line in lines if line.startswith("ray_hfta_tune")]}), flush=True)
            seen.touch()
            return


context = ray.init(
    num_cpus=2,
    include_dashboard=True,
    dashboard_port=0,
    log_to_driver=False,
    logging_config=ray.LoggingConfig(log_level="INFO"),
    _system_config={"metrics_report_interval_ms": 1000},
)
exporter = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
dashboard = f"http://{context.dashboard_url}"
print(json.dumps({"dashboard": dashboard, "exporter": exporter}), flush=True)
threading.Thread(target=wait_for_lanes, args=(exporter,), daemon=True).start()
analysis = tune.run(
    Ends,
    name="climbs",
    config={"peak": tune.grid_search([1, 1, 2, 3, 4, 1])},
    scheduler=HFTAPacker(Stops4(), B=2),
    stop=lambda trial_id, result: result["training_iteration"] >= 3 and seen.exists(),
    resources_per_trial={"cpu": 2},
    storage_path=storage,
    raise_on_failed_trial=False,
    verbose=0,
)
trials = [
    {
        "id": trial.trial_id,
        "peak": trial.config["peak"],
        "rounds": (trial.last_result or {}).get("training_iteration", 0),
        "status": trial.status,
    }
    for trial in analysis.trials
]
actors = [
    {"name": own.name, "repr": own.repr_name, "class": own.class_name}
    for own in list_actors(address=dashboard, detail=True)
]
log = "".join(path.read_text() for path in Path(context.address_info["session_dir"], "logs").glob("worker-*.err"))
tasks: list[str] = []
give_up = time.monotonic() + 60
while not any(task.startswith("stop") for task in tasks) and time.monotonic() < give_up:  # Ray tells once a second
    time.sleep(0.5)
    tasks = sorted({task.name for task in list_tasks(address=dashboard, limit=10_000)})
print(json.dumps({"trials": trials, "actors": actors, "tasks": tasks, "log": log}), flush=True)
sys.stdin.readline()
ray.shutdown()
