"""Settings that only change how Tune talks to trials, reuse_actors and result buffers, change no result."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from ray import tune

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


class Heights(tune.Callback):
    def __init__(self) -> None:
        self.of: dict[int, list[float]] = defaultdict(list)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.of[trial.config["peak"]].append(result["height"])


@pytest.mark.parametrize("reuse", [True, False])
def test_results(climb: Any, monkeypatch: pytest.MonkeyPatch, reuse: bool) -> None:
    monkeypatch.setenv("TUNE_RESULT_BUFFER_LENGTH", "3")
    heights = Heights()
    analysis = climb(
        packed=True,
        B=2,
        config={"peak": tune.grid_search([2, 4, 3, 5])},
        reuse_actors=reuse,
        stop={"score": 0},
        callbacks=[heights],
    )
    assert heights.of == {peak: list(range(1, peak + 1)) for peak in (2, 4, 3, 5)}
    assert {trial.status for trial in analysis.trials} == {"TERMINATED"}
    setups = [trial.last_result["setups"] for trial in analysis.trials]
    assert max(setups) == 1 if not reuse else max(setups) > 1


def test_stock_tune_gives_the_same(climb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_RESULT_BUFFER_LENGTH", "3")
    heights = Heights()
    config = {"peak": tune.grid_search([2, 4, 3, 5])}
    climb(packed=False, config=config, reuse_actors=True, stop={"score": 0}, callbacks=[heights])
    assert heights.of == {peak: list(range(1, peak + 1)) for peak in (2, 4, 3, 5)}
