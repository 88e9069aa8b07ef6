"""fusible: a function trainable whose trials share workers, with its own training loop."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from numbers import Number
from typing import Any, ClassVar

from ray.train._internal.session import TrialInfo
from ray.tune.result import DEFAULT_METRIC, RESULT_DUPLICATE, SHOULD_CHECKPOINT
from ray.tune.trainable import FunctionTrainable
from ray.tune.utils import _detect_config_single

from hfta_tune.loops import current_lane
from hfta_tune.trainable import HostedTrainable
from hfta_tune.tune._sessions import LaneSession, serve_sessions_of_lanes
from hfta_tune.worker import Worker

__all__ = ["fusible"]

TrainFunction = Callable[[dict[str, Any]], Any]


def fusible(function: TrainFunction) -> type[FunctionTrainable]:
    """Make a function trainable of Tune fusible: under `HFTAPacker` its trials run in the lanes of shared workers.

    The function keeps its own loop. What it makes ready with `hfta_tune.prepare` is trained with the other trials' as
    one, and it calls `hfta_tune.backward(loss)`. tune.report with checkpoints, tune.get_checkpoint and tune.get_context
    work as always. Without the packer it runs as Tune always runs a function.

    Trials share a process, so its working directory is not the trial's: write to `tune.get_context().get_trial_dir()`.

    Args:
        function: `function(config)`, as Tune takes it; also what `tune.with_parameters` returns.

    Returns:
        A trainable class for tune.run, tune.Tuner and tune.with_resources.

    Raises:
        TypeError: if `function` does not take the config alone.

    Example:
        >>> import hfta_tune
        >>> from ray import tune
        >>> def train(config):
        ...     tune.report({"score": config["x"] ** 2})
        >>> hfta_tune.fusible(train).__name__
        'train'
    """
    if not callable(function) or isinstance(function, type) or not _detect_config_single(function):
        raise TypeError(
            f"fusible takes a function of one argument, the config, but got {function!r:.80}. Pass data to it with "
            "tune.with_parameters, and a FusedTrainable class to Tune as it is."
        )
    name = getattr(function, "__name__", "func")
    own = type(name, (_FusibleFunction,), {"_function": staticmethod(function), "_name": name})
    own.__module__ = getattr(function, "__module__", __name__)
    own.__doc__ = function.__doc__
    return own


class _FusibleFunction(HostedTrainable, FunctionTrainable):
    _function: ClassVar[TrainFunction]
    _name: ClassVar[str] = "func"

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        resources = getattr(cls._function, "_resources", None)
        return resources(config) if callable(resources) else resources

    def setup(self, config: dict[str, Any]) -> None:
        self._loaded: Any = None
        self._session: LaneSession | None = None
        self._last_training_result = None

    def step(self) -> dict[str, Any]:
        metrics = dict(super().step())
        if RESULT_DUPLICATE in metrics:
            metrics[SHOULD_CHECKPOINT] = False
        if self._last_training_result is not None and self._last_training_result.checkpoint is not None:
            metrics[SHOULD_CHECKPOINT] = True
        return metrics

    def save_checkpoint(self, checkpoint_dir: str = "") -> Any:
        return self._last_training_result

    def load_checkpoint(self, checkpoint: Any) -> None:
        self._loaded = checkpoint.checkpoint
        if self._session is not None:
            self._session.loaded_checkpoint = self._loaded

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._leave()
        self.setup(copy.deepcopy(new_config))
        self.config = new_config
        if self._worker is not None:
            self._join(self._worker, self.trial_id)
        return True

    def _join(self, worker: Worker, name: str) -> None:
        self._worker, self._lane_name = worker, name
        worker.add_loop(name, self._run, placed=True, around=serve_sessions_of_lanes)

    def _run(self) -> None:
        """Run the function, in its lane, to its end: then Tune hears that the last result was the last."""
        lane = current_lane()
        assert lane is not None
        info = TrialInfo(
            name=self.trial_name,
            id=self.trial_id,
            resources=self.trial_resources,
            logdir=self._storage.trial_driver_staging_path,
            driver_ip=None,
            driver_node_id=None,
            experiment_name=self._storage.experiment_dir_name,
        )
        os.makedirs(self._storage.trial_working_directory, exist_ok=True)
        session = self._session = lane.session = LaneSession(info, self._storage, self._loaded, self._keep)
        function = functools.partial(type(self)._function, self.config)
        if inspect.isgeneratorfunction(type(self)._function):
            for output in function():
                _report(session, output)
        else:
            _report(session, function())
        session.report({RESULT_DUPLICATE: True})

    def _keep(self, result: Any) -> None:
        self._last_training_result = result

    def __repr__(self) -> str:
        return self._name


def _report(session: LaneSession, output: Any) -> None:
    """Report what the function returned or yielded, as Tune does."""
    if not output:
        return
    if isinstance(output, dict):
        session.report(output)
    elif isinstance(output, Number):
        session.report({DEFAULT_METRIC: output})
    else:
        raise ValueError(
            f"The function returned or yielded {output!r:.80}; return nothing, a number or a dict of results."
        )
