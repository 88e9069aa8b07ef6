"""Any optimizer, a user's own included: its stock code, lane by lane, on views of the stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.stack import LaneStack

__all__ = ["OptimizerViews"]


class OptimizerViews:
    """Runs each lane's own `optimizer.step()`; forward and backward stay fused.

    The lanes' parameters are views of the stacked ones, so the stock code updates the stack in place.
    """

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack) -> None:
        self._lanes = list(lanes)
        self._own = {name: [lane.model.get_parameter(name) for lane in lanes] for name in stack.trainable()}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the stacked parameters in place; a parameter without gradient is left alone."""
        for name, gradient in gradients.items():
            for row, parameter in enumerate(self._own[name]):
                # Contiguous: the fused kernels of torch.optim read a gradient without its strides.
                parameter.grad = gradient[row].contiguous()
        for lane in self._lanes:
            try:
                lane.optimizer.step()
            except Exception as error:  # the other lanes go on
                lane.error = error
        for parameters in self._own.values():
            for parameter in parameters:
                parameter.grad = None
