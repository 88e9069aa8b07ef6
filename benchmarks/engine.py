"""Times training steps of B small models: stock PyTorch in a loop, plain vmap, hfta_tune, and its rivals.

    python benchmarks/engine.py --out NAME        # writes benchmarks/results/NAME.json too

The loop trains B models one after the other in one process and uses nothing of hfta_tune; `vmap` is plain
torch.func.vmap with a stock optimizer on stacked parameters, which gives all lanes one learning rate; `ours` is
a Worker with B FusedTrainables, each with its own; `by hand` is a network fused by hand in the way of HFTA; and
`jax` is jit(vmap) where JAX is installed. All start from the same weights and train on the same batches, and
their losses are compared before they are timed.

Each measurement is a number of slices. In each slice all contenders take turns, so that what else the machine
does hits all of them, and disturbed slices are taken again; a speed-up is the median over the slices of the
loop's time over the contender's in that slice. Steps are measured in the steady state: the engine first gets
time to choose a strategy, which is reported apart. Each workload has a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _contenders import Contender, Ours, PlainVmap, Settled, StockLoop, Unavailable
from _handwritten import HANDWRITTEN
from _jax_vmap import IN_JAX, JaxVmap, jax_version
from _workloads import WORKLOADS, Workload, learning_rates

RESULTS = Path(__file__).resolve().parent / "results"
LANES = (1, 8, 32, 128)
LANES_OF_BARS = 32
SLICES = 7
FEWEST_STEPS = 4
RETAKES = 3
QUIET_LOAD = 0.04
CONTENDERS = ("loop", "vmap", "ours", "by hand", "jax")
BARS = {"mlp": 12.0, "mlp_bn_dropout": 6.0, "cnn8": 3.5, "lstm": 4.0, "transformer": 3.0}


@dataclass
class Row:
    """What was measured of one workload with one number of lanes.

    Attributes:
        step_seconds: {contender: seconds a step of all lanes, one for each slice}.
        others: The share of the CPUs that other processes had in the most disturbed of these slices.
        steps: {contender: steps in a slice}.
        unavailable: {contender: why it was not measured}.
        settled: How the engine came to its strategy.
        strategy_after: The engine's strategy after the measurement.
        engine_seconds: {strategy: seconds a step}, as the engine measured them to choose.
        warnings: What was warned of meanwhile, most of it by the engine.
    """

    workload: str
    lanes: int
    step_seconds: dict[str, list[float]] = field(default_factory=dict)
    others: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    settled: Settled | None = None
    strategy_after: str = ""
    engine_seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def milliseconds(self, contender: str) -> float | None:
        """The median step of a contender."""
        seconds = self.step_seconds.get(contender)
        return 1e3 * statistics.median(seconds) if seconds else None

    def ratios(self, contender: str, over: str) -> list[float]:
        """How many times as fast as `over` a contender was, for each slice; empty if one was not measured."""
        slower, faster = self.step_seconds.get(over, []), self.step_seconds.get(contender, [])
        return [slow / fast for slow, fast in zip(slower, faster, strict=False)]

    def ratio(self, contender: str, over: str) -> float | None:
        """The median of `ratios`."""
        ratios = self.ratios(contender, over)
        return statistics.median(ratios) if ratios else None

    def noise(self) -> float:
        """The widest range of a contender's slices, over their median."""
        return max((max(seconds) - min(seconds)) / statistics.median(seconds) for seconds in self.step_seconds.values())


def measure_workload(workload_name: str, args: argparse.Namespace) -> list[Row]:
    """Measures a workload with each number of lanes; runs in a process of its own."""
    return [measure(WORKLOADS[workload_name], lanes, args) for lanes in args.lanes]


def measure(workload: Workload, lanes: int, args: argparse.Namespace) -> Row:
    device = torch.device(args.device)
    row = Row(workload.name, lanes)
    batches, rates = workload.batches(device), learning_rates(lanes)
    kinds: dict[str, Callable[..., Contender]] = {"loop": StockLoop, "vmap": PlainVmap, "ours": Ours}
    if workload.name in HANDWRITTEN:
        kinds["by hand"] = HANDWRITTEN[workload.name]
    if workload.name in IN_JAX:
        kinds["jax"] = JaxVmap
    contenders: dict[str, Contender] = {}
    losses: dict[str, tuple[list[float], list[float]]] = {}
    with warnings.catch_warnings(record=True) as caught:
        for name, kind in kinds.items():
            try:
                contender = kind(workload, batches, rates, device)
                losses[name] = contender.run(1), contender.run(3)
                contenders[name] = contender
            except Unavailable as error:
                row.unavailable[name] = str(error)
            except Exception as error:  # a contender that fails must not end the others' measurement
                row.unavailable[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.160}"
                if name == "loop":
                    raise
        if not workload.draws:
            for name, contender in contenders.items():
                check_losses(f"{workload.name}, {lanes} lanes, {name}", contender, losses[name], losses["loop"])
        ours = contenders.get("ours")
        if isinstance(ours, Ours):
            row.settled = ours.settle(args.warm_up)
        take_turns(contenders, args.seconds, row)
    if isinstance(ours, Ours):
        row.strategy_after, row.engine_seconds = ours.strategy, ours.measured
    row.warnings = list(dict.fromkeys(str(warning.message) for warning in caught))
    return row


def check_losses(
    what: str, contender: Contender, own: tuple[list[float], list[float]], loop: tuple[list[float], list[float]]
) -> None:
    """Checks that a contender's losses are the loop's, in the first step and, with its learning rates, after.

    Raises:
        RuntimeError: with the first loss that is not.
    """
    for number, (got, expected) in enumerate(zip(own, loop, strict=True)):
        if number and not contender.own_rates:
            return
        for lane, (loss, reference) in enumerate(zip(got, expected, strict=True)):
            if not math.isclose(loss, reference, rel_tol=1e-3):
                raise RuntimeError(
                    f"{what}: lane {lane} has a loss of {loss} in {'steps 2 to 4' if number else 'step 1'}, where "
                    f"the loop has {reference}. They do not train the same."
                )


def take_turns(contenders: Mapping[str, Contender], seconds: float, row: Row) -> None:
    """Times slices of each contender in turn, for about `seconds` each, forwards and backwards by turns.

    Two threads that wait for each other all the time become many times slower when a third one wants their
    CPUs. So slices that other processes disturbed are taken again, and the least disturbed ones count.
    """
    a_step = {name: seconds_a_step(contender, seconds / SLICES) for name, contender in contenders.items()}
    slices = max(3, min(SLICES, int(seconds / max(a_step.values()))))
    row.steps = {name: max(FEWEST_STEPS, round(seconds / slices / step)) for name, step in a_step.items()}
    gc.collect()
    taken: list[tuple[float, dict[str, float]]] = []
    while len(taken) < slices * RETAKES and sum(load <= QUIET_LOAD for load, _ in taken) < slices:
        order = list(contenders) if len(taken) % 2 == 0 else list(contenders)[::-1]
        others = OtherProcesses()
        times = {}
        for name in order:
            times[name] = timed(contenders[name], row.steps[name]) / row.steps[name]
        taken.append((others.load(), times))
    least_disturbed = sorted(taken, key=lambda one: one[0])[:slices]
    row.others = least_disturbed[-1][0]
    row.step_seconds = {name: [times[name] for _, times in least_disturbed] for name in contenders}


class OtherProcesses:
    """What other processes take of the machine's CPUs since this object was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time(), self._busy()

    def load(self) -> float:
        """The share of the CPUs that others had, from 0 to 1; 0 where the system does not tell (/proc/stat)."""
        start, own, busy = self._start
        others = self._busy() - busy - (time.process_time() - own)
        return max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))

    @staticmethod
    def _busy() -> float:
        """The seconds that the CPUs have worked."""
        try:
            with open("/proc/stat") as statistics_of_system:
                fields = [int(number) for number in statistics_of_system.readline().split()[1:]]
        except OSError:
            return 0.0
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = fields[:8]
        return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def seconds_a_step(contender: Contender, enough: float) -> float:
    """Warms a contender up with ever more steps, until they take half of `enough` seconds; times the last."""
    steps = 1
    while True:
        # The lesser of two: who is disturbed here would get slices of too few steps.
        taken = min(timed(contender, steps), timed(contender, steps))
        if taken > enough / 2:
            return taken / steps
        steps *= 2


def timed(contender: Contender, steps: int) -> float:
    """The seconds that `steps` steps take."""
    start = time.perf_counter()
    contender.run(steps)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Bar:
    """A floor for a figure.

    Attributes:
        value: The figure, or None where something that it needs was not measured.
        detail: What else there is to say about the figure.
    """

    name: str
    floor: float
    value: float | None
    detail: str = ""

    @property
    def verdict(self) -> str:
        """Held, missed or not measured."""
        if self.value is None:
            return "not measured"
        return "held" if self.value >= self.floor else "missed"


def bars_of(rows: Iterable[Row]) -> list[Bar]:
    """Judges the figures of LANES_OF_BARS lanes."""
    by_name = {row.workload: row for row in rows if row.lanes == LANES_OF_BARS}
    speed_ups = {name: row.ratio("ours", "loop") for name, row in by_name.items()}

    def ratio(name: str, contender: str) -> float | None:
        return by_name[name].ratio("ours", contender) if name in by_name else None

    bars = [Bar(f"{name} over the loop", floor, speed_ups.get(name)) for name, floor in BARS.items()]
    bars.append(Bar("cnn8 over by hand", 0.95, ratio("cnn8", "by hand")))
    bars.append(Bar("mlp over jax", 1.0, ratio("mlp", "jax")))
    measured = {name: value for name, value in speed_ups.items() if value is not None}
    missing = [name for name in WORKLOADS if name not in measured]
    without = f"without {', '.join(missing)}: " if missing else ""
    slowest = min(measured, key=lambda name: measured[name], default=None)
    least = measured[slowest] if slowest else None
    # One workload below the floor is enough to miss it; to hold it, all must be measured.
    bars.append(
        Bar(
            "every workload over the loop",
            1.0,
            least if not missing or (least is not None and least < 1.0) else None,
            f"{without}the slowest is {slowest}, {least:.3g}" if slowest else "",
        )
    )
    mean = statistics.geometric_mean(measured.values()) if measured else None
    bars.append(
        Bar(
            f"geometric mean of all {len(WORKLOADS)}",
            3.5,
            None if missing else mean,
            f"{without}{mean:.3g}" if mean is not None and missing else "",
        )
    )
    return bars


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for line in (header, ["-" * width for width in widths], *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_rows(rows: Sequence[Row]) -> None:
    header = ["workload", "B", "loop, ms"]
    header += [f"{contender}, x" for contender in CONTENDERS[1:]]
    header += ["ours, range", "noise", "others", "strategy", "after, s"]
    cells = []
    for row in rows:
        line = [row.workload, str(row.lanes), shown(row.milliseconds("loop"))]
        line += [shown(row.ratio(contender, "loop")) for contender in CONTENDERS[1:]]
        own = row.ratios("ours", "loop")
        line.append(f"{min(own):.3g} to {max(own):.3g}" if own else "-")
        line += [f"{100 * row.noise():.0f}%", f"{100 * row.others:.0f}%"]
        settled = row.settled
        if settled is None:
            line += ["-", "-"]
        else:
            changed = f", then {row.strategy_after}" if row.strategy_after != settled.strategy else ""
            line += [settled.strategy + changed, f"{settled.seconds:.1f}" if settled.chosen else "undecided"]
        cells.append(line)
    print_table(header, cells)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def print_bars(bars: Sequence[Bar]) -> None:
    header = [f"bar at B={LANES_OF_BARS}", "at least", "measured", "", ""]
    print_table(header, [[bar.name, f"{bar.floor:g}", shown(bar.value), bar.verdict, bar.detail] for bar in bars])


def print_notes(rows: Sequence[Row]) -> None:
    for row in rows:
        where = f"{row.workload}, B={row.lanes}"
        for contender, reason in row.unavailable.items():
            if contender != "jax" or jax_version() is not None:
                print(f"{where}: {contender} not measured: {reason}")
        if row.engine_seconds:
            figures = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in row.engine_seconds.items())
            print(f"{where}: the engine chose from {figures}")
        for warning in row.warnings:
            print(f"{where}: warning: {warning}")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"some of {','.join(WORKLOADS)}")
    parser.add_argument("--lanes", help=f"numbers of lanes (default: {','.join(map(str, LANES))})")
    parser.add_argument("--seconds", type=float, help="time for one contender's measurement (default: 2)")
    parser.add_argument("--warm-up", type=float, help="the most seconds for the engine's choice (default: 60)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fast", action="store_true", help=f"a rough look: B={LANES_OF_BARS}, 0.7 s, 30 s")
    parser.add_argument("--out", help="name of the JSON file in benchmarks/results/, without .json")
    args = parser.parse_args()
    args.workloads = args.workloads.split(",")
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"--workloads knows {','.join(WORKLOADS)}, not {','.join(sorted(unknown))}.")
    default_lanes = [LANES_OF_BARS] if args.fast else list(LANES)
    try:
        args.lanes = [int(lanes) for lanes in args.lanes.split(",")] if args.lanes else default_lanes
    except ValueError:
        parser.error(f"--lanes must be numbers such as 8,32, but got {args.lanes}.")
    if min(args.lanes) < 1:
        parser.error(f"--lanes must be positive but got {min(args.lanes)}.")
    args.seconds = args.seconds or (0.7 if args.fast else 2.0)
    args.warm_up = args.warm_up or (30.0 if args.fast else 60.0)
    return args


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    machine = {
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg(),
        "versions": {"torch": torch.__version__, "jax": jax_version(), "python": platform.python_version()},
    }
    print(f"{machine['device']}, {machine['cpus']} CPUs, torch {torch.__version__} with {machine['threads']} threads,")
    print(f"jax {jax_version() or 'not installed'}, load average {os.getloadavg()[0]:.1f} before the start\n")
    rows: list[Row] = []
    for name in args.workloads:
        start = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            try:
                rows += process.submit(measure_workload, name, args).result()
            except BrokenProcessPool:
                print(f"{name}: the process died; it may have run out of memory.")
                continue
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print()
    print_rows(rows)
    print("\nx: speed-up over the loop, median of the slices. ours, range: the slices' least and greatest. noise: the")
    print("widest range of a contender's times, over its median. others: what other processes had of the CPUs in the")
    print("most disturbed slice. after: from the array's first step to its strategy's first.\n")
    print_notes(rows)
    bars = bars_of(rows)
    if bars:
        print()
        print_bars(bars)
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{args.out}.json"
        record = {
            "command": vars(args),
            "date": time.strftime("%Y-%m-%d"),
            **machine,
            "load_average_after": os.getloadavg(),
            "rows": [recorded(row) for row in rows],
            "bars": [{**dataclasses.asdict(bar), "verdict": bar.verdict} for bar in bars],
        }
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nWritten: {path.relative_to(RESULTS.parent.parent)}")


def recorded(row: Row) -> dict[str, Any]:
    """A row with its medians, for the JSON file."""
    others = [contender for contender in row.step_seconds if contender != "ours"]
    return {
        **dataclasses.asdict(row),
        "milliseconds": {contender: row.milliseconds(contender) for contender in row.step_seconds},
        "speed_up": {contender: row.ratio(contender, "loop") for contender in row.step_seconds},
        "ours_over": {contender: row.ratio("ours", contender) for contender in others if "ours" in row.step_seconds},
        "noise": row.noise(),
    }


if __name__ == "__main__":
    main()
