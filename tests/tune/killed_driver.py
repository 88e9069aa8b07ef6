"""A driver that gets stuck in the middle of its run, to be killed by test_resume.py: address, storage, mark."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0"  # the run is saved after every step, not every ten seconds

import ray
import trainables
from ray import cloudpickle, tune

from hfta_tune import HFTAPacker

address, storage, mark = sys.argv[1:]


class StuckInTheMiddle(tune.Callback):
    """Goes no further once two trials are saved as finished, and one as running and with a checkpoint."""

    def on_step_begin(self, **info: Any) -> None:
        if Path(mark).exists():  # the run has been restored
            return
        saved = max(Path(storage, "killed").glob("experiment_state-*.json"), default=None)
        try:
            trials = json.loads(saved.read_text())["trial_data"] if saved is not None else []
        except json.JSONDecodeError:  # it is being written
            return
        finished = [json.loads(state)["status"] == "TERMINATED" for state, _ in trials]
        iterations = [json.loads(data)["last_result"].get("training_iteration", 0) for _, data in trials]
        going_on = [number for number, ended in zip(iterations, finished, strict=True) if not ended]
        if sum(finished) >= 2 and max(going_on, default=0) > 2:
            Path(mark).touch()
            threading.Event().wait()


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(trainables)
    ray.init(address=address, log_to_driver=False)
    tune.Tuner(
        tune.with_resources(trainables.Climb, {"cpu": 2}),
        param_space={"peak": tune.grid_search([2, 3, 40, 41, 42])},
        tune_config=tune.TuneConfig(scheduler=HFTAPacker(B=3)),
        run_config=tune.RunConfig(
            name="killed",
            storage_path=storage,
            stop={"score": 0},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2),
            callbacks=[StuckInTheMiddle()],
            verbose=0,
        ),
    ).fit()
