"""A sampler that suggests trials in groups of one structure, so that they fill arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler, BruteForceSampler, CmaEsSampler, GridSampler
from optuna.trial import FrozenTrial, TrialState

from hfta_tune._kinds import Kinds
from hfta_tune.optuna._session import PLACE

__all__ = ["StructureFirst"]

_GROUP = "hfta_tune:group"


class StructureFirst(BaseSampler):
    """Suggests `lanes` trials of one structure before it goes on to the next, with any sampler of Optuna.

    Trials share an array only if what makes their signatures is equal: widths, depths, the choice of an optimizer.
    A sampler that suggests these anew for each trial makes arrays of few lanes. Here the first trial of a
    group is suggested by the sampler whole; the others take over its structural parameters, and the sampler
    suggests the rest. So the structure is searched by the same sampler, once a group.

    A trial's group is in its system attributes, so a study may be resumed, and several processes may work on it.
    A group ends early if its first trial fails. Enqueued trials are in no group. A genetic sampler's generation
    should be several groups, for its children have the structures of their parents.

    Args:
        sampler: Suggests everything. Not GridSampler or BruteForceSampler, which go through combinations themselves.
        structural: The names of the structural parameters. "auto" presumes that they are those that are no floats,
            and learns from the signatures that `hfta_tune.optimize` writes into the trials' system attributes: in
            the first groups, some trials differ from the first one in one parameter each, which shows whether it
            makes signatures. Where trials differ in signature and in floats only, floats make signatures, too.
        lanes: How many trials a group has: B.

    Raises:
        TypeError: if `sampler` is no sampler of Optuna, or one of those two.
        ValueError: if `lanes` is no positive integer or `structural` neither names nor "auto".

    Example:
        >>> import optuna
        >>> from hfta_tune.searchers import StructureFirst
        >>> sampler = StructureFirst(optuna.samplers.TPESampler(seed=0), structural=["width"], lanes=4)
        >>> study = optuna.create_study(sampler=sampler)
        >>> widths = [study.ask().suggest_categorical("width", [32, 64, 128]) for _ in range(8)]
        >>> len(set(widths[:4])), len(set(widths[4:]))
        (1, 1)
    """

    def __init__(
        self, sampler: BaseSampler, *, structural: Sequence[str] | Literal["auto"] = "auto", lanes: int = 8
    ) -> None:
        if not isinstance(sampler, BaseSampler):
            raise TypeError(
                f"sampler must be a sampler of Optuna but got {sampler!r}. Pass, for example, TPESampler()."
            )
        if isinstance(sampler, (GridSampler, BruteForceSampler)):
            raise TypeError(
                f"{type(sampler).__name__} goes through the combinations in an order of its own, so its trials cannot "
                "share a structure. Use RandomSampler or TPESampler, or a grid for each structure."
            )
        if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
            raise ValueError(f"lanes must be a positive integer but got {lanes!r}. It is the B of the run.")
        if structural != "auto" and (
            isinstance(structural, str) or not all(isinstance(name, str) for name in structural)
        ):
            raise ValueError(f'structural must be a sequence of names of parameters or "auto" but got {structural!r}.')
        self._base_sampler = sampler
        self._named = None if structural == "auto" else frozenset(structural)
        self._lanes = lanes
        self._fixed: dict[int, dict[str, Any]] = {}
        self._learned = _Learned()

    def structural(self, study: optuna.Study) -> frozenset[str]:
        """The names of the parameters that trials of a group share, as far as is known now."""
        return self._structural_in(study.get_trials(deepcopy=False))

    def reseed_rng(self) -> None:
        self._base_sampler.reseed_rng()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._base_sampler.before_trial(study, trial)
        if "fixed_params" in trial.system_attrs:  # it was enqueued
            return
        trials = study.get_trials(deepcopy=False)
        lead, members = self._open_group(trials, trial)
        if lead is not None:
            names = self._structural_in(trials) - self._probed(members)
            self._fixed[trial.number] = {name: value for name, value in lead.params.items() if name in names}
        number = trial.number if lead is None else lead.number
        study._storage.set_trial_system_attr(trial._trial_id, _GROUP, number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        space = self._base_sampler.infer_relative_search_space(study, trial)
        fixed = set(self._fixed.get(trial.number, ()))
        if isinstance(self._base_sampler, CmaEsSampler):  # which must have the same space in all trials
            fixed |= self.structural(study)
        return {name: distribution for name, distribution in space.items() if name not in fixed}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._base_sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        fixed = self._fixed.get(trial.number, {})
        if param_name in fixed and _contains(param_distribution, fixed[param_name]):
            return fixed[param_name]
        return self._base_sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._fixed.pop(trial.number, None)
        self._base_sampler.after_trial(study, trial, state, values)

    def _structural_in(self, trials: Sequence[FrozenTrial]) -> frozenset[str]:
        return self._learned.structural(trials) if self._named is None else self._named

    def _open_group(self, trials: Sequence[FrozenTrial], trial: FrozenTrial) -> tuple[FrozenTrial | None, int]:
        """The first trial of the newest group, if that has room for one more; and how many trials the group has."""
        others = (own for own in trials if own.number != trial.number)
        groups = Counter(own.system_attrs[_GROUP] for own in others if _GROUP in own.system_attrs)
        if not groups:
            return None, 0
        newest = max(groups)
        lead = trials[newest]
        # Of a trial that has suggested nothing yet there is nothing to share; another process may be about to.
        if groups[newest] >= self._lanes or lead.state == TrialState.FAIL or not lead.params:
            return None, 0
        return lead, groups[newest]

    def _probed(self, members: int) -> set[str]:
        """What the next trial of a group may have otherwise than the first, to see whether its signature differs."""
        unsure = [] if self._named is not None else sorted(self._learned.unsure)
        return {unsure[members - 1]} if members <= len(unsure) else set()


class _Learned:
    """What the signatures of trials tell about their parameters.

    Attributes:
        unsure: The parameters that are presumed structural but were not seen to be.
    """

    def __init__(self) -> None:
        self.unsure: frozenset[str] = frozenset()
        self._kinds = Kinds()
        self._signatures: dict[int, tuple[str, str]] = {}
        self._params: dict[int, dict[str, Any]] = {}
        self._seen: set[str] = set()
        self._floats_matter = False

    def structural(self, trials: Sequence[FrozenTrial]) -> frozenset[str]:
        new = [trial for trial in trials if trial.number not in self._signatures and PLACE in trial.system_attrs]
        for trial in new:
            self._learn_what_is_free(trial)
        for trial in new:
            self._learn_what_is_not(trial)
        free = self._kinds.free_keys(None)
        names: dict[str, bool] = {}
        for trial in trials:
            for name, distribution in trial.distributions.items():
                names[name] = isinstance(distribution, FloatDistribution)
        found = frozenset(
            name for name, is_float in names.items() if name not in free and (self._floats_matter or not is_float)
        )
        self.unsure = found - self._seen
        return found

    def _learn_what_is_free(self, trial: FrozenTrial) -> None:
        place = trial.system_attrs[PLACE]
        signature = str(place["worker"]), str(place["signature"])
        self._signatures[trial.number], self._params[trial.number] = signature, trial.params
        self._kinds.add(trial.number, None, trial.params)
        self._kinds.learn(trial.number, signature)
        self._kinds.remove(trial.number)

    def _learn_what_is_not(self, trial: FrozenTrial) -> None:
        lead, signature = trial.system_attrs.get(_GROUP), self._signatures[trial.number]
        if lead not in self._signatures or self._signatures[lead][0] != signature[0]:
            return  # signatures of two workers cannot be compared
        if self._signatures[lead] != signature:
            other, free = self._params[lead], self._kinds.free_keys(None)
            names = trial.params.keys() | other.keys()
            differing = [name for name in names - free if trial.params.get(name) != other.get(name)]
            if len(differing) == 1:
                self._seen.add(differing[0])
            self._floats_matter |= all(
                isinstance(trial.distributions.get(name), FloatDistribution) for name in differing
            )


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except ValueError:  # a choice that a categorical distribution does not have
        return False
