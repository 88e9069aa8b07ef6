"""A step of tensors as the list of its tensor operations, for any number of lanes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.any_lanes import NotAlike, for_any_lanes

__all__ = ["Recording", "Tensors", "without_aliases"]

Tensors: TypeAlias = Any
"""Nested dicts, lists and tuples of tensors. What is not in "batch" has shape [lanes, ...]."""


class Recording:
    """A step, run on stand-ins without data to record its tensor operations.

    The user's code, vmap and autograd leave nothing else behind. It is run once for each of two numbers of lanes,
    which makes a record for any number. What the step changes in place, the record changes in place.

    Attributes:
        graph: The record. Its inputs are the tensors in their order.
        batch_places: Which of the inputs are the batch, which lanes share; the others have lanes.
        result: The structure of what the step returns.

    Args:
        step: step(tensors) -> tensors. Everything that it reads is in `tensors`.
        tensors: An example, {other names: ..., "batch": ...}.
        forms: What torch's operations are made of, where they are not to stay as they are.

    Raises:
        NotAlike: if the step is another one for another number of lanes.
    """

    def __init__(
        self,
        step: Callable[[Tensors], Tensors],
        tensors: dict[str, Tensors],
        forms: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        leaves, structure = pytree.tree_flatten(tensors)
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        constants = [None if tensor else leaf for tensor, leaf in zip(is_tensor, leaves, strict=True)]
        shared = _batch_leaves(tensors)
        total = sum(is_tensor)
        of_batch = sum(tensor and batch for tensor, batch in zip(is_tensor, shared, strict=True))
        self.batch_places = slice(total - of_batch, total)  # the batch is last
        self.result: Any = None
        varying = [leaf for leaf in leaves if isinstance(leaf, Tensor)][: self.batch_places.start]
        lead = next((place for place, leaf in enumerate(varying) if leaf.dim()), None)
        if lead is None:
            raise NotAlike("nothing that the step reads has lanes")
        first, second = _numbers_of_lanes_to_assume(leaves, shared)

        def flat_step(*given: Tensor) -> list[Tensor]:
            remaining = iter(given)
            full = [next(remaining) if t else c for t, c in zip(is_tensor, constants, strict=True)]
            out, self.result = pytree.tree_flatten(step(pytree.tree_unflatten(full, structure)))
            return out

        def stand_ins(fake: FakeTensorMode, lanes: int, varies: DimDynamic) -> list[Tensor]:
            pairs = [(leaf, batch) for leaf, batch in zip(leaves, shared, strict=True) if isinstance(leaf, Tensor)]
            return [_stand_in(fake, leaf, n, None if batch else lanes, varies) for n, (leaf, batch) in enumerate(pairs)]

        def record(lanes: int) -> torch.fx.GraphModule:
            fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            table = dict(forms or {})
            with fake, enable_python_dispatcher():
                recorded = make_fx(flat_step, decomposition_table=table)(*stand_ins(fake, lanes, DimDynamic.STATIC))
            recorded.graph.eliminate_dead_code()
            return recorded

        self.graph = for_any_lanes(record(first), record(second), (first, second), lead)
        fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.examples = lambda: stand_ins(fake, first, DimDynamic.DUCK)
        """The inputs, without data and with a number of lanes that varies."""


def without_aliases(record: torch.fx.GraphModule) -> None:
    """Leave out what gives a tensor another name: there is no autograd that has to be told them apart."""
    for node in list(record.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            record.graph.erase_node(node)
    record.recompile()


def _batch_leaves(tensors: dict[str, Tensors]) -> list[bool]:
    """For each leaf, whether it belongs to the batch that the lanes share."""
    return [name == "batch" for name, part in tensors.items() for _ in range(len(pytree.tree_leaves(part)))]


def _numbers_of_lanes_to_assume(leaves: list[Any], shared: list[bool]) -> tuple[int, int]:
    """Two numbers of lanes that no other dimension has, so that nothing of the example is equal by chance."""
    tensors = [(leaf, batch) for leaf, batch in zip(leaves, shared, strict=True) if isinstance(leaf, Tensor)]
    lanes = next((len(leaf) for leaf, batch in tensors if not batch and leaf.dim()), 2)
    others = {size for leaf, batch in tensors for size in (leaf.shape if batch else leaf.shape[1:])}
    # Sizes of what is computed are sums and products of those; a prime is seldom among them.
    numbers = (number for number in itertools.count(lanes) if number not in others and _is_prime(number))
    return next(numbers), next(numbers)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _stand_in(fake: Any, tensor: Tensor, number: int, lanes: int | None, varies: Any) -> Tensor:
    """A tensor without data; with so many lanes, that vary in this way, if `lanes` is not None."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    example = tensor.detach()
    sizes = [DimDynamic.STATIC] * tensor.dim()
    if lanes is not None and sizes:
        sizes[0] = varies
        example = torch.empty_strided(
            (lanes, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    source = ConstantSource(f"input{number}")
    stand_in: Tensor = fake.from_tensor(example, symbolic_context=context, source=source)
    return stand_in
