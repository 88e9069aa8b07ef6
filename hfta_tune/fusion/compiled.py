"""A whole training step of an array as one function of tensors, recorded or compiled: with backward and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.any_lanes import NotAlike
from hfta_tune.fusion.compiled_forms import FORMS
from hfta_tune.fusion.recording import Recording, Tensors, without_aliases

__all__ = ["BoundStep", "CompiledStep", "RecordedStep"]


class RecordedStep:
    """A step of tensors, as the list of its tensor operations, for any number of lanes.

    Running that does what the step does, without the time that Python, vmap and autograd take. What the step changes
    in place, it changes in place.

    Args:
        step: step(tensors) -> tensors: a whole training step. Everything that it reads is in `tensors`.
        tensors: An example, {other names: ..., "batch": ...}.

    Raises:
        NotAlike: if the step is another one for another number of lanes.
    """

    _forms: Mapping[Any, Callable[..., Any]] = {}

    def __init__(self, step: Callable[[Tensors], Tensors], tensors: dict[str, Tensors]) -> None:
        recording = Recording(step, tensors, self._forms)
        self._batch_places, self._result = recording.batch_places, recording.result
        self._run = self._runs(recording.graph, recording.examples)
        self._try_on_two_lanes(pytree.tree_leaves(tensors))

    def _runs(self, record: torch.fx.GraphModule, examples: Callable[[], list[Tensor]]) -> Any:
        """Make something to call of the record."""
        without_aliases(record)
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
