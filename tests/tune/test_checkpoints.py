"""Which checkpoints of a trial remain, and what can be done with them, as in stock Tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from torch import nn
from trainables import Climb, PlainClimb

from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

# Of trials of seven rounds whose score is best in the third.
KEPT = {
    "no checkpoints": ({}, []),
    "checkpoint_frequency": ({"checkpoint_frequency": 3}, [3, 6]),
    "checkpoint_at_end": ({"checkpoint_at_end": True}, [7]),
    "both": ({"checkpoint_frequency": 3, "checkpoint_at_end": True}, [3, 6, 7]),
    "num_to_keep": ({"checkpoint_frequency": 1, "num_to_keep": 2}, [6, 7]),
    # Tune never deletes the latest, from which a trial goes on.
    "highest score": (
        {"checkpoint_frequency": 1, "num_to_keep": 2, "checkpoint_score_attribute": "score"},
        [3, 4, 7],
    ),
    "lowest score": (
        {
            "checkpoint_frequency": 1,
            "num_to_keep": 2,
            "checkpoint_score_attribute": "score",
            "checkpoint_score_order": "min",
        },
        [6, 7],
    ),
}


def checkpoints(directory: str) -> dict[str, float]:
    """The height in each checkpoint of a trial."""
    heights = {}
    for path in sorted(Path(directory).glob("checkpoint_*")):
        if (path / "checkpoint.pt").exists():
            state = torch.load(path / "checkpoint.pt", weights_only=True)
            assert state["epoch"] == state["model"]["weight"].item()
            heights[path.name] = float(state["epoch"])
        else:
            heights[path.name] = json.loads((path / "height.json").read_text())
    return heights


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> dict[str, dict[str, dict[str, float]]]:
    """The checkpoints that remain, by front end and row of the table; one run, an Experiment for each row."""
    found = {}
    for name, trainable, scheduler in (("packed", Climb, HFTAPacker(B=8)), ("stock", PlainClimb, None)):
        experiments = [
            tune.Experiment(
                row.replace(" ", "_"),
                trainable,
                config={"peak": 3},
                stop={"training_iteration": 7},
                checkpoint_config=tune.CheckpointConfig(**arguments),
                storage_path=str(tmp_path_factory.mktemp(name)),
                resources_per_trial={"cpu": 2 if name == "packed" else 1},
            )
            for row, (arguments, _) in KEPT.items()
        ]
        analysis = tune.run(experiments, scheduler=scheduler, verbose=0, reuse_actors=name == "stock")
        found[name] = {row: checkpoints(trial.path) for row, trial in zip(KEPT, analysis.trials, strict=True)}
    return found


@pytest.mark.parametrize("row", KEPT)
def test_checkpoints_that_remain(kept: Any, row: str) -> None:
    assert kept["packed"][row] == kept["stock"][row]
    assert list(kept["packed"][row].values()) == KEPT[row][1]


@pytest.mark.parametrize("packed", [True, False])
def test_best_checkpoint_and_a_run_that_starts_from_it(climb: Any, storage: str, packed: bool) -> None:
    tuner = tune.Tuner(
        tune.with_resources(Climb if packed else PlainClimb, {"cpu": 2 if packed else 1}),
        param_space={"peak": tune.grid_search([2, 3])},
        tune_config=tune.TuneConfig(
            scheduler=HFTAPacker(B=2) if packed else None, metric="score", mode="max", reuse_actors=not packed
        ),
        run_config=tune.RunConfig(
            storage_path=storage,
            stop={"training_iteration": 4},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
        ),
    )
    result = tuner.fit().get_best_result()
    assert result.config == {"peak": 3} and result.checkpoint.path.endswith("checkpoint_000003")
    best = result.get_best_checkpoint("score", "max")
    with best.as_directory() as directory:
        if packed:
            model = nn.Linear(1, 1, bias=False)
            model.load_state_dict(torch.load(Path(directory) / "checkpoint.pt", weights_only=True)["model"])
            assert model(torch.ones(1, 1)).item() == 3
        restored = climb(packed=packed, config={"peak": 3}, restore=directory, stop={"height": 6})
    [trial] = restored.trials
    frame = restored.trial_dataframes[trial.trial_id]
    assert list(frame["height"]) == [4, 5, 6]
    assert list(frame["training_iteration"]) == [1, 2, 3]  # Tune restores the trainable, and counts anew
