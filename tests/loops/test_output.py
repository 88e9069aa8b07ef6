"""What lanes print and warn says whose it is, and a lane that holds the others up is named."""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import sys
import time
from typing import Any

import pytest
from loops.lanes_of_loops import in_lanes
from torch import nn

import hfta_tune
from hfta_tune.loops import LoopHost
from hfta_tune.loops._hub import Hub

SCRIPT = r"""
import sys, warnings
import torch
import hfta_tune
from hfta_tune.loops import LaneRuns

def own(name):
    net = hfta_tune.prepare(torch.nn.Linear(8, 2))
    print("begins", end=" ")
    net(torch.ones(2, 8))  # the other's turn, in the middle of the line
    print(name)
    print("two\nlines", file=sys.stderr)
    warnings.warn(f"{name} warns")
    for share in range(3):
        print(f"\r{share} of 2", end="", file=sys.stderr)  # a progress bar
    print(file=sys.stderr)
    print("no end", end="")

with LaneRuns() as runs:
    for name in "ab":
        runs.start(name, lambda name=name: own(name))
    while len(runs):
        list(runs.wait())
print("afterwards")
"""


def test_lines_name_trials() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "afterwards"
    assert sorted(done.stdout.splitlines()[:-1]) == [
        f"(trial {name}) {text}" for name in "ab" for text in (f"begins {name}", "no end")
    ]
    for name in "ab":
        assert f"(trial {name}) two\n(trial {name}) lines\n" in done.stderr
        assert done.stderr.count(f"(trial {name}) 2 of 2\n") == 1 and "1 of 2" not in done.stderr
        assert any(line.startswith(f"(trial {name})") and f"{name} warns" in line for line in done.stderr.splitlines())


def test_errors_say_which_trial() -> None:
    def own() -> None:
        raise ValueError("no")

    ended = in_lanes({"seven": own})
    assert ended["seven"].error is not None
    assert ended["seven"].error.__notes__ == ["raised by trial seven"]


def test_errors_of_hosted_loops_do_not() -> None:
    """Whoever hosts them says so itself."""

    def own() -> None:
        hfta_tune.prepare(nn.Linear(2, 1))
        raise ValueError("no")

    host = LoopHost(itertools.count(), strategy="auto", audit=False)
    host.add("seven", own, contextlib.nullcontext)
    [error] = host.run(["seven"]).values()
    assert isinstance(error, ValueError) and not hasattr(error, "__notes__")


def test_a_lane_that_holds_up_the_others_is_named(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub(silence=0.2)
    flags: list[str] = []

    def blocks() -> None:
        end = time.monotonic() + 30
        while not any("blocks" in record.getMessage() for record in caplog.records) and time.monotonic() < end:
            time.sleep(0.05)  # waiting for what the other does
        flags.append("seen")

    def waits(net: Any) -> None:
        assert hub.lanes
        flags.append("waits")

    hub.start("waits", lambda: waits(None))
    hub.start("blocks", blocks)
    with caplog.at_level(logging.WARNING, "hfta_tune"):
        while hub.lanes:
            hub.run()
    hub.close()
    [record] = [record for record in caplog.records if "share a thread" in record.getMessage()]
    assert flags == ["waits", "seen"]
    assert f"blocks: {__file__}:" in record.getMessage() and " in blocks" in record.getMessage()
