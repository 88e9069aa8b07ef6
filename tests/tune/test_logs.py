"""Tune's loggers write late, and nobody sees a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback

from hfta_tune.tune._logs import DeferredLogs

RESULT = "on_trial_result"
OF_A_TRIAL = (
    RESULT,
    "on_trial_start",
    "on_trial_restore",
    "on_trial_save",
    "on_trial_complete",
    "on_trial_recover",
    "on_trial_error",
    "on_checkpoint",
)


class Written:
    """What callbacks are told, in its order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int | None]] = []

    def callback(self, name: str, kind: type = tune.Callback) -> Any:
        callback = kind()
        for hook in OF_A_TRIAL:

            def note(hook: str = hook, **info: Any) -> None:
                self.events.append((name, hook, info.get("result", {}).get("training_iteration")))

            setattr(callback, hook, note)
        return callback


def test_results_of_tune_s_loggers_wait_until_they_are_written() -> None:
    written = Written()
    logs = DeferredLogs([written.callback("own"), written.callback("json", JsonLoggerCallback)])
    for trial in ("a", "b"):
        logs.on_trial_result(iteration=0, trials=[], trial=trial, result={"training_iteration": 1})
    assert written.events == [("own", RESULT, 1)] * 2 and logs.waiting
    logs.write(most=1)
    assert written.events[2:] == [("json", RESULT, 1)] and logs.waiting
    logs.write()
    assert written.events[3:] == [("json", RESULT, 1)] and not logs.waiting


def test_no_logger_waits_that_another_callback_follows() -> None:
    written = Written()
    callbacks = [("json", JsonLoggerCallback), ("own", tune.Callback), ("csv", CSVLoggerCallback)]
    logs = DeferredLogs([written.callback(name, kind) for name, kind in callbacks])
    logs.on_trial_result(iteration=0, trials=[], trial="a", result={"training_iteration": 1})
    assert written.events == [("json", RESULT, 1), ("own", RESULT, 1)]


@pytest.mark.parametrize("hook", OF_A_TRIAL)
def test_whatever_happens_to_a_trial_finds_its_results_written(hook: str) -> None:
    written = Written()
    logs = DeferredLogs([written.callback("own"), written.callback("json", JsonLoggerCallback)])
    for trial in ("a", "b"):
        logs.on_trial_result(iteration=0, trials=[], trial=trial, result={"training_iteration": 1})
    del written.events[:]
    getattr(logs, hook)(iteration=0, trials=[], trial="a", **({"result": {}} if hook == RESULT else {}))
    assert written.events[:2] == [("json", RESULT, 1), ("own", hook, None)]
    assert logs.waiting  # of b


def test_a_saved_run_has_all_results_written(tmp_path: Path) -> None:
    written = Written()
    logs = DeferredLogs([written.callback("json", JsonLoggerCallback)])
    logs.on_trial_result(iteration=0, trials=[], trial="a", result={"training_iteration": 1})
    logs.save_to_dir(str(tmp_path))
    assert written.events == [("json", RESULT, 1)]


def test_a_logger_gets_the_result_as_it_was(tmp_path: Path) -> None:
    seen = []
    logger = JsonLoggerCallback()
    logger.on_trial_result = lambda **info: seen.append(info["result"])
    logs = DeferredLogs([logger])
    result = {"score": 1, "config": {"lr": 1}}
    logs.on_trial_result(iteration=0, trials=[], trial="a", result=result)
    result["score"] = result["config"]["lr"] = 2  # type: ignore[index]
    logs.write()
    assert seen == [{"score": 1, "config": {"lr": 1}}]
