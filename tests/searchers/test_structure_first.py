"""StructureFirst: groups of trials that share their structure, under any sampler of Optuna."""

from __future__ import annotations

import doctest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest
import torch
from optuna import samplers
from optuna.trial import TrialState
from torch import Tensor, nn
from torch.nn import functional as F

import hfta_tune
from hfta_tune.searchers import StructureFirst, _structure_first

WIDTHS, DEPTHS = [4, 8, 16], [1, 2, 3]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Optuna says that some of its samplers are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True),
        "width": trial.suggest_categorical("width", WIDTHS),
        "depth": trial.suggest_int("depth", 1, 3),
        "seed": trial.suggest_int("seed", 0, 10_000),
    }


def objective(trial: optuna.Trial) -> float:
    config = suggest(trial)
    return float((config["lr"] - 0.03) ** 2 + abs(config["width"] - 8) + abs(config["depth"] - 2))


def structures(study: optuna.Study) -> list[tuple[int, int]]:
    return [(trial.params["width"], trial.params["depth"]) for trial in study.trials]


SAMPLERS: dict[str, Callable[[], samplers.BaseSampler]] = {
    "random": lambda: samplers.RandomSampler(seed=0),
    "TPE": lambda: samplers.TPESampler(seed=0, n_startup_trials=4),
    "TPE multivariate": lambda: samplers.TPESampler(seed=0, n_startup_trials=4, multivariate=True),
    "GP": lambda: samplers.GPSampler(seed=0, n_startup_trials=4),
    "CMA-ES": lambda: samplers.CmaEsSampler(seed=0, n_startup_trials=2),
    "NSGA-II": lambda: samplers.NSGAIISampler(seed=0, population_size=12),
    "QMC": lambda: samplers.QMCSampler(seed=0, scramble=True),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_groups_share_the_structure_and_nothing_else(name: str) -> None:
    sampler = StructureFirst(SAMPLERS[name](), structural=["width", "depth"], lanes=4)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=20)
    own = structures(study)
    groups = [own[start : start + 4] for start in range(0, 20, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) > 1  # the structure is searched, too
    assert len({trial.params["lr"] for trial in study.trials}) >= 16


def test_the_structure_is_searched_by_the_sampler() -> None:
    study = optuna.create_study(
        sampler=StructureFirst(samplers.TPESampler(seed=0, n_startup_trials=24), structural=["width", "depth"], lanes=4)
    )
    study.optimize(objective, n_trials=96)
    best = Counter(structures(study)[48:])
    assert best[8, 2] >= 24  # of 48; chance would give 5


def test_a_resumed_study_goes_on_with_its_group() -> None:
    study = optuna.create_study()
    for n_trials in (3, 2, 3):
        study.sampler = StructureFirst(samplers.RandomSampler(), structural=["width", "depth"], lanes=4)
        study.optimize(objective, n_trials=n_trials)
    own = structures(study)
    assert len(set(own[:4])) == len(set(own[4:])) == 1


def test_a_group_whose_first_trial_fails_ends() -> None:
    study = optuna.create_study(
        sampler=StructureFirst(samplers.RandomSampler(seed=1), structural=["width", "depth"], lanes=4)
    )
    study.optimize(objective, n_trials=1)
    study.sampler._lanes = 1  # so that the next one begins a group
    failed = study.ask()
    suggest(failed)
    study.sampler._lanes = 4
    study.tell(failed, state=TrialState.FAIL)
    study.optimize(objective, n_trials=4)
    groups = [trial.system_attrs["hfta_tune:group"] for trial in study.trials]
    assert groups == [0, 1, 2, 2, 2, 2]


def test_enqueued_trials_are_in_no_group() -> None:
    study = optuna.create_study(
        sampler=StructureFirst(samplers.RandomSampler(seed=0), structural=["width", "depth"], lanes=3)
    )
    study.optimize(objective, n_trials=1)
    study.enqueue_trial({"lr": 0.05, "width": 4, "depth": 3, "seed": 1})
    study.optimize(objective, n_trials=3)
    assert study.trials[1].params == {"lr": 0.05, "width": 4, "depth": 3, "seed": 1}
    own = structures(study)
    assert own[0] == own[2] == own[3]


def test_a_value_that_the_space_no_longer_has() -> None:
    study = optuna.create_study(sampler=StructureFirst(samplers.RandomSampler(seed=0), structural=["depth"], lanes=8))
    study.optimize(lambda trial: trial.suggest_int("depth", 7, 9), n_trials=1)
    study.optimize(lambda trial: trial.suggest_int("depth", 0, 3), n_trials=3)
    assert all(0 <= trial.params["depth"] <= 3 for trial in study.trials[1:])


class Net(hfta_tune.FusedTrainable):
    """Its width and depth make its signature; its seed does not, though it is an integer too."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(config["seed"])
            hidden = [nn.Sequential(nn.Linear(config["width"], config["width"]), nn.ReLU())] * config["depth"]
            return nn.Sequential(nn.Linear(2, config["width"]), *hidden, nn.Linear(config["width"], 1))

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        x = torch.linspace(-1, 1, 8).reshape(4, 2)
        return [(x, x.sum(1, keepdim=True))]

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)


def share_of_shared(study: optuna.Study) -> float:
    """The share of trials that train in an array with at least three others: with no pruning, eight start at once."""
    arrays = Counter((t.number // 8, t.system_attrs["hfta_tune"]["signature"]) for t in study.trials)
    return sum(count for count in arrays.values() if count >= 4) / len(study.trials)


def test_auto_learns_the_structure_from_signatures() -> None:
    sampler = StructureFirst(samplers.RandomSampler(seed=0), lanes=8)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
    hfta_tune.optimize(study, Net, suggest, n_trials=64, epochs=2, B=8)
    assert sampler.structural(study) == {"width", "depth"}
    later = [trial for trial in study.trials if trial.number >= 16]
    for trial in later:
        assert len({other.params["seed"] for other in later}) > 24
        lead = study.trials[trial.system_attrs["hfta_tune:group"]]
        assert (trial.params["width"], trial.params["depth"]) == (lead.params["width"], lead.params["depth"])

    plain = optuna.create_study(sampler=samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())
    hfta_tune.optimize(plain, Net, suggest, n_trials=64, epochs=2, B=8)
    assert share_of_shared(study) >= 0.8 > share_of_shared(plain)


def test_auto_finds_a_float_that_makes_signatures() -> None:
    class Leaky(Net):
        """The slope is an attribute of a module, so it is in the signature as it is."""

        def build_model(self, config: dict[str, Any]) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(config["slope"]), nn.Linear(4, 1))

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "slope": trial.suggest_float("slope", 0.0, 0.5)}

    sampler = StructureFirst(samplers.RandomSampler(seed=0), lanes=8)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
    hfta_tune.optimize(study, Leaky, space, n_trials=48, epochs=1, B=8)
    assert sampler.structural(study) == {"slope"}
    later = study.trials[24:]
    assert len({trial.params["lr"] for trial in later}) == 24
    assert len({trial.params["slope"] for trial in later}) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampler": "TPE"}, TypeError, "'TPE'.*TPESampler"),
        ({"sampler": samplers.GridSampler({"x": [1]})}, TypeError, "GridSampler.*RandomSampler"),
        ({"sampler": samplers.BruteForceSampler()}, TypeError, "BruteForceSampler"),
        ({"lanes": 0}, ValueError, "got 0"),
        ({"lanes": True}, ValueError, "got True"),
        ({"structural": "width"}, ValueError, "'width'"),
        ({"structural": [1]}, ValueError, r"\[1\]"),
    ],
    ids=["no sampler", "grid", "brute force", "no lanes", "True lanes", "one name", "no name"],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StructureFirst(**{"sampler": samplers.RandomSampler(), **arguments})


def test_docstring_example() -> None:
    assert doctest.testmod(_structure_first).failed == 0
