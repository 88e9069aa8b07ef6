"""Recorded steps against plain PyTorch: of all that trains fused, and while lanes come and go."""

from __future__ import annotations

import logging

import pytest
from fusion.breadth import FUSED, LANES, Row, assert_equal_to_alone, task_of
from fusion.test_compiled import (
    Annealed,
    Convolved,
    Counting,
    Momentum,
    Normed,
    Viewed,
    assert_as_alone_while_lanes_come_and_go,
    compare_with_alone,
)
from fusion.test_modules import LOSSES, ROWS

from hfta_tune import FusedTrainable
from hfta_tune.fusion import RECORDED

pytestmark = pytest.mark.slow

ROUNDS = 3  # two to see the step settle, and one of the record


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in (*ROWS, *LOSSES) if row.strategy == FUSED])
def test_modules_functions_and_losses(
    row: Row, always_records: None, steps_of_tensors: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be recorded goes on under vmap, and a log line says why."""
    caplog.set_level(logging.INFO, logger="hfta_tune")
    assert_equal_to_alone(task_of(row), LANES, ROUNDS, strategy=FUSED)
    assert steps_of_tensors or "goes on without RecordedStep: " in caplog.text


@pytest.mark.parametrize("kind", [Normed, Convolved, Viewed, Momentum])
def test_lanes_come_and_go(kind: type[FusedTrainable], always_records: None, steps_of_tensors: list[int]) -> None:
    assert_as_alone_while_lanes_come_and_go(kind, RECORDED, steps_of_tensors)


def test_attributes_of_self_are_followed(always_records: None, steps_of_tensors: list[int]) -> None:
    compare_with_alone(Annealed, rounds=6)
    assert steps_of_tensors


def test_a_step_that_changes_self_is_not_recorded(always_records: None, steps_of_tensors: list[int]) -> None:
    compare_with_alone(Counting, rounds=5)
    assert not steps_of_tensors
