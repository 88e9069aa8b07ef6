"""Accumulated gradients, rounds of so many steps and bfloat16, each against a plain PyTorch loop."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion.breadth import fused, run_round
from reference import Config, DampedMomentum, assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hfta_tune import FusionError, Worker
from hfta_tune.fusion import COMPILED, FusedArray

ROUNDS = 3
TRIALS = ["ada", "bob", "cyd", "dee"]
LANES: list[Config] = [
    dict(seed=1, lr=0.02, scale=1.0, late="once"),
    dict(seed=2, lr=0.005, scale=2.0, late="twice"),
    dict(seed=3, lr=0.01, scale=0.5, late="once"),
    dict(seed=4, lr=0.03, scale=1.5, late="twice"),
]


class Task:
    """Classification with batch norm, in 7 batches, of which the last is smaller."""

    batches = 7

    def build_model(self, config: Config) -> nn.Module:
        # A bias before batch norm would have no gradient but rounding, which Adam would magnify.
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def build_optimizer(self, model: nn.Module, config: Config) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)

    def train_dataloader(self, config: Config) -> Iterable[Any]:
        x, y = self.samples(8 * self.batches - 3)
        return list(zip(x.split(8), y.split(8), range(self.batches), strict=True))

    def val_dataloader(self, config: Config) -> Iterable[Any]:
        return [self.samples(10)]

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(count, 6, generator=generator)
        return x, x[:, :3].argmax(1)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y, *_ = batch
        return config["scale"] * F.cross_entropy(model(x), y)

    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        x, y = batch
        return {"val_loss": F.cross_entropy(model(x), y)}


class Alone:
    """One trial in plain PyTorch."""

    def __init__(self, task: Any, config: Config) -> None:
        self.task, self.config = task, config
        torch.manual_seed(config["seed"])
        self.model = task.build_model(config)
        optimizer = task.build_optimizer(self.model, config)
        self.optimizers = optimizer if isinstance(optimizer, dict) else {"": optimizer}
        self.scheduler = getattr(task, "build_lr_scheduler", lambda *_: None)(optimizer, config)
        self.accumulate = self.option("accumulate_grad_batches", 1)
        self.steps = self.option("steps_per_round", None)
        self.batches = itertools.cycle(task.train_dataloader(config))
        self.validates = hasattr(task, "validation_step")

    def option(self, name: str, default: Any) -> Any:
        return self.config.get(name, getattr(self.task, name, default))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        lower = self.option("precision", "32") == "bf16"
        return torch.autocast("cpu", dtype=torch.bfloat16) if lower else contextlib.nullcontext()

    def run_round(self) -> dict[str, float]:
        self.model.train()
        steps = self.steps or self.task.batches
        total = samples = 0.0
        for number, batch in enumerate(itertools.islice(self.batches, steps), 1):
            with self.autocast():
                found = self.task.training_step(self.model, batch, self.config)
            losses = found if isinstance(found, dict) else {"": found}
            for name, loss in losses.items():
                (loss / self.accumulate).backward(inputs=self.parameters(name), retain_graph=True)
            if number % self.accumulate == 0 or number == steps:
                self.update()
            total += sum(float(loss.detach()) for loss in losses.values()) * len(batch[0])
            samples += len(batch[0])
        results = {"train_loss": total / samples}
        if self.validates:
            self.model.eval()
            (batch,) = self.task.val_dataloader(self.config)
            with torch.no_grad(), self.autocast():
                metrics = self.task.validation_step(self.model, batch, self.config)
            results |= {name: float(value) for name, value in metrics.items()}
        if self.scheduler is not None and not self.by_steps:
            self.scheduler.step()
        return results

    @property
    def by_steps(self) -> bool:
        return getattr(self.task, "lr_scheduler_interval", "epoch") == "step"

    def parameters(self, name: str) -> list[nn.Parameter]:
        return [parameter for group in self.optimizers[name].param_groups for parameter in group["params"]]

    def update(self) -> None:
        limit = self.option("gradient_clip_val", None)
        for name, optimizer in self.optimizers.items():
            if limit is not None:
                nn.utils.clip_grad_norm_(self.parameters(name), limit)
            optimizer.step()
            optimizer.zero_grad()
        if self.scheduler is not None and self.by_steps:
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": states[""] if list(states) == [""] else states,
                "lr_scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            }
        )


def add(worker: Worker, kind: type[Any], trial: str, config: Config) -> None:
    worker.add(trial, fused(kind)._outside_tune(config), config)


def start(kind: type[Any], configs: list[Config], strategy: str | None = None, lanes: int | None = None) -> Worker:
    worker = Worker(lanes or len(configs), device="cpu", strategy=strategy)
    for trial, config in zip(TRIALS, configs, strict=False):
        add(worker, kind, trial, config)
    return worker


def assert_equal_to_alone(worker: Worker, runs: dict[str, Alone], rounds: int = ROUNDS, atol: float = 1e-6) -> None:
    for round_ in range(1, rounds + 1):
        results = run_round(worker)
        assert results.keys() == runs.keys()
        for trial, run in runs.items():
            metrics = run.run_round()
            where = f"{trial} round {round_}"
            assert_same({name: results[trial][name] for name in metrics}, metrics, where, atol=atol)
            state, expected = worker.state_dict(trial), run.state()
            assert_same({name: state[name] for name in expected}, expected, where, atol=atol)


def runs_of(kind: type[Any], configs: list[Config]) -> dict[str, Alone]:
    return {trial: Alone(kind(), config) for trial, config in zip(TRIALS, configs, strict=False)}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each training step was done."""
    taken: list[str] = []
    for method, way in (("_train_vmap", "vmap"), ("_train_alone", "lane by lane")):
        real = getattr(FusedArray, method)

        def train(*args: Any, real: Any = real, way: str = way) -> Any:
            taken.append(way)
            return real(*args)

        monkeypatch.setattr(FusedArray, method, train)
    return taken


# Accumulated gradients


class Three(Task):
    accumulate_grad_batches = 3


class ThreeOfViews(Three):
    def build_optimizer(self, model: nn.Module, config: Config) -> Any:
        return DampedMomentum(model.parameters(), lr=config["lr"])


class ThreeClipped(Three):
    gradient_clip_val = 0.05


class ThreeByEpochs(Three):
    def build_lr_scheduler(self, optimizer: Any, config: Config) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.5)


class ThreeBySteps(Three):
    """A round has three steps of the optimizer: the schedule ends after three rounds, and raises if it is late."""

    lr_scheduler_interval = "step"

    def build_lr_scheduler(self, optimizer: Any, config: Config) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=3 * ROUNDS + 1)


class ThreeOfTwo(Three):
    """Two optimizers, of which the last batch before a step may have a loss for one only."""

    gradient_clip_val = 0.02

    def build_optimizer(self, model: nn.Module, config: Config) -> Any:
        assert isinstance(model, nn.Sequential)
        return {
            "body": torch.optim.SGD(model[:3].parameters(), lr=config["lr"], momentum=0.9),
            "head": torch.optim.Adam(model[3].parameters(), lr=config["lr"], eps=1e-3),
        }

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        losses = {"body": loss, "head": loss**2}
        return losses if batch[2] in (0, 1, 4, 6) else {"head": losses["head"]}


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
@pytest.mark.parametrize("kind", [Three, ThreeOfViews, ThreeClipped, ThreeByEpochs, ThreeBySteps, ThreeOfTwo])
def test_gradients_are_accumulated(kind: type[Task], strategy: str) -> None:
    worker = start(kind, LANES, strategy)
    assert_equal_to_alone(worker, runs_of(kind, LANES))
    assert [array["strategy"] for array in worker.describe()["arrays"]] == [strategy]


def test_it_is_the_mean_of_the_batches() -> None:
    """Six batches by two are three batches of twice the size, where no batch norm tells them apart."""

    class Small(Task):
        accumulate_grad_batches = 2

        def build_model(self, config: Config) -> nn.Module:
            return nn.Linear(6, 3)

        def train_dataloader(self, config: Config) -> Any:
            x, y = self.samples(48)
            size = 8 * self.per_batch
            return list(zip(x.split(size), y.split(size), strict=True))

        per_batch = 1

    class Large(Small):
        accumulate_grad_batches = 1
        per_batch = 2

    small, large = start(Small, LANES), start(Large, LANES)
    for _ in range(2):
        first, second = run_round(small), run_round(large)
        for trial in TRIALS:
            assert first[trial] == pytest.approx(second[trial], rel=1e-4)
            assert_same(small.state_dict(trial)["model"], large.state_dict(trial)["model"], trial)


def test_config_wins_over_the_class() -> None:
    configs = [config | {"accumulate_grad_batches": n} for config, n in zip(LANES, (1, 2, 3, 2), strict=True)]
    del configs[2]["accumulate_grad_batches"]
    worker = start(Three, configs)
    assert_equal_to_alone(worker, runs_of(Three, configs))
    arrays = {frozenset(array["trials"]) for array in worker.describe()["arrays"]}
    assert arrays == {frozenset({"ada"}), frozenset({"bob", "dee"}), frozenset({"cyd"})}


@pytest.mark.parametrize("kind", [Three, ThreeOfViews, ThreeClipped, ThreeOfTwo])
def test_the_strategy_changes_between_the_batches_of_a_step(kind: type[Task], ways: list[str]) -> None:
    worker = start(kind, LANES, "auto")
    assert_equal_to_alone(worker, runs_of(kind, LANES))
    changes = {number % 7 for number, pair in enumerate(itertools.pairwise(ways), 1) if pair[0] != pair[1]}
    assert changes - {0, 3, 6}, f"all changes are after a step: {ways}"


class ReadsLate(Three):
    """It reads a key that differs between the lanes on the second batch of a step only.

    By then it has changed its batch, and batch norm its statistics: both must be undone.
    """

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        batch[0].mul_(2).sub_(1)
        loss = super().training_step(model, batch, config)
        if batch[2] == 4 and config["late"] == "twice":
            loss = 2 * loss
        return loss


class BranchesLate(Three):
    """It does what vmap cannot on the second batch of a step only."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return 2 * loss if batch[2] == 4 and loss > 0.5 else loss


class NeedsNumberLate(Three):
    """It makes a Python number of a float on the second batch of a step only."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        loss = super().training_step(model, batch, config)
        return loss * (1 + float(config["lr"])) if batch[2] == 4 else loss


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane", "auto"])
@pytest.mark.parametrize(("kind", "arrays"), [(ReadsLate, 2), (BranchesLate, 1), (NeedsNumberLate, 4)])
@pytest.mark.filterwarnings("ignore::hfta_tune.FusionWarning")
def test_an_array_is_split_between_the_batches_of_a_step(
    kind: type[Task], arrays: int, strategy: str, ways: list[str]
) -> None:
    worker = start(kind, LANES, strategy)
    assert_equal_to_alone(worker, runs_of(kind, LANES))
    if strategy == "vmap":
        assert ways[:4] == ["vmap"] * 4  # a whole step and the first batch of the next were fused
        assert len(worker.describe()["arrays"]) == arrays


class Headed(nn.Module):
    """A second head that some trials use when they are told to, so that only some lanes have a gradient of it."""

    def __init__(self, uses_head: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("uses_head", torch.tensor(uses_head))

    def forward(self, x: Tensor, late: bool) -> Tensor:
        return self.body(x) + self.head(x) if late and self.uses_head else self.body(x)  # type: ignore[no-any-return]


class UsesItsHeadLate(ThreeClipped):
    def build_model(self, config: Config) -> nn.Module:
        return Headed(config["late"] == "twice")

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        return F.cross_entropy(model(batch[0], batch[2] == 4), batch[1])

    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        return {"val_loss": F.cross_entropy(model(batch[0], True), batch[1])}


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane", "auto"])
@pytest.mark.filterwarnings("ignore::hfta_tune.FusionWarning")
def test_only_some_lanes_have_a_gradient_on_a_later_batch(strategy: str) -> None:
    assert_equal_to_alone(start(UsesItsHeadLate, LANES, strategy), runs_of(UsesItsHeadLate, LANES))


def test_lanes_join_and_leave_while_gradients_are_accumulated() -> None:
    worker = start(Three, LANES[:3], lanes=4)
    runs = runs_of(Three, LANES)
    last = runs.pop("dee")
    assert_equal_to_alone(worker, runs, rounds=1)
    add(worker, Three, "dee", LANES[3])
    worker.remove("ada")
    del runs["ada"]
    assert_equal_to_alone(worker, runs | {"dee": last}, rounds=2)


class ThreeOfOneForm(ThreeClipped):
    """Without the numbers of the batches, for each of which another step would be compiled."""

    def train_dataloader(self, config: Config) -> Iterable[Any]:
        return [batch[:2] for batch in super().train_dataloader(config)]


@pytest.mark.slow
def test_compiled_steps_accumulate(always_compiles: None, steps_of_tensors: list[int]) -> None:
    worker = start(ThreeOfOneForm, LANES)
    runs = runs_of(ThreeOfOneForm, LANES)
    run_round(worker, rounds_left=1e9)
    run_round(worker, rounds_left=1e9)
    for run in runs.values():
        for _ in range(2):
            run.run_round()
    assert worker.describe()["arrays"][0]["strategy"] == COMPILED
    assert_equal_to_alone(worker, runs, rounds=2, atol=1e-5)
    assert steps_of_tensors == [4] * 18  # of three rounds, all but those of another size


# Rounds of so many steps


class Rounds(Task):
    """Five batches of one size, so that a batch out of turn shows in the loss and nothing else differs."""

    batches = 5

    def train_dataloader(self, config: Config) -> Any:
        x, y = self.samples(40)
        return DataLoader(TensorDataset(x, y), batch_size=8)


@pytest.mark.parametrize("steps", [2, 5, 7, 11])
def test_rounds_go_on_where_the_last_ended(steps: int) -> None:
    configs = [config | {"steps_per_round": steps} for config in LANES]
    worker = start(Rounds, configs)
    assert_equal_to_alone(worker, runs_of(Rounds, configs), rounds=4)
    assert len(worker.describe()["arrays"]) == 1


def test_the_class_says_how_many_steps() -> None:
    class Two(Rounds):
        steps_per_round = 2

    assert_equal_to_alone(start(Two, LANES), runs_of(Two, LANES))


def test_a_step_follows_the_last_batch_of_a_short_round() -> None:
    configs = [config | {"steps_per_round": 4, "accumulate_grad_batches": 3} for config in LANES]
    assert_equal_to_alone(start(Rounds, configs), runs_of(Rounds, configs))


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
def test_trials_of_rounds_of_different_lengths_share_a_worker(strategy: str) -> None:
    configs = [dict(config) for config in LANES]
    for config, steps in zip(configs, (2, None, 7, 2), strict=True):
        config["steps_per_round"] = steps
    worker = start(Rounds, configs, strategy)
    assert_equal_to_alone(worker, runs_of(Rounds, configs))
    arrays = {frozenset(array["trials"]) for array in worker.describe()["arrays"]}
    assert arrays == {frozenset({"ada", "dee"}), frozenset({"bob"}), frozenset({"cyd"})}


@pytest.mark.parametrize("steps", [2, 5, 7])
def test_a_restored_trial_goes_on_at_its_batch(steps: int, tmp_path: Path) -> None:
    configs = [config | {"steps_per_round": steps} for config in LANES[:2]]
    first = start(Rounds, configs)
    runs = runs_of(Rounds, configs)
    assert_equal_to_alone(first, runs)
    for trial in runs:
        (tmp_path / trial).mkdir()
        first.save(trial, tmp_path / trial)
    second = start(Rounds, configs)
    for trial in runs:
        second.load(trial, tmp_path / trial)
    assert_equal_to_alone(second, runs)


SEEN: list[int] = []


class Shuffled(Task):
    batches = 5

    def train_dataloader(self, config: Config) -> Any:
        data = TensorDataset(*self.samples(40), torch.arange(40))
        return DataLoader(data, batch_size=8, shuffle=True)

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        SEEN.extend(batch[2].tolist())
        return super().training_step(model, batch, config)


def test_a_shuffled_pass_goes_over_all_samples_though_rounds_are_shorter() -> None:
    configs = [config | {"steps_per_round": 2} for config in LANES]
    worker = start(Shuffled, configs)
    SEEN.clear()
    for _ in range(5):
        run_round(worker)
    passes = SEEN[:40], SEEN[40:]
    assert [Counter(own) for own in passes] == [Counter(range(40))] * 2
    assert passes[0] != passes[1]


class Failing:
    """Raises in the middle of its first pass, as a file system may."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, batch in enumerate(self.batches):
            if self.passes == 1 and number == 3:
                raise OSError("no such share")
            yield batch


def test_a_loader_that_raised_serves_the_next_trial() -> None:
    class Retried(Rounds):
        steps_per_round = 2

        def train_dataloader(self, config: Config) -> Any:
            return Failing(list(super().train_dataloader(config)))

    worker = start(Retried, LANES[:2])
    run_round(worker)
    assert {type(result) for result in worker.run_round().values()} == {OSError}
    for trial, config in zip(TRIALS, LANES[:2], strict=False):
        add(worker, Retried, trial, config)
    assert_equal_to_alone(worker, runs_of(Rounds, [config | {"steps_per_round": 2} for config in LANES[:2]]))


def test_a_loader_that_has_no_batches_any_more_is_an_error() -> None:
    class Emptied:
        def __init__(self) -> None:
            self.batches = Task().train_dataloader({})

        def __iter__(self) -> Iterator[Any]:
            while self.batches:  # type: ignore[truthy-iterable]
                yield self.batches.pop()  # type: ignore[attr-defined]

    class Once(Rounds):
        steps_per_round = 5

        def train_dataloader(self, config: Config) -> Any:
            return Emptied()

    worker = start(Once, LANES[:2])
    run_round(worker)
    run_round(worker)  # two batches are left
    for result in worker.run_round().values():
        assert isinstance(result, FusionError) and "train_dataloader gave no batch in this round" in str(result)


# bfloat16

DTYPES: list[tuple[torch.dtype, ...]] = []


class Lower(Task):
    """It notes the dtype of what it computes. No Adam, which makes whole steps of rounding."""

    precision = "bf16"

    def build_optimizer(self, model: nn.Module, config: Config) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 8),
            nn.Linear(8, 3),
        )

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
        x, y = batch[:2]
        return config["scale"] * self.noted(model, x, y)

    def validation_step(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        return {"val_loss": self.noted(model, *batch)}

    def noted(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        convolved = model[0](x.unsqueeze(1))
        normed = model[1](convolved)
        hidden = model[4](model[2:4](normed))
        logits = model[5](hidden)
        loss = F.cross_entropy(logits, y)
        squared = logits @ logits.transpose(0, 1)
        DTYPES.append(tuple(t.dtype for t in (convolved, hidden, normed, logits, squared, squared.sum(), loss)))
        return loss + 1e-3 * squared.square().mean()


def dtypes_of(train: Any) -> set[tuple[torch.dtype, ...]]:
    DTYPES.clear()
    train()
    return set(DTYPES)


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
def test_bfloat16_is_autocast(strategy: str) -> None:
    worker = start(Lower, LANES, strategy)
    runs = runs_of(Lower, LANES)
    for round_ in range(ROUNDS):
        results: dict[str, Any] = {}
        computed = dtypes_of(lambda: results.update(run_round(worker)))  # noqa: B023
        expected: dict[str, Any] = {}
        assert computed == dtypes_of(lambda: expected.update({t: r.run_round() for t, r in runs.items()}))  # noqa: B023
        assert all(torch.bfloat16 in dtypes and dtypes[-1] == torch.float32 for dtypes in computed)
        for trial, run in runs.items():
            assert results[trial] == pytest.approx(expected[trial], rel=2e-2), (trial, round_)
            state, own = worker.state_dict(trial), run.state()
            assert_like_in_bfloat16({name: state[name] for name in own}, own, trial)
    assert [array["strategy"] for array in worker.describe()["arrays"]] == [strategy]


def assert_like_in_bfloat16(actual: Any, expected: Any, where: str) -> None:
    """The same tree with the same dtypes, and float32 tensors that are as near as bfloat16 makes them."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_like_in_bfloat16(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and actual.dtype != torch.bfloat16, where
        gap = float((actual - expected).double().abs().max())
        assert gap <= 3e-2 * float(expected.double().abs().max()) + 1e-4, f"{where}: {gap}"


def test_bfloat16_is_not_float32() -> None:
    """What plain PyTorch makes of it in float32 is another loss."""
    (result,) = run_round(start(Lower, LANES[:1])).values()
    (exact,) = runs_of(Lower, [LANES[0] | {"precision": "32"}]).values()
    assert result["val_loss"] != pytest.approx(exact.run_round()["val_loss"], rel=1e-5)


def test_trials_of_both_precisions_share_a_worker() -> None:
    configs = [config | {"precision": p} for config, p in zip(LANES, ("bf16", "32", "bf16", 32), strict=True)]
    worker = start(Lower, configs)
    runs = runs_of(Lower, configs)
    for _ in range(2):
        results = run_round(worker)
        for trial, run in runs.items():
            lower = run.config["precision"] == "bf16"
            assert results[trial] == pytest.approx(run.run_round(), rel=2e-2 if lower else 1e-4)
    assert {frozenset(array["trials"]) for array in worker.describe()["arrays"]} == {
        frozenset({"ada", "cyd"}),
        frozenset({"bob", "dee"}),
    }


def test_bfloat16_accumulates_and_clips() -> None:
    configs = [config | {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1} for config in LANES]
    worker = start(Lower, configs)
    for trial, run in runs_of(Lower, configs).items():
        run.run_round()
        run.run_round()
        if trial == "ada":
            run_round(worker)
            run_round(worker)
        assert_like_in_bfloat16(worker.state_dict(trial)["model"], run.state()["model"], trial)


# What is wrong is said.


@pytest.mark.parametrize("per", ["class", "config"])
@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        *(("precision", value, 'set it to "32" or "bf16"') for value in ("16", 16, "fp16", True, None, ["bf16"])),
        *(("accumulate_grad_batches", v, "set it to a positive integer") for v in (0, -2, 1.5, "2", True, None)),
        *(("steps_per_round", v, "set it to a positive integer") for v in (0, -2, 1.5, "all", True)),
    ],
)
def test_wrong_values(option: str, value: Any, remedy: str, per: str) -> None:
    kind = type("Odd", (Task,), {option: value} if per == "class" else {})
    config = LANES[0] | ({option: value} if per == "config" else {})
    worker = Worker(2, device="cpu")
    with pytest.raises(FusionError) as caught:
        add(worker, kind, "odd", config)
    assert str(caught.value) == f"trial odd: {option} is {value!r}; {remedy}."
    assert worker.free_lanes == 2


def test_gradients_cannot_be_accumulated_for_a_closure() -> None:
    class Closed(Three):
        def build_optimizer(self, model: nn.Module, config: Config) -> Any:
            return torch.optim.LBFGS(model.parameters())

    with pytest.raises(FusionError, match=r"trial odd: LBFGS.* accumulate_grad_batches must be 1"):
        add(Worker(2, device="cpu"), Closed, "odd", LANES[0])
