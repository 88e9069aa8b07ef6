"""The table of schedules: each of torch.optim.lr_scheduler goes on in an array as it does alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from fusion.breadth import FUSED, assert_equal_to_alone
from reference import Config
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

# By epoch the schedule advances after each round of two steps, by step after each step.
EPOCHS, STEPS = 5, 7

LANES: list[Config] = [
    dict(seed=1, lr=0.1, gamma=0.5, after=1, until=4, power=1.0, low=0.01, monitor_threshold=0.5),
    dict(seed=2, lr=0.05, gamma=0.1, after=2, until=5, power=2.0, low=0.001, monitor_threshold=0.9),
    dict(seed=3, lr=0.2, gamma=0.9, after=3, until=6, power=0.5, low=0.02, monitor_threshold=0.0),
]


def sgd(model: nn.Module, c: Config) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=c["lr"], momentum=0.9)


def adam(model: nn.Module, c: Config) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=c["lr"], eps=1e-2)


def in_groups(model: nn.Module, c: Config) -> Optimizer:
    parameters = dict(model.named_parameters())
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    weights = [parameter for name, parameter in parameters.items() if not name.endswith("bias")]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 2 * c["lr"]}], lr=c["lr"], momentum=0.9)


def rmsprop(model: nn.Module, c: Config) -> Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=c["lr"] / 10, eps=1e-2)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: How a user would write it.
        build: Builds the schedule.
        kind: The class of torch.optim.lr_scheduler that the row is about.
        optimizer: Builds the optimizer.
        intervals: When it may advance.
        monitor: What it watches.
    """

    name: str
    build: Callable[[Optimizer, Config], Any]
    kind: type
    optimizer: Callable[[nn.Module, Config], Optimizer] = sgd
    intervals: tuple[str, ...] = ("epoch", "step")
    monitor: str | None = None


def row(kind: type, build: Callable[[Optimizer, Config], Any], note: str = "", **options: Any) -> Row:
    return Row(f"{kind.__name__}{note and ' '}{note}", build, kind, **options)


def warm_up_then_cosine(optimizer: Optimizer, c: Config) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=c["gamma"], total_iters=c["after"])
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=c["until"], eta_min=c["low"] / 10)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[c["after"]])


def three_in_turn(optimizer: Optimizer, c: Config) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, c["gamma"]),
        lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2, 2 + c["after"]])


def chained(optimizer: Optimizer, c: Config) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=c["after"]),
        lr_scheduler.ExponentialLR(optimizer, gamma=c["gamma"]),
        lr_scheduler.MultiStepLR(optimizer, milestones=[c["until"]], gamma=0.5),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def one_cycle(optimizer: Optimizer, c: Config) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2 * c["lr"], total_steps=20, pct_start=c["gamma"])


def three_phases(optimizer: Optimizer, c: Config) -> Any:
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=2 * c["lr"],
        epochs=5,
        steps_per_epoch=4,
        pct_start=0.2,
        anneal_strategy="linear",
        three_phase=True,
        div_factor=1 + c["after"],
        cycle_momentum=False,
    )


def cyclic(mode: str) -> Callable[[Optimizer, Config], Any]:
    return lambda optimizer, c: lr_scheduler.CyclicLR(
        optimizer, base_lr=c["low"], max_lr=c["lr"], step_size_up=c["after"], mode=mode, gamma=c["gamma"]
    )


def plateau(optimizer: Optimizer, c: Config) -> Any:
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=c["gamma"], patience=0, threshold=c["monitor_threshold"], min_lr=c["low"]
    )


def patient_plateau(optimizer: Optimizer, c: Config) -> Any:
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", factor=c["gamma"], patience=1, threshold=c["monitor_threshold"], cooldown=1
    )


class HalfWay(lr_scheduler.LRScheduler):
    """A schedule of a user's own."""

    def get_lr(self) -> list[float]:
        return [
            (rate + group["lr"]) / 2 for rate, group in zip((0.01, 0.02), self.optimizer.param_groups, strict=False)
        ]


ROWS = [
    row(lr_scheduler.LambdaLR, lambda o, c: lr_scheduler.LambdaLR(o, lambda epoch: c["gamma"] ** epoch)),
    row(
        lr_scheduler.LambdaLR,
        lambda o, c: lr_scheduler.LambdaLR(o, [lambda epoch: 1 / (1 + epoch), lambda epoch: c["gamma"] ** epoch]),
        "of two groups",
        optimizer=in_groups,
    ),
    row(lr_scheduler.MultiplicativeLR, lambda o, c: lr_scheduler.MultiplicativeLR(o, lambda epoch: c["gamma"])),
    row(lr_scheduler.StepLR, lambda o, c: lr_scheduler.StepLR(o, step_size=c["after"], gamma=c["gamma"])),
    row(lr_scheduler.StepLR, lambda o, c: lr_scheduler.StepLR(o, c["after"], c["gamma"]), "of AdamW", optimizer=adam),
    row(
        lr_scheduler.StepLR,
        lambda o, c: lr_scheduler.StepLR(o, c["after"], c["gamma"]),
        "of RMSprop",
        optimizer=rmsprop,
    ),
    row(
        lr_scheduler.StepLR,
        lambda o, c: lr_scheduler.StepLR(o, c["after"], c["gamma"]),
        "of two groups",
        optimizer=in_groups,
    ),
    row(lr_scheduler.MultiStepLR, lambda o, c: lr_scheduler.MultiStepLR(o, [c["after"], c["until"]], c["gamma"])),
    row(lr_scheduler.ConstantLR, lambda o, c: lr_scheduler.ConstantLR(o, factor=c["gamma"], total_iters=c["after"])),
    row(lr_scheduler.LinearLR, lambda o, c: lr_scheduler.LinearLR(o, c["gamma"], 1.0, total_iters=c["until"])),
    row(lr_scheduler.ExponentialLR, lambda o, c: lr_scheduler.ExponentialLR(o, gamma=c["gamma"])),
    row(lr_scheduler.PolynomialLR, lambda o, c: lr_scheduler.PolynomialLR(o, total_iters=c["until"], power=c["power"])),
    row(lr_scheduler.CosineAnnealingLR, lambda o, c: lr_scheduler.CosineAnnealingLR(o, c["until"], eta_min=c["low"])),
    row(
        lr_scheduler.CosineAnnealingWarmRestarts,
        lambda o, c: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=c["after"] + 1, T_mult=2, eta_min=c["low"]),
    ),
    row(lr_scheduler.CyclicLR, cyclic("triangular"), "triangular"),
    row(lr_scheduler.CyclicLR, cyclic("triangular2"), "triangular2"),
    row(lr_scheduler.CyclicLR, cyclic("exp_range"), "exp_range, of AdamW: it cycles beta1", optimizer=adam),
    row(lr_scheduler.OneCycleLR, one_cycle, "with momentum"),
    row(lr_scheduler.OneCycleLR, one_cycle, "of AdamW: it cycles beta1", optimizer=adam),
    row(lr_scheduler.OneCycleLR, three_phases, "of three phases", optimizer=in_groups),
    row(lr_scheduler.SequentialLR, warm_up_then_cosine, "of LinearLR and CosineAnnealingLR"),
    row(lr_scheduler.SequentialLR, three_in_turn, "of three"),
    row(lr_scheduler.ChainedScheduler, chained, "of three"),
    row(lr_scheduler.ChainedScheduler, chained, "of three, of two groups", optimizer=in_groups),
    row(lr_scheduler.ReduceLROnPlateau, plateau, "of val_loss", intervals=("epoch",), monitor="val_loss"),
    row(lr_scheduler.ReduceLROnPlateau, patient_plateau, "of accuracy", intervals=("epoch",), monitor="accuracy"),
    row(swa_utils.SWALR, lambda o, c: swa_utils.SWALR(o, swa_lr=c["low"], anneal_epochs=c["until"])),
    row(HalfWay, lambda o, c: HalfWay(o), "a user's own", optimizer=in_groups),
]


def task_of(row: Row, interval: str) -> type:
    class Task:
        lr_scheduler_interval = interval
        lr_scheduler_monitor = row.monitor

        def build_model(self, config: Config) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def build_optimizer(self, model: nn.Module, config: Config) -> Optimizer:
            return row.optimizer(model, config)

        def build_lr_scheduler(self, optimizer: Optimizer, config: Config) -> Any:
            return row.build(optimizer, config)

        def train_dataloader(self, config: Config) -> list[tuple[Tensor, ...]]:
            data = reference.vectors(16, 6).tensors
            halves = list(zip(*(tensor.chunk(2) for tensor in data), strict=True))
            return halves if interval == "epoch" else halves[:1]  # one step a round, to see each step's rate

        def val_dataloader(self, config: Config) -> list[tuple[Tensor, ...]] | None:
            return None if row.monitor is None else [reference.vectors(16, 6, seed=1).tensors]

        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            return F.cross_entropy(model(x), y)

        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            out = model(x)
            return {"val_loss": F.cross_entropy(out, y), "accuracy": (out.argmax(1) == y).float().mean()}

    return Task


LINES = [pytest.param(row, interval, id=f"{row.name} by {interval}") for row in ROWS for interval in row.intervals]


@pytest.mark.parametrize(("row", "interval"), LINES)
def test_schedules(row: Row, interval: str) -> None:
    rounds = EPOCHS if interval == "epoch" else STEPS
    rates = assert_equal_to_alone(task_of(row, interval), LANES, rounds, strategy=FUSED, joins_later=True)
    # A schedule that stood still would prove nothing, nor would lanes that all had the same.
    assert any(len(set(lane)) > 1 for lane in rates)
    assert len({tuple(lane) for lane in rates}) == len(LANES)


def test_no_two_rows_have_one_name() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_class_of_torch_optim_lr_scheduler_has_a_row() -> None:
    names = {name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type)}
    assert names - {row.kind.__name__ for row in ROWS} == {"LRScheduler"}
