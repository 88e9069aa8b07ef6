"""Tunes an MLP and a CNN on the digits with Optuna: 64 trials in one process, bad ones pruned. No Ray.

python examples/digits_optuna.py --compare
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import digits
import optuna
import torch
import torch.nn.functional as F
from optuna.trial import FrozenTrial, TrialState

from hfta_tune import optimize


def search_space(trial: optuna.Trial, model: str) -> dict[str, Any]:
    return {
        "model": trial.suggest_categorical("model", digits.models_of(model)),
        "width": trial.suggest_categorical("width", digits.WIDTHS),
        "dropout": trial.suggest_categorical("dropout", digits.DROPOUTS),
        "lr": trial.suggest_float("lr", 1e-4, 3e-2, log=True),
        "lr_decay": trial.suggest_float("lr_decay", 0.85, 1.0),
        "beta1": trial.suggest_float("beta1", 0.8, 0.95),
        "beta2": trial.suggest_float("beta2", 0.95, 0.999),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
    }


def plain_objective(trial: optuna.Trial, model_choice: str, epochs: int) -> float:
    """Trains one trial as one does without hfta_tune: the same model, data and seed in an ordinary loop."""
    config = search_space(trial, model_choice)
    torch.manual_seed(0)
    model = digits.build_model(config)
    optimizer = digits.build_optimizer(model, config)
    scheduler = digits.build_lr_scheduler(optimizer, config)
    train, val = digits.train_batches(), digits.val_batches()
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = sum((model(images).argmax(1) == labels).float().mean().item() for images, labels in val)
            accuracy /= len(val)
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def create_study(args: argparse.Namespace) -> optuna.Study:
    # MedianPruner knows only complete trials, so it cannot judge those that start first, all together.
    pruner = optuna.pruners.MedianPruner(n_startup_trials=args.lanes, n_warmup_steps=5)
    sampler = optuna.samplers.TPESampler(seed=args.seed)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)


def epochs_of(study: optuna.Study) -> int:
    return sum(len(trial.intermediate_values) for trial in study.trials)


def print_best(study: optuna.Study, count: int = 5) -> None:
    header = ["trial", "model", "width", "lr", "weight_decay", "dropout"]
    complete = study.get_trials(states=[TrialState.COMPLETE])
    best = sorted(complete, key=lambda trial: trial.value, reverse=True)[:count]
    rows = [[trial.number] + [trial.params[key] for key in header[1:]] + [trial.value] for trial in best]
    digits.print_table([*header, "accuracy"], rows)


def print_agreement(fused: Sequence[FrozenTrial], plain: Sequence[FrozenTrial]) -> None:
    """Prints how far the values of the same trials lie apart, over the epochs that both runs trained."""
    differences = [
        abs(value - other.intermediate_values[epoch])
        for trial, other in zip(plain, fused, strict=True)
        if trial.params["dropout"] == 0
        for epoch, value in trial.intermediate_values.items()
        if epoch in other.intermediate_values
    ]
    if differences:
        print(
            f"The same trials, without dropout: in the {len(differences)} epochs that both runs trained, "
            f"the accuracy differs by {max(differences):.4f} at most."
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*digits.MODELS, "both"], default="both")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=16, help="B, the trials that train at once")
    parser.add_argument("--cpus", type=int, default=2, help="threads that torch may use")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler, not of the trials")
    parser.add_argument("--compare", action="store_true", help="then run some of the same trials with study.optimize")
    parser.add_argument("--compare-trials", type=int, default=8)
    args = parser.parse_args()
    for name in ("trials", "compare_trials"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, but got {getattr(args, name)}.")
    if args.compare_trials > args.trials:
        parser.error(f"--compare-trials cannot be above --trials, {args.trials}.")
    return args


def main() -> None:
    args = parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(args.cpus)

    print(f"hfta_tune: {args.trials} trials of up to {args.epochs} epochs, {args.lanes} lanes.")
    fused = create_study(args)
    start = time.perf_counter()
    optimize(
        fused,
        digits.Digits,
        lambda trial: search_space(trial, args.model),
        n_trials=args.trials,
        epochs=args.epochs,
        metric="accuracy",
        B=args.lanes,
    )
    fused_seconds = time.perf_counter() - start
    pruned = len(fused.get_trials(states=[TrialState.PRUNED]))
    print(f"\nThe best trials, after {fused_seconds:.1f} s ({pruned} of {len(fused.trials)} were pruned):\n")
    print_best(fused)

    if args.compare:
        print(f"\nstudy.optimize: {args.compare_trials} of the same trials, one after the other.\n")
        # Evenly spread, since the sampler's later trials are of other models and widths than its first.
        chosen = [fused.trials[i * args.trials // args.compare_trials] for i in range(args.compare_trials)]
        plain = create_study(args)
        for trial in chosen:
            plain.enqueue_trial(trial.params)
        start = time.perf_counter()
        plain.optimize(lambda trial: plain_objective(trial, args.model, args.epochs), n_trials=args.compare_trials)
        plain_seconds = time.perf_counter() - start
        rows = [
            [name, len(study.trials), epochs, seconds, seconds / len(study.trials), 1000 * seconds / epochs]
            for name, study, epochs, seconds in [
                ("hfta_tune.optimize", fused, epochs_of(fused), fused_seconds),
                ("study.optimize", plain, epochs_of(plain), plain_seconds),
            ]
        ]
        digits.print_table(["", "trials", "epochs", "seconds", "seconds a trial", "ms an epoch"], rows)
        print(f"\nhfta_tune is {rows[1][-1] / rows[0][-1]:.1f} times as fast an epoch of one trial.")
        print_agreement(chosen, plain.trials)


if __name__ == "__main__":
    main()
