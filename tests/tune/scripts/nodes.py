"""Tunes on a cluster of three nodes of its own; prints what the trials reported.

Two runs of the same trials: one in which they move between nodes, and one in which they stay but a node is lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import faulty
import ray
import trainables
from ray import cloudpickle, tune
from ray.cluster_utils import Cluster
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from torch import nn

from hfta_tune import HFTAPacker

for module in (faulty, trainables):
    cloudpickle.register_pickle_by_value(module)


class Reporter(trainables.Points):
    """Also reports its node: the first digits of its name, as a number."""

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        return {"node": int(ray.get_runtime_context().get_node_id()[:8], 16)}


class Moves(FIFOScheduler):
    """Pauses all trials after every second round, and resumes them in an order in which others are first."""

    def __init__(self) -> None:
        super().__init__()
        self._resuming: list[Any] = []
        self._times = 0

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        pauses = result["training_iteration"] in (2, 4)
        return TrialScheduler.PAUSE if pauses else super().on_trial_result(tune_controller, trial, result)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        trials = tune_controller.get_trials()
        if len(trials) == TRIALS and all(trial.status == "PAUSED" for trial in trials):
            self._times += 1
            first = self._times * LANES
            ordered = sorted(trials, key=lambda trial: trial.trial_id)
            self._resuming = ordered[first:] + ordered[:first]
        while self._resuming and self._resuming[0].status != "PAUSED":
            self._resuming.pop(0)
        return self._resuming[0] if self._resuming else None


class Remover(faulty.Recorder):
    """Takes the first node away that a trial has had three results from, other than the driver's."""

    removed: int | None = None

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        super().on_trial_result(iteration, trials, trial, result)
        if self.removed is None and result["training_iteration"] == 3:
            for node in list(cluster.worker_nodes):
                if number_of(node.node_id) == result["node"]:
                    self.removed = result["node"]
                    cluster.remove_node(node, allow_graceful=False)
                    wait_for_the_end_of(result["pid"])  # else it may train its trials to their end before it dies


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} outlives its node")


def number_of(node_id: str) -> int:
    """The first digits of a node's name."""
    return int(node_id[:8], 16)


def run(scheduler: Any, recorder: faulty.Recorder) -> list[dict[str, Any]]:
    """Tune trials, some on each node; return what they reported, as callbacks and as files have it."""
    trials = tune.run(
        Reporter,
        config={"lr": tune.grid_search([0.01 * (number + 1) for number in range(TRIALS)]), "seed": 1},
        scheduler=HFTAPacker(scheduler, B=LANES),
        stop={"training_iteration": 6},
        checkpoint_freq=2,
        max_failures=1,
        storage_path=storage,
        callbacks=[recorder],
        raise_on_failed_trial=False,
        verbose=0,
    ).trials
    return [
        {
            "lr": trial.config["lr"],
            "status": trial.status,
            "failures": trial.num_failures,
            "reported": [chosen(result) for result in recorder.results[trial.trial_id]],
            "logged": [chosen(result) for result in faulty.logged(trial.path)],
        }
        for trial in sorted(trials, key=lambda trial: trial.config["lr"])
    ]


def chosen(result: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a result."""
    return {name: result[name] for name in ("training_iteration", "train_loss", "accuracy", "node")}


[storage] = sys.argv[1:]
NODES, LANES = 3, 2
TRIALS = NODES * LANES
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    remover = Remover()
    outcomes = {
        "moved": run(Moves(), faulty.Recorder()),
        "lost": run(FIFOScheduler(), remover),
        "removed": remover.removed,
    }
    Path(storage, "outcomes.json").write_text(json.dumps(outcomes))  # not printed: Ray prints too
finally:
    ray.shutdown()
    cluster.shutdown()
