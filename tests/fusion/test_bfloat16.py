"""The tables of modules, functions and losses once more: autocast gives under vmap what it gives one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fusion.breadth import FUSED, Row, Twice
from fusion.test_modules import LOSSES, ROWS
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune.fusion import Lane, Options
from hfta_tune.fusion.stack import LaneStack, Template
from hfta_tune.fusion.vmapped import call_for_all

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")

CPU = torch.device("cpu")
LOWER = torch.bfloat16


class TwiceLower(Twice):
    """The later module is fed what a layer before it gives under autocast."""

    def called(self, module: nn.Module, *inputs: Tensor) -> Any:
        if module is self.later and self.lower:
            inputs = tuple(x.to(LOWER) if x.dtype == torch.float32 else x for x in inputs)
        return super().called(module, *inputs)

    lower = True


class TwiceFloat32(TwiceLower):
    """For modules that stock torch does not run on bfloat16."""

    lower = False


class WithLoss(nn.Module):
    """A module and the loss of its output."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        assert row.criterion is not None
        self.module, self.criterion = row.build(), row.criterion()

    def forward(self, first: Tensor, *others: Tensor) -> Any:
        output = self.module(first)
        return self.criterion(*(output if isinstance(output, tuple) else (output,)), *others)


Maker = Callable[[Row], nn.Module]


def models(row: Row, make: Maker) -> list[nn.Module]:
    built = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        built.append(make(row))
    return built


def leaves(output: Any) -> dict[str, Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def plain(row: Row, makers: Sequence[Maker]) -> tuple[Maker, list[dict[str, Tensor]]]:
    """What stock torch makes of a batch under autocast, with the first of `makers` that it can run."""
    for make in makers:
        built = models(row, make)
        try:
            with torch.no_grad(), torch.autocast("cpu", dtype=LOWER):
                return make, [leaves(model(*row.batch(0))) for model in built]
        except (RuntimeError, ValueError):
            continue
    assert row.kind is nn.LSTM, "stock torch runs all others under autocast"
    pytest.skip("stock torch does not run it under autocast on a CPU")


def vmapped(row: Row, make: Maker) -> dict[str, Tensor]:
    lanes = [Lane(str(number), model, {}) for number, model in enumerate(models(row, make))]
    template, stack = Template(lanes[0].model), LaneStack(lanes, CPU)

    def step(lanes: Sequence[Lane], model: nn.Module, batch: Any, values: Any) -> Any:
        return model(*batch)

    buffers = {**stack.buffers, **stack.carried}
    options = Options(precision="bf16")
    with torch.no_grad():
        result, _ = call_for_all(
            step, lanes, template, row.batch(0), stack.parameters, buffers, stack.values, leaves, options
        )
    return result


def fused(rows: Sequence[Row]) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in rows if row.strategy == FUSED]


@pytest.mark.parametrize("row", fused(ROWS))
def test_modules_and_functions(row: Row) -> None:
    assert_row(row, TwiceLower, TwiceFloat32)


@pytest.mark.parametrize("row", fused(LOSSES))
def test_losses(row: Row) -> None:
    assert_row(row, WithLoss)


def assert_row(row: Row, *makers: Maker) -> None:
    make, expected = plain(row, makers)
    got = vmapped(row, make)
    for lane, own in enumerate(expected):
        assert got.keys() == own.keys()
        for name, tensor in own.items():
            assert got[name].dtype == tensor.dtype, f"output {name}"
            gap, size = (float(t.double().abs().max()) for t in (got[name][lane] - tensor, tensor))
            assert gap <= 3e-2 * size, f"output {name} is off by {gap} of {size}"
