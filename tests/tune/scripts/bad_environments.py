"""Tunes with workers that cannot start, one way after the other; prints what became of the trials."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import trainables
from ray import cloudpickle, tune

from hfta_tune import HFTAPacker

cloudpickle.register_pickle_by_value(trainables)
address, storage, markers = sys.argv[1:]


def die_once() -> None:
    """Have the process that first starts a worker die of it."""

    class Finder:
        def find_spec(self, name: str, *arguments: Any) -> None:
            marker = Path(markers, "died")
            if name == "hfta_tune.tune._actor" and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


def run(runtime_env: dict[str, Any], max_failures: int) -> list[dict[str, Any]]:
    """Tune two trials in a job with this environment."""
    ray.init(address=address, log_to_driver=False, runtime_env=runtime_env)
    try:
        trials = tune.run(
            trainables.Points,
            config={"lr": tune.grid_search([0.01, 0.02])},
            scheduler=HFTAPacker(B=2),
            resources_per_trial={"cpu": 2},
            stop={"training_iteration": 2},
            max_failures=max_failures,
            storage_path=storage,
            raise_on_failed_trial=False,
            verbose=0,
        ).trials
    finally:
        ray.shutdown()
    return [
        {"status": trial.status, "failures": trial.num_failures, "error": trial.get_error(), "path": trial.path}
        for trial in trials
    ]


failing = run({"working_dir": "file:///no/such/environment.zip"}, max_failures=1)
raising = run({"env_vars": {"HFTA_TUNE_STRATEGY": "no such strategy"}}, max_failures=0)
killed = run({"worker_process_setup_hook": die_once}, max_failures=1)
print(json.dumps([failing, raising, killed]))
