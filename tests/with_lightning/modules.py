"""Ordinary LightningModules, and what lightning's own Trainer makes of them."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 3


def data(samples: int = 72, shape: tuple[int, ...] = (8,), seed: int = 0) -> TensorDataset:
    x = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(seed))
    flat = x.flatten(1)
    return TensorDataset(x, (flat[:, 0] > 0).long() + (flat.sum(1) > 0).long())


class Data(lightning.LightningDataModule):
    def __init__(self, shape: tuple[int, ...] = (8,), batch_size: int = 20) -> None:
        super().__init__()
        self.shape, self.batch_size = shape, batch_size

    def setup(self, stage: str) -> None:
        self.train, self.val = data(72, self.shape), data(30, self.shape, seed=1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=16)


class Classifier(lightning.LightningModule):
    """An MLP with AdamW, that logs in all the usual ways."""

    def __init__(self, lr: float = 1e-3, smoothing: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = self.build(width)

    def build(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        mix = self.hparams.smoothing
        loss = (1 - mix) * F.cross_entropy(logits, y) - mix * logits.log_softmax(1).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"train_acc": (logits.argmax(1) == y).float().mean()}, on_step=False, on_epoch=True)
        self.log("last", loss.detach() * self.lr)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4, weight_decay=0.1)


class Convolved(Classifier):
    """Batch norm, and a schedule by step."""

    def build(self, width: int) -> nn.Module:
        first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Recurrent(Classifier):
    """An LSTM, and a schedule that watches a metric."""

    def build(self, width: int) -> nn.Module:
        self.head = nn.Linear(8, CLASSES)
        return nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)[0][:, -1])

    def on_validation_epoch_end(self) -> None:
        self.log("head", self.head.weight.square().sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=self.lr, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def by_lightning(kind: Any, config: dict[str, Any], datamodule: Any, epochs: int, **trainer: Any) -> Any:
    """The metrics of each epoch, and the weights at the end, of lightning's own Trainer."""
    torch.manual_seed(0)
    module = kind(**config)
    seen: list[dict[str, float]] = []

    class Notes(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append({})

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.note(trainer)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.note(trainer)

        def note(self, trainer: Any) -> None:
            if seen:
                seen[-1].update({name: float(value) for name, value in trainer.callback_metrics.items()})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[Notes()],
            **trainer,
        ).fit(module, datamodule=datamodule)
    return seen, module.state_dict()
