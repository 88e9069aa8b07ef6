"""Tunes an MLP on scikit-learn's digits with Optuna: an objective with a training loop of its own."""

import argparse
import time

import optuna
import torch
from digits import load_split
from torch import nn
from torch.utils.data import DataLoader

import hfta_tune


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    train, val = load_split()
    loader = DataLoader(train, batch_size=64, shuffle=True)
    val_images, val_labels = val.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=trial.suggest_float("lr", 1e-4, 3e-2, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, trial.suggest_float("lr_decay", 0.85, 1.0))
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader, criterion = hfta_tune.prepare(model, optimizer, loader, criterion)
    accuracy = 0.0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            hfta_tune.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(val_images).argmax(dim=1) == val_labels).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return accuracy


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--trials", type=int, default=64)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=8, n_warmup_steps=3),
)
begin = time.perf_counter()
hfta_tune.optimize(study, objective, n_trials=args.trials, B=32)
print(f"{len(study.trials)} trials in {time.perf_counter() - begin:.1f} s")
print(f"best accuracy {study.best_value:.4f} with {study.best_params}")
