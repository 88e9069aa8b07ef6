"""Compares whole tune.run calls: HFTAPacker, stock Tune, and stock Tune with reuse_actors=True.

    python benchmarks/tune_vs_stock.py --out NAME        # writes benchmarks/results/NAME.json too

All runs train the same trials, in one command, under one ray.init, in the order in which --runs names them.
The seconds of a run are those of its tune.run call: starting worker processes, importing torch in them,
training, and Tune's default loggers. Ray's own start is not in them. `stock` is the very FusedTrainable that
the packer runs; `plain` is a Trainable in ordinary PyTorch that uses nothing of hfta_tune.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray import tune
from ray.tune.search import BasicVariantGenerator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(EXAMPLES))

import digits  # noqa: E402
from digits_tune import start_ray  # noqa: E402

from hfta_tune import HFTAPacker  # noqa: E402


class PlainDigits(tune.Trainable):
    """The same trial as digits.Digits, as one writes it for stock Tune."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = digits.build_model(config)
        self.optimizer = digits.build_optimizer(self.model, config)
        self.scheduler = digits.build_lr_scheduler(self.optimizer, config)
        self.train_batches, self.val_batches = digits.train_batches(), digits.val_batches()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True

    def step(self) -> dict[str, float]:
        self.model.train()
        total = torch.zeros(())
        for images, labels in self.train_batches:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        self.scheduler.step()
        self.model.eval()
        with torch.no_grad():
            ((images, labels),) = self.val_batches
            logits = self.model(images)
            return {
                "train_loss": (total / len(self.train_batches)).item(),
                "val_loss": F.cross_entropy(logits, labels).item(),
                "accuracy": (logits.argmax(dim=1) == labels).float().mean().item(),
            }


RUNS: dict[str, tuple[str, type[tune.Trainable], bool]] = {
    "packer": ("HFTAPacker(B={lanes})", digits.Digits, False),
    "stock": ("stock", digits.Digits, False),
    "stock-reuse": ("stock, reuse_actors=True", digits.Digits, True),
    "plain": ("stock, plain PyTorch", PlainDigits, False),
    "plain-reuse": ("stock, plain PyTorch, reuse_actors=True", PlainDigits, True),
}


def search_space(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "width": 64,
        "dropout": 0.0,
        "lr": tune.loguniform(1e-4, 3e-2),
        "lr_decay": tune.uniform(0.85, 1.0),
        "beta1": tune.uniform(0.8, 0.95),
        "beta2": tune.uniform(0.95, 0.999),
        "weight_decay": tune.loguniform(1e-5, 1e-1),
    }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Times one tune.run call and returns its row."""
    label, trainable, reuse_actors = RUNS[name]
    trials = args.trials if name == "packer" else args.stock_trials
    start = time.perf_counter()
    analysis = tune.run(
        trainable,
        config=search_space(args.model),
        num_samples=trials,
        search_alg=BasicVariantGenerator(random_state=args.seed),
        metric="accuracy",
        mode="max",
        scheduler=HFTAPacker(B=args.lanes) if name == "packer" else None,
        resources_per_trial={"cpu": args.cpus_per_worker},
        reuse_actors=reuse_actors,
        stop={"training_iteration": args.epochs},
        verbose=0,
    )
    seconds = time.perf_counter() - start
    results = [trial.last_result for trial in analysis.trials]
    if len(results) != trials or any(result["training_iteration"] != args.epochs for result in results):
        raise RuntimeError(f"The run {name!r} did not train {trials} trials for {args.epochs} epochs.")
    return {
        "run": name,
        "label": label.format(lanes=args.lanes),
        "trials": trials,
        "seconds": seconds,
        "seconds_a_trial": seconds / trials,
        "processes": len({result["pid"] for result in results}),
        "threads_a_process": args.cpus_per_worker,
        "best_accuracy": max(result["accuracy"] for result in results),
        "train_losses": [result["train_loss"] for result in results],
    }


def loss_differences(row: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Returns the relative differences between the final train losses of the same trials."""
    pairs = zip(row["train_losses"], other["train_losses"], strict=False)
    return [abs(a - b) / abs(b) for a, b in pairs]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="packer,stock,stock-reuse", help=f"some of {','.join(RUNS)}, in this order")
    parser.add_argument("--model", choices=digits.MODELS, default="mlp")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--stock-trials", type=int, help="trials of each stock run (default: all)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=32, help="B, the trials that share a worker")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray may use")
    parser.add_argument(
        "--cpus-per-worker", type=int, default=1, help="CPUs, and so threads, of a worker or stock trial"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="name of the JSON file in benchmarks/results/, without .json")
    args = parser.parse_args()
    args.runs = args.runs.split(",")
    if unknown := set(args.runs) - set(RUNS):
        parser.error(f"--runs knows {','.join(RUNS)}, not {','.join(sorted(unknown))}.")
    args.stock_trials = args.stock_trials or args.trials
    if not 0 < args.stock_trials <= args.trials:
        parser.error(f"--stock-trials must be from 1 to --trials, {args.trials}, but got {args.stock_trials}.")
    return args


def main() -> None:
    args = parse_args()
    # Ray gives its workers this script's folder and the working directory, but not the rest of sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    start_ray(args.cpus)
    rows = []
    for name in args.runs:
        rows.append(measure(name, args))
        print(f"{rows[-1]['label']}: {rows[-1]['seconds']:.1f} s", flush=True)
    ray.shutdown()

    reference = rows[0]
    for row in rows:
        row["ratio"] = row["seconds_a_trial"] / reference["seconds_a_trial"]
        differences = loss_differences(row, reference)
        row["loss_difference"] = {"median": statistics.median(differences), "max": max(differences)}
        row["scaled"] = row["trials"] != args.trials
    print(f"\nDigits {args.model.upper()}, {args.trials} trials of {args.epochs} epochs, {args.cpus} CPUs:\n")
    header = [
        "run",
        "trials",
        "processes",
        "threads",
        "seconds",
        "s a trial",
        "ratio",
        "accuracy",
        "loss differs by",
    ]
    keys = [
        "label",
        "trials",
        "processes",
        "threads_a_process",
        "seconds",
        "seconds_a_trial",
        "ratio",
        "best_accuracy",
    ]
    table = []
    for row in rows:
        difference = "{median:.0e}, {max:.0e}".format(**row["loss_difference"])
        table.append([*(row[key] for key in keys), difference])
    digits.print_table(header, table)
    print(f"\nratio: seconds a trial, over those of {reference['label']}. accuracy: the best trial's.")
    print("loss differs by: a trial's final train_loss from the same trial's in the first run, relative: median,")
    print("maximum. Runs round differently, and high learning rates magnify it.")
    if any(row["scaled"] for row in rows):
        print(
            f"The stock runs had {args.stock_trials} of the {args.trials} trials. Their start-up is spread "
            "over fewer trials, so their seconds a trial may be too high."
        )
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{args.out}.json"
        record = {
            "command": vars(args),
            "date": time.strftime("%Y-%m-%d"),
            "cpus_of_the_machine": os.cpu_count(),
            "versions": {
                "torch": torch.__version__,
                "ray": ray.__version__,
                "python": platform.python_version(),
            },
            "rows": rows,
        }
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nWritten: {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
