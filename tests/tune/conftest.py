"""Runs of the trainables that the tests tune."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from ray import tune

from hfta_tune import HFTAPacker

RunClimb: TypeAlias = Callable[..., tune.ExperimentAnalysis]


@pytest.fixture
def climb(storage: str) -> RunClimb:
    """Run tune.run on Climb with the packer, one worker of B lanes, or on PlainClimb with stock Tune.

    Stock Tune reuses its processes, which saves the tests time.
    """
    from trainables import Climb, PlainClimb

    def run(*, packed: bool, B: int = 4, base: Any = None, **arguments: Any) -> tune.ExperimentAnalysis:
        given = {
            "run_or_experiment": Climb if packed else PlainClimb,
            "name": "packed" if packed else "stock",
            "config": {"peak": tune.grid_search([1, 2, 3])},
            "scheduler": HFTAPacker(base, B=B) if packed else base,
            "resources_per_trial": {"cpu": 2 if packed else 1},
            "reuse_actors": not packed,
            "storage_path": storage,
            "raise_on_failed_trial": False,
            "verbose": 0,
        }
        return tune.run(**{**given, **arguments})

    return run


@pytest.fixture
def lines() -> Callable[[str], list[dict[str, Any]]]:
    """The results in the result.json of a trial's directory; none without that file."""

    def read(directory: str) -> list[dict[str, Any]]:
        file = Path(directory) / "result.json"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return read
