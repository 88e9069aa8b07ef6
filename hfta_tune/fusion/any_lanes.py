"""A record of a step that holds for any number of lanes, from two records for two numbers of them.

torch's batching rules read sizes as plain numbers, so a record made with a size that may vary holds for the number
of lanes in the example all the same. Two records differ in just those numbers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["NotAlike", "for_any_lanes"]


class NotAlike(Exception):
    """Why two records cannot be one."""


def for_any_lanes(first: fx.GraphModule, second: fx.GraphModule, lanes: tuple[int, int], lead: int) -> fx.GraphModule:
    """Make `first` hold for any number of lanes.

    A number that differs between the records is taken for a multiple of the lanes plus a constant.

    Args:
        first: The record of a step, which is changed.
        second: The record of the same step for another number of lanes.
        lanes: The two numbers.
        lead: Which input has the lanes as its first dimension.

    Returns:
        `first`.

    Raises:
        NotAlike: if the records differ in anything else.
    """
    return _Merger(first, second, lanes, lead).merged()


class _Merger:
    def __init__(self, first: fx.GraphModule, second: fx.GraphModule, lanes: tuple[int, int], lead: int) -> None:
        self._first, self._second, self._lanes = first, second, lanes
        self._numbers: dict[tuple[int, int], fx.Node] = {}
        self._same: dict[fx.Node, fx.Node] = {}
        placeholders = [node for node in first.graph.nodes if node.op == "placeholder"]
        with first.graph.inserting_after(placeholders[-1]):
            self._count = first.graph.call_function(torch.ops.aten.sym_size.int, (placeholders[lead], 0))
        self._last: fx.Node = self._count

    def merged(self) -> fx.GraphModule:
        ours = [node for node in self._first.graph.nodes if node is not self._count]
        theirs = list(self._second.graph.nodes)
        if len(ours) != len(theirs):
            raise NotAlike(
                f"the step has {len(ours)} operations for {self._lanes[0]} lanes and {len(theirs)} for others"
            )
        for our, their in zip(ours, theirs, strict=True):
            if our.op != their.op or (our.op == "call_function" and our.target != their.target):
                raise NotAlike(f"{our.target} for {self._lanes[0]} lanes is {their.target} for others")
            self._same[their] = our
            if our.op == "get_attr":
                self._check_constant(our, their)
            elif our.op != "placeholder":
                our.args = self._merge(our.args, their.args)
                our.kwargs = self._merge(our.kwargs, their.kwargs)
        self._first.recompile()
        return self._first

    def _check_constant(self, our: fx.Node, their: fx.Node) -> None:
        first, second = (getattr(m, str(n.target)) for m, n in ((self._first, our), (self._second, their)))
        if isinstance(first, Tensor) and not (first.shape == second.shape and bool((first == second).all())):
            raise NotAlike("a constant differs with the number of lanes")

    def _merge(self, our: Any, their: Any) -> Any:
        if isinstance(our, fx.Node):
            if self._same.get(their) is not our:
                raise NotAlike("the records are made of their operations in different ways")
            return our
        if isinstance(our, (list, tuple)) and len(our) == len(their):
            return type(our)(self._merge(a, b) for a, b in zip(our, their, strict=True))
        if isinstance(our, dict) and our.keys() == their.keys():
            return {key: self._merge(value, their[key]) for key, value in our.items()}
        if type(our) is int and type(their) is int and our != their:
            return self._number(our, their)
        if our != their:
            raise NotAlike(f"{our!r} for {self._lanes[0]} lanes is {their!r} for others")
        return our

    def _number(self, our: int, their: int) -> fx.Node:
        """The node of lanes * factor + rest."""
        factor, inexact = divmod(their - our, self._lanes[1] - self._lanes[0])
        if inexact:
            raise NotAlike(f"{our} for {self._lanes[0]} lanes is {their} for {self._lanes[1]}")
        rest = our - factor * self._lanes[0]
        if (factor, rest) not in self._numbers:
            number = self._after(operator.mul, self._count, factor) if factor != 1 else self._count
            self._numbers[factor, rest] = self._after(operator.add, number, rest) if rest else number
        return self._numbers[factor, rest]

    def _after(self, operation: Any, number: fx.Node, other: int) -> fx.Node:
        with self._first.graph.inserting_after(self._last):
            node: fx.Node = self._first.graph.call_function(operation, (number, other))
        self._last = node
        return node
