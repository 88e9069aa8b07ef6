"""Measures what many trials cost in the driver: a result's price, the worker's busy share, and 1,000 trials.

    python benchmarks/tune_scale.py --out NAME           # writes benchmarks/results/NAME.json too

- Driver: trials of a model of two parameters, B=64, no loggers: what the driver's thread computes for one result
  more, with our packer and in stock Tune.
- Busy share: digits MLP, one worker, B=32, Tune's default loggers. The seconds of all finished rounds over the
  seconds from the beginning of the first to the end of the last one.
- Scale: 1,000 trials of 10 epochs of the digits MLP on 2 CPUs without loggers, with the driver's memory and what of
  it Tune's own records of the trials are, beside stock Tune with reuse_actors=True on fewer trials, scaled.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.search import BasicVariantGenerator
from torch import Tensor, nn
from tune_vs_stock import EXAMPLES, RESULTS, digits, search_space, start_ray

from hfta_tune import FusedTrainable, HFTAPacker

SPACE = search_space("mlp")


class Line(FusedTrainable):
    """Next to no training: what is left is what the driver does."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def train_dataloader(self, config: dict[str, Any]) -> list[Tensor]:
        return [torch.linspace(-1, 1, 8).unsqueeze(1)]

    def training_step(self, model: nn.Module, batch: Tensor, config: dict[str, Any]) -> Tensor:
        return (model(batch) - 2 * batch).square().mean()


def resident() -> int:
    """The bytes of memory that this process has, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Meter(tune.Callback):
    """Notes when results come, what the driver has computed by then, and how large it has grown."""

    def __init__(self) -> None:
        self.results = 0
        self.first = self.last = (0.0, 0.0, 0.0)
        self.rounds: dict[tuple[int, float], float] = {}
        self.sizes: list[tuple[int, int]] = []
        self._ended = 0

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        now = time.perf_counter()
        self.last = now, time.thread_time(), time.process_time()
        if not self.results:
            self.first = self.last
        self.results += 1
        self.rounds.setdefault((result["pid"], result["time_this_iter_s"]), now)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._ended += 1
        if self._ended % 50 == 0:
            gc.collect()
            self.sizes.append((self._ended, resident()))

    def milliseconds_a_result(self) -> dict[str, float]:
        spans = [last - first for first, last in zip(self.first, self.last, strict=True)]
        return {
            name: 1e3 * span / (self.results - 1)
            for name, span in zip(("wall", "driver thread", "driver process"), spans, strict=True)
        }

    def busy_share(self) -> float:
        """Of the workers' time from the first round's beginning on, while each had rounds."""
        shares = []
        for pid in {pid for pid, _ in self.rounds}:
            own = {seconds: end for (process, seconds), end in self.rounds.items() if process == pid}
            first = min(own, key=own.__getitem__)
            shares.append(sum(own) / (max(own.values()) - own[first] + first))
        return sum(shares) / len(shares)

    def kilobytes_a_trial(self) -> float:
        """The growth from a tenth of the trials on: before, modules are imported and pools filled."""
        start = next(size for size in self.sizes if size[0] >= self.sizes[-1][0] / 10)
        return (self.sizes[-1][1] - start[1]) / (self.sizes[-1][0] - start[0]) / 1024


def run(trainable: type, space: dict[str, Any], trials: int, rounds: int, loggers: bool, **arguments: Any) -> Any:
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "0" if loggers else "1"
    logging.getLogger("ray.tune.analysis").setLevel(logging.ERROR)  # it misses the loggers' files
    meter = Meter()
    begin = time.perf_counter()
    analysis = tune.run(
        trainable,
        config=space,
        num_samples=trials,
        search_alg=BasicVariantGenerator(random_state=0),
        stop={"training_iteration": rounds},
        metric="train_loss",
        mode="min",
        callbacks=[meter],
        verbose=0,
        **arguments,
    )
    seconds = time.perf_counter() - begin
    done = [trial.last_result["training_iteration"] for trial in analysis.trials]
    if done != [rounds] * trials:
        raise RuntimeError(f"Not all of {trials} trials trained {rounds} rounds.")
    return meter, seconds, analysis.trials


def kilobytes_of_records(trials: list[Any]) -> float:
    """What Tune's own records of finished trials hold in memory, a trial: what copies of them add."""
    gc.collect()
    before = resident()
    copies = copy.deepcopy(trials)
    return (resident() - before) / len(copies) / 1024


def driver(args: argparse.Namespace) -> dict[str, Any]:
    """A result's own price is what 25 more rounds cost; with few rounds a trial, what a trial costs counts too."""
    space = {"lr": tune.loguniform(1e-3, 1e-1)}
    few, many = 5, 30
    rows: dict[str, Any] = {}
    contenders: dict[str, tuple[int, Any]] = {"packed": (128, lambda: {"scheduler": HFTAPacker(B=64)})}
    if not args.no_stock:
        contenders["stock"] = (16, lambda: {"reuse_actors": True})
    for name, (trials, arguments) in contenders.items():
        seconds = []
        for rounds in (few, many):
            begin = time.thread_time()
            run(Line, space, trials, rounds, False, resources_per_trial={"cpu": 1}, **arguments())
            seconds.append(time.thread_time() - begin)
        cost = 1e3 * (seconds[1] - seconds[0]) / (trials * (many - few))
        rows[name] = {"milliseconds_a_result": cost, "milliseconds_a_trial": 1e3 * seconds[0] / trials - few * cost}
        print(
            f"driver, {name}: {cost:.2f} ms a result, {rows[name]['milliseconds_a_trial']:.1f} ms a trial besides",
            flush=True,
        )
    return rows


def busy(args: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for loggers in (True, False):
        meter, seconds, _ = run(
            digits.Digits,
            SPACE,
            128,
            20,
            loggers,
            scheduler=HFTAPacker(B=32),
            resources_per_trial={"cpu": args.cpus_of_one},
        )
        name = "default loggers" if loggers else "no loggers"
        rows[name] = {"share": meter.busy_share(), "seconds": seconds}
        print(f"busy share, one worker, {name}: {rows[name]['share']:.0%} ({seconds:.1f} s)", flush=True)
    return rows


def scale(args: argparse.Namespace) -> dict[str, Any]:
    meter, seconds, trials = run(
        digits.Digits, SPACE, args.trials, 10, False, scheduler=HFTAPacker(B=32), resources_per_trial={"cpu": 1}
    )
    row: dict[str, Any] = {
        "trials": args.trials,
        "seconds": seconds,
        "driver_kilobytes_a_trial": meter.kilobytes_a_trial(),
        "kilobytes_of_tune_s_record_of_a_trial": kilobytes_of_records(trials),
        "busy_share": meter.busy_share(),
        "driver_milliseconds_a_result": meter.milliseconds_a_result(),
    }
    print(
        f"{args.trials} trials of 10 epochs: {seconds:.1f} s, busy {row['busy_share']:.0%}, the driver grows by "
        f"{row['driver_kilobytes_a_trial']:.1f} KB a trial; Tune's own record of a trial holds "
        f"{row['kilobytes_of_tune_s_record_of_a_trial']:.1f} KB",
        flush=True,
    )
    if not args.no_stock:
        _, own, _ = run(
            digits.Digits, SPACE, args.stock_trials, 10, False, reuse_actors=True, resources_per_trial={"cpu": 1}
        )
        row["stock_trials"], row["stock_seconds"] = args.stock_trials, own
        row["stock_seconds_scaled"] = own * args.trials / args.stock_trials
        print(
            f"stock Tune, reuse_actors=True, {args.stock_trials} trials: {own:.1f} s; scaled to {args.trials}: "
            f"{row['stock_seconds_scaled']:.0f} s, {row['stock_seconds_scaled'] / seconds:.1f} times as long",
            flush=True,
        )
    return row


PARTS = {"scale": scale, "driver": driver, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--stock-trials", type=int, default=100)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray may use")
    parser.add_argument("--cpus-of-one", type=int, default=2, help="CPUs, and so threads, of the one worker of `busy`")
    parser.add_argument("--out", help="name of the JSON file in benchmarks/results/, without .json")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts knows {','.join(PARTS)}, not {','.join(sorted(unknown))}.")
    # Ray gives its workers this script's folder and the working directory, but not the rest of sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    start_ray(args.cpus)
    rows = {name: PARTS[name](args) for name in parts}
    ray.shutdown()
    if args.out:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        machine |= {"ray": ray.__version__, "torch": torch.__version__}
        RESULTS.mkdir(exist_ok=True)
        path = Path(RESULTS, f"{args.out}.json")
        path.write_text(json.dumps({"machine": machine, "arguments": vars(args), **rows}, indent=2) + "\n")
        print(f"Wrote {path.relative_to(RESULTS.parent.parent)}.")


if __name__ == "__main__":
    main()
