"""Several optimizers a trial, each by its own loss, against a plain PyTorch loop."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion.breadth import fused
from reference import Config, DampedMomentum, assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hfta_tune import FusionError, Worker
from hfta_tune.fusion import COMPILED

ROUNDS = 3
TRIALS = ["ada", "bob", "cyd", "dee"]
LANES: list[Config] = [
    dict(seed=1, lr=0.02, d_lr=0.05, weight=1.0),
    dict(seed=2, lr=0.01, d_lr=0.1, weight=0.5),
    dict(seed=3, lr=0.03, d_lr=0.2, weight=2.0),
    dict(seed=4, lr=0.005, d_lr=0.02, weight=1.5),
]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


class GAN:
    """Each loss depends on the parameters of both, so a gradient of the wrong loss shows."""

    def build_model(self, config: Config) -> Pair:
        return Pair()

    def build_optimizer(self, model: Any, config: Config) -> dict[str, torch.optim.Optimizer]:
        return {
            "generator": torch.optim.Adam(model.generator.parameters(), lr=config["lr"], eps=1e-3),
            "discriminator": torch.optim.SGD(model.discriminator.parameters(), lr=config["d_lr"], momentum=0.9),
        }

    def train_dataloader(self, config: Config) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        return [
            {
                "noise": torch.randn(size, 4, generator=generator),
                "real": torch.randn(size, 6, generator=generator) + 1,
                "trains": trains,
            }
            for size, trains in self.batches()
        ]

    def batches(self) -> list[tuple[int, str]]:
        """The size of each batch, and which optimizers have a loss for it."""
        return [(8, "both"), (8, "both"), (5, "both")]

    def training_step(self, model: Any, batch: Any, config: Config) -> dict[str, Tensor]:
        judged = model.discriminator(model.generator(batch["noise"]))
        real = model.discriminator(batch["real"])
        losses = {
            "discriminator": config["weight"] * (F.softplus(judged) + F.softplus(-real)).mean(),
            "generator": F.softplus(-judged).mean(),
        }
        return losses if batch["trains"] == "both" else {batch["trains"]: losses[batch["trains"]]}


class WithViews(GAN):
    """A native optimizer and two that run their stock code."""

    def build_optimizer(self, model: Any, config: Config) -> dict[str, torch.optim.Optimizer]:
        first, *others = model.discriminator.parameters()
        return {
            "generator": torch.optim.Adafactor(model.generator.parameters(), lr=config["lr"]),
            "discriminator": torch.optim.Adam(others, lr=config["d_lr"] / 5, eps=1e-3),
            "its first layer": DampedMomentum([first], lr=config["d_lr"]),
        }

    def training_step(self, model: Any, batch: Any, config: Config) -> dict[str, Tensor]:
        losses = super().training_step(model, batch, config)
        return {**losses, "its first layer": losses["discriminator"] - losses["generator"] ** 2}


class Scheduled(GAN):
    """One of the two has a schedule."""

    def build_lr_scheduler(self, optimizer: Any, config: Config) -> dict[str, Any]:
        return {
            "discriminator": lr_scheduler.ExponentialLR(optimizer["discriminator"], 1 - config["d_lr"]),
            "generator": None,
        }


class ScheduledBySteps(GAN):
    lr_scheduler_interval = "step"

    def build_lr_scheduler(self, optimizer: Any, config: Config) -> dict[str, Any]:
        return {
            "generator": lr_scheduler.OneCycleLR(optimizer["generator"], config["lr"], total_steps=20),
            "discriminator": lr_scheduler.StepLR(optimizer["discriminator"], 2, gamma=0.7),
        }


class Watching(GAN):
    lr_scheduler_monitor = "train_loss_generator"

    def build_lr_scheduler(self, optimizer: Any, config: Config) -> dict[str, Any]:
        return {"discriminator": lr_scheduler.ReduceLROnPlateau(optimizer["discriminator"], patience=0, threshold=0.5)}


class InTurns(GAN):
    """Steps that train only one of them on some batches."""

    def batches(self) -> list[tuple[int, str]]:
        return [(8, "both"), (8, "discriminator"), (8, "both"), (5, "discriminator"), (8, "generator")]


class ClippedByNorm(GAN):
    gradient_clip_val = 0.2


class ClippedByValue(InTurns):
    gradient_clip_val = 0.02
    gradient_clip_algorithm = "value"


KINDS: list[type[GAN]] = [
    GAN,
    WithViews,
    Scheduled,
    ScheduledBySteps,
    Watching,
    InTurns,
    ClippedByNorm,
    ClippedByValue,
]


class Alone:
    """One trial in plain PyTorch."""

    def __init__(self, task: Any, config: Config) -> None:
        self.task, self.config = task, config
        torch.manual_seed(config["seed"])
        self.model = task.build_model(config)
        self.optimizers = task.build_optimizer(self.model, config)
        schedulers = getattr(task, "build_lr_scheduler", lambda *_: {})(self.optimizers, config)
        self.schedulers = {name: own for name, own in schedulers.items() if own is not None}
        self.clipped = False

    def run_round(self) -> dict[str, float]:
        weights: dict[str, int] = {}
        totals: dict[str, float] = {}
        by_steps = getattr(self.task, "lr_scheduler_interval", "epoch") == "step"
        for batch in self.task.train_dataloader(self.config):
            losses = self.task.training_step(self.model, batch, self.config)
            for name, loss in losses.items():
                loss.backward(inputs=self.parameters(name), retain_graph=True)
            for name in losses:
                self.clip(self.parameters(name))
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            if by_steps:
                for scheduler in self.schedulers.values():
                    scheduler.step()
            numbers = {f"train_loss_{name}": float(loss.detach()) for name, loss in losses.items()}
            for name, number in {**numbers, "train_loss": sum(numbers.values())}.items():
                totals[name] = totals.get(name, 0) + number * len(batch["real"])
                weights[name] = weights.get(name, 0) + len(batch["real"])
        results = {name: total / weights[name] for name, total in totals.items()}
        if not by_steps:
            for scheduler in self.schedulers.values():
                plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([results[self.task.lr_scheduler_monitor]] if plateau else []))
        return results

    def parameters(self, name: str) -> list[nn.Parameter]:
        return [parameter for group in self.optimizers[name].param_groups for parameter in group["params"]]

    def clip(self, parameters: list[nn.Parameter]) -> None:
        limit = getattr(self.task, "gradient_clip_val", None)
        if limit is None:
            return
        before = copy.deepcopy([parameter.grad for parameter in parameters])
        if getattr(self.task, "gradient_clip_algorithm", "norm") == "norm":
            nn.utils.clip_grad_norm_(parameters, limit)
        else:
            nn.utils.clip_grad_value_(parameters, limit)
        self.clipped |= any(not own.grad.equal(old) for own, old in zip(parameters, before, strict=True))

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": {name: own.state_dict() for name, own in self.optimizers.items()},
                "lr_scheduler": {name: own.state_dict() for name, own in self.schedulers.items()} or None,
            }
        )


@functools.cache
def alone(kind: type[GAN], lane: int, rounds: int = ROUNDS) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """What a trial reports after each round, and its state then."""
    run = Alone(kind(), LANES[lane])
    after = [(run.run_round(), run.state()) for _ in range(rounds)]
    assert run.clipped == hasattr(kind, "gradient_clip_val")
    return after


def add(worker: Worker, kind: type[GAN], lane: int) -> None:
    worker.add(TRIALS[lane], fused(kind)._outside_tune(LANES[lane]), LANES[lane])


def assert_lane(worker: Worker, result: Any, kind: type[GAN], lane: int, round_: int, *, atol: float = 1e-6) -> None:
    if isinstance(result, Exception):
        raise result
    metrics, expected = alone(kind, lane, max(ROUNDS, round_))[round_ - 1]
    where = f"{kind.__name__} {TRIALS[lane]} round {round_}"
    assert_same(result, metrics, where)
    state = worker.state_dict(TRIALS[lane])
    assert_same({name: state[name] for name in expected}, expected, where, atol=atol)


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_goes_by_its_own_loss(kind: type[GAN], strategy: str) -> None:
    worker = Worker(4, device="cpu", strategy=strategy)
    for lane in range(4):
        add(worker, kind, lane)
    for round_ in range(1, ROUNDS + 1):
        results = worker.run_round()
        assert [array["strategy"] for array in worker.describe()["arrays"]] == [strategy]
        for lane, trial in enumerate(TRIALS):
            assert_lane(worker, results[trial], kind, lane, round_)


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane", "auto"])
@pytest.mark.parametrize("kind", [WithViews, InTurns])
def test_lanes_join_and_leave(kind: type[GAN], strategy: str) -> None:
    worker = Worker(4, device="cpu", strategy=strategy)
    for lane in range(3):
        add(worker, kind, lane)
    worker.run_round()
    add(worker, kind, 3)
    results = worker.run_round()
    assert_lane(worker, results["ada"], kind, 0, 2)
    worker.remove("ada")
    results = worker.run_round()
    assert len(worker.describe()["arrays"]) == 1
    for lane, round_ in ((1, 3), (2, 3), (3, 2)):
        assert_lane(worker, results[TRIALS[lane]], kind, lane, round_)


class InTurnsOfOneSize(InTurns):
    """The last batch, which trains one only, is not the one to compile for."""

    def batches(self) -> list[tuple[int, str]]:
        return [(8, "both"), (8, "both"), (5, "discriminator")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WithViews, InTurnsOfOneSize])
def test_compiled(kind: type[GAN], always_compiles: None, steps_of_tensors: list[int]) -> None:
    worker = Worker(4, device="cpu")
    for lane in range(3):
        add(worker, kind, lane)
    for round_ in range(1, 7):
        if round_ == 5:
            add(worker, kind, 3)
        results = worker.run_round(rounds_left=1e9)
        for lane, trial in enumerate(TRIALS[: len(results)]):
            assert_lane(worker, results[trial], kind, lane, round_ - 4 * (lane == 3), atol=1e-5)
    assert [array["strategy"] for array in worker.describe()["arrays"]] == [COMPILED]
    assert set(steps_of_tensors) == {3, 4}


# Checkpoints


@pytest.mark.parametrize("kind", [WithViews, Scheduled, ScheduledBySteps])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_checkpoint_goes_on_in_plain_pytorch(kind: type[GAN], lanes: int, tmp_path: Path) -> None:
    worker = Worker(lanes, device="cpu")
    for lane in range(lanes):
        add(worker, kind, lane)
    worker.run_round()
    worker.save("ada", tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    run = Alone(kind(), LANES[0])
    assert state["optimizer"].keys() == run.optimizers.keys()
    assert (state["lr_scheduler"] or {}).keys() == run.schedulers.keys()
    run.model.load_state_dict(state["model"])
    for name, optimizer in run.optimizers.items():
        optimizer.load_state_dict(state["optimizer"][name])
    for name, scheduler in run.schedulers.items():
        scheduler.load_state_dict(state["lr_scheduler"][name])
    for round_ in (2, 3):
        metrics, got = run.run_round(), run.state()
        expected_metrics, expected = alone(kind, 0)[round_ - 1]
        # A lane that trains alone is plain PyTorch, so there is not even rounding between them.
        assert_same(metrics, expected_metrics, rtol=1e-4 if lanes > 1 else 0.0, atol=1e-6 if lanes > 1 else 0.0)
        assert_same(got, expected, rtol=1e-4 if lanes > 1 else 0.0, atol=1e-6 if lanes > 1 else 0.0)


@pytest.mark.parametrize("kind", [WithViews, Scheduled, ScheduledBySteps])
def test_a_checkpoint_goes_on_in_another_array(kind: type[GAN], tmp_path: Path) -> None:
    first, second = Worker(3, device="cpu"), Worker(3, device="cpu")
    for lane in range(3):
        add(first, kind, lane)
    first.run_round()
    first.save("bob", tmp_path)
    for lane in (3, 1):
        add(second, kind, lane)
    second.load("bob", tmp_path)
    for round_ in (2, 3):
        results = second.run_round()
        assert_lane(second, results["bob"], kind, 1, round_)
        assert_lane(second, results["dee"], kind, 3, round_ - 1)


def test_a_checkpoint_of_other_optimizers_does_not_fit(tmp_path: Path) -> None:
    worker = Worker(2, device="cpu")
    add(worker, WithViews, 0)
    add(worker, GAN, 1)
    worker.run_round()
    worker.save("ada", tmp_path)
    before = worker.state_dict("bob")
    with pytest.raises(FusionError, match="trial bob: the checkpoint does not fit"):
        worker.load("bob", tmp_path)
    assert_same(worker.state_dict("bob"), before)


def test_a_changed_number_of_one_of_them_holds(tmp_path: Path) -> None:
    """Tune's exploit: the schedule of that optimizer goes on in proportion, and the other stays as it was."""
    first, second = Worker(1, device="cpu"), Worker(1, device="cpu")
    add(first, Scheduled, 0)
    first.run_round()
    first.save("ada", tmp_path)
    config = LANES[0] | {"lr": 0.5, "d_lr": 0.1}  # d_lr was 0.05
    second.add("ada", fused(Scheduled)._outside_tune(config), config)
    second.load("ada", tmp_path)
    groups = {name: own["param_groups"][0] for name, own in second.state_dict("ada")["optimizer"].items()}
    assert groups["generator"]["lr"] == 0.5
    assert groups["discriminator"]["lr"] == pytest.approx(0.1 * (1 - 0.05))


# What is wrong is said.


def refused(kind: type[GAN], trial: str = "odd") -> str:
    with pytest.raises(FusionError) as caught:
        Worker(1, device="cpu").add(trial, fused(kind)._outside_tune(LANES[0]), LANES[0])
    return str(caught.value)


@pytest.mark.parametrize("returned", [{}, {"generator": None}, {"": "an optimizer"}, {1: "an optimizer"}, "Adam", []])
def test_build_optimizer_returns_something_else(returned: Any) -> None:
    class Odd(GAN):
        def build_optimizer(self, model: Any, config: Config) -> Any:
            if not isinstance(returned, dict):
                return returned
            real = torch.optim.SGD(model.parameters(), lr=0.1)
            return {name: real if own == "an optimizer" else own for name, own in returned.items()}

    said = refused(Odd)
    assert said.startswith("trial odd: build_optimizer returned ") and "or a dict of several by name" in said


def test_a_parameter_in_two_optimizers() -> None:
    class Shared(GAN):
        def build_optimizer(self, model: Any, config: Config) -> Any:
            last = model.generator[2].parameters()
            return {**super().build_optimizer(model, config), "head": torch.optim.SGD(last, lr=0.1)}

    said = refused(Shared)
    assert "trial odd: the optimizers 'generator' and 'head' hold the same parameter of shape [6, 8]" in said
    assert "Give each parameter to one optimizer" in said


@pytest.mark.parametrize("single", [False, True])
def test_schedulers_by_other_names(single: bool) -> None:
    class Odd(GAN):
        def build_lr_scheduler(self, optimizer: Any, config: Config) -> Any:
            scheduler = lr_scheduler.StepLR(optimizer["generator"], 1)
            return scheduler if single else {"generators": scheduler}

    said = refused(Odd)
    assert said.startswith("trial odd: build_lr_scheduler returned ")
    assert "the optimizers 'generator', 'discriminator', so return a dict" in said


def test_a_scheduler_under_the_name_of_another_optimizer() -> None:
    class Crossed(GAN):
        def build_lr_scheduler(self, optimizer: Any, config: Config) -> Any:
            return {"generator": lr_scheduler.StepLR(optimizer["discriminator"], 1)}

    assert "build_lr_scheduler returned a scheduler on another optimizer" in refused(Crossed)


def test_one_that_needs_a_closure() -> None:
    class Closed(GAN):
        def build_optimizer(self, model: Any, config: Config) -> Any:
            found = super().build_optimizer(model, config)
            return {**found, "generator": torch.optim.LBFGS(model.generator.parameters())}

    said = refused(Closed)
    assert "LBFGS" in said and "must be the only optimizer" in said


WRONG_LOSSES: list[tuple[Any, str]] = [
    ("tensor", "returned a tensor of shape []"),
    ({"generator": "loss", "critic": "loss"}, "returned the losses 'generator', 'critic'"),
    ({}, "returned the losses "),
    (None, "returned None"),
    ({"generator": 1.0}, "returned float '1.0'"),
    ({"generator": "vector"}, "returned a tensor of shape [8]"),
]


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
@pytest.mark.parametrize(("returned", "message"), WRONG_LOSSES)
def test_training_step_returns_something_else(returned: Any, message: str, strategy: str) -> None:
    class Odd(GAN):
        def training_step(self, model: Any, batch: Any, config: Config) -> Any:
            scores = model.discriminator(model.generator(batch["noise"]))[:, 0]
            values = {"loss": scores.mean(), "vector": scores}
            if isinstance(returned, dict):
                return {name: values.get(own, own) for name, own in returned.items()}
            return scores.mean() if returned == "tensor" else returned

    worker = Worker(2, device="cpu", strategy=strategy)
    for lane in range(2):
        add(worker, Odd, lane)
    for trial, result in worker.run_round().items():
        assert isinstance(result, FusionError)
        assert str(result).startswith(f"trial {trial}: training_step {message}")
        if not isinstance(returned, dict) or "critic" in returned or not returned:
            assert "the optimizers 'generator', 'discriminator', so return a dict" in str(result)


def test_one_in_a_dict_has_its_name_too() -> None:
    """A dict with a single optimizer is not the same as that optimizer."""

    class Single(GAN):
        def build_optimizer(self, model: Any, config: Config) -> Any:
            return {"all": torch.optim.SGD(model.parameters(), lr=config["lr"])}

        def training_step(self, model: Any, batch: Any, config: Config) -> Any:
            return {"all": super().training_step(model, batch, config)["discriminator"]}

    worker = Worker(2, device="cpu")
    for lane in range(2):
        add(worker, Single, lane)
    for round_ in (1, 2):
        results = worker.run_round()
        for lane in range(2):
            assert_lane(worker, results[TRIALS[lane]], Single, lane, round_)
    assert list(worker.state_dict("ada")["optimizer"]) == ["all"]
