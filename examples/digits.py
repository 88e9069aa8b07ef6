"""What both digits examples share: the data set, the two models and the trainable.

The data are the 1,797 images of 8x8 pixels that scikit-learn ships. 1,408 of them (22 batches of 64) are for
training and 389 (one batch) for validation.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from hfta_tune import FusedTrainable

TRAIN_IMAGES = 1408
SPLIT_SEED = 0

MODELS = ("mlp", "cnn")
WIDTHS = (32, 64)
DROPOUTS = (0.0, 0.2)


@functools.cache
def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the validation set: images [n, 1, 8, 8] from 0 to 1, labels [n]."""
    # The file that sklearn.datasets.load_digits reads, without the 3 seconds that importing sklearn.datasets
    # costs each process.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("The digits come with scikit-learn: pip install 'hfta-tune[examples]'.")
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = torch.tensor(table[:, :64] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(table[:, 64], dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, val = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """Returns the MLP or the CNN that the config asks for, on images [n, 1, 8, 8]."""
    width = config["width"]
    if config["model"] == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(config["dropout"]),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(config["dropout"]),
            nn.Linear(width, 10),
        )
    channels = width // 8
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(8 * channels, 10),
    )


def build_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config["lr"],
        betas=(config["beta1"], config["beta2"]),
        weight_decay=config["weight_decay"],
    )


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, config: Mapping[str, Any]
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=config["lr_decay"])


def train_batches() -> DataLoader[Any]:
    """Returns batches of 64, in one order that stays.

    The split was shuffled once. With one order, a trial sees the same batches in a shared array and in a run
    of its own, so that the two can be compared number by number.
    """
    train, _ = load_split()
    # The sampler yields 64 indices at a time: a batch is one index operation, with nothing to collate.
    batches = BatchSampler(SequentialSampler(train), batch_size=64, drop_last=False)
    return DataLoader(train, sampler=batches, batch_size=None)


def val_batches() -> DataLoader[Any]:
    """Returns the validation set as one batch."""
    _, val = load_split()
    return DataLoader(val, sampler=BatchSampler(SequentialSampler(val), len(val), drop_last=False), batch_size=None)


class Digits(FusedTrainable):
    """One trial: an MLP or a CNN on the digits, with AdamW and an exponential schedule."""

    def build_model(self, config):
        return build_model(config)

    def build_optimizer(self, model, config):
        return build_optimizer(model, config)

    def build_lr_scheduler(self, optimizer, config):
        return build_lr_scheduler(optimizer, config)

    def train_dataloader(self, config):
        return train_batches()

    def val_dataloader(self, config):
        return val_batches()

    def training_step(self, model, batch, config):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def validation_step(self, model, batch, config):
        images, labels = batch
        logits = model(images)
        return {
            "val_loss": F.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(dim=1) == labels).float().mean(),
        }


def models_of(choice: str) -> list[str]:
    """Returns the models that `--model mlp|cnn|both` names."""
    return list(MODELS) if choice == "both" else [choice]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under a header, each column as wide as its widest cell, numbers to the right."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    left = [bool(rows) and isinstance(cell, str) for cell in (rows[0] if rows else header)]
    for line in [list(header), ["-" * width for width in widths], *cells]:
        padded = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ]
        print("  " + "  ".join(padded).rstrip())
