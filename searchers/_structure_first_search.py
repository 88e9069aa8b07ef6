"""Any searcher of Tune, its suggestions handed out in groups of one structure."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from ray.tune.search import ConcurrencyLimiter, Repeater, Searcher
from ray.tune.search.util import _set_search_properties_backwards_compatible

from hfta_tune._kinds import Kinds, flatten_config

__all__ = ["StructureFirstSearch"]


class StructureFirstSearch(Searcher):
    """Hands out the suggestions of any Tune searcher so that trials of one structure follow one another.

    A searcher of Tune cannot be asked for a trial of a given structure. So this one asks it for some suggestions
    ahead, hands out those of the structure of which it holds most, up to `lanes` of them, and goes on to the next.
    Each suggestion is evaluated as it was made, and the searcher is told its results: it only makes some of
    its suggestions earlier than it otherwise would, which `ahead` bounds. No more are made than the run has trials.

    For an Optuna sampler, `FusedOptunaSearch(sampler=StructureFirst(sampler))` is better, for it need not ask ahead.
    It does not suit a searcher that limits how many suggestions are open (a ConcurrencyLimiter goes around this one,
    not inside), BOHB, which must know which trials pause, and a Repeater.

    Args:
        searcher: Suggests everything.
        structural: The names of the structural keys of config, nested ones as "model/width". "auto" presumes that they
            are those whose values are no floats, and drops those in which trials of equal signature differ, as
            `HFTAPacker` reports them.
        lanes: How many trials a group has: B.
        ahead: How many suggestions it holds at most; 2 * lanes by default.

    Raises:
        TypeError: if `searcher` is no searcher of Tune, or one of those three.
        ValueError: if `lanes` or `ahead` is no positive integer, or `structural` neither names nor "auto".

    Example:
        >>> from ray.tune.search.hyperopt import HyperOptSearch
        >>> from hfta_tune.searchers import StructureFirstSearch
        >>> search = StructureFirstSearch(HyperOptSearch(), structural=["width"], lanes=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        searcher: Searcher,
        *,
        structural: Sequence[str] | Literal["auto"] = "auto",
        lanes: int = 8,
        ahead: int | None = None,
    ) -> None:
        if not isinstance(searcher, Searcher):
            raise TypeError(
                f"searcher must be a searcher of Tune but got {searcher!r}. "
                "For a sampler of Optuna, use StructureFirst."
            )
        if isinstance(searcher, (ConcurrencyLimiter, Repeater)) or hasattr(searcher, "on_pause"):
            raise TypeError(
                f"{type(searcher).__name__} cannot be asked ahead: it counts which of its suggestions run. "
                "Pass the searcher inside it, and put a ConcurrencyLimiter around StructureFirstSearch."
            )
        ahead = 2 * lanes if ahead is None else ahead
        for name, value in {"lanes": lanes, "ahead": ahead}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer but got {value!r}.")
        if structural != "auto" and (
            isinstance(structural, str) or not all(isinstance(name, str) for name in structural)
        ):
            raise ValueError(f'structural must be a sequence of names of keys or "auto" but got {structural!r}.')
        super().__init__(metric=searcher.metric, mode=searcher.mode)
        self.searcher = searcher
        self._named = None if structural == "auto" else frozenset(structural)
        self._lanes = lanes
        self._ahead = ahead
        self._to_suggest: float = float("inf")
        self._held: dict[str, dict[str, Any]] = {}
        self._own_ids: dict[str, str] = {}
        self._kinds = Kinds()
        self._group: Hashable = None
        self._left_in_group = 0
        self._exhausted = False
        self._numbers = itertools.count()

    @property
    def metric(self) -> Any:
        return self.searcher.metric

    @property
    def mode(self) -> Any:
        return self.searcher.mode

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        samples = spec.get("num_samples", -1)
        self._to_suggest = samples if samples > 0 else float("inf")
        return bool(
            _set_search_properties_backwards_compatible(
                self.searcher.set_search_properties, metric, mode, config, **spec
            )
        )

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        while not self._exhausted and len(self._held) < min(self._ahead, self._to_suggest):
            name = f"{trial_id}_{next(self._numbers)}"
            suggestion = self.searcher.suggest(name)
            self._exhausted = suggestion == Searcher.FINISHED
            if suggestion is None or self._exhausted:
                break
            self._held[name] = suggestion
        if not self._held:
            return Searcher.FINISHED if self._exhausted else None
        groups = Counter(map(self._structure, self._held.values()))
        if not self._left_in_group or self._group not in groups:
            self._group, self._left_in_group = groups.most_common(1)[0][0], self._lanes
        own = next(name for name, config in self._held.items() if self._structure(config) == self._group)
        config = self._held.pop(own)
        self._own_ids[trial_id] = own
        self._to_suggest -= 1
        self._left_in_group -= 1
        self._kinds.add(trial_id, None, config)
        return config

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.searcher.on_trial_result(self._own_ids[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.searcher.on_trial_complete(self._own_ids[trial_id], result=result, error=error)
        self._kinds.remove(trial_id)

    def on_trial_place(self, trial_id: str, place: dict[str, Any]) -> None:
        """HFTAPacker tells where a trial trains."""
        self._kinds.learn(trial_id, (place["worker"], place["signature"]))
        self._forward("on_trial_place", trial_id, place)

    def on_trial_early_stop(self, trial_id: str) -> None:
        """HFTAPacker tells that the scheduler is about to stop a trial before its end."""
        self._forward("on_trial_early_stop", trial_id)

    def get_state(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["searcher"]
        return copy.deepcopy(state)

    def set_state(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def save(self, checkpoint_path: str) -> None:
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        self.searcher.restore(checkpoint_path)

    def _structure(self, config: dict[str, Any]) -> Hashable:
        flat = flatten_config(config)
        if self._named is not None:
            return frozenset((name, flat.get(name)) for name in self._named)
        free = self._kinds.free_keys(None)
        return frozenset(
            (name, value) for name, value in flat.items() if name not in free and not isinstance(value, float)
        )

    def _forward(self, hook: str, trial_id: str, *arguments: Any) -> None:
        told = getattr(self.searcher, hook, None)
        if told is not None:
            told(self._own_ids[trial_id], *arguments)
