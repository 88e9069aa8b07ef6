"""Data loaders are built once for each combination of what their hooks read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hfta_tune._loaders import Data, DataCache

BATCHES = [torch.zeros(2, 1)]


class Trainable:
    """Stands for a FusedTrainable; `reads` is what its train_dataloader does with self and config."""

    built = 0

    def __init__(self, reads: Any, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.reads = reads

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        Trainable.built += 1
        self.reads(self, config)
        return list(BATCHES)

    def val_dataloader(self, config: dict[str, Any]) -> Any:
        return None


def shared(cache: DataCache, *trials: tuple[Trainable, dict[str, Any]]) -> list[int]:
    """Return for each trial the number of the loaders it got."""
    got: list[Data] = []
    for name, (trainable, config) in enumerate(trials):
        got.append(cache.get(str(name), trainable, config, list(got)))
    distinct = list(dict.fromkeys(got))
    return [distinct.index(data) for data in got]


def reads_batch(self: Any, config: Any) -> None:
    config["batch"]


def reads_on_condition(self: Any, config: Any) -> None:
    if config["augment"]:
        config["strength"]


def reads_own_width(self: Any, config: Any) -> None:
    _ = self.width


def reads_what_it_set(self: Any, config: Any) -> None:
    self.classes = 10
    _ = self.classes


def reads_own_config(self: Any, config: Any) -> None:
    _ = self.config["batch"]


def reads_all(self: Any, config: Any) -> None:
    dict(config)


CASES: list[tuple[Any, list[dict[str, Any]], list[int]]] = [
    (reads_batch, [{"batch": 8, "lr": 1}, {"batch": 8, "lr": 2}, {"batch": 16, "lr": 1}], [0, 0, 1]),
    (
        reads_on_condition,
        [
            {"augment": True, "strength": 1},
            {"augment": False, "strength": 1},
            {"augment": False, "strength": 2},
            {"augment": True, "strength": 2},
            {"augment": True, "strength": 1},
        ],
        [0, 1, 1, 2, 0],
    ),
    (reads_what_it_set, [{"a": 1}, {"a": 2}], [0, 0]),
    (reads_own_config, [{"batch": 8, "lr": 1}, {"batch": 8, "lr": 2}, {"batch": 9, "lr": 1}], [0, 0, 1]),
]


@pytest.mark.parametrize(("reads", "configs", "expected"), CASES)
def test_only_what_was_read_must_agree(reads: Any, configs: list[dict[str, Any]], expected: list[int]) -> None:
    Trainable.built = 0
    trials = [(Trainable(reads, config=config), config) for config in configs]
    assert shared(DataCache(pytest.fail), *trials) == expected
    assert Trainable.built == len(set(expected))


def test_attributes_of_self_that_were_read_must_agree() -> None:
    trials = [(Trainable(reads_own_width, width=width), {}) for width in (1, 1, 2)]
    assert shared(DataCache(pytest.fail), *trials) == [0, 0, 1]


def test_a_trial_that_shares_loaders_gets_the_attributes_that_building_them_set() -> None:
    trials = [(Trainable(reads_what_it_set), {"a": number}) for number in range(2)]
    shared(DataCache(pytest.fail), *trials)
    assert [trainable.classes for trainable, _ in trials] == [10, 10]  # type: ignore[attr-defined]


def test_reading_everything_costs_sharing_and_is_said() -> None:
    trials = [(Trainable(reads_all), {"lr": lr}) for lr in (1, 2, 2)]
    said: list[str] = []
    assert shared(DataCache(said.append), *trials) == [0, 1, 1]
    assert "train_dataloader of Trainable reads its whole config" in said[0] and len(set(said)) == 1


def test_unused_loaders_are_let_go() -> None:
    cache = DataCache(pytest.fail)
    for batch in range(20):
        cache.get(str(batch), Trainable(reads_batch), {"batch": batch}, [])
    assert len(cache._known) <= 3
