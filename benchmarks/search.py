"""Measures how well searches search that train B trials at once: best accuracy against trials and against time.

    python benchmarks/search.py                 # writes benchmarks/results/search.json and search.png
    python benchmarks/search.py --plot-only     # prints and draws the JSON file's figures again

An MLP on scikit-learn's digits, half of which are for validation. Searched are lr, weight decay, dropout, both
betas, width and depth. `one at a time` is study.optimize with an ordinary PyTorch loop that uses nothing of hfta_tune;
the others are hfta_tune.optimize with B trials at once. All train the same models on the same batches for as many
epochs, from the seed's initial weights, with as many threads. Nothing is pruned: the samplers make the difference.

Seeds are those of the samplers and of the initial weights. All contenders run a seed before the next one begins, in
an order that rotates, in one process, after short searches that do not count. Seconds are those since the search began.
The searches with B trials at once have more trials (--more): what they have found when one at a time has ended is what
they are worth at equal wall time.

Ask and tell: what suggesting and telling a trial costs in hfta_tune.optimize when the study has many finished trials.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
import torch.nn.functional as F
from engine import OtherProcesses, device_name
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from scipy import stats
from torch import Tensor, nn

from hfta_tune import FusedTrainable, optimize
from hfta_tune.searchers import StructureFirst

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(EXAMPLES))

import digits  # noqa: E402

WIDTHS = (32, 64, 128)
DEPTHS = (1, 2, 3)
BATCH_SIZE = 64
COMPANY = 3
MEASURED_TRIALS = 64

Batch = tuple[Tensor, Tensor]


@functools.cache
def load_batches() -> tuple[list[Batch], list[Batch]]:
    """Returns the training batches, which keep their order, and the other half of the digits as one batch."""
    parts = [part.tensors for part in digits.load_split()]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    half = len(labels) // 2
    train = list(zip(images[:half].split(BATCH_SIZE), labels[:half].split(BATCH_SIZE), strict=True))
    return train, [(images[half:], labels[half:])]


def build_model(config: Mapping[str, Any]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    features = 64
    for _ in range(config["depth"]):
        layers += [nn.Linear(features, config["width"]), nn.ReLU(), nn.Dropout(config["dropout"])]
        features = config["width"]
    return nn.Sequential(*layers, nn.Linear(features, 10))


def build_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    betas = config["beta1"], config["beta2"]
    return torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=betas, weight_decay=config["weight_decay"])


def accuracy_of(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return (model(images).argmax(dim=1) == labels).float().mean()


class SearchedDigits(FusedTrainable):
    def build_model(self, config):
        return build_model(config)

    def build_optimizer(self, model, config):
        return build_optimizer(model, config)

    def train_dataloader(self, config):
        return load_batches()[0]

    def val_dataloader(self, config):
        return load_batches()[1]

    def training_step(self, model, batch, config):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def validation_step(self, model, batch, config):
        return {"accuracy": accuracy_of(model, batch)}


class OneBatchOfDigits(SearchedDigits):
    """Next to no training: what is left is what a trial costs besides."""

    def train_dataloader(self, config):
        return load_batches()[0][:1]


def suggest(trial: optuna.Trial, seed: int) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.7),
        "beta1": trial.suggest_float("beta1", 0.5, 0.99),
        "beta2": trial.suggest_float("beta2", 0.8, 0.9999),
        "width": trial.suggest_categorical("width", WIDTHS),
        "depth": trial.suggest_int("depth", min(DEPTHS), max(DEPTHS)),
        "seed": seed,
    }


def plain_objective(trial: optuna.Trial, seed: int, epochs: int) -> float:
    """Trains one trial in an ordinary loop."""
    config = suggest(trial, seed)
    torch.manual_seed(seed)
    model = build_model(config)
    optimizer = build_optimizer(model, config)
    train, (val,) = load_batches()
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = accuracy_of(model, val).item()
        trial.report(accuracy, epoch)
    return accuracy


@dataclass(frozen=True)
class Contender:
    """A way to search.

    Attributes:
        label: What tables and plots call it.
        sampler: Makes the sampler of a seed and B.
        fused: Whether hfta_tune.optimize trains B at once; else study.optimize trains one at a time.
    """

    label: str
    sampler: Callable[[int, int], BaseSampler]
    fused: bool = True


def tpe(seed: int, lanes: int) -> BaseSampler:
    return TPESampler(seed=seed, constant_liar=True)


def structure_first(seed: int, lanes: int) -> BaseSampler:
    # Several groups share the lanes: groups of B would leave a short search with fewer structures than there are.
    return StructureFirst(tpe(seed, lanes), structural="auto", lanes=min(lanes, COMPANY + 1))


def random(seed: int, lanes: int) -> BaseSampler:
    return RandomSampler(seed=seed)


ALONE = "one"
CONTENDERS = {
    ALONE: Contender("one at a time, TPE", tpe, fused=False),
    "tpe": Contender("B={lanes}, TPE", tpe),
    "structure": Contender("B={lanes}, StructureFirst(TPE)", structure_first),
    "random": Contender("B={lanes}, random", random),
}


@dataclass(frozen=True)
class Search:
    """What one search found.

    Attributes:
        accuracies: Of each trial, in the order in which they ended: validation accuracy after the last epoch; NaN of a
            trial that failed.
        seconds: When each of them ended, since the search began.
        company: The share of lanes whose array had at least COMPANY others; None where no arrays are.
        lanes_an_array: How many lanes the array of a lane had, on average; None where no arrays are.
        others: The share of the CPUs that other processes had.
    """

    contender: str
    seed: int
    accuracies: list[float]
    seconds: list[float]
    company: float | None
    lanes_an_array: float | None
    others: float

    def best_so_far(self) -> np.ndarray:
        """[trials]: the best accuracy after each trial."""
        return np.fmax.accumulate(self.accuracies)

    def best_after(self, seconds: float | np.ndarray) -> np.ndarray:
        """The best accuracy at these times, which have any shape; NaN before the first trial has ended."""
        return np.concatenate([[np.nan], self.best_so_far()])[np.searchsorted(self.seconds, seconds, side="right")]


def run_search(name: str, seed: int, trials: int, epochs: int, lanes: int) -> Search:
    contender = CONTENDERS[name]
    study = optuna.create_study(
        direction="maximize", sampler=contender.sampler(seed, lanes), pruner=optuna.pruners.NopPruner()
    )
    others, start = OtherProcesses(), datetime.now()
    if contender.fused:
        space = functools.partial(suggest, seed=seed)
        optimize(study, SearchedDigits, space, n_trials=trials, epochs=epochs, metric="accuracy", B=lanes)
    else:
        study.optimize(functools.partial(plain_objective, seed=seed, epochs=epochs), n_trials=trials)
    load = others.load()
    ended = sorted(study.trials, key=lambda trial: trial.datetime_complete)
    sizes = lanes_of_arrays(ended)
    return Search(
        name,
        seed,
        [trial.value if trial.state == TrialState.COMPLETE else float("nan") for trial in ended],
        [(trial.datetime_complete - start).total_seconds() for trial in ended],
        float(np.mean(np.array(sizes) > COMPANY)) if sizes else None,
        float(np.mean(sizes)) if sizes else None,
        load,
    )


def lanes_of_arrays(trials: Sequence[FrozenTrial]) -> list[int]:
    """The lanes of each trial's array: its own, and those of trials that ran in it at the same time."""
    places = [(trial, trial.system_attrs["hfta_tune"]) for trial in trials if "hfta_tune" in trial.system_attrs]
    return [
        sum(
            place["array"] == other_place["array"]
            and trial.datetime_start < other.datetime_complete
            and other.datetime_start < trial.datetime_complete
            for other, other_place in places
        )
        for trial, place in places
    ]


def run_searches(args: argparse.Namespace) -> list[Search]:
    for name in args.only:
        run_search(name, 0, 2 * args.B, 1, args.B)  # imports, first calls
    searches = []
    for seed in range(args.seeds):
        shift = seed % len(args.only)
        for name in args.only[shift:] + args.only[:shift]:
            trials = args.trials * (args.more if CONTENDERS[name].fused else 1)
            searches.append(run_search(name, seed, trials, args.epochs, args.B))
            own = searches[-1]
            print(
                f"seed {seed}, {label_of(name, args.B)}: {own.best_so_far()[-1]:.2%} after {own.seconds[-1]:.1f} s; "
                f"other processes had {own.others:.0%} of the CPUs",
                flush=True,
            )
    return searches


class Stopwatch:
    """Adds up the seconds that functions take.

    Attributes:
        seconds: The sum so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are timed."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def measure_ask_and_tell(finished: int, lanes: int) -> list[dict[str, Any]]:
    """Times ask, suggest and tell in runs of optimize that go on with a study of so many finished trials."""
    space = functools.partial(suggest, seed=0)
    run = functools.partial(optimize, trainable=OneBatchOfDigits, epochs=1, metric="accuracy", B=lanes)
    past = optuna.create_study(direction="maximize", sampler=StructureFirst(RandomSampler(seed=0), lanes=lanes))
    run(past, space=space, n_trials=finished)
    rows = []
    for name, contender in CONTENDERS.items():
        if not contender.fused:
            continue
        study = optuna.create_study(
            direction="maximize", sampler=contender.sampler(0, lanes), pruner=optuna.pruners.NopPruner()
        )
        study.add_trials(past.trials)
        ask, tell = Stopwatch(), Stopwatch()
        study.ask, study.tell = ask.timed(study.ask), tell.timed(study.tell)
        start = time.perf_counter()
        run(study, space=ask.timed(space), n_trials=MEASURED_TRIALS)
        whole = time.perf_counter() - start
        a_trial = {"ask": ask.seconds, "tell": tell.seconds, "rest": whole - ask.seconds - tell.seconds}
        rows.append(
            {"contender": name} | {f"{what}_ms": 1e3 * seconds / MEASURED_TRIALS for what, seconds in a_trial.items()}
        )
    return rows


def label_of(name: str, lanes: int) -> str:
    return CONTENDERS[name].label.format(lanes=lanes)


def middle(values: Sequence[float] | np.ndarray) -> str:
    """The median and the quartiles of accuracies, in percent."""
    if np.isnan(values).any():
        return "-"
    low, median, high = np.percentile(100 * np.asarray(values), [25, 50, 75])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def by_contender(searches: Sequence[Search]) -> dict[str, list[Search]]:
    """The searches of each contender in the order of their seeds."""
    grouped = {name: [search for search in searches if search.contender == name] for name in CONTENDERS}
    return {name: sorted(own, key=lambda search: search.seed) for name, own in grouped.items() if own}


def print_quality(grouped: Mapping[str, Sequence[Search]], lanes: int) -> None:
    trials = min(len(search.accuracies) for own in grouped.values() for search in own)
    counts = sorted({max(1, trials * sixths // 6) for sixths in (1, 2, 4, 6)})
    slowest = ALONE if ALONE in grouped else max(grouped, key=lambda name: median_seconds(grouped[name], trials))
    times = [median_seconds(grouped[slowest], trials) * share for share in (1 / 8, 1 / 4, 1 / 2, 1)]
    seeds = max(map(len, grouped.values()))
    by_trials, by_time = [], []
    for name, own in grouped.items():
        curves = np.stack([search.best_so_far()[:trials] for search in own])
        mean = middle(curves.mean(axis=1))
        by_trials.append([label_of(name, lanes), *(middle(curves[:, count - 1]) for count in counts), mean])
        reached = [middle([float(search.best_after(seconds)) for search in own]) for seconds in times]
        by_time.append([label_of(name, lanes), *reached, f"{median_seconds(own, trials):.1f}"])
    print(f"\nBest validation accuracy in %, median of {seeds} seeds (quartiles):\n")
    digits.print_table(["after trials:", *map(str, counts), "mean over the trials"], by_trials)
    print()
    digits.print_table(["after seconds:", *(f"{seconds:.2f}" for seconds in times), f"s, {trials} trials"], by_time)
    print("\nmean over the trials: of the best so far, after each trial. A search that is over keeps its best.")


def median_seconds(searches: Sequence[Search], trials: int = 0) -> float:
    """The seconds that the searches took for so many trials; by default for all."""
    return float(np.median([search.seconds[trials - 1] for search in searches]))


def print_differences(grouped: Mapping[str, Sequence[Search]], lanes: int) -> None:
    """Prints the differences from one at a time, of the same seeds."""
    rows = []
    for name, searches in grouped.items():
        pairs = [(own, alone) for alone in grouped[ALONE] for own in searches if own.seed == alone.seed]
        if name == ALONE or len(pairs) < 2:
            continue
        trials = min(len(search.accuracies) for pair in pairs for search in pair)
        seconds = float(np.median([alone.seconds[-1] for _, alone in pairs]))
        measures: dict[str, Callable[[Search, Search], float]] = {
            f"after {trials} trials": lambda search, _, last=trials - 1: search.best_so_far()[last],
            "mean over the trials": lambda search, _, trials=trials: search.best_so_far()[:trials].mean(),
            f"after {seconds:.1f} s": lambda search, alone: np.nan_to_num(search.best_after(alone.seconds[-1])),
        }
        for what, measure in measures.items():
            values = np.array([[measure(own, alone), measure(alone, alone)] for own, alone in pairs])
            rows.append([label_of(name, lanes), what, *difference(100 * values)])
    if not rows:
        return
    print("\nDifference from one at a time, of the same seed, in percentage points:\n")
    digits.print_table(["", "best accuracy", "median", "95% interval", "spread alone", "verdict"], rows)
    print("\n95% interval: of the median difference, bootstrapped over the seeds (scipy.stats.bootstrap, percentiles).")
    print("spread alone: between the quartiles of one at a time, over the seeds. within noise: the interval has 0.")
    print("after seconds: when one at a time, of the same seed, has ended.")


def difference(values: np.ndarray) -> list[str]:
    """The cells of a row.

    Args:
        values: [seeds, 2]: a contender's value, and that of one at a time.
    """
    differences = values[:, 0] - values[:, 1]
    low, high = stats.bootstrap((differences,), np.median, method="percentile", rng=0).confidence_interval
    verdict = "ahead" if low > 0 else "behind" if high < 0 else "within noise"
    spread = stats.iqr(values[:, 1])
    return [f"{np.median(differences):+.2f}", f"{low:+.2f} to {high:+.2f}", f"{spread:.2f}", verdict]


def print_company(grouped: Mapping[str, Sequence[Search]], lanes: int) -> None:
    rows = []
    for name, own in grouped.items():
        shares = [search.company for search in own if search.company is not None]
        sizes = [search.lanes_an_array for search in own if search.lanes_an_array is not None]
        if shares:
            cells = f"{np.mean(shares):.0%}", f"{min(shares):.0%} to {max(shares):.0%}", f"{np.mean(sizes):.1f}"
            rows.append([label_of(name, lanes), *cells])
    if rows:
        print(f"\nShare of lanes whose array has at least {COMPANY} other lanes, and lanes of a lane's array:\n")
        digits.print_table(["", "mean", "over the seeds", "lanes"], rows)
        print(
            '\nCounted in each trial\'s last round, from its system attribute "hfta_tune": trials that ran at the same'
        )
        print("time in one array. B trials begin and end together here, so other rounds have the same arrays.")


def print_ask_and_tell(record: Mapping[str, Any], grouped: Mapping[str, Sequence[Search]]) -> None:
    lanes = record["arguments"]["B"]
    rows = [
        [label_of(row["contender"], lanes), *(f"{row[f'{what}_ms']:.2f}" for what in ("ask", "tell", "rest"))]
        for row in record["ask_and_tell"]
    ]
    finished = record["arguments"]["finished"]
    print(f"\nMilliseconds a trial in hfta_tune.optimize, when the study has {finished} finished trials:\n")
    digits.print_table(["", "ask and suggest", "tell", "the rest"], rows)
    print("\nthe rest: one step, validation, building the model, and all that optimize itself does.")
    if ALONE in grouped:
        alone = np.median([search.seconds[-1] / len(search.seconds) for search in grouped[ALONE]])
        print(f"For comparison: one at a time takes {1e3 * alone:.0f} ms a trial in the searches above.")


def draw(grouped: Mapping[str, Sequence[Search]], lanes: int, path: Path) -> None:
    """Draws the best accuracy against trials and against time: medians, and the quartiles as bands."""
    import matplotlib  # here, for the figures need none of it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trials = min(len(search.accuracies) for own in grouped.values() for search in own)
    ends = {name: median_seconds(own) for name, own in grouped.items()}
    end = ends.get(ALONE, max(ends.values()))
    firsts = [max(search.seconds[0] for search in own) for own in grouped.values()]
    figure, (by_trials, by_time) = pyplot.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    floor = 1.0
    for number, (name, own) in enumerate(grouped.items()):
        style = {"color": f"C{number}", "label": label_of(name, lanes)}
        curves = np.stack([search.best_so_far()[:trials] for search in own])
        first = min(trials // 2, 4)
        floor = min(floor, np.percentile(curves[:, first], 25))
        plot_band(by_trials, np.arange(1, trials + 1), curves, style)
        times = np.geomspace(max(search.seconds[0] for search in own), max(min(end, ends[name]), *firsts), 400)
        plot_band(by_time, times, np.stack([search.best_after(times) for search in own]), style)
        after = median_seconds(own, trials)
        by_time.plot(after, 100 * np.median([search.best_after(after) for search in own]), "o", color=style["color"])
    by_trials.set(xlabel="trials that have ended", ylabel="best validation accuracy, %", xlim=(1, trials))
    by_time.set(xlabel=f"seconds since the search began (dot: {trials} trials have ended)", xscale="log")
    by_time.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    by_time.xaxis.set_major_formatter("{x:g}")
    by_trials.set_ylim(100 * floor, None)
    for axes in (by_trials, by_time):
        axes.grid(alpha=0.3)
    by_trials.legend(loc="lower right", title=f"median and quartiles of {max(map(len, grouped.values()))} seeds")
    figure.savefig(path, dpi=150)


def plot_band(axes: Any, x: np.ndarray, curves: np.ndarray, style: Mapping[str, Any]) -> None:
    """Draws the median of curves [seeds, points] and a band between the quartiles."""
    low, median, high = np.percentile(100 * curves, [25, 50, 75], axis=0)
    axes.step(x, median, where="post", **style)
    axes.fill_between(x, low, high, step="post", color=style["color"], alpha=0.15, linewidth=0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=64, help="trials of a search")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of a trial")
    parser.add_argument("--more", type=int, default=2, help="how many times --trials the searches of B at once have")
    parser.add_argument("--B", type=int, default=16, help="trials that train at once")
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--finished", type=int, default=1000, help="finished trials for ask and tell; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use, for all contenders")
    parser.add_argument("--out", default="search", help="name of the JSON file and the plot in benchmarks/results/")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing; read the JSON file")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(CONTENDERS):
        parser.error(f"--only knows {','.join(CONTENDERS)}, not {','.join(sorted(unknown))}.")
    for name in ("seeds", "trials", "epochs", "more", "B", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive but got {getattr(args, name)}.")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything and returns what the JSON file holds."""
    load_before = os.getloadavg()
    searches = run_searches(args)
    return {
        "arguments": vars(args),
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(torch.device("cpu")),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "versions": {"torch": torch.__version__, "optuna": optuna.__version__, "python": platform.python_version()},
        "searches": [asdict(search) for search in searches],
        "ask_and_tell": measure_ask_and_tell(args.finished, args.B) if args.finished else [],
    }


def main() -> None:
    args = parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    torch.set_num_threads(args.threads)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.out}.json"
    if args.plot_only:
        record = json.loads(path.read_text())
    else:
        record = measure(args)
        path.write_text(json.dumps(record, indent=2) + "\n")
    grouped = by_contender([Search(**search) for search in record["searches"]])
    lanes = record["arguments"]["B"]
    print_quality(grouped, lanes)
    if ALONE in grouped:
        print_differences(grouped, lanes)
    print_company(grouped, lanes)
    if record["ask_and_tell"]:
        print_ask_and_tell(record, grouped)
    busiest = max(search["others"] for search in record["searches"])
    print(
        f"\n{record['device']}, {record['cpus']} CPUs, {record['threads']} threads; other processes had at most "
        f"{busiest:.0%} of the CPUs during a search."
    )
    draw(grouped, lanes, path.with_suffix(".png"))
    print(f"In {RESULTS.relative_to(RESULTS.parent.parent)}: {path.name}, {path.stem}.png")


if __name__ == "__main__":
    main()
