"""StructureFirstSearch: any searcher of Tune, its suggestions in groups of one structure."""

from __future__ import annotations

import doctest
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trainables
from optuna.samplers import RandomSampler
from ray import tune
from ray.tune.search import ConcurrencyLimiter, Repeater, Searcher, SearchGenerator
from ray.tune.search.optuna import OptunaSearch

from hfta_tune import HFTAPacker
from hfta_tune.searchers import FusedOptunaSearch, StructureFirstSearch, _structure_first_search

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

WIDTHS = [8, 16, 32]


class Listed(Searcher):
    """Suggests configs one after another, at most `limit` open ones, and notes what it is told of each."""

    def __init__(self, configs: list[Any], limit: int | None = None) -> None:
        super().__init__(metric="score", mode="max")
        self.configs = list(configs)
        self.limit = limit
        self.suggested: dict[str, Any] = {}
        self.told: dict[str, list[Any]] = {}
        self.ended = 0

    def suggest(self, trial_id: str) -> Any:
        if self.limit is not None and len(self.suggested) - self.ended >= self.limit:
            return None
        if not self.configs:
            return Searcher.FINISHED
        self.suggested[trial_id] = self.configs.pop(0)
        return self.suggested[trial_id]

    def on_trial_result(self, trial_id: str, result: Any) -> None:
        self.told.setdefault(trial_id, []).append(result["score"])

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.told.setdefault(trial_id, []).append("error" if error else result["score"])
        self.ended += 1

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_text("saved")

    def restore(self, checkpoint_path: str) -> None:
        assert Path(checkpoint_path).read_text() == "saved"


def alternating(count: int) -> list[dict[str, Any]]:
    """Widths take turns, lr differs in every trial."""
    return [{"model": {"width": WIDTHS[number % 3]}, "lr": 0.01 * (1 + number)} for number in range(count)]


def runs_of(configs: list[Any]) -> list[int]:
    """How many trials of one width follow one another."""
    return [len(list(group)) for _, group in itertools.groupby(config["model"]["width"] for config in configs)]


def all_suggestions(search: Searcher) -> list[Any]:
    made = []
    for number in itertools.count():
        config = search.suggest(f"trial {number}")
        if config is None or config == Searcher.FINISHED:
            return made
        made.append(config)


def test_docstring() -> None:
    assert doctest.testmod(_structure_first_search).attempted


@pytest.mark.parametrize("structural", [["model/width"], "auto"])
def test_every_suggestion_is_handed_out_once_in_groups(structural: Any) -> None:
    configs = alternating(24)
    search = StructureFirstSearch(Listed(configs), structural=structural, lanes=4, ahead=12)
    made = all_suggestions(search)
    assert sorted(made, key=lambda config: config["lr"]) == configs
    # All trials but those at the end follow at least three of their width.
    assert runs_of(made)[:4] == [4, 4, 4, 4]
    assert search.suggest("one more") == Searcher.FINISHED


def test_it_looks_no_further_ahead_than_it_was_told() -> None:
    inner = Listed(alternating(24))
    search = StructureFirstSearch(inner, structural=["model/width"], lanes=8, ahead=5)
    search.suggest("a")
    assert len(inner.suggested) == 5
    search.suggest("b")
    assert len(inner.suggested) == 6


def test_no_more_is_suggested_than_the_run_has_trials() -> None:
    inner = Listed(alternating(24))
    search = StructureFirstSearch(inner, structural=["model/width"], lanes=4)
    search.set_search_properties(None, None, {}, num_samples=10)
    for number in range(10):
        assert search.suggest(str(number))
    assert len(inner.suggested) == 10


def test_a_searcher_that_has_nothing_now_is_asked_again() -> None:
    inner = Listed(alternating(6), limit=3)
    search = StructureFirstSearch(inner, structural=["model/width"], lanes=4)
    assert len(all_suggestions(search)) == 3
    search.on_trial_complete("trial 1", {"score": 1.0})
    assert search.suggest("another") is not None and search.suggest("one more") is None


def test_the_searcher_is_told_of_its_own_suggestions() -> None:
    inner = Listed(alternating(12))
    search = StructureFirstSearch(inner, structural=["model/width"], lanes=4)
    made = all_suggestions(search)
    for number, config in enumerate(made):
        search.on_trial_result(f"trial {number}", {"score": config["lr"]})
        search.on_trial_complete(f"trial {number}", {"score": -config["lr"]}, error=number == 5)
    expected = {name: [config["lr"], -config["lr"]] for name, config in inner.suggested.items()}
    failed = next(name for name, config in inner.suggested.items() if config == made[5])
    expected[failed][1] = "error"
    assert inner.told == expected


def test_auto_learns_from_signatures_what_is_not_structural() -> None:
    """Seeds are integers that make no signature: trials that differ in theirs come to stand in one group."""
    configs = [{"model": {"width": WIDTHS[number % 2]}, "seed": number} for number in range(40)]
    search = StructureFirstSearch(Listed(configs), lanes=8, ahead=16)
    first = [search.suggest(str(number)) for number in range(8)]
    for number, config in enumerate(first):
        search.on_trial_place(str(number), {"worker": 0, "signature": f"width {config['model']['width']}"})
    following = [search.suggest(str(number)) for number in range(8, 24)]
    assert max(Counter(config["seed"] for config in following).values()) == 1
    assert runs_of(following)[:2] == [8, 8]


def test_hooks_of_the_packer_reach_the_searcher_inside() -> None:
    inner = FusedOptunaSearch(sampler=RandomSampler(seed=0), metric="score", mode="max")
    search = StructureFirstSearch(inner, lanes=2)
    search.set_search_properties(None, None, {"width": tune.choice(WIDTHS)}, num_samples=2)
    search.suggest("a")
    search.on_trial_place("a", {"worker": 3, "signature": "s"})
    search.on_trial_early_stop("a")
    search.on_trial_complete("a", {"score": 1.0, "training_iteration": 1})
    trials = {trial.state.name: trial for trial in inner._ot_study.trials}
    assert trials.keys() == {"PRUNED", "RUNNING"}
    assert trials["PRUNED"].system_attrs["hfta_tune"] == {"worker": 3, "signature": "s"}


def test_saved_and_restored(tmp_path: Path) -> None:
    inner = Listed(alternating(12))
    search = StructureFirstSearch(inner, structural=["model/width"], lanes=4)
    for number in range(3):
        search.suggest(f"trial {number}")
    SearchGenerator(search).save_to_dir(str(tmp_path), "session")
    restored = StructureFirstSearch(Listed(inner.configs), structural="auto", lanes=2)
    SearchGenerator(restored).restore_from_dir(str(tmp_path))
    assert [restored.suggest(str(n)) for n in range(9)] == [search.suggest(str(n)) for n in range(9)]
    restored.on_trial_complete("trial 0", {"score": 1.0})


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"searcher": RandomSampler()}, TypeError, "For a sampler of Optuna, use StructureFirst."),
        ({"searcher": ConcurrencyLimiter(Listed([]), 2)}, TypeError, "ConcurrencyLimiter cannot be asked ahead"),
        ({"searcher": Repeater(Listed([]), 2)}, TypeError, "Repeater cannot be asked ahead"),
        ({"lanes": 0}, ValueError, "lanes must be a positive integer but got 0"),
        ({"ahead": 1.5}, ValueError, "ahead must be a positive integer but got 1.5"),
        ({"structural": "width"}, ValueError, "structural must be a sequence of names of keys or"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StructureFirstSearch(**{"searcher": Listed([]), **arguments})


@pytest.mark.slow
def test_arrays_are_fuller_than_with_the_searcher_alone(storage: str) -> None:
    """The share of trials that train beside at least three others of their width, in a worker of 8 lanes.

    Without the first 8, from which it learns what is free, and the last 8, which are what is left.
    """

    def in_full_arrays(search: Searcher) -> float:
        analysis = tune.run(
            trainables.Points,
            search_alg=search,
            scheduler=HFTAPacker(B=8),
            config={"lr": tune.loguniform(1e-3, 1e-1), "hidden": tune.choice(WIDTHS), "free": tune.randint(0, 1000)},
            num_samples=48,
            stop={"training_iteration": 2},
            metric="accuracy",
            mode="max",
            resources_per_trial={"cpu": 2},
            storage_path=storage,
            verbose=0,
        )
        hidden = [trial.config["hidden"] for trial in analysis.trials]
        together = [hidden[start : start + 8] for start in range(8, 40, 8)]
        return sum(lanes.count(own) > 3 for lanes in together for own in lanes) / 32

    def searcher() -> Searcher:
        return OptunaSearch(sampler=RandomSampler(seed=0))

    alone = in_full_arrays(searcher())
    grouped = in_full_arrays(StructureFirstSearch(searcher(), lanes=8, ahead=24))
    assert grouped >= 0.8 > alone
