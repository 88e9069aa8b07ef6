"""Memory that runs out: arrays are split until they fit, and no trial notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna
import pytest
import torch
from fusion.breadth import fused
from reference import CNN, DampedMomentum, Run, Task, assert_same
from torch import Tensor, nn

import hfta_tune
from hfta_tune import Worker
from hfta_tune.fusion import LANE_BY_LANE, VMAP
from hfta_tune.fusion import vmapped_steps as steps_module
from hfta_tune.fusion.optimizers import ArrayOptimizers

Config = dict[str, Any]

TRIALS = ["ada", "bob", "cyd", "dee", "eve", "fay", "gus", "hal"]
LANES: list[Config] = [dict(seed=number, lr=0.02 + 0.01 * number, kind=number % 2) for number in range(1, 9)]


class Norms(CNN):
    """Batch norm, whose statistics an attempt moves before it stops, and a batch that it changes."""

    batches = 3

    def build_optimizer(self, model: nn.Module, config: Config) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def train_dataloader(self, config: Config) -> Iterable[Any]:
        x, y = self.data(8 * self.batches, seed=0).tensors
        return _Batches(x, y)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y, _ = batch
        x.mul_(2).sub_(0.1)
        return super().training_step(model, (x, y), config)


class _Batches:
    """New tensors each time, as a data set would give them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter([(x.clone(), y, n) for n, (x, y) in enumerate(zip(self.x.split(8), self.y.split(8), strict=True))])


class Views(Norms):
    def build_optimizer(self, model: nn.Module, config: Config) -> Any:
        return DampedMomentum(model.parameters(), lr=config["lr"])


class MLP(Task):
    """A model of another signature."""


PHASES = ["before", "after the forward pass", "in the backward pass"]
in_each_phase = pytest.mark.parametrize("memory", PHASES, indirect=True)


@dataclass
class Memory:
    """How many lanes fit into a fused step, in training and in evaluation.

    Attributes:
        training: In a training step.
        validation: In a validation step.
        phase: Where in a training step it shows.
        runs_out_at: After how many attempts at a training step memory gets short.
        attempts: How many there have been.
        steps: The number of lanes of each step that fitted.
    """

    training: int = 99
    validation: int = 99
    phase: str = "before"
    runs_out_at: int = 0
    attempts: int = 0
    steps: list[int] = field(default_factory=list)

    def check(self, lanes: int, room: int) -> None:
        if lanes > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nSee the documentation.")


@pytest.fixture
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Memory:
    own = Memory(phase=getattr(request, "param", PHASES[0]))
    monkeypatch.setattr(steps_module, "call_for_all", _limited(own, steps_module.call_for_all))
    gradients = steps_module.gradients_by_optimizer

    def limited_gradients(losses: Any, *arguments: Any) -> Any:
        lanes = len(next(iter(losses.values())))
        if own.phase == "in the backward pass" and own.attempts > own.runs_out_at:
            own.check(lanes, own.training)
        own.steps.append(lanes)
        return gradients(losses, *arguments)

    monkeypatch.setattr(steps_module, "gradients_by_optimizer", limited_gradients)
    return own


def _limited(own: Memory, real: Callable[..., Any]) -> Callable[..., Any]:
    def call_for_all(step: Any, lanes: Any, template: Any, *arguments: Any) -> Any:
        training = template.training
        own.attempts += training
        applies = not training or own.attempts > own.runs_out_at
        room = own.training if training else own.validation
        if applies and (own.phase == "before" or not training):
            own.check(len(lanes), room)
        result = real(step, lanes, template, *arguments)
        if applies and own.phase == "after the forward pass":
            own.check(len(lanes), room)
        return result

    return call_for_all


def add(worker: Worker, kind: type[Any], lane: int, **options: Any) -> None:
    config = LANES[lane] | options
    worker.add(TRIALS[lane], fused(kind)._outside_tune(config), config)


def start(kind: type[Any], lanes: int, **options: Any) -> Worker:
    worker = Worker(lanes, device="cpu", **options)
    for lane in range(lanes):
        add(worker, kind, lane)
    return worker


class Runs:
    """What the trials come to alone."""

    def __init__(self, kind: type[Any], lanes: Iterable[int], run: type[Run] = Run) -> None:
        self.runs = {TRIALS[lane]: run(kind(), LANES[lane]) for lane in lanes}

    def assert_equal(self, worker: Worker, rounds: int = 1) -> None:
        for _ in range(rounds):
            results = worker.run_round()
            assert results.keys() == self.runs.keys()
            for trial, run in self.runs.items():
                result, metrics = results[trial], run.run_round()
                if isinstance(result, Exception):
                    raise result
                assert_same({name: result[name] for name in metrics}, metrics, trial)
                assert_same(worker.state_dict(trial)["model"], run.model.state_dict(), trial)
                assert_same(worker.state_dict(trial)["optimizer"], run.optimizer.state_dict(), trial)


def sizes(worker: Worker) -> list[int]:
    return sorted(len(array["trials"]) for array in worker.describe()["arrays"])


@in_each_phase
@pytest.mark.parametrize("kind", [Norms, Views])
def test_an_array_is_halved(kind: type[Task], memory: Memory, said: Callable[[], list[str]]) -> None:
    memory.training = 4
    worker = start(kind, 8)
    Runs(kind, range(8)).assert_equal(worker, rounds=3)
    assert sizes(worker) == [4, 4] and set(memory.steps) == {4}
    assert (worker.lanes, worker.fitting_lanes, worker.free_lanes) == (8, 4, 0)
    assert worker.describe()["fitting_lanes"] == 4
    (message,) = said()
    assert message == (
        "8 lanes do not fit into the memory of cpu (OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.)"
        ". They train on in arrays of 4, and this worker takes no more than 4 trials from now on. Set B to that."
    )


def test_halves_are_halved(memory: Memory, said: Callable[[], list[str]]) -> None:
    memory.training = 2
    worker = start(Norms, 8)
    Runs(Norms, range(8)).assert_equal(worker, rounds=2)
    assert sizes(worker) == [2, 2, 2, 2] and set(memory.steps) == {2}
    assert (worker.fitting_lanes, worker.free_lanes) == (2, 0)
    assert [message.split(",")[0].split(" do ")[0] for message in said()] == ["8 lanes", "4 lanes"]
    assert "Set B to that" in said()[1] and "no more than 2 trials" in said()[1]


@pytest.mark.parametrize(("lanes", "room", "expected"), [(5, 2, [1, 2, 2]), (3, 2, [1, 2]), (2, 1, [1, 1])])
@pytest.mark.usefixtures("said")
def test_odd_numbers_of_lanes(lanes: int, room: int, expected: list[int], memory: Memory) -> None:
    memory.training = room
    worker = start(Norms, lanes)
    Runs(Norms, range(lanes)).assert_equal(worker, rounds=2)
    assert sizes(worker) == expected
    assert worker.fitting_lanes == max(expected)


@pytest.mark.usefixtures("said")
def test_nothing_fused_fits(memory: Memory) -> None:
    memory.training = memory.validation = 0
    worker = start(Norms, 4)
    Runs(Norms, range(4)).assert_equal(worker, rounds=2)
    assert sizes(worker) == [1, 1, 1, 1] and worker.fitting_lanes == 1 and not memory.steps


@pytest.mark.usefixtures("said")
def test_it_runs_out_in_validation(memory: Memory) -> None:
    memory.validation = 2
    worker = start(Norms, 4)
    Runs(Norms, range(4)).assert_equal(worker, rounds=2)
    assert sizes(worker) == [2, 2] and worker.fitting_lanes == 2
    assert memory.steps == [4] * 3 + [2] * 6


@in_each_phase
@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("step", [2, 4])
def test_it_runs_out_later(step: int, memory: Memory) -> None:
    """Then the step is known to run, and works on the loader's own tensors."""
    memory.training, memory.runs_out_at = 2, step
    worker = start(Norms, 4)
    Runs(Norms, range(4)).assert_equal(worker, rounds=3)
    assert sizes(worker) == [2, 2] and memory.steps[:step] == [4] * step


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("options", [{"strategy": "auto"}, {"audit": True}, {"strategy": "auto", "audit": True}])
def test_with_other_options(options: dict[str, Any], memory: Memory) -> None:
    memory.training = 2
    worker = start(Norms, 4, **options)
    Runs(Norms, range(4)).assert_equal(worker, rounds=3)
    assert sizes(worker) == [2, 2]


@in_each_phase
@pytest.mark.usefixtures("said")
def test_it_runs_out_while_gradients_are_accumulated(memory: Memory) -> None:
    class Accumulating(Norms):
        accumulate_grad_batches = 2

    class Mean(Run):
        def _train(self) -> float:
            self.model.train()
            total = 0.0
            for number, batch in enumerate(self.train_loader):
                loss = self.task.training_step(self.model, batch, self.config)
                (loss / 2).backward()
                if number in (1, 2):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                total += float(loss.detach()) / 3
            return total

    memory.training, memory.runs_out_at = 2, 1
    worker = start(Accumulating, 4)
    Runs(Accumulating, range(4), Mean).assert_equal(worker, rounds=2)
    assert sizes(worker) == [2, 2]


@pytest.mark.usefixtures("said")
def test_arrays_of_another_signature_stay_whole(memory: Memory) -> None:
    memory.training = 2
    worker = Worker(8, device="cpu")
    cnn, mlp = Runs(Norms, range(4)), Runs(MLP, (6, 7))
    for lane in range(4):
        add(worker, Norms, lane)
    for lane in (6, 7):
        add(worker, MLP, lane)
    both = Runs(Norms, ())
    both.runs = cnn.runs | mlp.runs
    both.assert_equal(worker, rounds=2)
    assert sizes(worker) == [2, 2, 2]
    assert (worker.fitting_lanes, worker.free_lanes) == (4, 0)  # those two, and two of the others


# Splits within splits: a lane must not have a step twice, or none.


@pytest.mark.usefixtures("said")
def test_halves_do_not_join_arrays_that_have_had_the_step(memory: Memory) -> None:
    memory.training = 4
    worker = start(Norms, 8)
    runs = Runs(Norms, range(8))
    runs.assert_equal(worker)
    _, other = (array["trials"] for array in worker.describe()["arrays"])
    for trial in other[1:]:
        worker.remove(trial)
        del runs.runs[trial]
    memory.training = 2  # an array of 4, and one of 1 that would have room for another
    runs.assert_equal(worker, rounds=2)
    assert len(worker.trial_ids) == 5 and set(memory.steps) == {4, 2}


class ReadsLate(Norms):
    """Its lanes turn out to differ on the second batch."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return 2 * loss if batch[2] == 1 and config["kind"] else loss


@pytest.mark.usefixtures("said")
def test_halves_that_turn_out_to_differ(memory: Memory) -> None:
    memory.training = 2
    worker = start(ReadsLate, 4)
    Runs(ReadsLate, range(4)).assert_equal(worker, rounds=2)
    assert set(memory.steps) <= {1, 2}


# New trials


@pytest.mark.usefixtures("said")
def test_new_trials_take_the_lanes_that_fit(memory: Memory) -> None:
    memory.training = 2
    worker = start(Norms, 4)
    runs = Runs(Norms, range(4))
    runs.assert_equal(worker)
    for trial in ("ada", "bob"):
        assert worker.free_lanes == 0
        with pytest.raises(ValueError, match="trial eve: all 2 lanes that fit into memory are taken"):
            add(worker, Norms, 4)
        worker.remove(trial)
        del runs.runs[trial]
    assert worker.free_lanes == 0
    worker.remove("cyd")
    del runs.runs["cyd"]
    assert worker.free_lanes == 1
    add(worker, Norms, 4)
    assert worker.free_lanes == 0
    runs.runs |= Runs(Norms, [4]).runs
    runs.assert_equal(worker, rounds=2)
    assert sizes(worker) in ([1, 1], [2]) and set(memory.steps) == {2}


@pytest.mark.usefixtures("said")
def test_a_trial_that_has_its_place_keeps_it(memory: Memory) -> None:
    """Under Tune a trial may have been given a lane before memory ran out, or be reset in its lane."""
    memory.training = 2
    worker = Worker(4, device="cpu")
    trainables = [fused(Norms)._outside_tune(config) for config in LANES[:5]]
    for trial, trainable in zip(TRIALS[:3], trainables, strict=False):
        trainable._join(worker, trial)
    runs = Runs(Norms, range(3))
    runs.assert_equal(worker)
    assert worker.fitting_lanes == 2
    trainables[3]._join(worker, "dee")
    runs.runs |= Runs(Norms, [3]).runs
    runs.assert_equal(worker)
    with pytest.raises(ValueError, match="trial eve: all 4 lanes are taken"):
        trainables[4]._join(worker, "eve")
    assert set(memory.steps) <= {1, 2}


@pytest.mark.usefixtures("said")
def test_a_trial_is_reset_in_a_lane_that_does_not_fit(memory: Memory) -> None:
    """As Tune does when it reuses actors, and PBT when it exploits."""
    memory.training = 2
    worker = start(Norms, 3)
    trainable = fused(Norms)._outside_tune(LANES[3])
    worker.remove("ada")
    trainable._join(worker, trainable.trial_id)
    worker.run_round()
    assert (len(worker.trial_ids), worker.fitting_lanes) == (3, 2)
    trainable.config = LANES[4]  # as Trainable.reset does first
    assert trainable.reset_config(LANES[4])
    run, results = Run(Norms(), LANES[4]), worker.run_round()
    metrics, own = run.run_round(), results[trainable.trial_id]
    assert_same({name: own[name] for name in metrics}, metrics)


# One lane alone


class Greedy(Norms):
    """One of them needs more memory than there is, even alone."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        if config["greedy"] and batch[2] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(model, batch, config)


class GreedyValidation(Norms):
    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        if config["greedy"]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().validation_step(model, batch, config)


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("strategy", [VMAP, LANE_BY_LANE])
@pytest.mark.parametrize("kind", [Greedy, GreedyValidation])
def test_a_lane_that_runs_out_alone_fails_alone(kind: type[Norms], strategy: str) -> None:
    worker = Worker(4, device="cpu", strategy=strategy)
    for lane in range(4):
        add(worker, kind, lane, greedy=lane == 1)
    runs = Runs(Norms, (0, 2, 3))
    results = worker.run_round()
    assert isinstance(results.pop("bob"), torch.OutOfMemoryError)
    for trial, run in runs.runs.items():
        metrics = run.run_round()
        assert_same({name: results[trial][name] for name in metrics}, metrics, trial)
    runs.assert_equal(worker)


@pytest.mark.parametrize("strategy", [VMAP, LANE_BY_LANE])
def test_it_runs_out_in_the_optimizers_of_one_array(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those lanes are torn, and fail with that error; the other array goes on."""
    apply = ArrayOptimizers.apply

    def limited(self: Any, parameters: dict[str, Tensor], *arguments: Any) -> None:
        if "4.weight" in parameters:  # the CNN's
            raise torch.OutOfMemoryError("CUDA out of memory.")
        apply(self, parameters, *arguments)

    monkeypatch.setattr(ArrayOptimizers, "apply", limited)
    worker = Worker(5, device="cpu", strategy=strategy)
    for lane in range(2):
        add(worker, Norms, lane)
    for lane in (6, 7):
        add(worker, MLP, lane)
    results = worker.run_round()
    assert all(isinstance(results.pop(trial), torch.OutOfMemoryError) for trial in ("ada", "bob"))
    for trial, run in Runs(MLP, (6, 7)).runs.items():
        metrics = run.run_round()
        assert_same({name: results[trial][name] for name in metrics}, metrics, trial)
    assert worker.trial_ids == ["gus", "hal"] and worker.free_lanes == 3


# Optuna


@pytest.mark.usefixtures("said")
def test_optimize_places_no_more_trials_than_fit(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.training = 3
    in_use: list[int] = []
    run_round = Worker.run_round

    def counted(self: Worker, *arguments: Any, **options: Any) -> Any:
        in_use.append(len(self.trial_ids))
        return run_round(self, *arguments, **options)

    monkeypatch.setattr(Worker, "run_round", counted)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())
    hfta_tune.optimize(
        study,
        fused(Norms),
        lambda trial: {"lr": trial.suggest_float("lr", 1e-2, 1e-1), "seed": trial.number},
        n_trials=14,
        epochs=2,
        metric="val_loss",
        B=6,
        device="cpu",
    )
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE] * 14
    assert in_use == [6, 6] + [3] * 4 + [2] * 2
    for trial in study.trials[::4]:
        run = Run(Norms(), {**trial.params, "seed": trial.number})
        run.run_round()
        assert trial.value == pytest.approx(run.run_round()["val_loss"], rel=1e-4)
