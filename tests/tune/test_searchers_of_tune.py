"""Tune's own searchers, their wrappers, and lists of experiments, as in stock Tune."""

from __future__ import annotations

from typing import Any

import pytest
from ray import tune
from ray.tune.search import ConcurrencyLimiter, Repeater, Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch
from trainables import Climb, PlainClimb, Points

from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


class Listed(Searcher):
    """Suggests peaks one after another; notes what it is told, and how many suggestions were open at once."""

    def __init__(self, peaks: list[int]) -> None:
        super().__init__(metric="score", mode="max")
        self.peaks = list(peaks)
        self.open: dict[str, int] = {}
        self.most_open = 0
        self.told: dict[int, float] = {}

    def suggest(self, trial_id: str) -> Any:
        if not self.peaks:
            return Searcher.FINISHED
        self.open[trial_id] = self.peaks.pop(0)
        self.most_open = max(self.most_open, len(self.open))
        return {"peak": self.open[trial_id]}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.told[self.open.pop(trial_id)] = result["score"]

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


@pytest.mark.parametrize("packed", [True, False])
def test_concurrency_limiter(climb: Any, packed: bool) -> None:
    searcher = Listed([1, 2, 3])
    limited = ConcurrencyLimiter(searcher, max_concurrent=2, batch=True)
    analysis = climb(packed=packed, config=None, search_alg=limited, num_samples=3, stop={"training_iteration": 2})
    assert [trial.config["peak"] for trial in analysis.trials] == [1, 2, 3]
    assert searcher.most_open == 2
    assert searcher.told == {1: -1, 2: 0, 3: -1}


@pytest.mark.parametrize("packed", [True, False])
def test_repeater(climb: Any, packed: bool) -> None:
    searcher = Listed([1, 4])
    repeated = Repeater(searcher, repeat=2, set_index=True)
    analysis = climb(packed=packed, config=None, search_alg=repeated, num_samples=4, stop={"training_iteration": 2})
    configs = [(trial.config["peak"], trial.config["__trial_index__"]) for trial in analysis.trials]
    assert configs == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert searcher.told == {1: -1, 4: -2}  # the means over the repetitions


@pytest.mark.parametrize(
    "searcher",
    [
        lambda points: BasicVariantGenerator(points_to_evaluate=points, random_state=0),
        lambda points: OptunaSearch(points_to_evaluate=points, seed=0, metric="score", mode="max"),
    ],
    ids=["Tune's own", "Optuna"],
)
def test_points_to_evaluate(climb: Any, searcher: Any) -> None:
    points = [{"peak": 2.5}, {"peak": 1.5}]
    suggested = {}
    for packed in (True, False):
        search = ConcurrencyLimiter(own, 1) if isinstance(own := searcher(points), Searcher) else own
        analysis = climb(
            packed=packed,
            config={"peak": tune.uniform(1, 4)},
            search_alg=search,
            num_samples=3,
            stop={"training_iteration": 1},
        )
        suggested[packed] = [trial.config["peak"] for trial in analysis.trials]
    assert suggested[True] == suggested[False]
    assert suggested[True][:2] == [2.5, 1.5]


def test_a_list_of_experiments(storage: str) -> None:
    """Each with its own trainable, space and stop; two can share a worker, and one runs the stock way."""
    config = {"peak": tune.grid_search([1, 2])}
    common: dict[str, Any] = {"storage_path": storage, "resources_per_trial": {"cpu": 1}}
    analysis = tune.run(
        [
            tune.Experiment("a", Climb, config=config, stop={"training_iteration": 2}, **common),
            tune.Experiment("b", Points, config={"lr": 0.1}, num_samples=2, stop={"training_iteration": 4}, **common),
            tune.Experiment("c", PlainClimb, config=config, stop={"height": 3}, **common),
        ],
        scheduler=HFTAPacker(B=4),
        reuse_actors=False,
        verbose=0,
    )
    ends = [(trial.trainable_name, trial.status, trial.last_result["training_iteration"]) for trial in analysis.trials]
    expected = [("Climb", 2)] * 2 + [("Points", 4)] * 2 + [("PlainClimb", 3)] * 2
    assert ends == [(name, "TERMINATED", iterations) for name, iterations in expected]
    pids = [trial.last_result["pid"] for trial in analysis.trials]
    assert len(set(pids[:4])) == 1 and len(set(pids)) == 3
