"""What the breadth tables share: rows, and the comparison of lanes with each trial trained alone.

The plain side is `reference.Run`, which imports nothing of hfta_tune. A table says of each row whether the array
trains fused or lane by lane, and if lane by lane then why, so that documentation can be made of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import reference
import torch
from reference import Config, assert_same
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune import FusedTrainable
from hfta_tune.fusion import FusionWarning
from hfta_tune.worker import Worker

__all__ = [
    "FUSED",
    "LANES",
    "LANE_BY_LANE",
    "TRIALS",
    "Applied",
    "Row",
    "as_expected",
    "assert_equal_to_alone",
    "floats",
    "fused",
    "integers",
    "lane_by_lane",
    "named",
    "of",
    "one_thread",
    "run_round",
    "score",
    "task_of",
    "training",
]

FUSED = "fused"
LANE_BY_LANE = "lane by lane"
TRIALS = ["ada", "bob", "cyd", "dee"]

# Other weights by the seed, and other numbers, all in one array.
LANES: list[Config] = [
    dict(seed=1, lr=0.1, momentum=0.9, scale=1.0),
    dict(seed=2, lr=0.05, momentum=0.5, scale=2.0),
    dict(seed=3, lr=0.2, momentum=0.8, scale=0.5),
]

# Gradients are sums of many terms of about 1 that cancel each other; three steps add up their rounding.
ATOL = 1e-5

Maker = Callable[[torch.Generator], Tensor]
AnyRow = TypeVar("AnyRow", bound=Any)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Maker:
    return lambda generator: torch.randn(*shape, generator=generator, dtype=dtype)


def integers(below: int, *shape: int, least: int = 0) -> Maker:
    return lambda generator: torch.randint(least, below, shape, generator=generator)


@dataclass(frozen=True)
class Row:
    """One line of a table of modules, functions or losses.

    Attributes:
        name: How a user would write it.
        build: Builds the module.
        inputs: What makes each tensor of a batch.
        kind: The class of torch.nn that the row is about, if it is one.
        call: Calls the module; by default on the batch's tensors.
        criterion: Builds the loss of the module's output and the batch's tensors after the first; None for
            `score` of the output.
        strategy: How an array of it trains: FUSED or LANE_BY_LANE.
        reason: Why not fused: a part of what the user is told.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Maker, ...]
    kind: type | None = None
    call: Callable[..., Any] | None = None
    criterion: Callable[[], Callable[..., Tensor]] | None = None
    strategy: str = FUSED
    reason: str = ""

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(make(generator) for make in self.inputs)


def of(
    kind: type[nn.Module],
    *arguments: Any,
    on: Maker | tuple[Maker, ...],
    call: Callable[..., Any] | None = None,
    note: str = "",
    **options: Any,
) -> Row:
    """The row of a class of torch.nn and its arguments."""
    written = [repr(argument) for argument in arguments] + [
        f"{name}={getattr(value, '__name__', repr(value))}" for name, value in options.items()
    ]
    name = f"{kind.__name__}({', '.join(written)}){note and ' '}{note}"
    inputs = on if isinstance(on, tuple) else (on,)
    return Row(name, functools.partial(kind, *arguments, **options), inputs, kind=kind, call=call)


def named(
    name: str, build: Callable[[], nn.Module], *, on: Maker | tuple[Maker, ...], call: Callable[..., Any] | None = None
) -> Row:
    """The row of a module of a user's own."""
    return Row(name, build, on if isinstance(on, tuple) else (on,), call=call)


def lane_by_lane(reason: str, *rows: AnyRow) -> list[AnyRow]:
    """Rows that train lane by lane, and what the user is told about it."""
    return [replace(row, strategy=LANE_BY_LANE, reason=reason) for row in rows]


class Applied(nn.Module):
    """A function as a module, with parameters of its own."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, **{name: getattr(self, name) for name in self.names})


class Twice(nn.Module):
    """A row's module in the two places that a module can be in.

    `first` is fed by the batch, which all lanes share; what `later` is fed is each lane's own, and needs gradients.
    A module without tensors has nothing to do in the first place.
    """

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.call = row.call
        self.later = row.build()
        self.first = row.build() if self.later.state_dict() else None
        for index, x in enumerate(row.batch(0)):
            if x.is_floating_point():
                # One for each entry: a shift that all samples share would be lost in a batch norm, and its
                # gradient rounding noise.
                self.register_parameter(f"scale_{index}", nn.Parameter(1 + torch.randn_like(x) / 10))
                self.register_parameter(f"shift_{index}", nn.Parameter(torch.randn_like(x) / 10))

    def forward(self, *inputs: Tensor) -> tuple[Any, Any]:
        first = None if self.first is None else self.called(self.first, *inputs)
        own = [
            x * getattr(self, f"scale_{index}") + getattr(self, f"shift_{index}") if x.is_floating_point() else x
            for index, x in enumerate(inputs)
        ]
        return first, self.called(self.later, *own)

    def called(self, module: nn.Module, *inputs: Tensor) -> Any:
        return module(*inputs) if self.call is None else self.call(module, *inputs)


def score(output: Any) -> Tensor:
    """One number that every entry of every tensor in an output moves, each by another amount."""
    total: Any = 0.0
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            values = (leaf if leaf.is_floating_point() else leaf.float()).flatten()
            weights = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype)
            total = total + (weights * values.sin()).sum() / math.sqrt(max(1, values.numel()))
    return total


class Batches:
    """One batch, made anew each time, because a module may change it in place."""

    def __init__(self, row: Row, seed: int) -> None:
        self.row, self.seed = row, seed

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter([self.row.batch(self.seed)])


@functools.cache
def task_of(row: Row) -> type:
    """The task class that trains a row."""

    class Task:
        def build_model(self, config: Config) -> nn.Module:
            if row.criterion is None:
                return Twice(row)
            self.criterion = row.criterion()
            return row.build()

        def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
            # After the first step the momentum buffer is the gradient, which so is compared with all else.
            return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

        def train_dataloader(self, config: Config) -> Batches:
            return Batches(row, seed=0)

        def val_dataloader(self, config: Config) -> Batches:
            return Batches(row, seed=1)

        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            return config["scale"] * self.loss(model, batch)

        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            return {"val_loss": self.loss(model, batch)}

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            if row.criterion is None:
                return score(model(*batch))
            output = model(batch[0])
            loss = self.criterion(*(output if isinstance(output, tuple) else (output,)), *batch[1:])
            return loss if loss.dim() == 0 else loss.mean()

    return Task


@functools.cache  # two classes, however alike, never share an array
def fused(task: type) -> type[FusedTrainable]:
    return type("Fused" + task.__name__, (task, FusedTrainable), {})


def run_round(worker: Worker, **arguments: Any) -> dict[str, Any]:
    """A worker's round, in which no trial may fail."""
    results = worker.run_round(**arguments)
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return results


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Models this small are slower on two threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def training(
    task: type,
    configs: Sequence[Config],
    *,
    strategy: str | None,
    reason: str = "",
    lanes: int | None = None,
) -> Iterator[Worker]:
    """A worker with a lane for each config; in the end it is asked for its strategy.

    Args:
        task: The task class.
        configs: The lanes' configs.
        strategy: What is to be found: FUSED (by whatever means), LANE_BY_LANE, or None for either.
        reason: What a user is told of lanes that train one by one.
        lanes: How many lanes the worker has.
    """
    with one_thread(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = Worker(lanes=lanes or len(configs), device="cpu")
        for trial, config in zip(TRIALS, configs, strict=False):
            worker.add(trial, fused(task)._outside_tune(config), config)
        yield worker
    if strategy is None:
        return
    # Lanes trained one by one are equal too, so without this an equality would prove nothing.
    arrays = worker.describe()["arrays"]
    assert {as_expected(array["strategy"]) for array in arrays} == {strategy}
    assert {as_expected(array["evaluation_strategy"]) for array in arrays} == {strategy}
    said = [str(warning.message) for warning in caught if issubclass(warning.category, FusionWarning)]
    if strategy == FUSED:
        assert len(arrays) == 1 and not said, (arrays, said)
    else:
        assert any(reason in message for message in said), f"the user is told {said}"


def assert_equal_to_alone(
    task: type,
    configs: Sequence[Config],
    rounds: int,
    *,
    strategy: str | None = None,
    reason: str = "",
    joins_later: bool = False,
    rtol: float = 1e-4,
    run: type[reference.Run] = reference.Run,
) -> list[list[float]]:
    """Trains the configs as lanes of one worker, and each alone, and compares them.

    What they report is compared after every round; weights, buffers and the optimizer's state after the first
    round of each lane, when they show the gradients, and after the last.

    Args:
        task: The task class.
        configs: The lanes' configs.
        rounds: How many rounds each lane trains at least.
        strategy: As in `training`.
        reason: As in `training`.
        joins_later: The last lane joins after the first round.
        rtol: Relative tolerance.
        run: The plain loop.

    Returns:
        The learning rate of the first group of each lane alone, after each round.
    """
    rates: list[list[float]] = [[] for _ in configs]
    runs = [run(task(), config) for config in configs]
    at_first = configs[:-1] if joins_later else configs
    options: dict[str, Any] = dict(strategy=strategy, reason=reason, lanes=len(configs))
    last = rounds + joins_later - 1
    compared = {0, int(joins_later), last}
    with training(task, at_first, **options) as worker:
        for r in range(last + 1):
            if joins_later and r == 1:
                worker.add(TRIALS[len(configs) - 1], fused(task)._outside_tune(configs[-1]), configs[-1])
            for lane, (trial, result) in enumerate(worker.run_round().items()):
                if isinstance(result, Exception):
                    raise result
                alone, where = runs[lane], f"{trial} round {r + 1}"
                metrics = alone.run_round()
                rates[lane].append(float(alone.optimizer.param_groups[0]["lr"]))
                own = {name: result[name] for name in metrics}
                assert_same(own, metrics, f"{where} metrics", rtol=rtol)
                if r not in compared:
                    continue
                state = worker.state_dict(trial)
                for part in ("model", "optimizer", "lr_scheduler"):
                    plain = getattr(alone, part)
                    expected = None if plain is None else plain.state_dict()
                    assert_same(state[part], expected, f"{where} {part}", rtol=rtol, atol=ATOL)
    return rates


def as_expected(strategy: str) -> str:
    """A strategy as the tables call it: all but one are ways to train fused."""
    return strategy if strategy == LANE_BY_LANE else FUSED
