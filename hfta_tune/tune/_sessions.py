"""Tune's session, a lane its own: what tune.report, tune.get_checkpoint and tune.get_context speak to.

Beside `_executor.py` this is the only file that uses private names of Ray: the session of a process is one of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from ray.train._internal import session as of_process
from ray.train._internal.session import TrialInfo, _TrainSession

from hfta_tune.loops import current_lane

__all__ = ["LaneSession", "serve_sessions_of_lanes"]


class LaneSession(_TrainSession):
    """The session of one lane: a report parks the lane until Tune asks for its next result.

    Args:
        trial_info: What get_context() tells.
        storage: Where checkpoints go.
        checkpoint: What get_checkpoint() returns.
        on_result: Is given each result before the lane parks with its metrics.
    """

    def __init__(self, trial_info: TrialInfo, storage: Any, checkpoint: Any, on_result: Callable[[Any], None]) -> None:
        self._on_result = on_result
        # Lanes share the process, so none of them may change its working directory.
        with mock.patch.dict(os.environ, {"RAY_CHDIR_TO_TRIAL_DIR": "0"}):
            super().__init__(
                training_func=lambda: None,
                world_rank=None,
                local_rank=None,
                node_rank=None,
                local_world_size=None,
                world_size=None,
                trial_info=trial_info,
                storage=storage,
                checkpoint=checkpoint,
                synchronous_result_reporting=True,
            )

    def _report_training_result(self, training_result: Any) -> None:
        if training_result.checkpoint:
            self.loaded_checkpoint = training_result.checkpoint
        self._on_result(training_result)
        lane = current_lane()
        if lane is None:
            raise RuntimeError("tune.report was called outside the function of a trial, from another thread say.")
        lane.park(training_result.metrics)


class _SessionOfTheLane:
    """Stands where Ray keeps the session of the process, and is that of the lane whose code runs."""

    def __getattr__(self, name: str) -> Any:
        lane = current_lane()
        session = None if lane is None else getattr(lane, "session", None)
        if session is None:
            raise AttributeError(f"no trial's function runs here, so there is no session with {name!r}")
        return getattr(session, name)

    def __setattr__(self, name: str, value: Any) -> None:
        lane = current_lane()
        if lane is not None:
            setattr(getattr(lane, "session", None), name, value)


@contextlib.contextmanager
def serve_sessions_of_lanes() -> Any:
    """Meanwhile Tune's functions speak to the session of the lane that calls them."""
    before = of_process._session
    of_process._session = _SessionOfTheLane()
    try:
        yield
    finally:
        of_process._session = before
