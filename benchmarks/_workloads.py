"""The workloads: models, their losses and their batches, in ordinary PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Batch", "Workload", "learning_rates"]

Batch: TypeAlias = tuple[Tensor, ...]

CLASSES = 10
BATCHES = 16
TOKENS = 64
NOISE = 32


@dataclass(frozen=True)
class Workload:
    """What the lanes train.

    Attributes:
        build: Returns a model with new weights.
        losses: Returns {optimizer: 0-d loss} of a model on a batch.
        draw_batch: Returns a batch.
        parts: {optimizer: submodule that it trains}; "" is the whole model.
        betas: Adam's.
        draws: Whether a step draws random numbers, so that no two runs of it agree.
    """

    name: str
    build: Callable[[], nn.Module]
    losses: Callable[[nn.Module, Batch], dict[str, Tensor]]
    draw_batch: Callable[[], Batch]
    parts: tuple[tuple[str, str], ...] = (("all", ""),)
    betas: tuple[float, float] = (0.9, 0.999)
    draws: bool = False

    def models(self, lanes: int) -> list[nn.Module]:
        """Builds the models of all lanes; lane i has the weights of seed i, whoever trains it."""
        models = []
        with torch.random.fork_rng():
            for lane in range(lanes):
                torch.manual_seed(lane)
                models.append(self.build())
        return models

    def batches(self, device: torch.device) -> list[Batch]:
        """Draws the batches, the same ones each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = [self.draw_batch() for _ in range(BATCHES)]
        return [tuple(tensor.to(device) for tensor in batch) for batch in drawn]

    def optimizers(self, model: nn.Module, rate: float) -> dict[str, torch.optim.Optimizer]:
        """Builds the optimizers of one model."""
        return {
            name: torch.optim.Adam(model.get_submodule(part).parameters(), lr=rate, betas=self.betas)
            for name, part in self.parts
        }


def learning_rates(lanes: int) -> list[float]:
    """The lanes' learning rates, low ones.

    Whoever is faster trains further. If models could get far, dead units and vanishing losses would bring
    denormal numbers, which slow a CPU down, into some measurements and not into others.
    """
    return [float(rate) for rate in np.geomspace(1e-5, 1e-4, lanes)]


def classification(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    inputs, labels = batch
    return {"all": F.cross_entropy(model(inputs), labels)}


def labelled(size: int, *shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(size, *shape), torch.randint(CLASSES, (size,)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def mlp_bn_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, CLASSES),
    )


def cnn(side: int) -> nn.Module:
    """The CNN of examples/digits.py, for images of side * side pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (side // 4) ** 2, CLASSES),
    )


class PointNet(nn.Module):
    """Features of each point of [samples, 3, points], then their maximum over the points."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(3, 32, 1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 64, 1),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Conv1d(64, 128, 1),
            nn.BatchNorm1d(128),
        )
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.features(points).max(dim=2).values)


class Transformer(nn.Module):
    """An encoder of two layers over [samples, tokens], with torch's default dropout of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.position = nn.Parameter(0.02 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position).mean(dim=1))


class Recurrent(nn.Module):
    """An LSTM over [samples, steps, 32]; its last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        outputs, _ = self.lstm(sequences)
        return self.head(outputs[:, -1])


class DCGAN(nn.Module):
    """Radford et al. 2015 (arXiv 1511.06434), for images of 28 * 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 32, 7, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 7, bias=False),
            nn.Flatten(0),
        )


def adversarial(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    (images,) = batch
    discriminator = model.get_submodule("discriminator")
    fakes = model.get_submodule("generator")(torch.randn(len(images), NOISE, 1, 1, device=images.device))
    on_images, on_detached = discriminator(images), discriminator(fakes.detach())
    on_fakes = discriminator(fakes)
    loss = F.binary_cross_entropy_with_logits
    return {
        "generator": loss(on_fakes, torch.ones_like(on_fakes)),
        "discriminator": loss(on_images, torch.ones_like(on_images)) + loss(on_detached, torch.zeros_like(on_detached)),
    }


def _by_name(workloads: Sequence[Workload]) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


WORKLOADS: dict[str, Workload] = _by_name(
    [
        Workload("mlp", mlp, classification, labelled(64, 64)),
        Workload("mlp_bn_dropout", mlp_bn_dropout, classification, labelled(64, 64), draws=True),
        Workload("cnn8", lambda: cnn(8), classification, labelled(32, 1, 8, 8)),
        Workload("cnn28", lambda: cnn(28), classification, labelled(32, 1, 28, 28)),
        Workload("pointnet", PointNet, classification, labelled(32, 3, 64)),
        Workload(
            "transformer",
            Transformer,
            classification,
            lambda: (torch.randint(TOKENS, (32, 16)), torch.randint(CLASSES, (32,))),
            draws=True,
        ),
        Workload("lstm", Recurrent, classification, labelled(32, 16, 32)),
        Workload(
            "dcgan",
            DCGAN,
            adversarial,
            lambda: (torch.rand(32, 1, 28, 28) * 2 - 1,),
            parts=(("generator", "generator"), ("discriminator", "discriminator")),
            betas=(0.5, 0.999),
            draws=True,
        ),
    ]
)
