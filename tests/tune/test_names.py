"""Names of workers where others have them."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray import tune

from hfta_tune.tune._names import named

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


class Holder:
    def name(self) -> str | None:
        return ray.get_runtime_context().get_actor_name()


def test_a_name_that_is_taken_is_made_unique(cluster: None) -> None:
    actors = [named(ray.remote(Holder), "hfta_tune:test:0").options(num_cpus=0).remote() for _ in range(3)]
    names = ray.get([actor.name.remote() for actor in actors])
    assert names[0] == "hfta_tune:test:0" and len(set(names)) == 3
    assert all(name.startswith("hfta_tune:test:0") for name in names)


def test_other_errors_of_ray_are_not_hidden(cluster: None) -> None:
    with pytest.raises(ValueError, match="num_cpus"):
        named(ray.remote(Holder), "hfta_tune:test:1").options(num_cpus=-1).remote()


def test_runs_of_one_name(climb: Any) -> None:
    taken = named(ray.remote(Holder), "hfta_tune:packed:0").options(num_cpus=0).remote()
    assert ray.get(taken.name.remote()) == "hfta_tune:packed:0"
    for _ in range(2):
        analysis = climb(packed=True, config={"peak": tune.grid_search([1, 2])}, stop={"training_iteration": 2})
        assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 2
