"""Measures what fusing a training function of the user's own gains.

    python benchmarks/own_loop.py --out own_loop      # writes benchmarks/results/own_loop.json

B trials of the digits MLP (64-64-64-10, Adam, batches of 64), each with its own learning rate, trained

    plain loop       one after the other, as study.optimize would
    bare criterion   in lanes, with prepare(model, optimizer, loader)
    prepared         in lanes, the criterion prepared, too
    FusedTrainable   as the lanes of a Worker, from hooks instead of a loop

for as many epochs, on the same batches, with as many threads. A measurement is a whole run, building the models
and the choice of a strategy included. The contenders take turns --repeats times; ratios are of medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine import device_name
from torch import Tensor, nn

import hfta_tune
from hfta_tune.loops import LaneRuns

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(EXAMPLES))

import digits  # noqa: E402

BARS = {"bare criterion": 3.5, "prepared": 6.0}
BAR_OVER_FUSED_TRAINABLE = 0.7


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    return [(images.flatten(1), labels) for images, labels in digits.train_batches()]


def learning_rates(lanes: int) -> list[float]:
    return [1e-4 * 30 ** (lane / max(1, lanes - 1)) for lane in range(lanes)]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(lr: float, epochs: int, prepare_criterion: bool) -> float:
    """The training function; outside fused runs it is a plain loop."""
    torch.manual_seed(0)
    model, criterion = build_model(), F.cross_entropy
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer, loader = hfta_tune.prepare(model, optimizer, batches())
    if prepare_criterion:
        criterion = hfta_tune.prepare(criterion)
    loss = torch.zeros(())
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            hfta_tune.backward(loss)
            optimizer.step()
    return loss.item()


class Digits(hfta_tune.FusedTrainable):
    def build_model(self, config):
        return build_model()

    def build_optimizer(self, model, config):
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def train_dataloader(self, config):
        return batches()

    def training_step(self, model, batch, config):
        images, labels = batch
        return F.cross_entropy(model(images), labels)


def plain(lanes: int, epochs: int) -> list[float]:
    return [train(lr, epochs, False) for lr in learning_rates(lanes)]


def own_loop(lanes: int, epochs: int, prepare_criterion: bool) -> list[float]:
    losses: dict[str, float] = {}
    with LaneRuns() as runs:
        for lane, lr in enumerate(learning_rates(lanes)):
            runs.start(str(lane), functools.partial(train, lr, epochs, prepare_criterion))
        while len(runs):
            for name, ended, _ in runs.wait():
                if ended.error is not None:
                    raise ended.error
                losses[name] = ended.value
    return [losses[str(lane)] for lane in range(lanes)]


def fused_trainable(lanes: int, epochs: int, strategy: str | None = None) -> list[float]:
    worker = hfta_tune.Worker(lanes, device="cpu", strategy=strategy)
    for lane, lr in enumerate(learning_rates(lanes)):
        config = {"lr": lr}
        worker.add(str(lane), Digits._outside_tune(config), config)
    for epoch in range(epochs):
        results = worker.run_round(rounds_left=epochs - epoch - 1)
    return [results[str(lane)]["train_loss"] for lane in range(lanes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--B", type=int, default=32, help="trials that train at once")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="name of the JSON file in benchmarks/results/, without .json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contenders: dict[str, Callable[[], list[float]]] = {
        "plain loop": functools.partial(plain, args.B, args.epochs),
        "bare criterion": functools.partial(own_loop, args.B, args.epochs, False),
        "prepared": functools.partial(own_loop, args.B, args.epochs, True),
        "FusedTrainable": functools.partial(fused_trainable, args.B, args.epochs),
        "FusedTrainable, vmap": functools.partial(fused_trainable, args.B, args.epochs, "vmap"),
    }
    for name in contenders:
        contenders[name]()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {}
    for repeat in range(args.repeats):
        names = list(contenders)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            begin = time.perf_counter()
            losses[name] = contenders[name]()
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    rows: list[dict[str, Any]] = []
    steps = args.epochs * len(batches())
    for name, own in seconds.items():
        row = {
            "contender": name,
            "seconds": own,
            "ms_a_step": 1e3 * medians[name] / steps,
            "over_plain_loop": medians["plain loop"] / medians[name],
        }
        if name in BARS or name == "plain loop":
            pairs = zip(losses[name], losses["plain loop"], strict=True)
            row["loss_differs_by"] = max(abs(a - b) / abs(b) for a, b in pairs)
        rows.append(row)
    print(f"\n{args.B} trials of {args.epochs} epochs, {args.threads} threads, {device_name(torch.device('cpu'))}:\n")
    digits.print_table(
        ["", "s, median", "range", "ms a step", "over the plain loop", "loss differs by"],
        [
            [
                row["contender"],
                f"{medians[row['contender']]:.2f}",
                f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}",
                f"{row['ms_a_step']:.2f}",
                f"{row['over_plain_loop']:.2f}",
                f"{row['loss_differs_by']:.0e}" if "loss_differs_by" in row else "-",
            ]
            for row in rows
        ],
    )
    print()
    for name, bar in BARS.items():
        ratio = medians["plain loop"] / medians[name]
        print(f"{name}: {ratio:.2f} over the plain loop, at least {bar}: {'held' if ratio >= bar else 'missed'}")
    ratio = medians["FusedTrainable"] / medians["prepared"]
    verdict = "held" if ratio >= BAR_OVER_FUSED_TRAINABLE else "missed"
    print(f"prepared: {ratio:.2f} of FusedTrainable's speed, at least {BAR_OVER_FUSED_TRAINABLE}: {verdict}")
    if args.out:
        record = {
            "arguments": vars(args),
            "date": time.strftime("%Y-%m-%d"),
            "device": device_name(torch.device("cpu")),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "rows": rows,
        }
        path = RESULTS / f"{args.out}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nWritten: {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
