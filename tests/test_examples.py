"""The examples as a user runs them, made small."""

from __future__ import annotations

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
