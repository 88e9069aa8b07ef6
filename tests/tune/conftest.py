"""One local Ray cluster for the session, and the trainables that the tests tune."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# A private Ray session of the tests: no dashboard, no usage reports, quiet.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import cloudpickle


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import trainables

    cloudpickle.register_pickle_by_value(trainables)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def storage(tmp_path: Path, cluster: None) -> str:
    return str(tmp_path / "results")
