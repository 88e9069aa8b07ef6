"""FusedTrainables for the tests of the front ends: tiny, deterministic, without shuffling or dropout."""

from __future__ import annotations

import os
from typing import Any

import torch
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
