"""Writes the tables of the pages: of what fuses, from the rows that tests/fusion is made of, and of the metrics.

python docs/_generate.py
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]

sys.path.insert(0, str(ROOT / "tests"))

from fusion import test_modules, test_optimizers, test_schedules  # noqa: E402
from fusion.breadth import FUSED, LANE_BY_LANE  # noqa: E402

from hfta_tune.monitor._metric_table import METRICS  # noqa: E402

GROUPS: dict[str, Sequence[Any]] = {
    "Convolutions": test_modules.CONVOLUTIONS,
    "Linear layers, lazy modules": test_modules.LINEAR,
    "Normalization": test_modules.NORMS,
    "Embeddings": test_modules.EMBEDDINGS,
    "Recurrent layers": test_modules.RECURRENT,
    "Attention": test_modules.ATTENTION,
    "Transformers": test_modules.TRANSFORMERS,
    "Activations": test_modules.ACTIVATIONS,
    "Pooling": test_modules.POOLING,
    "Padding, resampling, shapes": test_modules.SHAPES,
    "Random in training": test_modules.RANDOM,
    "Losses": test_modules.LOSSES,
    "Containers, models of a user's own": test_modules.MODELS,
    "Parametrizations": test_modules.PARAMETRIZED,
    "Functions in a user's forward": test_modules.FUNCTIONS,
}

# Why rows do not fuse, by the part of the warning that the test expects; where it expects no certain one, by the name.
REASONS = {
    "vmap stopped at module 'first' (BatchNorm": "weighs its average by 1 over a count, as a Python number",
    "(CrossMapLRN2d)": "an autograd function of torch without setup_context",
    "(AdaptiveLogSoftmaxWithLoss)": "writes the samples of each cluster into a tensor that has no lanes",
    "vmap stopped at module 'module' (RReLU)": "has no batching rule in torch",
    "setup_context": "an autograd function without setup_context; with it and `generate_vmap_rule = True` it fuses",
    "data-dependent control flow": "an `if` on the value of a tensor; `torch.where` fuses",
    "inplace randomness": "torch draws in place; `mean + std * torch.randn_like(std)` fuses",
    "inplace arithmetic": "written into a tensor that has no lanes; `torch.zeros_like` of what is computed has them",
    "updated in place, were not batched": "statistics that forward makes have no lanes",
    "dynamic shape": "the result's shape depends on values; `torch.where` fuses",
    "calling .item()": "a Python number, where each lane has another; tensors fuse",
    "data pointer": "NumPy is given one tensor, not one a lane",
    "requires_grad_": "`requires_grad_` in forward; `torch.func.grad` fuses",
    "sparse": "sparse gradients",
    "LBFGS.step evaluates the loss itself, through a closure": "its step evaluates the loss itself, through a closure",
    "spectral_norm": "its power iteration writes into given tensors (`out=`)",
    "weight_norm": "keeps a computed weight as an attribute; `parametrizations.weight_norm` fuses",
    "prune": "keeps an object that cannot be compared as an attribute of the module",
    "checkpoint": "vmap stops in the backward pass",
    "packed sequences": "torch's kernels for them have no batching rule",
}
# Rows that the tests do not bind to one strategy.
EITHER = {
    "TransformerEncoder(2 layers) with src_key_padding_mask": "training fuses; evaluation runs lane by lane, for torch "
    "makes nested tensors of padded sequences there",
    "the older spectral_norm(Linear)": "its computed weight differs between trials, so each is an array of its own",
}


def modules() -> str:
    """Which modules, functions and losses fuse."""
    grouped = {row.name for rows in GROUPS.values() for row in rows}
    losses = [row for row in test_modules.ROWS if row.name not in grouped]  # those that have parameters
    lines = []
    for title, rows in GROUPS.items():
        own = [*rows, *losses] if title == "Losses" else rows
        fused = [_subject(row) for row in own if row.strategy == FUSED]
        lines.append([title, _listed(fused), str(len(own))])
    return _table(["", "fuse", "rows"], lines)


def lane_by_lane() -> str:
    """What trains lane by lane, and why."""
    rows = [*test_modules.ROWS, *test_modules.LOSSES, *test_modules.RANDOM, *test_optimizers.ROWS]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.strategy != FUSED:
            by_reason[EITHER[row.name] if row.strategy is None else _reason(row)].append(row.name)
    lines = [[", ".join(f"`{name}`" for name in names), reason] for reason, names in by_reason.items()]
    return _table(["as the tests write it", "why"], lines)


def optimizers() -> str:
    """How each optimizer runs, and which of its numbers differ between the lanes in the tests."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for row in test_optimizers.ROWS:
        rows[row.kind.__name__ if row.kind else row.name].append(row)
    lines = []
    for name, own in rows.items():
        fused = [row for row in own if row.strategy == FUSED]
        numbers = {number for row in own for number in re.findall(r"(\w+)=\(?(?:[\d.]+, )?\.\.\.", row.name)}
        native = own[0].kind in test_optimizers.NATIVE
        update = "one for all lanes" if native and fused else "its own code, lane by lane" if fused else LANE_BY_LANE
        if own[0].kind is not None:
            lines.append([f"`{name}`", update, ", ".join(f"`{number}`" for number in sorted(numbers)), str(len(own))])
    others = [name for name, own in rows.items() if own[0].kind is None and own[0].strategy == FUSED]
    return (
        _table(["optimizer", "update", "differ between lanes in the tests", "rows"], lines)
        + "\n\nFurther rows: "
        + "; ".join(others).replace(" ,", ",")
        + "."
    )


def schedules() -> str:
    """Which schedules advance lane by lane, by epoch and by step."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for row in test_schedules.ROWS:
        rows[row.kind.__name__ if row.kind.__module__.startswith("torch.") else "a class of a user's own"].append(row)
    lines = []
    for name, own in rows.items():
        intervals = sorted({interval for row in own for interval in row.intervals})
        shown = f"`{name}`" if own[0].kind.__module__.startswith("torch.") else name
        lines.append([shown, " and ".join(intervals), str(sum(len(row.intervals) for row in own))])
    return _table(["scheduler", "interval", "rows"], lines)


def metrics() -> str:
    """The metrics of a run under Ray Tune."""
    lines = [[f"`{own.name}`", own.kind.value, ", ".join(own.labels), own.help] for own in METRICS.values()]
    return _table(["name", "type", "labels", "meaning"], lines)


TABLES = {
    "what_fuses.md": {
        "modules": modules,
        "lane by lane": lane_by_lane,
        "optimizers": optimizers,
        "schedules": schedules,
    },
    "monitoring.md": {"metrics": metrics},
}


def with_tables(page: str) -> str:
    """Return the text of a page with its tables made anew, between their comments."""
    text = (ROOT / "docs" / page).read_text()
    for name, make in TABLES[page].items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        before, rest = text.split(begin)
        text = before + begin + make() + end + rest.split(end, 1)[1]
    version = ".".join(torch.__version__.split(".")[:2])
    return re.sub(r"(<!-- torch -->)[\d.]*", rf"\g<1>{version}", text)


def _subject(row: Any) -> str:
    """What a row is about: a class of torch, or what it says."""
    return f"`{row.kind.__name__}`" if row.kind else row.name


def _reason(row: Any) -> str:
    if row.reason in REASONS:
        return REASONS[row.reason]
    return next(reason for part, reason in REASONS.items() if part in row.name)


def _listed(subjects: Iterable[str]) -> str:
    unique = list(dict.fromkeys(subjects))
    separator = ", " if all(subject.startswith("`") for subject in unique) else "; "
    return separator.join(unique)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / "docs" / page).write_text(with_tables(page))
