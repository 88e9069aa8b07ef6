"""A round that may be taken back: what is saved meanwhile, and what comes of a round that is begun anew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from reference import LANES, MODELS, OPTIMIZERS, SCHEDULES, Config, Task, assert_like
from torch import Tensor, nn

from hfta_tune import FusedTrainable
from hfta_tune.worker import RoundAbandoned, Worker

TRIALS = ["ada", "bob", "cyd", "dee"]
TABLE = [
    *(("mlp", optimizer, schedule) for optimizer in OPTIMIZERS for schedule in ("constant", "onecycle")),
    *(("mlp", "adam", schedule) for schedule in SCHEDULES),
    *((model, "adamw", "step") for model in MODELS),
]


def start(task: type[Task], strategy: str = "vmap", lanes: int = 4) -> Worker:
    worker = Worker(lanes, strategy=strategy)
    for trial, config in zip(TRIALS, LANES, strict=True):
        add(worker, trial, task, config)
    return worker


@functools.cache  # two classes, however alike, never share an array
def fused(task: type[Task]) -> type[FusedTrainable]:
    return type(f"Fused{task.__name__}", (task, FusedTrainable), {})


def add(worker: Worker, trial: str, task: type[Task], config: Config) -> None:
    worker.add(trial, fused(task)._outside_tune(config), config)


def after(steps: int) -> Callable[[], None]:
    """Gives a round up after so many steps."""
    left = [steps]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RoundAbandoned

    return count


@functools.cache
def alone(task: type[Task], trial: str, round_number: int) -> reference.Snapshot:
    return reference.train(task(), LANES[TRIALS.index(trial)], round_number)[-1]


def assert_all_like(worker: Worker, task: type[Task], round_number: int, trials: Sequence[str] = TRIALS) -> None:
    for trial in trials:
        assert_like(worker.state_dict(trial), alone(task, trial, round_number), f"{trial} after round {round_number}")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
@pytest.mark.parametrize(("model", "optimizer", "schedule"), TABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_round_that_is_given_up_leaves_no_trace(model: str, optimizer: str, schedule: str, strategy: str) -> None:
    """Given up in the first round, where optimizers have no state yet, and in the second; then trained to its end."""
    task = reference.compose(model, optimizer, schedule)
    worker = start(task, strategy)
    for round_number in (1, 2):
        assert worker.hold(TRIALS)
        with pytest.raises(RoundAbandoned):
            worker.run_round(between_steps=after(2))
        worker.rewind(TRIALS)
        worker.run_round()
        assert_all_like(worker, task, round_number)


def test_the_state_of_the_last_round_is_what_is_saved_until_it_is_released(tmp_path: Path) -> None:
    task = reference.compose("cnn", "adam", "cosine")
    worker = start(task)
    worker.run_round()
    assert worker.hold(TRIALS)
    seen: list[int] = []

    def in_the_middle() -> None:
        seen.append(1)
        assert_all_like(worker, task, 1)

    worker.run_round(between_steps=in_the_middle)
    assert len(seen) > 2
    assert_all_like(worker, task, 1)
    worker.save("bob", tmp_path)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["epoch"] == 1
    assert_like(saved, alone(task, "bob", 1), "bob's checkpoint")
    worker.release(TRIALS[:2])
    assert_all_like(worker, task, 2, TRIALS[:2])
    assert_all_like(worker, task, 1, TRIALS[2:])
    worker.rewind(TRIALS[2:])
    worker.run_round(TRIALS[2:])
    assert_all_like(worker, task, 2)


def test_trials_leave_join_and_are_restored_in_mid_round() -> None:
    task = reference.compose("mlp", "adam", "step")
    worker = start(task)
    worker.run_round()
    first = worker.state_dict("cyd")
    worker.run_round()
    steps: list[int] = []

    def change() -> None:
        steps.append(1)
        if len(steps) == 2:
            worker.remove("ada")
            add(worker, "eve", task, LANES[0])
            worker.load_state_dict("cyd", first)

    assert worker.hold(TRIALS)
    results = worker.run_round(between_steps=change)
    assert sorted(results) == ["bob", "dee"]
    worker.release(["bob", "dee"])
    assert_all_like(worker, task, 3, ["bob", "dee"])
    assert_all_like(worker, task, 1, ["cyd"])
    assert worker.state_dict("cyd")["epoch"] == 1
    worker.run_round(["cyd", "eve"])
    assert_all_like(worker, task, 2, ["cyd"])
    assert_like(worker.state_dict("eve"), alone(task, "ada", 1), "eve")


class Fails(reference.compose("mlp", "sgd", "constant")):  # type: ignore[misc]
    """Its evaluate raises in the second round of the trial with seed 2."""

    def evaluate(self, model: nn.Module, config: Config) -> dict[str, float]:
        self.rounds = getattr(self, "rounds", 0) + 1
        if config["seed"] == 2 and self.rounds == 2:
            raise RuntimeError("bob has had enough")
        return {}


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
def test_a_trial_that_fails_while_it_is_held_can_still_be_saved(strategy: str) -> None:
    worker = start(Fails, strategy)
    worker.run_round()
    assert worker.hold(TRIALS)
    results = worker.run_round()
    assert isinstance(results["bob"], RuntimeError)
    assert_all_like(worker, reference.compose("mlp", "sgd", "constant"), 1)
    worker.release(TRIALS)
    assert worker.trial_ids == ["ada", "cyd", "dee"]


class Annealed(nn.Module):
    """Counts its own calls in a plain attribute, so it trains lane by lane."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.calls = 0
        self.register_buffer("sums", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.sums = self.sums + self.calls
        return self.body(x) * (1 + self.calls) + self.sums.mean()


class Counts(reference.compose("mlp", "adam", "constant")):  # type: ignore[misc]
    def build_model(self, config: Config) -> nn.Module:
        return Annealed()


def test_what_modules_count_and_buffers_that_no_checkpoint_has_are_taken_back_too() -> None:
    worker = start(Counts, "lane by lane")
    worker.run_round()
    for _ in range(2):
        assert worker.hold(TRIALS)
        with pytest.raises(RoundAbandoned):
            worker.run_round(between_steps=after(2))
        worker.rewind(TRIALS)
    worker.run_round()
    assert_all_like(worker, Counts, 2)


class Accumulates(reference.compose("mlp", "adam", "constant")):  # type: ignore[misc]
    accumulate_grad_batches = 3


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
def test_gradients_of_a_round_that_is_given_up_are_dropped(strategy: str) -> None:
    plain, disturbed = start(Accumulates, strategy), start(Accumulates, strategy)
    plain.run_round()
    assert disturbed.hold(TRIALS)
    with pytest.raises(RoundAbandoned):
        disturbed.run_round(between_steps=after(2))
    disturbed.rewind(TRIALS)
    disturbed.run_round()
    for trial in TRIALS:
        reference.assert_same(disturbed.state_dict(trial), plain.state_dict(trial), trial)


def test_a_snapshot_for_which_memory_is_short_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a copy")

    worker = start(reference.compose("mlp", "adam", "constant"))
    worker.run_round()
    monkeypatch.setattr(torch.UntypedStorage, "clone", no_memory)
    assert not worker.hold(TRIALS)
    monkeypatch.undo()
    worker.run_round()
    assert_all_like(worker, reference.compose("mlp", "adam", "constant"), 2)


def test_rounds_that_go_on_in_the_data_cannot_be_taken_back() -> None:
    class Endless(reference.compose("mlp", "adam", "constant")):  # type: ignore[misc]
        steps_per_round = 2

    assert start(reference.compose("mlp", "adam", "constant")).can_rewind
    assert not start(Endless).can_rewind
