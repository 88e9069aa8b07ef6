"""Which config keys are found to matter, from the signatures of trials that have trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hfta_tune._kinds import Kinds

Seen = list[tuple[dict[str, Any], str]]


def taught(seen: Seen, trainable: str = "Net") -> Kinds:
    """Kinds that know these configs and their signatures, as trials 0, 1, 2..."""
    kinds = Kinds()
    for trial, (config, signature) in enumerate(seen):
        kinds.add(trial, trainable, config)
        kinds.learn(trial, signature)
    return kinds


def alike(kinds: Kinds, one: dict[str, Any], other: dict[str, Any]) -> bool:
    kinds.add("one", "Net", one)
    kinds.add("other", "Net", other)
    return kinds.kind_of("one") == kinds.kind_of("other")


@pytest.mark.parametrize(
    ("seen", "free"),
    [
        ([], set()),
        ([({"lr": 1, "hidden": 8}, "a")], set()),
        ([({"lr": 1, "hidden": 8}, "a"), ({"lr": 2, "hidden": 8}, "a")], {"lr"}),
        ([({"lr": 1, "hidden": 8}, "a"), ({"lr": 2, "hidden": 8}, "b")], set()),
        ([({"lr": 1, "seed": 1}, "a"), ({"lr": 2, "seed": 2}, "a")], {"lr", "seed"}),
        # Not of neighbours only: 0 and 2 have equal signatures.
        ([({"lr": 1, "hidden": 8}, "a"), ({"lr": 1, "hidden": 9}, "b"), ({"lr": 3, "hidden": 8}, "a")], {"lr"}),
        # Each differs from another of the three, and from the first in one key only.
        ([({"a": 1, "b": 1}, "s"), ({"a": 2, "b": 1}, "s"), ({"a": 1, "b": 2}, "s")], {"a", "b"}),
        (
            [({"optimizer": {"lr": 1, "name": "x"}}, "a"), ({"optimizer": {"lr": 2, "name": "x"}}, "a")],
            {"optimizer/lr"},
        ),
        ([({"lr": 1}, "a"), ({"lr": 1, "momentum": 0.9}, "a")], {"momentum"}),
        ([({"lr": float("nan")}, "a"), ({"lr": float("nan")}, "a")], set()),
        ([({"sizes": [1, {"x": 2}]}, "a"), ({"sizes": [1, {"x": 2}]}, "a")], set()),
        ([({"sizes": [1, {"x": 2}]}, "a"), ({"sizes": [1, {"x": 3}]}, "a")], {"sizes"}),
        ([({"kinds": {1, 2}}, "a"), ({"kinds": {2, 1}}, "a")], set()),
        ([({"data": np.arange(3)}, "a"), ({"data": np.arange(3)}, "a")], set()),
        ([({"data": np.arange(3)}, "a"), ({"data": np.arange(4)}, "a")], {"data"}),
        ([({"data": torch.ones(2)}, "a"), ({"data": torch.zeros(2)}, "a")], {"data"}),
        ([({"layer": torch.nn.ReLU}, "a"), ({"layer": torch.nn.Tanh}, "b")], set()),
    ],
)
def test_a_key_is_free_once_two_trials_of_equal_signature_differ_in_it(seen: Seen, free: set[str]) -> None:
    assert taught(seen).free_keys("Net") == free


def test_a_kind_is_the_values_of_the_keys_that_are_not_free() -> None:
    kinds = taught([({"lr": 1, "hidden": 8}, "a"), ({"lr": 2, "hidden": 8}, "a")])
    assert alike(kinds, {"lr": 3, "hidden": 16}, {"lr": 4, "hidden": 16})
    assert not alike(kinds, {"lr": 3, "hidden": 8}, {"lr": 3, "hidden": 16})
    assert not alike(kinds, {"lr": 3, "hidden": 8}, {"lr": 3})


def test_kinds_of_trials_that_wait_follow_what_is_learned() -> None:
    kinds = Kinds()
    for trial in range(4):
        kinds.add(trial, "Net", {"lr": trial, "hidden": 8 + trial // 3})
    assert len({kinds.kind_of(trial) for trial in range(4)}) == 4
    kinds.learn(0, "a")
    kinds.learn(1, "a")
    assert kinds.kind_of(1) == kinds.kind_of(2) != kinds.kind_of(3)


def test_a_new_config_of_a_trial_counts_from_then_on() -> None:
    """Tune reuses a lane for another trial."""
    kinds = Kinds()
    kinds.add("a", "Net", {"hidden": 8})
    kinds.add("b", "Net", {"hidden": 16})
    assert kinds.kind_of("a") != kinds.kind_of("b")
    kinds.add("a", "Net", {"hidden": 16})
    assert kinds.kind_of("a") == kinds.kind_of("b")
    kinds.learn("a", "s")
    kinds.learn("b", "s")
    assert kinds.free_keys("Net") == set()


def test_trainables_have_kinds_and_free_keys_of_their_own() -> None:
    kinds = taught([({"lr": 1}, "a"), ({"lr": 2}, "a")], trainable="Net")
    kinds.add(2, "Other", {"lr": 3})
    kinds.learn(2, "a")
    assert kinds.free_keys("Other") == set()
    kinds.add("net", "Net", {"lr": 1})
    kinds.add("other", "Other", {"lr": 1})
    assert kinds.kind_of("net") != kinds.kind_of("other")


def test_a_removed_trial_leaves_what_was_learned_from_it() -> None:
    kinds = taught([({"lr": 1, "hidden": 8}, "a"), ({"lr": 2, "hidden": 8}, "a")])
    kinds.remove(0)
    kinds.remove(0)
    kinds.learn(0, "a")
    assert kinds.free_keys("Net") == {"lr"}
