"""A small real task for the Optuna tests, as a FusedTrainable and as a plain PyTorch objective.

The objective and the functions that it calls use nothing of hfta_tune: they are the reference.
"""

import random
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hfta_tune

EPOCHS = 6
Batch = tuple[Tensor, Tensor]


def _images() -> Batch:
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


IMAGES, LABELS = _images()


def train_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES[:200], LABELS[:200]), batch_size=50)


def val_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES[200:400], LABELS[200:400]), batch_size=100)


def make_model(config: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(config["init"])
        return nn.Sequential(nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 10))


def make_optimizer(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )


class Digits(hfta_tune.FusedTrainable):
    """A small MLP with two metrics of validation, val_loss and accuracy."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return make_model(config)

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return make_optimizer(model, config)

    def train_dataloader(self, config: dict[str, Any]) -> DataLoader[Any]:
        return train_loader()

    def val_dataloader(self, config: dict[str, Any]) -> DataLoader[Any]:
        return val_loader()

    def training_step(self, model: nn.Module, batch: Batch, config: dict[str, Any]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def validation_step(self, model: nn.Module, batch: Batch, config: dict[str, Any]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "val_loss": F.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(-1) == labels).float().mean(),
        }


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 0.2, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.9),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
        "hidden": trial.suggest_categorical("hidden", [8, 16]),
        "init": trial.suggest_int("init", 0, 3),
    }


def plain_epochs(config: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Trains in plain PyTorch. Yields the validation loss and accuracy after each epoch."""
    model = make_model(config)
    optimizer = make_optimizer(model, config)
    for _ in range(EPOCHS):
        model.train()
        for images, labels in train_loader():
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        losses, accuracies = [], []
        with torch.no_grad():
            for images, labels in val_loader():
                logits = model(images)
                losses.append(F.cross_entropy(logits, labels).item())
                accuracies.append((logits.argmax(-1) == labels).float().mean().item())
        yield sum(losses) / len(losses), sum(accuracies) / len(accuracies)


class DigitsTask:
    """What the tests need of the task."""

    epochs = EPOCHS
    trainable = Digits
    suggest = staticmethod(suggest)
    plain_epochs = staticmethod(plain_epochs)

    @staticmethod
    def objective(trial: optuna.Trial) -> float:
        """The reference for optimize(..., metric="val_loss")."""
        loss = float("nan")
        for epoch, (loss, _) in enumerate(plain_epochs(suggest(trial))):
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned()
        return loss

    @staticmethod
    def configs(n: int) -> list[dict[str, Any]]:
        """n configurations to enqueue, always the same."""
        rng = random.Random(0)
        return [
            {
                "lr": 10 ** rng.uniform(-3, -0.8),
                "momentum": rng.uniform(0.0, 0.9),
                "weight_decay": 10 ** rng.uniform(-6, -2),
                "hidden": rng.choice([8, 16]),
                "init": rng.randrange(4),
            }
            for _ in range(n)
        ]


class Line(hfta_tune.FusedTrainable):
    """The cheapest training there is: a line through points, for the tests of how trials end."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def train_dataloader(self, config: dict[str, Any]) -> DataLoader[Any]:
        x = torch.linspace(-1, 1, 4).unsqueeze(1)
        return DataLoader(TensorDataset(x, 3 * x), batch_size=2)

    def training_step(self, model: nn.Module, batch: Batch, config: dict[str, Any]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, much slower when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def digits() -> DigitsTask:
    return DigitsTask()


@pytest.fixture
def line() -> type[hfta_tune.FusedTrainable]:
    return Line


@pytest.fixture
def optuna_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that sees Optuna's lines, which do not propagate by default."""
    optuna.logging.enable_propagation()
    yield caplog
    optuna.logging.disable_propagation()
