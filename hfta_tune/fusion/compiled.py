"""A whole training step of an array as one function of tensors, recorded or compiled: with backward and optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.any_lanes import NotAlike, for_any_lanes
from hfta_tune.fusion.compiled_forms import FORMS

__all__ = ["BoundStep", "CompiledStep", "RecordedStep", "Tensors"]

Tensors: TypeAlias = Any
"""Nested dicts, lists and tuples of tensors. What is not in "batch" has shape [lanes, ...]."""


class RecordedStep:
    """A step of tensors, as the list of its tensor operations, for any number of lanes.

    The step is run on stand-ins without data to record its tensor operations (the user's code, vmap and autograd
    leave nothing else behind), once for each of two numbers of lanes, which makes a record for any number. Running
    that does what the step does, without the time that Python, vmap and autograd take. What the step changes in
    place, it changes in place.

    Args:
        step: step(tensors) -> tensors: a whole training step. Everything that it reads is in `tensors`.
        tensors: An example, {"batch": ..., other names: ...}.

    Raises:
        NotAlike: if the step is another one for another number of lanes.
    """

    _forms: Mapping[Any, Callable[..., Any]] = {}

    def __init__(self, step: Callable[[Tensors], Tensors], tensors: dict[str, Tensors]) -> None:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        leaves, self._structure = pytree.tree_flatten(tensors)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        constants = [None if tensor else leaf for tensor, leaf in zip(self._is_tensor, leaves, strict=True)]
        shared = _batch_leaves(tensors)
        total = sum(self._is_tensor)
        of_batch = sum(tensor and batch for tensor, batch in zip(self._is_tensor, shared, strict=True))
        self._batch_places = slice(total - of_batch, total)  # the batch is last
        self._result: Any = None
        lead = next((place for place, leaf in enumerate(self._varying(leaves)) if leaf.dim()), None)
        if lead is None:
            raise NotAlike("nothing that the step reads has lanes")
        first, second = _numbers_of_lanes_to_assume(leaves, shared)

        def flat_step(*given: Tensor) -> list[Tensor]:
            remaining = iter(given)
            full = [next(remaining) if t else c for t, c in zip(self._is_tensor, constants, strict=True)]
            out, self._result = pytree.tree_flatten(step(pytree.tree_unflatten(full, self._structure)))
            return out

        def stand_ins(fake: FakeTensorMode, lanes: int, varies: DimDynamic) -> list[Tensor]:
            pairs = [(leaf, batch) for leaf, batch in zip(leaves, shared, strict=True) if isinstance(leaf, Tensor)]
            return [_stand_in(fake, leaf, n, None if batch else lanes, varies) for n, (leaf, batch) in enumerate(pairs)]

        def record(lanes: int) -> torch.fx.GraphModule:
            fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            forms = dict(self._forms)
            with fake, enable_python_dispatcher():
                recorded = make_fx(flat_step, decomposition_table=forms)(*stand_ins(fake, lanes, DimDynamic.STATIC))
            recorded.graph.eliminate_dead_code()
            return recorded

        general = for_any_lanes(record(first), record(second), (first, second), lead)
        fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._run = self._runs(general, lambda: stand_ins(fake, first, DimDynamic.DUCK))
        self._try_on_two_lanes(leaves)

    def _runs(self, record: torch.fx.GraphModule, examples: Callable[[], list[Tensor]]) -> Any:
        """Make something to call of the record."""
        _without_aliases(record)
        return record.forward

    def _try_on_two_lanes(self, leaves: list[Any]) -> None:
        """See that it is for any number of lanes."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = [torch.zeros_like(leaf[:2]) if leaf.dim() else leaf.clone() for leaf in self._varying(leaves)]
        try:
            with torch.random.fork_rng(), torch.no_grad():
                self._run(*own, *given[self._batch_places])
        except (AssertionError, RuntimeError) as error:
            raise NotAlike(f"what was made of the step is not for any number of lanes: {error}") from error

    def _varying(self, leaves: list[Any]) -> list[Tensor]:
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)][: self._batch_places.start]

    def bind(self, tensors: dict[str, Tensors], block: int | None = None) -> BoundStep:
        """Bind the step to tensors of the example's structure, with any number of lanes; only batches still vary.

        Args:
            tensors: The tensors.
            block: How many lanes to train at a time, about; by default all.
        """
        given = [leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor)]
        return BoundStep(self._run, self._blocks(given, block), self._batch_places, self._result)

    def _blocks(self, given: list[Tensor], block: int | None) -> list[list[Tensor]]:
        batch = given[self._batch_places]
        own = given[: self._batch_places.start]
        lanes = len(own[0]) if own else 0
        if block is None or lanes <= block:
            return [given]
        split = [tensor.tensor_split(-(-lanes // block)) for tensor in own]
        return [[*parts, *batch] for parts in zip(*split, strict=True)]


class CompiledStep(RecordedStep):
    """A recorded step compiled by torch's inductor, whose own cache on disk serves other workers and later runs.

    Inductor may take a size for a constant, also one that it took for one when it filled its cache; a trial on two
    lanes shows it.
    """

    _forms = FORMS

    def _runs(self, record: torch.fx.GraphModule, examples: Callable[[], list[Tensor]]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch.no_grad():
            # Random numbers are long sums of integers that are to be computed where they are read.
            return compile_fx(record, examples(), config_patches={"realize_opcount_threshold": 100})


class BoundStep:
    """A recorded or compiled step with all its inputs in place but the batch.

    Args:
        run: What to call.
        blocks: Its inputs, of each block of lanes.
        batch_places: Where among them the batch goes.
        result: The structure of what it returns.
    """

    def __init__(self, run: Any, blocks: list[list[Tensor]], batch_places: slice, result: Any) -> None:
        self._run, self._blocks, self._batch_places, self._result = run, blocks, batch_places, result

    def __call__(self, batch: Tensors) -> Tensors:
        """Run the step on a batch of the example's form."""
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        with torch.no_grad():
            parts = []
            for inputs in self._blocks:
                inputs[self._batch_places] = leaves
                parts.append(self._run(*inputs))
            whole = parts[0] if len(parts) == 1 else [torch.cat(own) for own in zip(*parts, strict=True)]
            return pytree.tree_unflatten(list(whole), self._result)


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


def _without_aliases(record: torch.fx.GraphModule) -> None:
    """Leave out what gives a tensor another name: there is no autograd that has to be told them apart."""
    for node in list(record.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            record.graph.erase_node(node)
    record.recompile()
