"""The table of optimizers: each of torch.optim trains in an array as it trains alone, its state included."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from fusion.breadth import FUSED, assert_equal_to_alone, lane_by_lane
from reference import Config, DampedMomentum, assert_same
from torch import Tensor, nn
from torch.optim import Optimizer

from hfta_tune.fusion.compiled import CompiledStep
from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers import FusedOptimizer, GroupUpdate, NativeOptimizer, fuse_optimizer
from hfta_tune.fusion.stack import LaneStack

ROUNDS = 4  # of one step each; the last lane joins after the first


class Each:
    """A number that each of the four lanes has another of."""

    def __init__(self, *numbers: Any) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:
        return "..."


LR = Each(0.02, 0.005, 0.01, 0.05)
MOMENTUM = Each(0.9, 0.5, 0.95, 0.8)
BETAS = (Each(0.9, 0.8, 0.5, 0.95), Each(0.99, 0.95, 0.999, 0.9))
DECAY = Each(0.0, 0.1, 0.01, 0.003)
# Well above rounding: a gradient that is zero but for rounding would else become a full step.
EPS = Each(1e-3, 1e-2, 3e-3, 1e-2)


def of_lane(option: Any, lane: int) -> Any:
    """An option of the table as the lane has it."""
    if isinstance(option, Each):
        return option.numbers[lane]
    return tuple(of_lane(part, lane) for part in option) if isinstance(option, tuple) else option


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def all_parameters(model: nn.Module) -> Any:
    return model.parameters()


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: How a user would write it.
        build: Builds the optimizer of a lane over parameters or groups of them.
        kind: The class of torch.optim that the row is about, if it is one.
        groups: What of a model the optimizer is built over.
        model: Builds the model.
        tokens: The model's input is words, not vectors.
        rounds: How many steps each lane is trained for at least.
        run: The plain loop.
        strategy: How an array of it trains: FUSED or LANE_BY_LANE.
        reason: Why not fused: a part of what the user is told.
        rtol: Relative tolerance of the comparison.
    """

    name: str
    build: Callable[[Any, int], Optimizer]
    kind: type | None = None
    groups: Callable[[nn.Module], Any] = all_parameters
    model: Callable[[], nn.Module] = mlp
    tokens: bool = False
    rounds: int = ROUNDS
    run: type[reference.Run] = reference.Run
    strategy: str = FUSED
    reason: str = ""
    rtol: float = 1e-4


def of(kind: type[Optimizer], *, note: str = "", **options: Any) -> Row:
    """The row of a class of torch.optim and its options."""

    def build(parameters: Any, lane: int) -> Optimizer:
        return kind(parameters, **{name: of_lane(option, lane) for name, option in options.items()})

    written = ", ".join(f"{name}={option!r}" for name, option in options.items())
    return Row(f"{kind.__name__}({written}){note and ' '}{note}", build, kind=kind)


class Closing(reference.Run):
    """The loop for optimizers that evaluate the loss themselves."""

    def _train(self) -> float:
        self.model.train()
        (batch,) = self.train_loader

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.task.training_step(self.model, batch, self.config)
            loss.backward()
            return loss

        return float(self.optimizer.step(closure))


# Parameter groups


def weights_and_biases(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: no weight decay on biases, and here a learning rate of their own too."""
    parameters = dict(model.named_parameters())
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    weights = [parameter for name, parameter in parameters.items() if not name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.03}]


def last_layer(model: nn.Module) -> Any:
    return model[-1].parameters()  # type: ignore[index]


def by_name(model: nn.Module) -> Any:
    return model.named_parameters()


def grouped(row: Row, groups: Callable[[nn.Module], Any] = weights_and_biases) -> Row:
    return replace(row, name=f"{row.name} over {groups.__name__.replace('_', ' ')}", groups=groups)


# Models of a kind of their own


class Bag(nn.Module):
    """A bag of words whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)


def without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def with_an_unused_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].unused = nn.Linear(2, 2)
    return model


def double() -> nn.Module:
    return nn.Sequential(mlp().double())


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).float()


def tensor_lr(parameters: Any, lane: int) -> Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(of_lane(LR, lane)), eps=of_lane(EPS, lane), foreach=False)


def hooked(parameters: Any, lane: int) -> Optimizer:
    """Keeps its parameters small, by a hook after each step."""
    optimizer = torch.optim.SGD(parameters, lr=of_lane(LR, lane), momentum=0.9)

    @torch.no_grad()
    def clamp(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def grown_adagrad(parameters: Any, lane: int) -> Optimizer:
    """Gets its biases later, so that not its constructor makes their state."""
    weights, biases = weights_and_biases(parameters)
    optimizer = torch.optim.Adagrad([weights], lr=of_lane(LR, lane), initial_accumulator_value=of_lane(DECAY, lane))
    optimizer.add_param_group(biases)
    return optimizer


SGD = functools.partial(of, torch.optim.SGD, lr=LR)
ADAM = functools.partial(of, torch.optim.Adam, lr=LR, betas=BETAS, eps=EPS)
ADAMW = functools.partial(of, torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS)
NADAM = functools.partial(of, torch.optim.NAdam, lr=LR, betas=BETAS, eps=EPS)
RADAM = functools.partial(of, torch.optim.RAdam, lr=LR, betas=BETAS, eps=EPS)
ADAMAX = functools.partial(of, torch.optim.Adamax, lr=LR, betas=BETAS, eps=EPS)
ADADELTA = functools.partial(of, torch.optim.Adadelta, lr=Each(1.0, 0.5, 2.0, 0.2), eps=EPS)
ADAGRAD = functools.partial(of, torch.optim.Adagrad, lr=LR, eps=EPS)
RMSPROP = functools.partial(of, torch.optim.RMSprop, lr=LR, eps=EPS)
RPROP = functools.partial(of, torch.optim.Rprop, lr=LR)
ASGD = functools.partial(of, torch.optim.ASGD, lr=LR)
ADAFACTOR = functools.partial(of, torch.optim.Adafactor, lr=LR)
LBFGS = functools.partial(of, torch.optim.LBFGS, lr=Each(0.5, 0.1, 0.2, 1.0))

ROWS = [
    SGD(),
    SGD(weight_decay=DECAY),
    SGD(momentum=MOMENTUM),
    SGD(momentum=Each(0.9, 0.0, 0.5, 0.0), note="some of them 0"),
    SGD(momentum=MOMENTUM, dampening=Each(0.0, 0.5, 0.9, 0.1), weight_decay=DECAY),
    SGD(momentum=MOMENTUM, weight_decay=DECAY, nesterov=True),
    SGD(momentum=MOMENTUM, weight_decay=DECAY, maximize=True),
    SGD(momentum=MOMENTUM, foreach=True),
    SGD(momentum=MOMENTUM, fused=True),
    grouped(SGD(momentum=MOMENTUM, weight_decay=DECAY)),
    grouped(SGD(momentum=MOMENTUM), last_layer),
    grouped(SGD(momentum=MOMENTUM), by_name),
    ADAM(),
    ADAM(weight_decay=DECAY),
    ADAM(weight_decay=DECAY, amsgrad=True),
    ADAM(weight_decay=DECAY, maximize=True),
    ADAM(weight_decay=DECAY, decoupled_weight_decay=True),
    ADAM(foreach=False),
    ADAM(fused=True),
    grouped(ADAM(weight_decay=DECAY)),
    ADAMW(weight_decay=DECAY),
    ADAMW(weight_decay=DECAY, amsgrad=True, maximize=True),
    ADAMW(fused=True),
    grouped(ADAMW(weight_decay=DECAY)),
    grouped(ADAMW(), last_layer),
    NADAM(),
    NADAM(weight_decay=DECAY, momentum_decay=Each(4e-3, 1e-2, 0.1, 0.0)),
    NADAM(weight_decay=DECAY, decoupled_weight_decay=True),
    NADAM(maximize=True),
    NADAM(weight_decay=DECAY, decoupled_weight_decay=True, maximize=True, foreach=True),
    grouped(NADAM(weight_decay=DECAY)),
    # Its variance is rectified from a step on that depends on beta2; for two lanes that is the sixth.
    *(
        replace(row, rounds=8)
        for row in (
            RADAM(),
            RADAM(weight_decay=DECAY),
            RADAM(weight_decay=DECAY, decoupled_weight_decay=True),
            RADAM(maximize=True),
            RADAM(weight_decay=DECAY, decoupled_weight_decay=True, maximize=True, foreach=True),
            # Where beta2 is 2/3 or less it is never rectified.
            of(torch.optim.RAdam, lr=LR, betas=(0.9, Each(0.5, 0.99, 0.6, 0.9)), eps=EPS),
            grouped(RADAM(weight_decay=DECAY)),
        )
    ),
    ADAMAX(),
    ADAMAX(weight_decay=DECAY),
    ADAMAX(maximize=True),
    ADAMAX(weight_decay=DECAY, maximize=True, foreach=True),
    grouped(ADAMAX(weight_decay=DECAY)),
    ADADELTA(),
    ADADELTA(rho=Each(0.9, 0.5, 0.8, 0.95), weight_decay=DECAY),
    ADADELTA(maximize=True),
    ADADELTA(weight_decay=DECAY, maximize=True, foreach=True),
    grouped(ADADELTA(weight_decay=DECAY)),
    ADAGRAD(),
    ADAGRAD(lr_decay=Each(0.0, 0.1, 0.5, 0.01), weight_decay=DECAY),
    ADAGRAD(initial_accumulator_value=Each(0.0, 0.1, 1.0, 0.5), maximize=True),
    ADAGRAD(weight_decay=DECAY, maximize=True, foreach=True),
    ADAGRAD(fused=True),
    grouped(ADAGRAD(weight_decay=DECAY)),
    Row("Adagrad whose biases are added later", grown_adagrad, kind=torch.optim.Adagrad, groups=lambda model: model),
    RMSPROP(),
    RMSPROP(alpha=Each(0.9, 0.5, 0.99, 0.8), weight_decay=DECAY),
    RMSPROP(momentum=Each(0.9, 0.0, 0.5, 0.2)),
    RMSPROP(momentum=MOMENTUM, weight_decay=DECAY, maximize=True, foreach=True),
    RMSPROP(momentum=Each(0.9, 0.0, 0.5, 0.0), weight_decay=DECAY, centered=True, note="some of them 0"),
    RMSPROP(centered=True, momentum=0.5),
    RMSPROP(maximize=True),
    grouped(RMSPROP(weight_decay=DECAY, centered=True)),
    RPROP(),
    RPROP(etas=(Each(0.5, 0.3, 0.8, 0.1), Each(1.2, 1.5, 2.0, 1.1)), step_sizes=(Each(1e-6, 1e-3, 1e-2, 1e-4), 0.1)),
    RPROP(maximize=True),
    grouped(RPROP(maximize=True, foreach=True)),
    ASGD(),
    ASGD(lambd=Each(1e-4, 1e-2, 0.1, 0.0), alpha=Each(0.75, 0.5, 0.9, 1.0), t0=Each(1.0, 2.0, 3.0, 1e6)),
    ASGD(weight_decay=DECAY, maximize=True),
    grouped(ASGD(weight_decay=DECAY)),
    ADAFACTOR(),
    ADAFACTOR(beta2_decay=Each(-0.8, -0.5, -0.9, -0.1), d=Each(1.0, 1.5, 2.0, 1.1), weight_decay=DECAY),
    ADAFACTOR(maximize=True, foreach=False),
    grouped(ADAFACTOR(weight_decay=DECAY)),
    *lane_by_lane(
        "LBFGS.step evaluates the loss itself, through a closure",
        replace(LBFGS(max_iter=Each(3, 4, 2, 5)), run=Closing),
        replace(LBFGS(history_size=Each(2, 3, 10, 5), line_search_fn="strong_wolfe"), run=Closing),
    ),
    Row("DampedMomentum, a user's own", lambda p, lane: DampedMomentum(p, of_lane(LR, lane), of_lane(MOMENTUM, lane))),
    grouped(Row("DampedMomentum, a user's own,", lambda p, lane: DampedMomentum(p, of_lane(LR, lane)))),
    Row("Adam(lr=a tensor)", tensor_lr),
    Row("SGD with a hook after each step", hooked),
    *(
        replace(row, name=f"{row.name} of {what}", model=model)
        for what, model in (
            ("a part without gradients", with_an_unused_part),
            ("parameters of two dtypes", Mixed),
            ("a float64 model", double),
        )
        for row in (SGD(momentum=MOMENTUM), ADAMW(weight_decay=DECAY), RMSPROP())
    ),
    *lane_by_lane(
        "sparse",
        *(
            replace(row, name=f"{row.name} of sparse gradients", model=Bag, tokens=True)
            for row in (SGD(), of(torch.optim.SparseAdam, lr=LR, betas=BETAS, eps=EPS), ADAGRAD())
        ),
    ),
]
if hasattr(torch.optim, "Muon"):
    MUON = functools.partial(of, torch.optim.Muon, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    ROWS += [
        # It orthogonalizes in bfloat16, where what is rounding elsewhere can become a difference of 1 in 256.
        replace(row, model=without_biases, rtol=5e-3)
        for row in (
            MUON(),
            MUON(nesterov=False, ns_steps=3),
            MUON(adjust_lr_fn="match_rms_adamw"),
        )
    ]


def task_of(row: Row) -> type:
    class Task:
        def build_model(self, config: Config) -> nn.Module:
            return row.model()

        def build_optimizer(self, model: nn.Module, config: Config) -> Optimizer:
            return row.build(row.groups(model), config["lane"])

        def train_dataloader(self, config: Config) -> list[Any]:
            x, y = (reference.words(16) if row.tokens else reference.vectors(16, 6)).tensors
            return [(x.double() if row.model is double else x, y)]

        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            x, y = batch
            return F.cross_entropy(model(x), y)

    return Task


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_optimizers(row: Row) -> None:
    assert_equal_to_alone(
        task_of(row),
        [{"seed": lane + 1, "lane": lane} for lane in range(4)],
        row.rounds,
        strategy=row.strategy,
        reason=row.reason,
        joins_later=True,
        rtol=row.rtol,
        run=row.run,
    )


def test_no_two_rows_have_one_name() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_class_of_torch_optim_has_a_row() -> None:
    kinds = [value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, Optimizer)]
    assert set(kinds) - {row.kind for row in ROWS} == {Optimizer}


# Native updates, without a model's forward and backward pass: in float64, where a slip is not taken for rounding

NATIVE = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
}


class Twins:
    """Lanes under one optimizer of an array, and twins of them under torch's own, given the same gradients."""

    def __init__(self, row: Row, dtype: torch.dtype = torch.float64) -> None:
        self.row, self.dtype = row, dtype
        self.names = tuple(name for name, _ in row.model().named_parameters())
        self.lanes: dict[int, Lane] = {}
        self.twins: dict[int, Lane] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.stack: LaneStack
        self.optimizer: FusedOptimizer

    def join(self, *lanes: int, after: int = 0) -> None:
        """Lanes join; before that they take some steps alone."""
        for number in lanes:
            torch.manual_seed(number)
            model = self.row.model().to(self.dtype)
            for place in (self.lanes, self.twins):
                own = copy.deepcopy(model)
                place[number] = Lane(str(number), own, {ONLY: self.row.build(self.row.groups(own), number)})
            for _ in range(after):
                self._step_alone(number, self._gradients(number, self.names), self.lanes, self.twins)
        self._stack()

    def leave(self, lane: int) -> None:
        del self.lanes[lane], self.twins[lane]
        self._stack()

    def scale(self, lane: int, **factors: float) -> None:
        """Set numbers of a lane to so many times what its optimizer was built with, as a schedule would."""
        for place in (self.lanes, self.twins):
            optimizer = place[lane].optimizers[ONLY]
            for group in optimizer.param_groups:
                for name in factors.keys() & optimizer.defaults.keys():
                    group[name] = factors[name] * optimizer.defaults[name]

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Steps the twins with new gradients, and returns those for the lanes."""
        own = {number: self._gradients(number, names) for number in self.lanes}
        for number, gradients in own.items():
            self._step_alone(number, gradients, self.twins)
        return {name: torch.stack([own[number][name] for number in self.lanes]) for name in names}

    def assert_equal(self, where: str) -> None:
        for number, lane in self.lanes.items():
            twin = self.twins[number]
            for own, other in ((lane.model, twin.model), (lane.optimizers[ONLY], twin.optimizers[ONLY])):
                state, expected = own.state_dict(), other.state_dict()
                assert_same(state, expected, f"{where}, lane {number}, {type(own).__name__}", rtol=1e-9, atol=1e-12)

    def _gradients(self, lane: int, names: Sequence[str]) -> dict[str, Tensor]:
        parameters = dict((self.lanes | self.twins)[lane].parameters())
        return {name: torch.randn(parameters[name].shape, generator=self.generator, dtype=self.dtype) for name in names}

    @staticmethod
    def _step_alone(lane: int, gradients: dict[str, Tensor], *places: dict[int, Lane]) -> None:
        for place in places:
            for name, parameter in place[lane].parameters():
                parameter.grad = gradients.get(name)
            place[lane].optimizers[ONLY].step()

    def _stack(self) -> None:
        for lane in self.lanes.values():
            lane.detach_storage()
        self.stack = LaneStack(list(self.lanes.values()), torch.device("cpu"))
        self.optimizer = fuse_optimizer(list(self.lanes.values()), self.stack)


def is_plain(row: Row) -> bool:
    return row.kind in NATIVE and row.model is mlp


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if is_plain(row)])
def test_native_updates_step_by_step(row: Row) -> None:
    twins = Twins(row)
    twins.join(0, 1, 2)
    without = {0: "2.bias", 1: "0.bias", 4: "0.bias", 6: "2.weight"}
    if row.kind is torch.optim.SGD and "fused" in row.name:  # fails where first gradients come one after the other
        without = {4: "0.bias", 6: "2.weight"}
    for step in range(12):
        if step == 3:
            twins.join(3, after=2)
        if step == 8:
            twins.leave(1)
        for lane in twins.lanes:
            twins.scale(lane, lr=0.9**step)
        if step in (5, 7):  # a momentum and a decay that were there rest for two steps
            twins.scale(2, momentum=float(step == 7), weight_decay=float(step == 7))
        gradients = twins.gradients([name for name in twins.names if name != without.get(step)])
        assert isinstance(twins.optimizer, NativeOptimizer)
        twins.optimizer.step(gradients)
        twins.assert_equal(f"step {step + 1}")


KINDS = {row.kind for row in ROWS if row.kind is not None}


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_which_classes_have_native_updates(kind: type[Optimizer]) -> None:
    model = without_biases()
    lane = Lane("ada", model, {ONLY: kind(model.parameters())})
    optimizer = fuse_optimizer([lane], LaneStack([lane], torch.device("cpu")))
    assert isinstance(optimizer, NativeOptimizer) == (kind in NATIVE)


def test_a_momentum_that_comes_later_starts_from_zeros() -> None:
    """Torch's own RMSprop ends in a KeyError there, so the twin is given what it lacks."""
    twins = Twins(RMSPROP())
    twins.join(0, 1)
    twins.optimizer.step(twins.gradients(twins.names))
    for place in (twins.lanes, twins.twins):
        place[1].optimizers[ONLY].param_groups[0]["momentum"] = 0.5
    for state in twins.twins[1].optimizers[ONLY].state.values():
        state["momentum_buffer"] = torch.zeros_like(state["square_avg"])
    for step in range(2):
        twins.optimizer.step(twins.gradients(twins.names))
        twins.assert_equal(f"step {step + 2}")


NEAR_1 = [  # in bfloat16, 0.99 is 0.988
    of(torch.optim.NAdam, lr=LR, betas=(0.9, 0.99)),
    of(torch.optim.RAdam, lr=LR, betas=(0.9, 0.99)),
    of(torch.optim.RMSprop, lr=LR, alpha=0.99, momentum=0.99),
    of(torch.optim.Adamax, lr=LR, betas=(0.9, 0.99)),
    of(torch.optim.Adadelta, lr=LR, rho=0.99),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in NEAR_1])
def test_factors_near_1_in_bfloat16(row: Row) -> None:
    twins = Twins(row, torch.bfloat16)
    twins.join(0, 1)
    for _ in range(100):
        twins.optimizer.step(twins.gradients(twins.names))
    for number, lane in twins.lanes.items():
        expected = twins.twins[number].optimizers[ONLY].state_dict()["state"]
        for index, state in lane.optimizers[ONLY].state_dict()["state"].items():
            for key, entry in state.items():
                assert entry.dtype == expected[index][key].dtype
                assert float(entry.norm()) == pytest.approx(float(expected[index][key].norm()), rel=0.05), key


COMPILED = [
    RMSPROP(momentum=Each(0.9, 0.0, 0.5, 0.0), weight_decay=DECAY, centered=True),
    ADAGRAD(lr_decay=Each(0.0, 0.1, 0.5, 0.01), weight_decay=DECAY, maximize=True),
    NADAM(weight_decay=DECAY, decoupled_weight_decay=True),
    RADAM(weight_decay=DECAY),
    ADAMAX(weight_decay=DECAY),
    ADADELTA(weight_decay=DECAY),
    ASGD(t0=Each(1.0, 2.0, 3.0, 1e6), weight_decay=DECAY),
    RPROP(),
]


def apply_all(updates: list[tuple[type[NativeOptimizer], list[GroupUpdate]]], tensors: dict[str, Any]) -> list[Tensor]:
    for (optimizer, own), (parameters, gradients, read) in zip(updates, tensors["lanes"], strict=True):
        given = [replace(update, **tensors_of) for update, tensors_of in zip(own, read, strict=True)]
        optimizer.apply(parameters, gradients, given)
    return [parameters["0.weight"].sum()]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler")
def test_native_updates_compile() -> None:
    """All in one function, which is compiled once and then serves other numbers of lanes."""
    every = [Twins(replace(row, model=without_biases)) for row in COMPILED]
    for twins in every:
        twins.join(0, 1, 2)
    compiled, first_forms = None, []
    for step in range(9):
        arguments, updates = [], []
        for twins in every:
            if step == 3:
                twins.join(3, after=2)
            if step == 7:
                twins.leave(0)
            assert isinstance(twins.optimizer, NativeOptimizer)
            own = twins.optimizer.prepare(twins.names)
            read = [{"numbers": u.numbers, "state": u.state, "clocks": u.clocks} for u in own]
            parameters = {name: tensor.detach() for name, tensor in twins.stack.parameters.items()}
            arguments.append((parameters, twins.gradients(twins.names), read))
            updates.append((type(twins.optimizer), own))
        forms = [[update.form for update in own] for _, own in updates]
        tensors = {"lanes": arguments, "batch": ()}
        if compiled is None:
            compiled, first_forms = CompiledStep(functools.partial(apply_all, updates), tensors), forms
        assert forms == first_forms
        compiled.bind(tensors)(())
        for twins in every:
            twins.assert_equal(f"{twins.row.name}, step {step + 1}")
