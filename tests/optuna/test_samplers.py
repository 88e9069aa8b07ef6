"""Every sampler of Optuna, asked for one trial at a time and for many."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
import pytest
import torch
from optuna import samplers
from optuna.trial import FrozenTrial, TrialState
from packaging.version import Version
from torch.nn import functional as F

import hfta_tune

EPOCHS = 2
Make = Callable[[], samplers.BaseSampler]


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.3), "momentum": trial.suggest_float("momentum", 0.0, 0.9)}


class Line(hfta_tune.FusedTrainable):
    """A line through points, with momentum."""

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return _model()

    def build_optimizer(self, model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        return _batches()

    def training_step(self, model: torch.nn.Module, batch: Any, config: dict[str, Any]) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)


def _model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Linear(1, 1)


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.linspace(-1, 1, 8).unsqueeze(1)
    return [(own, 3 * own + 1) for own in x.split(4)]


def objective(trial: optuna.Trial) -> float:
    """The reference in plain PyTorch."""
    config = space(trial)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    loss = float("nan")
    for epoch in range(EPOCHS):
        losses = []
        for x, y in _batches():
            optimizer.zero_grad()
            loss_of_batch = F.mse_loss(model(x), y)
            loss_of_batch.backward()
            optimizer.step()
            losses.append(loss_of_batch.item())
        loss = sum(losses) / len(losses)
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return loss


def _constraints(trial: FrozenTrial) -> Sequence[float]:
    return [trial.params["lr"] - 0.2]


GRID = {"lr": [0.02, 0.1, 0.2], "momentum": [0.0, 0.3, 0.6, 0.9]}

SAMPLERS: dict[str, Make] = {
    "random": lambda: samplers.RandomSampler(seed=0),
    "TPE": lambda: samplers.TPESampler(seed=0, n_startup_trials=4, constant_liar=True),
    "TPE multivariate": lambda: samplers.TPESampler(seed=0, n_startup_trials=4, multivariate=True, constant_liar=True),
    "TPE grouped": lambda: samplers.TPESampler(
        seed=0, n_startup_trials=4, multivariate=True, group=True, constant_liar=True
    ),
    "TPE constrained": lambda: samplers.TPESampler(
        seed=0, n_startup_trials=4, constraints_func=_constraints, constant_liar=True
    ),
    "CMA-ES": lambda: samplers.CmaEsSampler(seed=0, n_startup_trials=2, popsize=4),
    "GP": lambda: samplers.GPSampler(seed=0, n_startup_trials=6),
    "NSGA-II": lambda: samplers.NSGAIISampler(seed=0, population_size=4),
    "NSGA-III": lambda: samplers.NSGAIIISampler(seed=0, population_size=4),
    "QMC": lambda: samplers.QMCSampler(seed=0, scramble=True),
    "grid": lambda: samplers.GridSampler(GRID, seed=0),
    "partial fixed": lambda: samplers.PartialFixedSampler({"momentum": 0.5}, samplers.RandomSampler(seed=0)),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Optuna says that many of its samplers are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def make(name: str) -> samplers.BaseSampler:
    needs = {"CMA-ES": "cmaes", "GP": "scipy"}
    if name in needs:
        pytest.importorskip(needs[name])
    return SAMPLERS[name]()


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_at_a_time_it_suggests_what_study_optimize_gets(name: str) -> None:
    expected = optuna.create_study(sampler=make(name))
    expected.optimize(objective, n_trials=12)
    actual = optuna.create_study(sampler=make(name))
    hfta_tune.optimize(actual, Line, space, n_trials=12, epochs=EPOCHS, B=1)
    assert len(actual.trials) == 12
    for own, other in zip(actual.trials, expected.trials, strict=True):
        assert own.params == pytest.approx(other.params, rel=1e-6)
        assert own.state == other.state  # some are pruned: a study has a MedianPruner
        assert own.values == pytest.approx(other.values, rel=1e-5)
        assert own.intermediate_values == pytest.approx(other.intermediate_values, rel=1e-5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_many_at_once(name: str) -> None:
    study = optuna.create_study(sampler=make(name), pruner=optuna.pruners.NopPruner())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        hfta_tune.optimize(study, Line, space, n_trials=12, epochs=EPOCHS, B=4)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 12
    points = {tuple(trial.params.values()) for trial in study.trials}
    blind = name == "GP" and Version(optuna.__version__) < Version("4.8")  # to the trials that run
    if not blind and not name.startswith("NSGA"):  # whose children may be a parent once more, one at a time too
        assert len(points) == 12
    if name == "grid":
        assert points == {(lr, momentum) for lr in GRID["lr"] for momentum in GRID["momentum"]}


def test_brute_force_ends_when_all_is_tried() -> None:
    def choices(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "lr": trial.suggest_categorical("lr", [0.02, 0.1]),
            "momentum": trial.suggest_categorical("momentum", [0.0, 0.3, 0.6]),
        }

    study = optuna.create_study(sampler=samplers.BruteForceSampler(seed=0))
    hfta_tune.optimize(study, Line, choices, epochs=EPOCHS, B=4)
    points = {tuple(trial.params.values()) for trial in study.trials}
    assert points == {(lr, momentum) for lr in (0.02, 0.1) for momentum in (0.0, 0.3, 0.6)}
    assert all(trial.state.is_finished() for trial in study.trials)


def test_constraints_are_those_of_the_sampler() -> None:
    study = optuna.create_study(sampler=SAMPLERS["TPE constrained"]())
    hfta_tune.optimize(study, Line, space, n_trials=8, epochs=EPOCHS, B=4)
    for trial in study.trials:
        assert trial.system_attrs["constraints"] == pytest.approx(_constraints(trial))
    assert study.best_trial.params["lr"] <= 0.2


@pytest.mark.parametrize(
    ("sampler", "remedy"),
    [
        (lambda: samplers.TPESampler(seed=0, constant_liar=False), r"TPESampler\(constant_liar=True\)"),
        (
            lambda: samplers.PartialFixedSampler({"lr": 0.1}, samplers.TPESampler(constant_liar=False)),
            r"TPESampler\(constant_liar=True\)",
        ),
        (lambda: samplers.CmaEsSampler(seed=0, popsize=3), r"popsize=3.*CmaEsSampler\(popsize=4\)"),
        (lambda: samplers.GridSampler(GRID, seed=0), "n_trials=12"),
    ],
    ids=["TPE", "partial fixed TPE", "CMA-ES", "grid"],
)
def test_a_sampler_that_is_worse_in_batches(sampler: Make, remedy: str, recwarn: pytest.WarningsRecorder) -> None:
    for B in (1, 4):
        study = optuna.create_study(sampler=sampler())
        hfta_tune.optimize(study, Line, space, n_trials=13, epochs=1, B=B)
        told = [str(each.message) for each in recwarn if each.category is UserWarning and "hfta" not in each.filename]
        ours = [message for message in told if "Sampler" in message and ("at once" in message or "repeats" in message)]
        assert len(ours) == (B > 1)
    (message,) = ours
    assert re.search(remedy, message)
