"""What _executor.py needs of Ray's private parts. When Ray changes them, this says which."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import ray
from ray.air.execution._internal import RayActorManager, TrackedActor
from ray.air.execution._internal.event_manager import RayEventManager
from ray.air.execution._internal.tracked_actor_task import TrackedActorTask
from ray.tune.execution.tune_controller import TuneController
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback
from ray.tune.registry import _ParameterRegistry

from hfta_tune.tune._executor import LaneActorManager, memory_in_use

OVERRIDDEN = [
    "__init__",
    "add_actor",
    "remove_actor",
    "schedule_actor_task",
    "clear_actor_task_futures",
    "next",
    "_try_start_actors",
    "_cleanup_actor",
    "_try_kill_actor",
    "_actor_task_failed",
    "cleanup",
]


@pytest.mark.parametrize("method", OVERRIDDEN)
def test_overrides_keep_the_argument_names(method: str) -> None:
    base = inspect.signature(getattr(RayActorManager, method))
    ours = inspect.signature(getattr(LaneActorManager, method))
    assert list(ours.parameters) == list(base.parameters)
    for name, parameter in base.parameters.items():
        assert ours.parameters[name].default == parameter.default, name


@pytest.mark.parametrize("name", ["live_actors", "pending_actors", "num_pending_actors", "num_live_actors"])
def test_properties_exist(name: str) -> None:
    assert isinstance(inspect.getattr_static(RayActorManager, name), property)


def test_the_managers_own_state(cluster: None) -> None:
    from ray.air.execution import FixedResourceManager

    manager = RayActorManager(FixedResourceManager())
    for name in (
        "_resource_manager",
        "_pending_actors_to_attrs",
        "_pending_actors_to_enqueued_actor_tasks",
        "_live_actors_to_ray_actors_resources",
        "_live_actors_to_kill",
        "_failed_actor_ids",
        "_tracked_actors_to_task_futures",
        "_actor_task_events",
    ):
        assert hasattr(manager, name), name
    assert hasattr(RayEventManager(), "_tracked_futures")


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (TrackedActor, ["_on_start", "_on_stop", "_on_error", "actor_id"]),
        (TrackedActorTask, ["_tracked_actor", "_on_result", "_on_error"]),
    ],
)
def test_records(owner: Any, names: list[str]) -> None:
    source = inspect.getsource(owner)
    for name in names:
        assert f"self.{name} =" in source, name


def test_the_controller() -> None:
    source = inspect.getsource(TuneController)
    for name in (
        "_actor_manager",
        "_search_alg",
        "_scheduler_alg",
        "_trials",
        "_pending_trials",
        "_paused_trials",
        "_running_trials",
        "_cached_trial_decisions",
        "_should_stop_experiment",
        "_stop_queue",
        "_stopper",
        "_callbacks",
        "_actor_to_trial",
    ):
        assert f"self.{name}" in source, name


def test_memory_of_the_machine() -> None:
    used, total = memory_in_use(on_gpu=False)
    assert 0 < used < total


def test_parameters_of_with_parameters() -> None:
    registry = _ParameterRegistry()
    assert registry.references == {} and callable(registry.get)


@pytest.mark.parametrize("logger", [CSVLoggerCallback, JsonLoggerCallback])
def test_loggers_fetch_older_logs(logger: type) -> None:
    assert list(inspect.signature(LoggerCallback._restore_from_remote).parameters) == ["self", "file_name", "trial"]
    assert "self._restore_from_remote(" in inspect.getsource(logger)


def test_a_ray_without_these_names_is_told_which_versions_work() -> None:
    """In a process of its own, whose Ray has no RayActorManager."""
    script = (
        "import ray.tune, ray.air.execution._internal as internal\n"
        "del internal.RayActorManager\n"
        "try:\n"
        "    from hfta_tune import HFTAPacker\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "RayActorManager" in done.stdout
    assert f"Ray {ray.__version__} (" in done.stdout and "tested with Ray 2.47.1 to 2.60" in done.stdout
