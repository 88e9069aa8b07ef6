"""HFTAPacker as a scheduler: its arguments, and what it forwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)

from hfta_tune import HFTAPacker


@pytest.mark.parametrize("lanes", [0, -1, 2.0, True, "8", "Auto", None])
def test_b_must_be_a_positive_integer_or_auto(lanes: Any) -> None:
    message = 'B, the number of trials in one worker, must be a positive integer or "auto" but got ' + repr(lanes)
    with pytest.raises(ValueError, match=message):
        HFTAPacker(B=lanes)


def test_b_is_what_was_given_and_lanes_the_present_number() -> None:
    assert (HFTAPacker(B=3).B, HFTAPacker(B=3).lanes) == (3, 3)
    packer = HFTAPacker(B="auto")
    assert (packer.B, packer.lanes) == ("auto", 4)
    assert 'B="auto": 4 lanes a worker' in packer.debug_string()
    assert "auto" not in HFTAPacker(B=3).debug_string()


@pytest.mark.parametrize("base", ["asha", ASHAScheduler, 3])
def test_base_scheduler_must_be_a_scheduler(base: Any) -> None:
    with pytest.raises(TypeError, match="base_scheduler must be an instance"):
        HFTAPacker(base_scheduler=base)


@pytest.mark.parametrize("base", [HFTAPacker(), ResourceChangingScheduler()])
def test_base_scheduler_that_cannot_be_packed(base: Any) -> None:
    with pytest.raises(TypeError, match=type(base).__name__):
        HFTAPacker(base_scheduler=base)


def test_the_base_is_fifo_by_default() -> None:
    assert type(HFTAPacker().base_scheduler) is FIFOScheduler


def test_attributes_and_properties_are_the_bases() -> None:
    base = ASHAScheduler(metric="accuracy", mode="max", max_t=7)
    packer = HFTAPacker(base, B=3)
    assert packer.metric == "accuracy"
    assert packer._max_t == 7
    assert packer.supports_buffered_results == base.supports_buffered_results
    assert not HFTAPacker(HyperBandScheduler()).supports_buffered_results
    with pytest.raises(AttributeError, match="nonsense"):
        _ = packer.nonsense


def test_search_properties_reach_the_base() -> None:
    packer = HFTAPacker(PopulationBasedTraining(hyperparam_mutations={"lr": tune.uniform(0, 1)}))
    assert packer.set_search_properties("accuracy", "max")
    assert packer.base_scheduler.metric == "accuracy"
    assert not packer.set_search_properties("loss", "min")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda packer: pickle.loads(pickle.dumps(packer))])
def test_it_can_be_copied(copied: Any) -> None:
    packer = copied(HFTAPacker(ASHAScheduler(metric="accuracy", mode="max"), B=5))
    assert packer.B == 5 and packer.metric == "accuracy"
    assert copied(HFTAPacker(B="auto")).lanes == 4
