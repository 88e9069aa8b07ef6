"""The examples as a user runs them, made small."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMMANDS = [
    ["examples/digits_tune.py", "--trials", "8", "--epochs", "2", "--lanes", "4", "--compare", "--compare-trials", "2"],
    ["examples/digits_tune.py", "--trials", "8", "--epochs", "3", "--lanes", "4", "--asha"],
    [
        "examples/digits_optuna.py",
        "--trials",
        "8",
        "--epochs",
        "2",
        "--lanes",
        "4",
        "--compare",
        "--compare-trials",
        "2",
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=["tune-compare", "tune-asha", "optuna-compare"])
def test_an_example_runs_to_its_table(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    table = re.search(r"^  trial .*accuracy\n  -.*\n(.*)$", done.stdout, flags=re.MULTILINE)
    assert table is not None, done.stdout
    assert float(table[1].split()[-1]) > 0.3  # better than chance, three times over
    if "--compare" in command:
        assert re.search(r"hfta_tune is \d+\.\d times as fast", done.stdout), done.stdout


OWN_LOOPS = [
    ("own_loop_optuna", "hfta_tune.optimize"),
    ("own_loop_tune", "hfta_tune.fusible"),
    ("lightning_digits", "hfta_tune.lightning.trainable"),
]


@pytest.mark.parametrize(("name", "call"), OWN_LOOPS)
def test_an_own_loop_differs_from_the_plain_script_in_five_lines(name: str, call: str) -> None:
    plain, ours = ((ROOT / f"examples/{own}.py").read_text().splitlines() for own in (f"{name}_plain", name))
    changed = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= 5 and any(call in line for line in changed), changed


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in OWN_LOOPS])
def test_an_own_loop_finds_what_the_plain_script_finds(name: str, tmp_path: Path) -> None:
    """Few trials, so that no sampler has learned anything and nothing is pruned: they are the same trials."""
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    best = []
    for script in (f"{name}_plain", name):
        done = subprocess.run(
            [sys.executable, f"examples/{script}.py", "--trials", "4", "--epochs", "2"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = re.search(r"^best accuracy (\d\.\d+) with (.*)$", done.stdout, flags=re.MULTILINE)
        assert found is not None, done.stdout
        best.append((float(found[1]), found[2]))
    assert best[0][0] == pytest.approx(best[1][0], abs=0.006)  # two of the 389 images
    assert best[0][0] > 0.3
