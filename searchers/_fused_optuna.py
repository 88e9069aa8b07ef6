"""Tune's OptunaSearch, made fit for arrays."""

from __future__ import annotations

import logging
import math
import uuid
import warnings
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import TPESampler
from optuna.trial import TrialState
from ray.tune.result import TRAINING_ITERATION
from ray.tune.search.optuna import OptunaSearch

from hfta_tune.optuna._samplers import advice_for_batches, startup_trials
from hfta_tune.optuna._session import PLACE

__all__ = ["FusedOptunaSearch"]

_SEARCH = "hfta_tune:search"
_logger = logging.getLogger(__name__)


class FusedOptunaSearch(OptunaSearch):
    """Tune's OptunaSearch for runs in which many trials train at once.

    It takes what OptunaSearch takes, and differs in this:

    - Its default sampler sees the trials that run (`TPESampler(constant_liar=True)`), and suggests as many at random
      as a worker has lanes. Of another one that does worse with many trials at once, one warning names the remedy.
    - A sampler's n_startup_trials are not exceeded: when so many have been suggested, the next one waits until
      they have ended (https://github.com/ray-project/ray/issues/52535). A multiple of `lanes` leaves no lane idle.
    - With `HFTAPacker` as the scheduler, a trial that the scheduler stops early is PRUNED in the study, with its
      intermediate values. With another scheduler it is COMPLETE, as in OptunaSearch.
    - A trial that ends with a NaN, or without the metric, is FAIL. None is left RUNNING.
    - With `HFTAPacker`, a trial's system attribute "hfta_tune" says where it trains: {"worker", "signature"}. With
      `StructureFirst` as the sampler, arrays are full.

    `save` and `restore` are Tune's own calls. Trials of a study in an outside storage that the saved state does not
    know, because the run died before it was saved again, are FAIL after `restore`.

    Args:
        space, metric, mode, points_to_evaluate, sampler, study_name, storage, seed, evaluated_rewards: As in
            OptunaSearch.
        lanes: How many trials run at once: B, times the number of workers.

    Raises:
        ValueError: if `lanes` is no positive integer.

    Example:
        >>> import optuna
        >>> from hfta_tune.searchers import FusedOptunaSearch
        >>> space = {"lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)}
        >>> search = FusedOptunaSearch(space, metric="accuracy", mode="max", lanes=32, seed=0)
        >>> sorted(search.suggest("a trial"))
        ['lr']
    """

    def __init__(
        self,
        space: Any = None,
        metric: str | list[str] | None = None,
        mode: str | list[str] | None = None,
        points_to_evaluate: list[dict[str, Any]] | None = None,
        sampler: optuna.samplers.BaseSampler | None = None,
        study_name: str | None = None,
        storage: optuna.storages.BaseStorage | None = None,
        seed: int | None = None,
        evaluated_rewards: list[Any] | None = None,
        *,
        lanes: int = 8,
    ) -> None:
        if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
            raise ValueError(f"lanes must be a positive integer but got {lanes!r}. It is the B of the run.")
        if sampler is None:
            with warnings.catch_warnings():  # constant_liar is experimental before Optuna 5
                warnings.simplefilter("ignore", ExperimentalWarning)
                sampler = TPESampler(seed=seed, constant_liar=True, n_startup_trials=max(10, lanes))
            seed = None
        self._lanes = lanes
        self._warned = False
        self._token = uuid.uuid4().hex
        self._startup_trials = startup_trials(sampler)
        self._pruned: set[str] = set()
        self._last_steps: dict[str, int] = {}
        super().__init__(space, metric, mode, points_to_evaluate, sampler, study_name, storage, seed, evaluated_rewards)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        advice = advice_for_batches(self._sampler, self._lanes, spec.get("num_samples"))
        if advice is not None and not self._warned:
            self._warned = True
            warnings.warn(advice, UserWarning, stacklevel=2)
        return bool(super().set_search_properties(metric, mode, config, **spec))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        known = trial_id in self._ot_trials
        if not known and self._must_wait():
            return None
        config: dict[str, Any] | None = super().suggest(trial_id)
        if not known:
            self._note(trial_id, _SEARCH, self._token)
        return config

    def on_trial_place(self, trial_id: str, place: dict[str, Any]) -> None:
        """HFTAPacker tells where a trial trains."""
        if self._is_open(trial_id):
            self._note(trial_id, PLACE, place)

    def on_trial_early_stop(self, trial_id: str) -> None:
        """HFTAPacker tells that the scheduler is about to stop a trial before its end."""
        self._pruned.add(trial_id)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if self._is_open(trial_id) and not isinstance(self.metric, list):
            self._report(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if not self._is_open(trial_id):
            return
        metrics = self.metric if isinstance(self.metric, list) else [self.metric]
        values = [_number((result or {}).get(metric)) for metric in metrics]
        if result is not None and not error and not isinstance(self.metric, list):
            self._report(trial_id, result)
        broken = [metric for metric, value in zip(metrics, values, strict=True) if math.isnan(value)]
        if error:
            state = TrialState.FAIL
        elif result is None or trial_id in self._pruned:  # without a result: stopped while it was paused
            state = TrialState.PRUNED
        else:
            state = TrialState.FAIL if broken else TrialState.COMPLETE
            if broken:
                names = ", ".join(f"{name}={(result or {}).get(name)!r}" for name in broken)
                _logger.warning("Trial %s failed for Optuna: its last result has %s.", trial_id, names)
        told = values if state == TrialState.COMPLETE else None
        self._ot_study.tell(self._ot_trials[trial_id], told, state)
        self._completed_trials.add(trial_id)

    def restore(self, checkpoint_path: str) -> None:
        super().restore(checkpoint_path)
        known = {trial.number: trial_id for trial_id, trial in self._ot_trials.items()}
        for trial in self._ot_study.get_trials(deepcopy=False):
            if trial.number in known:
                if trial.state.is_finished():
                    self._completed_trials.add(known[trial.number])
            elif trial.state == TrialState.RUNNING and trial.system_attrs.get(_SEARCH) == self._token:
                self._ot_study.tell(trial.number, state=TrialState.FAIL)

    def _must_wait(self) -> bool:
        """Whether all startup trials have been suggested, and not all of them have ended."""
        if not self._startup_trials or self._ot_study is None:
            return False
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        ended = len(self._ot_study.get_trials(deepcopy=False, states=states))
        if ended >= self._startup_trials:
            self._startup_trials = 0
            return False
        return ended + len(self._ot_trials.keys() - self._completed_trials) >= self._startup_trials

    def _is_open(self, trial_id: str) -> bool:
        return trial_id in self._ot_trials and trial_id not in self._completed_trials

    def _report(self, trial_id: str, result: dict[str, Any]) -> None:
        step = result[TRAINING_ITERATION]
        # A trial that goes on from a checkpoint may report a step again, of which Optuna keeps the first.
        if self.metric in result and step > self._last_steps.get(trial_id, 0):
            self._last_steps[trial_id] = step
            self._ot_trials[trial_id].report(_number(result[self.metric]), step)

    def _note(self, trial_id: str, name: str, value: Any) -> None:
        self._ot_study._storage.set_trial_system_attr(self._ot_trials[trial_id]._trial_id, name, value)


def _number(value: Any) -> float:
    """The value of a metric; NaN if it has none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
