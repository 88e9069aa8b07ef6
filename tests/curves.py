"""A toy objective, as a plain trainable of Tune and as a FusedTrainable: learning curves that the config sets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from ray import tune
from torch import Tensor, nn

from hfta_tune import FusedTrainable


def score(config: dict[str, Any], trained: int) -> float:
    """Where the curve of a config stands after so many iterations."""
    return float(config["ceiling"] * (1 - math.exp(-trained * config["speed"])))


class Stock(tune.Trainable):
    """Knows nothing of hfta_tune. What it has trained is in its checkpoints."""

    def setup(self, config: dict[str, Any]) -> None:
        self.trained = 0

    def step(self) -> dict[str, float]:
        self.trained += 1
        return {"score": score(self.config, self.trained), "trained": self.trained}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "trained").write_text(str(self.trained))

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.trained = int(Path(checkpoint, "trained").read_text())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


class Counting(nn.Module):
    """Its buffer counts the batches that it was trained on."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches.add_(1)
        return x * self.weight


class Packed(FusedTrainable):
    """The same curves, at the place that the model has counted: one batch a round."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return Counting()

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        return [torch.ones(4)]

    def training_step(self, model: nn.Module, batch: Tensor, config: dict[str, Any]) -> Tensor:
        return (model(batch) - 1).square().mean()

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        trained = int(model.get_buffer("batches"))
        return {"score": score(config, trained), "trained": trained}
