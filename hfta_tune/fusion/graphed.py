"""CUDA graphs of eager steps: the kernels of a step, launched at once instead of one by one from Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.failure import first_line

__all__ = ["GraphedSteps"]

logger = logging.getLogger(__name__)

# The eager steps before a capture: they settle the optimizers' books and warm torch's libraries up.
_CALM_STEPS = 3


class GraphedSteps:
    """The captured steps of one array, by form of batch. A graph holds for the tensors that it was captured with."""

    def __init__(self) -> None:
        self._graphs: dict[Any, _Graph] = {}
        self._calm = 0
        self._holds_for: object = None
        self._possible = True

    def reset(self) -> None:
        """The array's tensors are others now."""
        self._graphs.clear()
        self._calm = 0

    def train(
        self, form: Any, batch: Any, holds_for: object, step: Callable[[Any], dict[str, Tensor]]
    ) -> dict[str, Tensor] | None:
        """Train one step by a graph.

        Args:
            form: The form of the batch.
            batch: What to train on.
            holds_for: An object that is the same as long as the array's tensors and numbers are.
            step: Trains on a batch and returns {optimizer: losses}, launching kernels only.

        Returns:
            The losses; None if this step must be trained eagerly.
        """
        if holds_for is not self._holds_for:
            self._holds_for = holds_for
            self.reset()
        self._calm += 1
        if not self._possible or self._calm <= _CALM_STEPS:
            return None
        if form not in self._graphs:
            try:
                self._graphs[form] = _Graph(batch, step)
            except Exception as error:  # nothing has been executed
                logger.info("The training step goes on without a CUDA graph: %s", first_line(error))
                self._possible = False
                return None
        return self._graphs[form].replay(batch)


class _Graph:
    def __init__(self, batch: Any, step: Callable[[Any], dict[str, Tensor]]) -> None:
        self._batch = pytree.tree_map_only(Tensor, torch.clone, batch)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._losses = step(self._batch)

    def replay(self, batch: Any) -> dict[str, Tensor]:
        """Train on a batch of the captured form."""
        for place, value in zip(pytree.tree_leaves(self._batch), pytree.tree_leaves(batch), strict=True):
            if isinstance(place, Tensor):
                place.copy_(value, non_blocking=True)
        self._graph.replay()
        return {name: loss.clone() for name, loss in self._losses.items()}
