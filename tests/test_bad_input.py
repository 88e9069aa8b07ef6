"""What is wrong with one trial is said once, with the remedy, and stays with that trial."""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from reference import Config, Snapshot, Task, assert_like, assert_same
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from hfta_tune import FusedTrainable, FusionError
from hfta_tune.worker import Worker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::hfta_tune.fusion.FusionWarning"),
]


GOOD: dict[str, Config] = {"good": {"seed": 1, "lr": 0.1}, "fine": {"seed": 2, "lr": 0.03}}


class FusedTask(Task, FusedTrainable):
    """A trial with nothing wrong."""


def add(worker: Worker, trial: str, trainable: type[FusedTrainable], config: Config) -> None:
    worker.add(trial, trainable._outside_tune(config), config)


def start(trainable: type[FusedTrainable] = FusedTask, extra: Config | None = None) -> Worker:
    """A worker in which two good trials train, and one lane is free."""
    worker = Worker(lanes=3)
    for trial, config in GOOD.items():
        add(worker, trial, trainable, config | (extra or {}))
    return worker


def alone(rounds: int, task: type[Task] = Task, extra: Config | None = None) -> dict[str, list[Snapshot]]:
    return {t: reference.train(task(), config | (extra or {}), rounds) for t, config in GOOD.items()}


def error_of(worker: Worker, trainable: type[FusedTrainable], config: Config) -> Exception:
    """What the trial `odd` raises in add, or else in its first round."""
    try:
        add(worker, "odd", trainable, config)
    except Exception as error:
        return error
    result = worker.run_round()["odd"]
    assert isinstance(result, Exception), f"no error, but {result}"
    return result


def assert_says(error: Exception, *patterns: str) -> None:
    """A FusionError whose message alone is enough: it names the trial, and all that the patterns ask for."""
    assert isinstance(error, FusionError), repr(error)
    for pattern in ("odd", *patterns):
        assert re.search(pattern, str(error), re.IGNORECASE | re.DOTALL), f"no {pattern!r} in: {error}"


def assert_goes_on(worker: Worker, expected: dict[str, list[Snapshot]]) -> None:
    """The good trials come to what they come to alone, and the odd one has left its lane."""
    while True:
        results = worker.run_round()
        epoch = worker.state_dict("good")["epoch"]
        assert results.keys() == GOOD.keys()
        for trial, snapshots in expected.items():
            result, snapshot = results[trial], snapshots[epoch - 1]
            assert not isinstance(result, Exception), result
            assert_same({k: result[k] for k in snapshot.metrics}, snapshot.metrics, trial)
            assert_like(worker.state_dict(trial), snapshot, trial)
        if epoch == len(next(iter(expected.values()))):
            break
    assert worker.free_lanes == 1


def variant(**hooks: Any) -> type[FusedTrainable]:
    """A trainable with some hooks changed, in that trial only."""
    return type("Odd", (Task, FusedTrainable), hooks)


# Hooks that are missing, or that raise.

REQUIRED = ["build_model", "build_optimizer", "train_dataloader", "training_step"]


@pytest.mark.parametrize("hook", REQUIRED)
def test_a_required_hook_is_missing(hook: str) -> None:
    present = {name: Task.__dict__[name] for name in (*REQUIRED, "data") if name != hook}
    trainable = type("Lacking", (FusedTrainable,), present)
    worker = start()
    error = error_of(worker, trainable, {"seed": 3, "lr": 0.1})
    assert isinstance(error, FusionError), repr(error)
    assert hook in str(error) and "Lacking" in str(error)
    assert re.search(r"define|implement|override|write|add", str(error), re.IGNORECASE)
    assert_goes_on(worker, alone(2))


def test_validation_step_without_its_loader() -> None:
    """Half of a pair: nothing would be validated, and nobody would know."""
    present = {name: Task.__dict__[name] for name in (*REQUIRED, "data", "validation_step")}
    worker = start()
    try:
        add(worker, "odd", type("Half", (FusedTrainable,), present), {"seed": 3, "lr": 0.1})
    except FusionError as error:
        assert_says(error, "val_dataloader")
    else:
        assert not isinstance(worker.run_round()["odd"], Exception)


class Bad(ArithmeticError):
    """What a user's own code raises."""


class RaisesInOneTrial(Task):
    """One class for all trials; the config of one of them makes one of its hooks raise."""

    def _check(self, hook: str, config: Config) -> None:
        if config["raise_in"] == hook:
            raise Bad(f"raised in {hook}")

    def build_model(self, config: Config) -> nn.Module:
        self._check("build_model", config)
        return super().build_model(config)

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        self._check("build_optimizer", config)
        return super().build_optimizer(model, config)

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        self._check("build_lr_scheduler", config)
        return lr_scheduler.StepLR(optimizer, 1)

    def train_dataloader(self, config: Config) -> Iterable[Any]:
        self._check("train_dataloader", config)
        return super().train_dataloader(config)

    def val_dataloader(self, config: Config) -> Iterable[Any]:
        self._check("val_dataloader", config)
        return super().val_dataloader(config)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        self._check("training_step", config)
        return super().training_step(model, batch, config)

    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        self._check("validation_step", config)
        return super().validation_step(model, batch, config)

    def evaluate(self, model: nn.Module, config: Config) -> dict[str, float]:
        self._check("evaluate", config)
        return {"size": 1.0}


class FusedRaisesInOneTrial(RaisesInOneTrial, FusedTrainable):
    """The same under hfta_tune."""


@pytest.mark.parametrize(
    "hook",
    [*REQUIRED, "build_lr_scheduler", "val_dataloader", "validation_step", "evaluate"],
)
def test_a_hook_raises_in_one_trial(hook: str) -> None:
    nowhere = {"raise_in": "nowhere"}
    worker = start(FusedRaisesInOneTrial, nowhere)
    worker.run_round()
    error = error_of(worker, FusedRaisesInOneTrial, {"seed": 3, "lr": 0.1, "raise_in": hook})
    assert isinstance(error, Bad) and str(error).startswith(f"raised in {hook}")
    assert_goes_on(worker, alone(4, RaisesInOneTrial, nowhere))


def test_a_loader_raises_in_the_middle_of_a_round() -> None:
    def train_dataloader(self: Any, config: Config) -> Iterable[Any]:
        class Breaks:
            def __iter__(self) -> Iterator[Any]:
                yield from list(DataLoader(reference.vectors(32, 6), batch_size=16))
                raise Bad("the disk is gone")

        return Breaks()

    worker = start()
    error = error_of(worker, variant(train_dataloader=train_dataloader), {"seed": 3, "lr": 0.1})
    assert isinstance(error, Bad)
    assert_goes_on(worker, alone(3))


def test_a_step_raises_in_all_lanes_of_its_array() -> None:
    """Nothing is left to go on, and each trial says why."""

    def training_step(self: Any, model: nn.Module, batch: Any, config: Config) -> Any:
        raise Bad("in every lane")

    worker = start(variant(training_step=training_step))
    results = worker.run_round()
    assert results.keys() == GOOD.keys()
    assert all(isinstance(result, Bad) for result in results.values())
    assert worker.free_lanes == 3


# What hooks return.


def returning(value: Any) -> Any:
    return lambda self, *args: value


RETURNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "build_model-none": ({"build_model": returning(None)}, ("build_model", "None", "Module")),
    "build_model-class": ({"build_model": returning(nn.Linear)}, ("build_model", "Linear", "Module")),
    "build_optimizer-none": ({"build_optimizer": returning(None)}, ("build_optimizer", "None", "Optimizer")),
    "build_optimizer-tuple": (
        {"build_optimizer": returning((1, 2))},
        ("build_optimizer", r"tuple|\(1, 2\)", "Optimizer"),
    ),
    "build_lr_scheduler-number": (
        {"build_lr_scheduler": returning(0.5)},
        ("build_lr_scheduler", r"float|0\.5", "schedul"),
    ),
    "train_dataloader-none": (
        {"train_dataloader": returning(None)},
        ("train_dataloader", "None", "DataLoader"),
    ),
    "train_dataloader-number": (
        {"train_dataloader": returning(3)},
        ("train_dataloader", "int|3", "DataLoader"),
    ),
    "train_dataloader-empty": ({"train_dataloader": returning([])}, ("train_dataloader", "empty|no batch")),
    "val_dataloader-empty": ({"val_dataloader": returning([])}, ("val_dataloader", "empty|no batch")),
    "training_step-none": ({"training_step": returning(None)}, ("training_step", "None", "return")),
    "training_step-string": ({"training_step": returning("low")}, ("training_step", "str|low", "return")),
    "training_step-number": ({"training_step": returning(0.5)}, ("training_step", r"float|0\.5", "tensor")),
    "training_step-vector": (
        {"training_step": lambda self, model, batch, config: model(batch[0])},
        ("training_step", r"\[16, 3\]|\(16, 3\)", "mean|scalar|one number"),
    ),
    "training_step-detached": (
        {"training_step": lambda self, model, batch, config: model(batch[0]).mean().detach()},
        ("training_step", "graph|requires_grad", "detach|no_grad|model"),
    ),
    "training_step-of-the-data-only": (
        {"training_step": lambda self, model, batch, config: batch[0].mean()},
        ("training_step", "graph|requires_grad", "model"),
    ),
    "validation_step-none": ({"validation_step": returning(None)}, ("validation_step", "None", "dict")),
    "validation_step-number": (
        {"validation_step": returning(0.5)},
        ("validation_step", r"float|0\.5", "dict"),
    ),
    "validation_step-tensor": (
        {"validation_step": lambda self, model, batch, config: model(batch[0]).mean()},
        ("validation_step", "tensor", "dict"),
    ),
    "validation_step-vector": (
        {"validation_step": lambda self, model, batch, config: {"logits": model(batch[0])}},
        ("validation_step", "logits", r"\[16, 3\]|\(16, 3\)", "mean|scalar|one number"),
    ),
    "validation_step-string": (
        {"validation_step": returning({"verdict": "good"})},
        ("validation_step", "verdict", "good|str", "number|scalar"),
    ),
    "evaluate-number": ({"evaluate": returning(0.5)}, ("evaluate", r"float|0\.5", "dict")),
    "evaluate-string": (
        {"evaluate": returning({"verdict": "good"})},
        ("evaluate", "verdict", "good|str", "number|scalar"),
    ),
}


@pytest.mark.parametrize("case", RETURNS)
def test_a_hook_returns_what_it_should_not(case: str) -> None:
    hooks, said = RETURNS[case]
    worker = start()
    worker.run_round()
    assert_says(error_of(worker, variant(**hooks), {"seed": 3, "lr": 0.1}), *said)
    assert_goes_on(worker, alone(4))


@pytest.mark.parametrize("hook", ["train_dataloader", "val_dataloader"])
def test_a_one_shot_generator_as_loader(hook: str) -> None:
    """It would give its batches in the first round, and none ever after."""

    def loader(self: Any, config: Config) -> Iterable[Any]:
        return (batch for batch in DataLoader(reference.vectors(40, 6), batch_size=16))

    worker = start()
    error = error_of(worker, variant(**{hook: loader}), {"seed": 3, "lr": 0.1})
    assert_says(error, hook, "generator|once|iterator", "DataLoader|list")
    assert_goes_on(worker, alone(3))


def test_a_hook_that_is_itself_a_generator() -> None:
    """`yield` instead of `return`."""

    def train_dataloader(self: Any, config: Config) -> Iterable[Any]:
        yield from DataLoader(reference.vectors(40, 6), batch_size=16)

    worker = start()
    error = error_of(worker, variant(train_dataloader=train_dataloader), {"seed": 3, "lr": 0.1})
    assert_says(error, "train_dataloader", "generator|once|iterator", "DataLoader|list")
    assert_goes_on(worker, alone(3))


def test_a_loader_that_runs_dry_in_a_later_round() -> None:
    class Drying:
        def __init__(self) -> None:
            self.batches = list(DataLoader(reference.vectors(40, 6), batch_size=16))

        def __iter__(self) -> Iterator[Any]:
            while self.batches:
                yield self.batches.pop()

    worker = start()
    add(worker, "odd", variant(train_dataloader=lambda self, config: Drying()), {"seed": 3, "lr": 0.1})
    assert not isinstance(worker.run_round()["odd"], Exception)
    error = worker.run_round()["odd"]
    assert isinstance(error, FusionError)  # of the loader's, not of one trial's, where trials share it
    assert re.search("train_dataloader.*(empty|no batch).*each round", str(error))
    assert_goes_on(worker, alone(4))


FOREIGN: dict[str, Any] = {
    "all": lambda self, model, config: torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1),
    "some": lambda self, model, config: torch.optim.Adam([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1),
    "copies": lambda self, model, config: torch.optim.Adagrad(
        [nn.Parameter(p.detach().clone()) for p in model.parameters()], lr=0.1
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_optimizer_over_foreign_parameters(case: str) -> None:
    worker = start()
    error = error_of(worker, variant(build_optimizer=FOREIGN[case]), {"seed": 3, "lr": 0.1})
    assert_says(error, "build_optimizer", "parameter", "of the model|model.parameters")
    assert_goes_on(worker, alone(3))


def test_an_optimizer_over_the_model_of_the_trial_before() -> None:
    """A model kept on the class: the second trial would train the first one's parameters."""
    kept: list[nn.Module] = []

    def build_model(self: Any, config: Config) -> nn.Module:
        kept.append(nn.Linear(6, 3))
        return kept[-1]

    def build_optimizer(self: Any, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(kept[0].parameters(), lr=0.1)

    trainable = variant(build_model=build_model, build_optimizer=build_optimizer)
    worker = Worker(lanes=2)
    add(worker, "first", trainable, {"seed": 1})
    assert_says(error_of(worker, trainable, {"seed": 2}), "build_optimizer", "of the model|model.parameters")


def test_two_trials_that_share_one_model() -> None:
    """build_model hands out one object twice.

    In processes of their own, as under stock Tune, each trial has it as it was built. So must lanes, or
    else be refused; they must not overwrite each other.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    built = copy.deepcopy(model)

    class Own(Task):
        def build_model(self, config: Config) -> nn.Module:
            return copy.deepcopy(built)

    trainable = variant(build_model=lambda self, config: model)
    worker = Worker(lanes=2)
    configs = {"first": {"lr": 0.1}, "odd": {"lr": 0.3}}
    add(worker, "first", trainable, configs["first"])
    try:
        add(worker, "odd", trainable, configs["odd"])
    except FusionError as error:
        assert_says(error, "build_model", "first|another|shared|new")
        del configs["odd"]
    expected = {trial: reference.train(Own(), config, 2) for trial, config in configs.items()}
    for r in range(2):
        results = worker.run_round()
        for trial, snapshots in expected.items():
            assert_same(results[trial]["train_loss"], snapshots[r].metrics["train_loss"], trial)
            assert_like(worker.state_dict(trial), snapshots[r], trial)


# Schedules.


def plateau(self: Any, optimizer: torch.optim.Optimizer, config: Config) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def step_lr(self: Any, optimizer: torch.optim.Optimizer, config: Config) -> Any:
    return lr_scheduler.StepLR(optimizer, 1)


SCHEDULE_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plateau-without-monitor": (
        {"build_lr_scheduler": plateau},
        ("ReduceLROnPlateau", "lr_scheduler_monitor", "train_loss|metric"),
    ),
    "plateau-of-an-unknown-metric": (
        {"build_lr_scheduler": plateau, "lr_scheduler_monitor": "val_acc"},
        ("lr_scheduler_monitor", "val_acc", "train_loss", "accuracy"),
    ),
    "interval-unknown": (
        {"build_lr_scheduler": step_lr, "lr_scheduler_interval": "batch"},
        ("lr_scheduler_interval", "batch", "epoch", "step"),
    ),
    "interval-none": (
        {"build_lr_scheduler": step_lr, "lr_scheduler_interval": None},
        ("lr_scheduler_interval", "None", "epoch", "step"),
    ),
    "plateau-by-step": (
        {"build_lr_scheduler": plateau, "lr_scheduler_monitor": "val_loss", "lr_scheduler_interval": "step"},
        ("ReduceLROnPlateau", "lr_scheduler_interval", "epoch"),
    ),
}


@pytest.mark.parametrize("case", SCHEDULE_CASES)
def test_schedules(case: str) -> None:
    attributes, said = SCHEDULE_CASES[case]
    worker = start()
    assert_says(error_of(worker, variant(**attributes), {"seed": 3, "lr": 0.1}), *said)
    assert_goes_on(worker, alone(3))


def test_a_schedule_of_another_optimizer() -> None:
    def build_lr_scheduler(self: Any, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return lr_scheduler.StepLR(other, 1)

    worker = start()
    error = error_of(worker, variant(build_lr_scheduler=build_lr_scheduler), {"seed": 3, "lr": 0.1})
    assert_says(error, "build_lr_scheduler", "optimizer")
    assert_goes_on(worker, alone(3))


# Losses that are no numbers.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_reported(value: float) -> None:
    class Spoilt(Task):
        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            return super().training_step(model, batch, config) * config["factor"]

    trainable = type("FusedSpoilt", (Spoilt, FusedTrainable), {})
    worker = start(trainable, {"factor": 1.0})
    expected = alone(3, Spoilt, {"factor": 1.0})
    add(worker, "odd", trainable, {"seed": 3, "lr": 0.1, "factor": value})
    for _ in range(2):
        result = worker.run_round()["odd"]
        [array] = worker.describe()["arrays"]
        assert sorted(array["trials"]) == ["fine", "good", "odd"]
        assert not isinstance(result, Exception)
        assert not math.isfinite(result["train_loss"])
    worker.remove("odd")
    assert_goes_on(worker, expected)


def test_a_metric_that_is_no_number_is_reported() -> None:
    class Spoilt(Task):
        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            return {"score": model(batch[0]).mean() / config["divisor"]}

    trainable = type("FusedSpoilt", (Spoilt, FusedTrainable), {})
    worker = start(trainable, {"divisor": 1.0})
    add(worker, "odd", trainable, {"seed": 3, "lr": 0.1, "divisor": 0.0})
    result = worker.run_round()["odd"]
    assert not isinstance(result, Exception) and not math.isfinite(result["score"])
    worker.remove("odd")
    assert_goes_on(worker, alone(3, Spoilt, {"divisor": 1.0}))


# `self` and config in the steps.


class ReadsSelf(Task):
    def build_model(self, config: Config) -> nn.Module:
        self.scale = config["scale"]
        return super().build_model(config)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return super().training_step(model, batch, config) * self.scale


@pytest.mark.parametrize("joins_later", [False, True])
def test_a_step_reads_an_attribute_of_self_that_differs(joins_later: bool) -> None:
    """No lane may train with another's value: each has its own, or an error, and the user is told."""
    trainable = type("FusedReadsSelf", (ReadsSelf, FusedTrainable), {})
    expected = alone(3, ReadsSelf, {"scale": 1.0})
    odd = {"seed": 3, "lr": 0.1, "scale": 2.0}
    expected["odd"] = reference.train(ReadsSelf(), odd, 3)
    worker = start(trainable, {"scale": 1.0})
    if joins_later:
        assert not any(isinstance(result, Exception) for result in worker.run_round().values())
    add(worker, "odd", trainable, odd)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for trial, result in worker.run_round().items():
                if isinstance(result, Exception):
                    assert isinstance(result, FusionError), repr(result)
                    told.append(str(result))
                else:
                    state = worker.state_dict(trial)
                    assert_like(state, expected[trial][state["epoch"] - 1], trial)
    told += [str(warning.message) for warning in caught]
    assert any("self.scale" in text and "odd" in text and "config" in text for text in told), told


def test_a_step_writes_to_self() -> None:
    """What one call for all lanes writes, no lane can call its own: refused, or else as alone."""

    class Counts(Task):
        count = 0

        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            self.count += 1
            return super().training_step(model, batch, config) * self.count

    worker = start(type("FusedCounts", (Counts, FusedTrainable), {}))
    expected = alone(2, Counts)
    for r in range(2):
        for trial, result in worker.run_round().items():
            if isinstance(result, Exception):
                assert isinstance(result, FusionError) and "count" in str(result)
            else:
                assert_same(result["train_loss"], expected[trial][r].metrics["train_loss"], trial)


def test_a_step_reads_a_key_that_config_has_not() -> None:
    def training_step(self: Any, model: nn.Module, batch: Any, config: Config) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1]) * config["wieght"]

    worker = start()
    error = error_of(worker, variant(training_step=training_step), {"seed": 3, "lr": 0.1})
    assert isinstance(error, KeyError) and "wieght" in str(error)
    assert_goes_on(worker, alone(3))


def test_a_step_writes_to_config() -> None:
    """One trial's change must reach no other trial."""

    def training_step(self: Any, model: nn.Module, batch: Any, config: Config) -> Any:
        config["lr"] = 7.0
        return F.cross_entropy(model(batch[0]), batch[1])

    worker = start()
    config = {"seed": 3, "lr": 0.1}
    try:
        add(worker, "odd", variant(training_step=training_step), config)
        worker.run_round()
        worker.remove("odd")
    except (FusionError, KeyError, TypeError):
        pass
    assert_goes_on(worker, alone(3))


# The worker's own arguments.


@pytest.mark.parametrize("lanes", [0, -1, 2.5, "4", None, True])
def test_a_number_of_lanes_that_is_no_positive_integer(lanes: Any) -> None:
    with pytest.raises(ValueError, match=rf"lanes.*{re.escape(str(lanes))}"):
        Worker(lanes=lanes)


def test_a_device_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"device.*tpu7"):
        Worker(device="tpu7")


def test_more_trials_than_lanes() -> None:
    worker = start()
    add(worker, "third", FusedTask, {"seed": 3, "lr": 0.1})
    with pytest.raises(ValueError, match=r"odd.*3|3.*odd"):
        add(worker, "odd", FusedTask, {"seed": 4, "lr": 0.1})
    worker.remove("third")
    assert_goes_on(worker, alone(2))


def test_a_trial_that_is_there_already() -> None:
    worker = start()
    with pytest.raises(ValueError, match="good"):
        add(worker, "good", FusedTask, {"seed": 3, "lr": 0.1})
    assert_goes_on(worker, alone(2))


def test_a_trial_that_is_not_there(tmp_path: Path) -> None:
    worker = start()
    state = worker.state_dict("good")
    for call in (
        lambda: worker.remove("odd"),
        lambda: worker.state_dict("odd"),
        lambda: worker.load_state_dict("odd", state),
        lambda: worker.save("odd", tmp_path),
        lambda: worker.load("odd", tmp_path),
        lambda: worker.run_round(["good", "odd"]),
    ):
        with pytest.raises(ValueError, match="odd"):
            call()
    assert_goes_on(worker, alone(2))


def test_no_trials() -> None:
    assert Worker(lanes=2).run_round() == {}


# Checkpoints.


class Stranger:
    """A class that weights_only=True does not let in, however harmless."""


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flipped(path: Path) -> None:
    """One byte of the tensors' storage is wrong."""
    path.write_bytes(path.read_bytes().replace(b"PK", b"QK"))


CORRUPT: dict[str, Any] = {
    "missing": os.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no checkpoint"),
    "truncated": _truncated,
    "broken-archive": _flipped,
    "not-a-dict": lambda path: torch.save([1, 2], path),
    "lacking-the-optimizer": lambda path: torch.save({"model": {}, "epoch": 1}, path),
    "with-a-class": lambda path: torch.save({"model": Stranger()}, path),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_checkpoint(case: str, tmp_path: Path) -> None:
    worker = start()
    add(worker, "odd", FusedTask, {"seed": 3, "lr": 0.1})
    expected = alone(3) | {"odd": reference.train(Task(), {"seed": 3, "lr": 0.1}, 3)}
    worker.run_round()
    worker.save("odd", tmp_path)
    CORRUPT[case](tmp_path / "checkpoint.pt")
    with pytest.raises(FusionError) as caught:
        worker.load("odd", tmp_path)
    assert_says(caught.value, "checkpoint", re.escape(str(tmp_path)))
    for r in (1, 2):
        results = worker.run_round()
        for trial, snapshots in expected.items():
            assert_same(results[trial]["train_loss"], snapshots[r].metrics["train_loss"], trial)
            assert_like(worker.state_dict(trial), snapshots[r], trial)


class Wider(Task):
    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


class WithAdam(Task):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)


class TwoGroups(Task):
    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        return torch.optim.SGD([{"params": m.parameters()} for m in (model[0], model[2])], lr=config["lr"])


@pytest.mark.parametrize("task", [Wider, TwoGroups])
def test_a_checkpoint_of_another_trial_s_form(task: type[Task], tmp_path: Path) -> None:
    """Half of it fits, perhaps: what is loaded is all of it or nothing."""
    other = Worker(lanes=1)
    add(other, "other", type("Other", (task, FusedTrainable), {}), {"seed": 5, "lr": 0.5})
    other.run_round()
    other.save("other", tmp_path)
    worker = start()
    add(worker, "odd", FusedTask, {"seed": 3, "lr": 0.1})
    expected = alone(3) | {"odd": reference.train(Task(), {"seed": 3, "lr": 0.1}, 3)}
    worker.run_round()
    with pytest.raises(FusionError) as caught:
        worker.load("odd", tmp_path)
    assert_says(caught.value, "checkpoint")
    for r in (1, 2):
        worker.run_round()
        for trial, snapshots in expected.items():
            assert_like(worker.state_dict(trial), snapshots[r], trial)
