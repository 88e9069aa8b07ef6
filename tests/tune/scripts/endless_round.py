"""Tunes trials that never end: after three rounds, a hook of each hangs."""

from __future__ import annotations

import sys

import faulty
import ray
import trainables
from ray import cloudpickle, tune

from hfta_tune import HFTAPacker

for module in (faulty, trainables):
    cloudpickle.register_pickle_by_value(module)
address, storage, markers = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
tune.run(
    faulty.Faulty,
    config={
        "lr": tune.grid_search([0.01, 0.02, 0.03]),
        "seed": 1,
        "fault": "evaluate",
        "how": "hang",
        "markers": markers,
    },
    scheduler=HFTAPacker(B=1),
    resources_per_trial={"cpu": 0.5},
    stop={"training_iteration": 9},
    storage_path=storage,
    verbose=0,
)
