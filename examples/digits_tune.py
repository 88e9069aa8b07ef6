"""Tunes an MLP and a CNN on the digits with Ray Tune: 64 trials that share two workers.

python examples/digits_tune.py --compare
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import ray
from digits import DROPOUTS, MODELS, WIDTHS, Digits, models_of, print_table
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator

from hfta_tune import HFTAPacker


def search_space(model: str) -> dict[str, Any]:
    return {
        # A grid over the models keeps their shares equal in any number of trials.
        "model": tune.grid_search(models_of(model)),
        "width": tune.choice(WIDTHS),
        "dropout": tune.choice(DROPOUTS),
        "lr": tune.loguniform(1e-4, 3e-2),
        "lr_decay": tune.uniform(0.85, 1.0),
        "beta1": tune.uniform(0.8, 0.95),
        "beta2": tune.uniform(0.95, 0.999),
        "weight_decay": tune.loguniform(1e-5, 1e-1),
    }


def start_ray(cpus: int) -> None:
    """Joins the cluster in RAY_ADDRESS, which every Ray job has, or starts Ray on this machine.

    Ray and Tune print warnings only, Tune no tables of its own.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # Ray warns of a change in how it hides GPUs from workers that ask for none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": cpus, "include_dashboard": False}
    ray.init(**local, logging_config=ray.LoggingConfig(log_level="WARNING"))


class Progress(tune.Callback):
    """Prints how far the run is, every ten seconds at most."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.trained = 0
        self.best = 0.0
        self.printed = time.monotonic()

    def on_trial_result(self, iteration, trials, trial, result, **info) -> None:
        self.trained += 1
        self.best = max(self.best, result["accuracy"])
        if time.monotonic() - self.printed > 10:
            self.printed = time.monotonic()
            print(f"  {self.trained} of {self.epochs} epochs, best accuracy {self.best:.4f}", flush=True)


def tune_digits(
    args: argparse.Namespace, trials: int, scheduler: HFTAPacker | None
) -> tuple[tune.ExperimentAnalysis, float]:
    """Runs the first `trials` trials that the seed gives; returns the analysis and the seconds it took."""
    start = time.perf_counter()
    analysis = tune.run(
        Digits,
        config=search_space(args.model),
        num_samples=trials // len(models_of(args.model)),
        search_alg=BasicVariantGenerator(random_state=args.seed),
        metric="accuracy",
        mode="max",
        scheduler=scheduler,
        stop={"training_iteration": args.epochs},
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        callbacks=[Progress(trials * args.epochs)],
        verbose=0,
    )
    return analysis, time.perf_counter() - start


def epochs_of(analysis: tune.ExperimentAnalysis) -> int:
    return sum(trial.last_result["training_iteration"] for trial in analysis.trials)


def print_best(analysis: tune.ExperimentAnalysis, count: int = 5) -> None:
    header = ["trial", "model", "width", "lr", "weight_decay", "dropout", "epochs", "train_loss", "val_loss"]
    best = sorted(analysis.trials, key=lambda trial: trial.last_result["accuracy"], reverse=True)[:count]
    rows = []
    for trial in best:
        config, result = trial.config, trial.last_result
        rows.append(
            [trial.trial_id]
            + [config[key] for key in header[1:6]]
            + [result["training_iteration"], result["train_loss"], result["val_loss"], result["accuracy"]]
        )
    print_table([*header, "accuracy"], rows)


def print_agreement(packed: tune.ExperimentAnalysis, stock: tune.ExperimentAnalysis) -> None:
    """Prints how far the results of the same trials lie apart."""
    packed_trials = {repr(sorted(trial.config.items())): trial for trial in packed.trials}
    losses, accuracies = [], []
    for trial in stock.trials:
        other = packed_trials[repr(sorted(trial.config.items()))].last_result
        result = trial.last_result
        if other["training_iteration"] != result["training_iteration"]:
            continue
        if trial.config["dropout"] == 0:
            losses.append(abs(other["train_loss"] - result["train_loss"]) / abs(result["train_loss"]))
        else:
            accuracies.append(abs(other["accuracy"] - result["accuracy"]))
    print("The same trials in both runs, and the largest difference:")
    if losses:
        print(f"  {len(losses)} without dropout: the final train_loss differs by {max(losses):.1e} (relative).")
    if accuracies:
        print(f"  {len(accuracies)} with dropout (other masks): the accuracy differs by {max(accuracies):.4f}.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=32, help="B, the trials that share a worker")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs of a Ray that starts here; a worker takes one")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search, not of the trials")
    parser.add_argument("--asha", action="store_true", help="stop bad trials early, with ASHA inside the packer")
    parser.add_argument("--compare", action="store_true", help="then run some of the same trials with stock Tune")
    parser.add_argument("--compare-trials", type=int, default=8)
    args = parser.parse_args()
    for name in ("trials", "compare_trials"):
        if getattr(args, name) < 1 or getattr(args, name) % len(models_of(args.model)):
            option = name.replace("_", "-")
            parser.error(f"--{option} must be a positive multiple of {len(models_of(args.model))}, the models.")
    if args.compare_trials > args.trials:
        parser.error(f"--compare-trials cannot be above --trials, {args.trials}.")
    return args


def main() -> None:
    args = parse_args()
    start_ray(args.cpus)
    print(f"hfta_tune: {args.trials} trials of {args.epochs} epochs, B={args.lanes}, {args.cpus} CPUs.")
    base = ASHAScheduler(max_t=args.epochs, grace_period=max(1, args.epochs // 5)) if args.asha else None
    packed, packed_seconds = tune_digits(args, args.trials, HFTAPacker(base, B=args.lanes))
    print(f"\nThe best trials, after {packed_seconds:.1f} s:\n")
    print_best(packed)
    print(f"\nEach trial's results and checkpoint: {packed.experiment_path}")

    if args.compare:
        print(f"\nStock Tune: the first {args.compare_trials} of the same trials, {args.cpus} at a time.")
        stock, stock_seconds = tune_digits(args, args.compare_trials, None)
        print()
        rows = [
            [name, len(analysis.trials), epochs_of(analysis), seconds, seconds / len(analysis.trials)]
            for name, analysis, seconds in [
                ("hfta_tune", packed, packed_seconds),
                ("stock Tune", stock, stock_seconds),
            ]
        ]
        print_table(["", "trials", "epochs", "seconds", "seconds a trial"], rows)
        if args.asha:
            ratio = (stock_seconds / epochs_of(stock)) / (packed_seconds / epochs_of(packed))
            print(f"\nhfta_tune is {ratio:.1f} times as fast an epoch; ASHA ended some of its trials early.")
        else:
            print(f"\nhfta_tune is {rows[1][-1] / rows[0][-1]:.1f} times as fast a trial.")
        print_agreement(packed, stock)
    ray.shutdown()


if __name__ == "__main__":
    main()
