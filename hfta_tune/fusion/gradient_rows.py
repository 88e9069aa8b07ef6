"""The gradients of a stack as its lanes' own code sees them: the `grad` of each lane's own parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.stack import LaneStack

__all__ = ["GradientRows", "Graph", "newest_first"]

_ages = itertools.count()


class Graph:
    """Lives as long as a graph that leads to a stack: its nodes hold it.

    Attributes:
        rows: The gradients of the stack.
    """

    __slots__ = ("__weakref__", "rows")

    def __init__(self, rows: GradientRows) -> None:
        self.rows = rows


class GradientRows:
    """Keeps `grad` of the stacked parameters and of the lanes' own parameters the same.

    A backward pass adds to the stacked parameters' `grad`. The lanes' are rows of that, so what lanes do to
    theirs in place is done to the stack, and an optimizer of the array finds all gradients in one tensor.

    Attributes:
        graph: What the graphs hold that lead to the stack, if there were any.

    Args:
        stack: The stack.
    """

    def __init__(self, stack: LaneStack) -> None:
        self.stack = stack
        self.lanes = stack.lanes
        self.age = next(_ages)
        self._leaves = {name: leaf for name, leaf in stack.parameters.items() if leaf.requires_grad}
        self._own: dict[str, list[nn.Parameter]] = {
            name: [lane.model.get_parameter(name) for lane in stack.lanes] for name in self._leaves
        }
        self._rows: dict[str, tuple[Tensor | None, ...]] = {}
        self.graph: weakref.ref[Graph] | None = None
        self._before: dict[str, tuple[Tensor, int]] = {}

    def hold_in(self, outputs: Sequence[Tensor]) -> None:
        """Let the graphs of tensors hold a `Graph`."""
        graph = None if self.graph is None else self.graph()
        if graph is None:
            graph = Graph(self)
            self.graph = weakref.ref(graph)
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.metadata["hfta_tune"] = graph  # type: ignore[index]

    def collect(self, claimed: set[int] | None = None) -> None:
        """Make the stacked gradients what the lanes' are now: before a backward pass adds to them.

        Args:
            claimed: By id, the parameters whose gradients other stacks have taken; this one's are added to it.
        """
        self._before = {}
        for name, leaf in self._leaves.items():
            own = [parameter.grad for parameter in self._own[name]]
            if claimed is not None:
                ids = list(map(id, self._own[name]))
                own = [None if id_ in claimed else gradient for id_, gradient in zip(ids, own, strict=True)]
                claimed.update(ids)
            rows = self._rows.get(name, (None,) * len(own))
            if all(gradient is None for gradient in own):
                leaf.grad = None
                self._rows.pop(name, None)
            elif leaf.grad is None or any(gradient is not row for gradient, row in zip(own, rows, strict=True)):
                filled = [
                    torch.zeros_like(parameter) if gradient is None else gradient
                    for parameter, gradient in zip(self._own[name], own, strict=True)
                ]
                leaf.grad = torch.stack(filled)
                self._bind(name, leaf.grad, [gradient is not None for gradient in own])
            if leaf.grad is not None:
                self._before[name] = leaf.grad, leaf.grad._version

    def deal_out(self, lanes: Collection[Lane]) -> None:
        """Give `lanes` what a backward pass has computed for them."""
        everyone = len(lanes) == len(self.lanes)
        for name, leaf in self._leaves.items():
            if leaf.grad is None:
                continue
            before, version = self._before.get(name, (None, 0))
            if leaf.grad is before and leaf.grad._version == version:
                continue  # the pass has not come here
            if leaf.grad.is_sparse:
                leaf.grad = leaf.grad.to_dense()
            if not leaf.grad.is_contiguous():  # fused kernels of torch.optim read a gradient without its strides
                leaf.grad = leaf.grad.contiguous()
                self._rows.pop(name, None)
            rows = self._rows.get(name)
            if rows is None and everyone and all(parameter.grad is None for parameter in self._own[name]):
                self._bind(name, leaf.grad, [True] * len(self.lanes))
                continue
            rows = rows or (None,) * len(self.lanes)
            has = []
            for row, lane in enumerate(self.lanes):
                gradient = self._own[name][row].grad
                if gradient is not None and gradient is not rows[row]:
                    # Besides through the array, the lane's own code has used this parameter itself.
                    leaf.grad[row].add_(gradient)
                has.append(gradient is not None or lane in lanes)
            if not all(has):  # rows of lanes that take no part are nothing that anybody has computed
                leaf.grad[torch.tensor([not own for own in has], device=leaf.grad.device)] = 0
            if any(own and row is None for own, row in zip(has, rows, strict=True)) or rows.count(None) < has.count(
                False
            ):
                self._bind(name, leaf.grad, has)
        self._before = {}

    def are_computed_now(self) -> bool:
        """Whether the backward pass that runs adds to them; one that returns gradients (torch.autograd.grad) does not.

        For a hook in that pass.
        """
        try:
            return any(
                torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in self._leaves.values()
            )
        except RuntimeError:  # so torch answers where gradients are returned
            return False

    def bound(self, name: str) -> Tensor | None:
        """The stacked gradient of a parameter, [lanes, ...], if the lanes' own are all rows of it."""
        leaf, rows = self._leaves.get(name), self._rows.get(name)
        if leaf is None or leaf.grad is None or rows is None:
            return None
        own = self._own[name]
        same = all(row is not None and parameter.grad is row for parameter, row in zip(own, rows, strict=True))
        return leaf.grad if same else None

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter, [lanes, ...], if every lane has one."""
        stacked = self.bound(name)
        if stacked is not None or name not in self._own:
            return stacked
        given = [parameter.grad for parameter in self._own[name] if parameter.grad is not None]
        return torch.stack(given) if len(given) == len(self._own[name]) else None

    def _bind(self, name: str, gradient: Tensor, has: list[bool]) -> None:
        """Make the lanes' own gradients rows of the stacked one."""
        rows = tuple(row if own else None for row, own in zip(gradient.unbind(), has, strict=True))
        self._rows[name] = rows
        for parameter, row in zip(self._own[name], rows, strict=True):
            if row is not None:
                parameter.grad = row


def newest_first(rows: Iterable[GradientRows]) -> list[GradientRows]:
    """The order in which gradients are collected and dealt out: a lane that has moved has its gradient in the last."""
    return sorted({id(own): own for own in rows}.values(), key=lambda own: -own.age)
