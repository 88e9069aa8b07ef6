"""The limit on a worker's calls, with a clock and workers of our own."""

from __future__ import annotations

from typing import Any

import pytest

from hfta_tune import HFTAPacker
from hfta_tune.tune import _watch
from hfta_tune.tune._watch import Overdue, UnansweredCalls, Watch


class Worker:
    """A worker that answers when told to, and says what it runs."""

    def __init__(self, watch: Watch, running: Any = None) -> None:
        self.actor, self.ready = running, True
        self.unanswered = watch.calls()


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    calls: set[str] = set()
    monkeypatch.setattr(_watch, "_is_answered", calls.__contains__)
    monkeypatch.setattr(_watch, "_running", lambda actor: actor)
    return calls


@pytest.mark.parametrize("seconds", [0, -1, True, "60", float("nan")])
def test_a_limit_must_be_a_positive_number(seconds: Any) -> None:
    with pytest.raises(ValueError, match="round_timeout_s must be a positive number of seconds or None but got"):
        HFTAPacker(round_timeout_s=seconds)


def test_each_call_has_the_limit_for_itself(answered: set[str]) -> None:
    now = [0.0]
    calls = UnansweredCalls(lambda: now[0], answered.__contains__)
    assert calls.seconds() == 0
    now[0] = 5
    calls.sent("create")
    calls.sent("round")
    now[0] = 9
    assert calls.seconds() == 4
    answered.add("create")
    assert calls.seconds() == 0
    now[0] = 12
    assert calls.seconds() == 3
    answered.add("round")
    assert calls.seconds() == 0


def test_a_worker_past_the_limit_is_asked_what_it_runs(answered: set[str]) -> None:
    now = [0.0]
    watch = Watch(10, clock=lambda: now[0])
    stuck, starting, idle = Worker(watch, ("evaluate", ("a",))), Worker(watch), Worker(watch)
    starting.ready = False
    for worker in (stuck, starting):
        worker.unanswered.sent("round")
    now[0] = 10
    assert watch.overdue([stuck, starting, idle]) == []
    now[0] = 11
    assert watch.overdue([stuck, starting, idle]) == [(stuck, Overdue(10, "evaluate", ("a",)))]
    starting.ready = True
    now[0] = 20
    assert watch.overdue([starting, idle]) == []  # its process was ready at 11
    answered.add("round")
    now[0] = 40
    assert watch.overdue([stuck, starting, idle]) == []


def test_without_a_limit_no_calls_are_kept() -> None:
    watch = Watch(None)
    assert watch.calls() is None and watch.overdue([]) == []


@pytest.mark.parametrize(
    ("overdue", "said"),
    [
        (Overdue(2.5, "evaluate", ("a",)), "round_timeout_s=2.5 s. It was in evaluate of trial a. It was killed."),
        (Overdue(60, "training_step", ("a", "b")), "It was in training_step of the trials a, b."),
        (Overdue(60), "does not let other threads run"),
    ],
)
def test_messages(overdue: Overdue, said: str) -> None:
    assert said in str(overdue)
    assert overdue.warning([], spared=False) == str(overdue)
    assert overdue.warning(["c", "d"], spared=True).endswith("which costs them no failure: c, d.")
    assert "each a failure" in overdue.warning(["c"], spared=False)
