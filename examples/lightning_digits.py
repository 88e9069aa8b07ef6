"""Tunes a LightningModule on scikit-learn's digits with Optuna, many trials at once."""

import argparse
import logging
import time
import warnings

import lightning
import optuna
import torch
import torch.nn.functional as F
from digits import load_split
from torch import nn
from torch.utils.data import DataLoader

import hfta_tune


class Digits(lightning.LightningDataModule):
    def setup(self, stage):
        self.train, self.val = load_split()

    def train_dataloader(self):
        order = torch.Generator().manual_seed(0)
        return DataLoader(self.train, batch_size=64, shuffle=True, generator=order)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=len(self.val))


class MLP(lightning.LightningModule):
    def __init__(self, lr, weight_decay):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_accuracy", (self.net(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


def suggest(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-4, 3e-2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
    }


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--trials", type=int, default=32)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))
begin = time.perf_counter()
trainable = hfta_tune.lightning.trainable(MLP, Digits())
hfta_tune.optimize(study, trainable, suggest, n_trials=args.trials, epochs=args.epochs, metric="val_accuracy", B=32)
print(f"{len(study.trials)} trials in {time.perf_counter() - begin:.1f} s")
print(f"best accuracy {study.best_value:.4f} with {study.best_params}")
