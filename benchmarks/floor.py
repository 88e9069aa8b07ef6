"""Says what a training step of B models costs at least, and where ours spends its time.

    python benchmarks/floor.py --out floor        # writes benchmarks/results/floor.json

For each workload of engine.py, in one process and in turns:

    loop             stock PyTorch, one model after the other
    ours             the strategy that the engine has chosen
    matrix products  only the matrix multiplications and convolutions of one of our steps, each timed alone on its
                     own shapes and added up: what is left of a step if all else cost nothing

The loop's time over that of the matrix products is a limit for any way to fuse that multiplies the same matrices
with the same library. A profile of ours says what the rest is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _contenders import Contender, Ours, StockLoop
from _workloads import WORKLOADS, learning_rates
from engine import device_name, print_table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).resolve().parent / "results"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


class Products(TorchDispatchMode):
    """Counts the matrix multiplications and convolutions that run, by operation, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Hashable] = Counter()
        self.calls: dict[Hashable, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            key = str(func), str(pytree.tree_map_only(Tensor, lambda t: (*t.shape, *t.stride()), args))
            self.counts[key] += 1
            self.calls.setdefault(key, _call_alike(func, args))
        return func(*args, **(kwargs or {}))


def _call_alike(func: Any, args: Any) -> Callable[[], Any]:
    given = pytree.tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).normal_(), args
    )
    return lambda: func(*given)


def products_of_a_step(step: Callable[[int], Any]) -> tuple[Callable[[], float], int]:
    """Record the products of a step; return what times them all once, in seconds, and how many there are."""
    step(1)
    with Products() as products:
        step(1)

    def run() -> float:
        total = 0.0
        for key, call in products.calls.items():
            call()
            start = time.perf_counter()
            for _ in range(products.counts[key]):
                call()
            total += time.perf_counter() - start
        return total

    return run, sum(products.counts.values())


def where_time_goes(contender: Contender, steps: int) -> list[tuple[str, float]]:
    """[(operation, milliseconds a step)] of the five that take the most."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        contender.run(steps)
    own = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [(event.key, event.self_cpu_time_total / 1e3 / steps) for event in own[:5]]


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    device, workload = torch.device("cpu"), WORKLOADS[name]
    batches, rates = workload.batches(device), learning_rates(args.lanes)
    with mock.patch.dict(os.environ, {"HFTA_TUNE_STRATEGY": "vmap"}):
        uncompiled = Ours(workload, batches, rates, device)
    products, count = products_of_a_step(uncompiled.run)
    contenders: dict[str, Contender] = {"loop": StockLoop(workload, batches, rates, device)}
    contenders["ours"] = ours = Ours(workload, batches, rates, device)
    ours.settle(args.warm_up)
    for contender in contenders.values():
        contender.run(args.steps)
    seconds: dict[str, list[float]] = {name: [] for name in (*contenders, "matrix products")}
    for _ in range(args.slices):
        for contender_name, contender in contenders.items():
            start = time.perf_counter()
            contender.run(args.steps)
            seconds[contender_name].append((time.perf_counter() - start) / args.steps)
        seconds["matrix products"].append(products())
    medians = {contender: statistics.median(own) for contender, own in seconds.items()}
    return {
        "workload": name,
        "strategy": ours.strategy,
        "seconds": seconds,
        "speed_up": medians["loop"] / medians["ours"],
        "limit": medians["loop"] / medians["matrix products"],
        "products": count,
        "milliseconds": {contender: 1e3 * median for contender, median in medians.items()},
        "profile": where_time_goes(ours, args.steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="lstm,transformer", help="of engine.py, separated by commas")
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="steps in a slice")
    parser.add_argument("--slices", type=int, default=9)
    parser.add_argument("--warm-up", type=float, default=100.0, help="the most seconds to choose a strategy in")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="name of the JSON file in benchmarks/results/, without .json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(name, args) for name in args.workloads.split(",")]
    print(f"\n{args.lanes} models, {args.threads} threads, {device_name(torch.device('cpu'))}; ms a step of all:\n")
    print_table(
        ["workload", "loop", "ours", "matrix products", "speed-up", "limit", "strategy"],
        [
            [
                row["workload"],
                *(f"{row['milliseconds'][name]:.1f}" for name in ("loop", "ours")),
                f"{row['milliseconds']['matrix products']:.1f} ({row['products']})",
                f"{row['speed_up']:.2f}",
                f"{row['limit']:.2f}",
                row["strategy"],
            ]
            for row in rows
        ],
    )
    for row in rows:
        print(f"\n{row['workload']}, profile of ours, ms a step:")
        for operation, milliseconds in row["profile"]:
            print(f"  {milliseconds:7.2f}  {operation:.90}")
    if args.out:
        record = {
            "arguments": vars(args),
            "date": time.strftime("%Y-%m-%d"),
            "device": device_name(torch.device("cpu")),
            "torch": torch.__version__,
            "rows": rows,
        }
        path = RESULTS / f"{args.out}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nWritten: {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
