"""Optuna's own tests of a sampler, on StructureFirst."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import optuna
import pytest
from optuna import samplers

from hfta_tune.searchers import StructureFirst

tests_of_optuna = pytest.importorskip("optuna.testing.pytest_samplers", reason="Optuna brings them from 4.8 on")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Optuna says that some of its samplers are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


class TestStructureFirst(
    tests_of_optuna.BasicSamplerTestCase,
    tests_of_optuna.RelativeSamplerTestCase,
    tests_of_optuna.MultiObjectiveSamplerTestCase,
):
    @pytest.fixture(params=["auto", ["x", "width"]], ids=["auto", "named"])
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], samplers.BaseSampler]:
        return lambda: StructureFirst(
            samplers.TPESampler(n_startup_trials=0, multivariate=True), structural=request.param, lanes=3
        )
