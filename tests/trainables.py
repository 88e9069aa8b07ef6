"""FusedTrainables for the tests of the front ends: tiny, deterministic, without shuffling or dropout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from ray import tune
from torch import Tensor, nn
from torch.nn import functional as F

from hfta_tune import FusedTrainable


def points(samples: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three Gaussian classes in 8 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % 3
    centres = torch.randn(3, 8, generator=generator)
    return centres[y] + torch.randn(samples, 8, generator=generator), y


class Points(FusedTrainable):
    """A small MLP; config: lr, and optionally hidden, seed."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        hidden = config.get("hidden", 16)
        return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        x, y = points()
        return list(zip(x.split(32), y.split(32), strict=True))

    def val_dataloader(self, config: dict[str, Any]) -> Any:
        return [points(seed=1)]

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def validation_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


class Watched(Points):
    """Also reports its process: threads, working directory and its own process id."""

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        in_trial_directory = os.getcwd() == self.logdir
        return {"threads": torch.get_num_threads(), "in_trial_directory": float(in_trial_directory)}


class Scheduled(Points):
    """With a schedule; reports its lr, its rank and which trials are in its array, and keeps what it was given.

    Config: sgd (or else AdamW), lr, momentum, weight_decay, batch_size, rank, and a directory `notes`.
    """

    gamma = 0.7

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        lr, decay = config["lr"], config["weight_decay"]
        if config["sgd"]:
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=config["momentum"], weight_decay=decay)
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(config["momentum"], 0.99), weight_decay=decay)

    def build_lr_scheduler(self, optimizer: Any, config: dict[str, Any]) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=self.gamma)

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        x, y = points()
        return list(zip(x.split(config["batch_size"]), y.split(config["batch_size"]), strict=True))

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        assert self._worker is not None
        arrays = [array["trials"] for array in self._worker.describe()["arrays"]]
        (own,) = [array for array in arrays if self._lane_name in array]
        together = sum(2 ** int(name.split("_")[1]) for name in own)
        return {"rank": config["rank"], "together": together}

    def load_checkpoint(self, checkpoint: Any) -> None:
        super().load_checkpoint(checkpoint)
        assert self._worker is not None
        torch.save(self._worker.state_dict(self._lane_name), Path(self.config["notes"], f"{self._lane_name}.pt"))


class FailsToBuild(Points):
    """Its build_model raises in the trials whose config says so."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        if config["fails"]:
            raise ValueError("no such model")
        return super().build_model(config)


class WithData(Points):
    """Gets its data through tune.with_parameters."""

    def setup(self, config: dict[str, Any], data: Any = None) -> None:
        self.data = data

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        return [self.data.batch]

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        return {"data": float(id(self.data))}


class Batch:
    """Data that cannot be compared by value, as data sets are."""

    __slots__ = ("batch",)

    def __init__(self) -> None:
        self.batch = points()


class Lacking(FusedTrainable):
    """Has no training_step."""

    build_model = Points.build_model
    build_optimizer = Points.build_optimizer
    train_dataloader = Points.train_dataloader


class Climb(FusedTrainable):
    """Its weight grows by one each round, so that a plain trainable can report the same: PlainClimb does.

    config: peak, where the score is best; fails_at, a height at which evaluate raises as often as `failures` says.
    """

    setups = 0

    def setup(self, config: dict[str, Any]) -> None:
        self.setups += 1

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        return [torch.ones(1, 1)]

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        return -model(batch).mean()

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        height = float(model.weight)
        fail_if_due(self.trial_id, height, config)
        return {"height": height, "score": -abs(height - config["peak"]), "setups": self.setups}


class PlainClimb(tune.Trainable):
    """What Climb reports, without hfta_tune and without torch."""

    setups = 0

    def setup(self, config: dict[str, Any]) -> None:
        self.setups += 1
        self.height = 0.0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True

    def step(self) -> dict[str, float]:
        self.height += 1
        fail_if_due(self.trial_id, self.height, self.config)
        return {"height": self.height, "score": -abs(self.height - self.config["peak"]), "setups": self.setups}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "height.json").write_text(json.dumps(self.height))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.height = json.loads(Path(checkpoint_dir, "height.json").read_text())


def fail_if_due(trial_id: str, height: float, config: dict[str, Any]) -> None:
    """Raise, unless the trial has raised often enough; files named after the trial keep count of that."""
    if height != config.get("fails_at"):
        return
    marks = Path(config["marks"])
    had = len(list(marks.glob(f"{trial_id}.*")))
    if had < config["failures"]:
        (marks / f"{trial_id}.{had}").touch()
        raise ValueError(f"fell at {height}")
