"""A checkpoint is plain PyTorch: saved in an array, it goes on anywhere."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from reference import LANES, Config, Task, assert_like, assert_same
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hfta_tune import FusedTrainable
from hfta_tune.worker import Worker

TRIALS = ["ada", "bob", "cyd", "dee"]

CASES = [
    pytest.param("mlp", "sgd", "constant", id="mlp-sgd-constant"),
    pytest.param("mlp", "sgd", "onecycle", id="mlp-sgd-onecycle"),
    pytest.param("cnn", "adam", "step", id="cnn-adam-step"),
    pytest.param("cnn", "rmsprop", "plateau", id="cnn-rmsprop-plateau"),
    pytest.param("cnn", "custom", "cosine", id="cnn-custom-cosine"),
    pytest.param("transformer", "adamw", "onecycle", id="transformer-adamw-onecycle"),
    pytest.param("transformer", "adagrad", "plateau", id="transformer-adagrad-plateau"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache  # two classes, however alike, never share an array
def fused(task: type[Task]) -> type[FusedTrainable]:
    return type(f"Fused{task.__name__}", (task, FusedTrainable), {})


def start(task: type[Task], configs: list[Config], lanes: int = 4) -> Worker:
    worker = Worker(lanes=lanes)
    trainable = fused(task)
    for trial, config in zip(TRIALS, configs, strict=False):
        worker.add(trial, trainable._outside_tune(config), config)
    return worker


def losses(worker: Worker, trial: str, rounds: int) -> list[float]:
    collected = []
    for _ in range(rounds):
        result = worker.run_round()[trial]
        assert not isinstance(result, Exception), result
        collected.append(result["train_loss"])
    return collected


# Everything by hand, as a user without hfta_tune would: the model, the optimizer and the schedule of the
# config, three load_state_dict, and a loop. One process for all cases: importing torch takes longer.
SCRIPT = """
import json, sys

import torch

import reference


def go_on(case, lane, directory):
    config = reference.LANES[lane]
    task = reference.compose(*case)()
    interval = getattr(task, "lr_scheduler_interval", "epoch")
    monitor = getattr(task, "lr_scheduler_monitor", None)

    checkpoint = torch.load(f"{directory}/checkpoint.pt", weights_only=True)
    model = task.build_model(config)
    model.load_state_dict(checkpoint["model"])
    optimizer = task.build_optimizer(model, config)
    scheduler = task.build_lr_scheduler(optimizer, config)
    optimizer.load_state_dict(checkpoint["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(checkpoint["lr_scheduler"])

    losses = []
    for epoch in range(checkpoint["epoch"], 4):
        model.train()
        total = samples = 0
        for x, y in task.train_dataloader(config):
            optimizer.zero_grad()
            loss = task.training_step(model, (x, y), config)
            loss.backward()
            optimizer.step()
            if scheduler is not None and interval == "step":
                scheduler.step()
            total += loss.item() * len(x)
            samples += len(x)
        losses.append(total / samples)
        model.eval()
        total = samples = 0
        with torch.no_grad():
            for x, y in task.val_dataloader(config):
                total += task.validation_step(model, (x, y), config)["val_loss"].item() * len(x)
                samples += len(x)
        if scheduler is not None and interval == "epoch":
            scheduler.step(*[total / samples] if monitor else [])
    return losses


print(json.dumps([go_on(*job) for job in json.loads(sys.argv[1])]))
assert not [name for name in sys.modules if name.startswith(("hfta_tune", "ray", "optuna"))]
"""


@functools.cache
def trained_on_without_hfta_tune(directory: Path) -> dict[tuple[str, ...], tuple[list[float], list[float]]]:
    """For each case the losses of rounds 3 and 4, in the array that went on and in the script."""
    lane = 2
    in_array, jobs = [], []
    for case in CASES:
        worker = start(reference.compose(*case.values), LANES)
        losses(worker, TRIALS[lane], 2)
        saved = directory / str(case.id)
        saved.mkdir()
        worker.save(TRIALS[lane], saved)
        in_array.append(losses(worker, TRIALS[lane], 2))
        jobs.append((case.values, lane, str(saved)))
    script = directory / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(jobs)],
        env=os.environ | {"PYTHONPATH": str(Path(reference.__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    both = zip(in_array, json.loads(done.stdout), strict=True)
    return dict(zip([case.values for case in CASES], both, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "optimizer", "schedule"), CASES)
def test_goes_on_in_a_script_without_hfta_tune(model: str, optimizer: str, schedule: str, directory: Path) -> None:
    in_array, alone = trained_on_without_hfta_tune(directory)[model, optimizer, schedule]
    assert len(in_array) == 2
    assert_same(alone, in_array, "losses")


@pytest.mark.parametrize(("model", "optimizer", "schedule"), CASES)
def test_goes_on_in_a_run_of_its_own(model: str, optimizer: str, schedule: str, tmp_path: Path) -> None:
    task = reference.compose(model, optimizer, schedule)
    expected = reference.train(task(), LANES[1], 4)
    worker = start(task, LANES)
    losses(worker, "bob", 2)
    worker.save("bob", tmp_path)
    own = start(task, [LANES[1] | {"seed": 99}], lanes=1)
    own.load("ada", tmp_path)
    assert_like(own.state_dict("ada"), expected[1], "as loaded")
    assert own.state_dict("ada")["epoch"] == 2
    for r in (2, 3):
        assert_same(losses(own, "ada", 1), [expected[r].metrics["train_loss"]], f"round {r + 1}")
        assert_like(own.state_dict("ada"), expected[r], f"round {r + 1}")


@pytest.mark.parametrize(("model", "optimizer", "schedule"), CASES)
def test_goes_on_in_another_lane_of_another_array(model: str, optimizer: str, schedule: str, tmp_path: Path) -> None:
    """The lanes that are there already are one round on, and do not notice."""
    task = reference.compose(model, optimizer, schedule)
    expected = [reference.train(task(), config, 4) for config in LANES]
    worker = start(task, LANES[:2])
    losses(worker, "ada", 2)
    worker.save("ada", tmp_path)

    other = Worker(lanes=3)
    trainable = fused(task)
    for trial, config in (("cyd", LANES[2]), ("dee", LANES[3])):
        other.add(trial, trainable._outside_tune(config), config)
    losses(other, "cyd", 1)
    other.add("again", trainable._outside_tune(LANES[0]), LANES[0])
    other.load("again", tmp_path)
    for r in (1, 2):
        results = other.run_round()
        for trial, lane, round_ in (("cyd", 2, r), ("dee", 3, r), ("again", 0, r + 1)):
            snapshot = expected[lane][round_]
            result = results[trial]
            assert not isinstance(result, Exception), result
            assert_same({k: result[k] for k in snapshot.metrics}, snapshot.metrics, f"{trial} metrics")
            assert_like(other.state_dict(trial), snapshot, trial)
    [array] = other.describe()["arrays"]
    assert array["strategy"] == "vmap" and sorted(array["trials"]) == ["again", "cyd", "dee"]


@pytest.mark.parametrize(("model", "optimizer", "schedule"), CASES)
def test_a_lane_goes_back_to_its_checkpoint(model: str, optimizer: str, schedule: str) -> None:
    """Into the very lane it came from, while the others go on: as population-based training does."""
    task = reference.compose(model, optimizer, schedule)
    expected = [reference.train(task(), config, 3) for config in LANES[:3]]
    worker = start(task, LANES[:3])
    worker.run_round()
    state = worker.state_dict("bob")
    worker.run_round()
    worker.load_state_dict("bob", state)
    assert_like(worker.state_dict("bob"), expected[1][0], "bob as loaded")
    worker.run_round()
    for trial, lane, round_ in (("ada", 0, 2), ("bob", 1, 1), ("cyd", 2, 2)):
        assert_like(worker.state_dict(trial), expected[lane][round_], trial)


def test_a_lane_takes_over_from_another() -> None:
    """As a scheduler does that clones a good trial: two lanes with one past."""
    task = reference.compose("cnn", "adam", "step")
    other_start = {**LANES[0], "seed": 99}
    worker = start(task, [*LANES[:2], other_start])
    worker.run_round()
    worker.load_state_dict("cyd", worker.state_dict("ada"))
    before = worker.state_dict("ada")
    assert_same(worker.state_dict("cyd"), before, "cyd")
    worker.remove("ada")
    after = worker.run_round()
    assert set(after) == {"bob", "cyd"}
    expected = reference.train(task(), LANES[0], 2)[1]
    assert_like(worker.state_dict("cyd"), expected, "cyd")


def test_a_checkpoint_of_plain_pytorch_loads_into_a_lane() -> None:
    """The way back: trained on by hand, and put into an array again."""
    task = reference.compose("mlp", "adamw", "onecycle")
    expected = reference.train(task(), LANES[0], 3)
    worker = start(task, LANES[:2])
    worker.run_round()
    state = worker.state_dict("ada")
    state |= {"model": expected[1].model, "optimizer": expected[1].optimizer}
    state |= {"lr_scheduler": expected[1].lr_scheduler, "epoch": 2}
    worker.load_state_dict("ada", state)
    result = worker.run_round()["ada"]
    assert not isinstance(result, Exception), result
    assert_same(result["train_loss"], expected[2].metrics["train_loss"], "ada")
    assert_like(worker.state_dict("ada"), expected[2], "ada")


def test_a_checkpoint_of_a_trial_that_vmap_cannot_do(tmp_path: Path) -> None:
    class Branching(Task):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            loss = super().training_step(model, batch, config)
            return 2 * loss if loss > 1 else loss

    expected = reference.train(Branching(), LANES[0], 3)
    with pytest.warns(match="(?i)lane by lane|one after the other|one by one"):
        worker = start(Branching, LANES[:2])
        worker.run_round()
        worker.save("ada", tmp_path)
        own = start(Branching, LANES[:1], lanes=1)
        own.load("ada", tmp_path)
        own.run_round()
        own.run_round()
    assert_like(own.state_dict("ada"), expected[2], "ada")


# What is in the file.


def tensors(state: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


class Large(Task):
    """Large enough that the lanes' storage would show in the size of a file."""

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 3))

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return reference.OPTIMIZERS[self.optimizer_name](model.parameters(), config)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad", "custom"])
def test_one_lane_is_saved_and_no_more(optimizer: str, tmp_path: Path) -> None:
    worker = start(type("Large", (Large,), {"optimizer_name": optimizer}), LANES)
    worker.run_round()
    worker.save("bob", tmp_path)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    size = sum(tensor.nbytes for tensor in tensors(loaded))
    assert size > 100_000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < size + 16_384
    assert_same(loaded, worker.state_dict("bob"), "the file", rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop", "custom"])
def test_a_state_is_a_copy_on_the_cpu(optimizer: str) -> None:
    task = reference.compose("cnn", optimizer, "step")
    worker = start(task, LANES)
    worker.run_round()
    state = worker.state_dict("cyd")
    for tensor in tensors(state):
        assert type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    worker.run_round()
    expected = reference.train(task(), LANES[2], 1)[0]
    assert_like(state, expected, "after another round")


def test_loading_copies_too() -> None:
    """The caller may do with the state what it likes."""
    task = reference.compose("mlp", "adam", "step")
    expected = reference.train(task(), LANES[0], 2)
    worker = start(task, LANES[:2])
    worker.run_round()
    state = worker.state_dict("ada")
    worker.load_state_dict("ada", state)
    for tensor in tensors(state):
        tensor.zero_()
    worker.run_round()
    assert_like(worker.state_dict("ada"), expected[1], "ada")


def test_a_state_has_no_lane_before_its_first_round() -> None:
    """Nothing has been stacked yet: the optimizer has no state, the model is as it was built."""
    worker = start(reference.compose("mlp", "adam", "step"), LANES)
    state = worker.state_dict("ada")
    torch.manual_seed(LANES[0]["seed"])
    assert_same(state["model"], Task().build_model(LANES[0]).state_dict(), "model", rtol=0, atol=0)
    assert state["epoch"] == 0 and not state["optimizer"]["state"]


def test_saving_writes_over_what_is_there(tmp_path: Path) -> None:
    task = reference.compose("mlp", "adam", "step")
    expected = reference.train(task(), LANES[0], 2)
    worker = start(task, LANES)
    worker.run_round()
    worker.save("ada", tmp_path)
    worker.run_round()
    worker.save("ada", str(tmp_path))
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert_like(loaded, expected[1], "ada")
    assert loaded["epoch"] == 2
