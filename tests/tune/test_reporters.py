"""Tune's progress reports, the old and the new ones, as in stock Tune."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ray import tune

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


def rows(text: str) -> set[tuple[str, ...]]:
    """The cells of the last table of trials that tell one trial from another and do not depend on the machine."""
    table = re.split(r"\n[^\n]*Trial name", text)[-1]
    found = re.findall(r"Climb_\S+?(\d{5})\s.*?(TERMINATED|ERROR|RUNNING)(.*)", table)
    return {(number, status, *re.findall(r"-?\d+(?:\.\d+)?", rest)[-2:]) for number, status, rest in found}


@pytest.mark.parametrize("new", [True, False])
def test_reports(climb: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", str(int(new)))
    text = {}
    for packed in (True, False):
        reporter = tune.CLIReporter(metric_columns=["height", "score"], max_report_frequency=0)
        climb(
            packed=packed,
            stop={"training_iteration": 2},
            verbose=2,
            progress_reporter=None if new else reporter,
        )
        text[packed] = capfd.readouterr().out
    assert "HFTAPacker: " in text[True] and "HFTAPacker: " not in text[False]
    if new:
        for out in text.values():
            assert "Trial status: 3 TERMINATED" in out
            assert len(re.findall(r"Trial \S+ completed after 2 iterations", out)) == 3
            assert re.search(r"Logical resource usage: [\d.]+/2 CPUs", out)
        assert "Logical resource usage: 2.0/2 CPUs" in text[True]
    else:
        assert "Number of trials: 3/3 (3 TERMINATED)" in text[True]
        assert re.search(r"HFTAPacker: 1 worker, 3 of 4 lanes in use, 1 array, [\d.e+]+ models' rounds/s, ", text[True])
        # Both end in a table with each trial's last result.
        assert rows(text[True]) == rows(text[False])
        assert {row[1:] for row in rows(text[True])} == {
            ("TERMINATED", "2", "-1"),
            ("TERMINATED", "2", "-0"),
        }
