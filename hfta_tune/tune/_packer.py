"""HFTAPacker: any Tune scheduler, with its trials packed into shared workers."""

from __future__ import annotations

import weakref
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler, TrialScheduler

from hfta_tune._checks import check_hooks
from hfta_tune._doubling import LaneDoubling
from hfta_tune.trainable import FusedTrainable
from hfta_tune.tune._executor import LaneActorManager, pack_trials_of, tell_early_stop
from hfta_tune.tune._watch import checked_limit

__all__ = ["HFTAPacker"]


class HFTAPacker(TrialScheduler):
    """Trains up to B trials of a FusedTrainable in one worker, fused where their models agree.

    It decides where trials run; when they stop or pause is up to the scheduler that it wraps. A trial's
    resources mean what they always meant, for one worker: the B trials in it share them. A trainable
    that is no FusedTrainable runs as Tune always runs it.

    Args:
        base_scheduler: Any Tune scheduler; FIFO by default.
        B: How many trials live in one worker. With "auto", workers begin with 4, and that is doubled while it raises
            their throughput by more than 10%, memory allows, and trials wait. One log line says where it stops.
        audit: Compare the first fused step of every array with the same step of each trial in plain PyTorch; where
            they differ, a warning says where, and those trials train one by one.
        round_timeout_s: How long a worker may take over one round, or over one other thing that it is asked for, such
            as to build a trial or to save one. After that it is killed: the trial that it hangs in fails with an
            error that names the hook, the others of the worker go on from their checkpoints. None for no limit.

    Raises:
        ValueError: if B is neither a positive integer nor "auto", or round_timeout_s no positive number.
        TypeError: if base_scheduler is no scheduler instance.

    Example:
        >>> from ray.tune.schedulers import ASHAScheduler
        >>> packer = HFTAPacker(base_scheduler=ASHAScheduler(metric="accuracy", mode="max"), B=32)
        >>> packer.metric
        'accuracy'
    """

    def __init__(
        self,
        base_scheduler: TrialScheduler | None = None,
        *,
        B: int | str = 8,
        audit: bool = False,
        round_timeout_s: float | None = None,
    ) -> None:
        automatic = isinstance(B, str) and B == "auto"
        if not automatic and (isinstance(B, (bool, str)) or not hasattr(B, "__index__") or B < 1):
            raise ValueError(
                f'B, the number of trials in one worker, must be a positive integer or "auto" but got {B!r}.'
            )
        if base_scheduler is not None and not isinstance(base_scheduler, TrialScheduler):
            raise TypeError(
                f"base_scheduler must be an instance of a Tune scheduler but got {base_scheduler!r}; "
                "for example HFTAPacker(base_scheduler=ASHAScheduler())."
            )
        if isinstance(base_scheduler, (HFTAPacker, ResourceChangingScheduler)):
            raise TypeError(
                f"base_scheduler is a {type(base_scheduler).__name__}, which cannot be packed: the trials of a "
                "worker share its resources. Pass the scheduler that it wraps."
            )
        super().__init__()
        self._base_scheduler = base_scheduler if base_scheduler is not None else FIFOScheduler()
        self._lanes: int | LaneDoubling = LaneDoubling() if automatic else int(B)
        self._audit = bool(audit)
        self._round_timeout_s = checked_limit(round_timeout_s)
        self._executor: weakref.ref[LaneActorManager] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_base_scheduler":
            raise AttributeError(name)
        return getattr(self._base_scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def B(self) -> int | str:
        """How many trials live in one worker, as it was given: `lanes` is the number where this is "auto"."""
        return "auto" if isinstance(self._lanes, LaneDoubling) else self._lanes

    @property
    def lanes(self) -> int:
        """How many lanes a worker has at present; with "auto" it grows, and stays after the run as it was found."""
        return self._lanes.lanes if isinstance(self._lanes, LaneDoubling) else self._lanes

    @property
    def base_scheduler(self) -> TrialScheduler:
        """The scheduler that decides when trials stop and pause."""
        return self._base_scheduler

    @property
    def metric(self) -> str | None:
        """The metric that the wrapped scheduler watches."""
        return self._base_scheduler.metric

    @property
    def supports_buffered_results(self) -> bool:
        """Whether the wrapped scheduler does."""
        return self._base_scheduler.supports_buffered_results

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return self._base_scheduler.set_search_properties(metric, mode, **spec)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        kind = trial.get_trainable_cls()
        if isinstance(kind, type) and issubclass(kind, FusedTrainable):
            check_hooks(kind)
        manager = pack_trials_of(tune_controller, self._lanes, audit=self._audit, round_timeout_s=self._round_timeout_s)
        self._executor = weakref.ref(manager)
        self._base_scheduler.on_trial_add(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._base_scheduler.on_trial_error(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        decision = self._base_scheduler.on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP and not self._is_at_its_end(result):
            tell_early_stop(tune_controller._tune_controller, trial)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._base_scheduler.on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._base_scheduler.on_trial_remove(tune_controller, trial)
        tell_early_stop(getattr(tune_controller, "_tune_controller", tune_controller), trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        return self._base_scheduler.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        lines = [self._base_scheduler.debug_string()]
        executor = self._executor() if self._executor is not None else None
        if executor is not None:
            lines.append(executor.summary())
        if isinstance(self._lanes, LaneDoubling):
            lines.append(f'B="auto": {self._lanes}')
        return "\n".join(lines)

    def _is_at_its_end(self, result: dict[str, Any]) -> bool:
        """Whether the wrapped scheduler lets no trial go on after this result, as ASHA and HyperBand with max_t."""
        scheduler = self._base_scheduler
        limit = getattr(scheduler, "_max_t", None) or getattr(scheduler, "_max_t_attr", None)
        return limit is not None and bool(result.get(getattr(scheduler, "_time_attr", ""), 0) >= limit)

    def save(self, checkpoint_path: str) -> None:
        self._base_scheduler.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        self._base_scheduler.restore(checkpoint_path)
