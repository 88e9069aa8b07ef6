"""Workers on several nodes: a trial goes on on another one exactly, and a node that is lost costs one failure."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from faulty import environment

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "nodes.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script writes. A cluster of several nodes cannot live in a process that has another one."""
    storage = str(tmp_path_factory.mktemp("nodes"))
    with tempfile.TemporaryDirectory(prefix="ray") as temporary:  # short: it holds sockets
        script = subprocess.run(
            [sys.executable, str(SCRIPT), storage],
            capture_output=True,
            text=True,
            timeout=400,
            # In a directory of its own, or the cluster would be the one that ray.init() of others here connects to.
            env=environment(RAY_TMPDIR=temporary, RAY_USAGE_STATS_ENABLED="0", HFTA_TUNE_STRATEGY="lane by lane"),
        )
    assert script.returncode == 0, script.stderr
    written: dict[str, Any] = json.loads(Path(storage, "outcomes.json").read_text())
    return written


def numbers(results: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(result["training_iteration"], result["train_loss"], result["accuracy"]) for result in results]


def nodes(trial: dict[str, Any]) -> set[int]:
    return {result["node"] for result in trial["reported"]}


def test_a_trial_that_moves_to_another_node_goes_on_exactly(outcomes: dict[str, Any]) -> None:
    assert len(set().union(*map(nodes, outcomes["moved"]))) == 3
    compared = 0
    for moved, other in zip(outcomes["moved"], outcomes["lost"], strict=True):
        assert moved["status"] == "TERMINATED" and moved["failures"] == 0
        assert [result["training_iteration"] for result in moved["reported"]] == [1, 2, 3, 4, 5, 6]
        assert moved["logged"] == moved["reported"]
        if len(nodes(moved)) > 1 and len(nodes(other)) == 1:
            assert numbers(moved["reported"]) == numbers(other["reported"])  # to the last bit
            compared += 1
    assert compared


def test_a_node_that_is_lost_costs_its_trials_one_failure(outcomes: dict[str, Any]) -> None:
    removed = outcomes["removed"]
    assert sum(removed in nodes(trial) for trial in outcomes["lost"]) == 2
    for trial, other in zip(outcomes["lost"], outcomes["moved"], strict=True):
        assert trial["status"] == "TERMINATED"
        assert trial["failures"] == (1 if removed in nodes(trial) else 0)
        assert trial["logged"] == trial["reported"]
        assert trial["reported"][-1]["node"] != removed
        own, expected = numbers(trial["reported"]), numbers(other["reported"])
        assert set(own) == set(expected)  # what was trained twice, too
