"""Tunes an MLP on scikit-learn's digits with Ray Tune: a function trainable with a training loop of its own."""

import argparse
import time

import torch
from digits import load_split
from digits_tune import start_ray
from ray import tune
from torch import nn
from torch.utils.data import DataLoader


def train(config):
    torch.manual_seed(0)
    data, val = load_split()
    loader = DataLoader(data, batch_size=64, shuffle=True)
    val_images, val_labels = val.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])
    criterion = nn.CrossEntropyLoss()
    for _ in range(config["epochs"]):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(val_images).argmax(dim=1) == val_labels).float().mean().item()
        tune.report({"accuracy": accuracy, "loss": loss.item()})


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--trials", type=int, default=32)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

start_ray(2)
space = {"lr": tune.loguniform(1e-4, 3e-2), "weight_decay": tune.loguniform(1e-5, 1e-1), "epochs": args.epochs}
begun = time.perf_counter()
analysis = tune.run(
    train,
    config=space,
    num_samples=args.trials,
    metric="accuracy",
    mode="max",
    search_alg=tune.search.BasicVariantGenerator(random_state=0),
    resources_per_trial={"cpu": 1},
    verbose=0,
)
print(f"{len(analysis.trials)} trials in {time.perf_counter() - begun:.0f} s")
print(f"best accuracy {analysis.best_result['accuracy']:.4f} with lr {analysis.best_config['lr']:.2g}")
