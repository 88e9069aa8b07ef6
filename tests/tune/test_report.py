"""What a worker tells of its trials: whose signatures are equal, and how many fit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import Tensor, nn
from trainables import Points

from hfta_tune import Worker
from hfta_tune.tune._report import report_on

numbers = itertools.count()


def hosting(worker: Worker, *configs: dict[str, Any], kind: type[Points] = Points) -> list[str]:
    names = [f"{next(numbers)}" for _ in configs]
    for name, config in zip(names, configs, strict=True):
        worker.add(name, kind._outside_tune(config), config)
    return names


def test_equal_signatures_have_equal_hashes() -> None:
    worker = Worker(4, device="cpu")
    names = hosting(worker, {"lr": 0.1}, {"lr": 0.2, "hidden": 16}, {"lr": 0.1, "hidden": 32}, {"lr": 0.3})
    for _ in range(2):
        worker.run_round()
        first, same, wider, last = (worker.signature_of(name) for name in names)
        assert first == same == last != wider


def test_a_key_that_a_step_reads_shows_in_the_hash() -> None:
    class Reads(Points):
        def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
            return super().training_step(model, batch, config) * config["times"]

    worker = Worker(2, device="cpu")
    one, other = hosting(worker, {"lr": 0.1, "times": 1}, {"lr": 0.1, "times": 2}, kind=Reads)
    worker.run_round()
    assert worker.signature_of(one) != worker.signature_of(other)


def test_data_that_is_gone_does_not_pass_for_other_data() -> None:
    """A new object may have the address of one that is gone."""

    class Sized(Points):
        def train_dataloader(self, config: dict[str, Any]) -> Any:
            return super().train_dataloader(config)[: config["batches"]]

    worker = Worker(1, device="cpu")
    seen = set()
    for batches in list(range(1, 9)) * 3:
        [name] = hosting(worker, {"lr": 0.1, "batches": batches}, kind=Sized)
        seen.add((worker.signature_of(name), batches))
        worker.remove(name)
    assert len({signature for signature, _ in seen}) == len(seen)


def test_a_report_on_a_round() -> None:
    worker = Worker(4, device="cpu")
    one, other = hosting(worker, {"lr": 0.1}, {"lr": 0.2})
    gone = "gone"
    report = report_on(worker, [one, None, other, gone], 3, 1.5, None, None)
    assert report.seconds == 1.5 and report.memory is None
    assert report.signatures == (worker.signature_of(one), None, worker.signature_of(other), None)
    assert report.fitting_lanes is None  # as long as memory has not run out
    worker._fitting = 2
    assert report_on(worker, [one], 1, 1.5, None, None).fitting_lanes == 2


def test_a_worker_can_have_more_and_fewer_lanes() -> None:
    worker = Worker(1, device="cpu")
    [first] = hosting(worker, {"lr": 0.1})
    with pytest.raises(ValueError, match="all 1 lanes are taken"):
        hosting(worker, {"lr": 0.1})
    worker.resize(3)
    hosting(worker, {"lr": 0.1}, {"lr": 0.2})
    assert (worker.lanes, worker.fitting_lanes, worker.free_lanes) == (3, 3, 0)
    assert worker.describe()["lanes"] == 3
    worker.resize(2)
    assert len(worker.run_round()) == 3 and worker.free_lanes == 0
    worker.remove(first)
    with pytest.raises(ValueError, match="all 2 lanes are taken"):
        hosting(worker, {"lr": 0.1})


def test_more_lanes_do_not_make_memory() -> None:
    worker = Worker(8, device="cpu")
    worker._fitting = 3
    worker.resize(16)
    assert (worker.lanes, worker.fitting_lanes) == (16, 3)
    worker.resize(2)
    assert (worker.lanes, worker.fitting_lanes) == (2, 2)
