"""Any optimizer, a user's own included: its stock code, lane by lane, on views of the stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hfta_tune.fusion.lane import ONLY, Lane

__all__ = ["OptimizerViews"]


class OptimizerViews:
    """Runs each lane's own `optimizer.step()`; forward and backward stay fused.

    The lanes' parameters are views of the stacked ones, so the stock code updates the stack in place.
    """

    def __init__(self, lanes: Sequence[Lane], name: str = ONLY) -> None:
        self._lanes = list(lanes)
        self._name = name

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the stacked parameters in place; a parameter without gradient is left alone."""
        for row, lane in enumerate(self._lanes):
            own = [lane.model.get_parameter(name) for name in gradients]
            for parameter, gradient in zip(own, gradients.values(), strict=True):
                # Contiguous: the fused kernels of torch.optim read a gradient without its strides.
                parameter.grad = gradient[row].contiguous()
            try:
                lane.optimizers[self._name].step()
            except Exception as error:  # the other lanes go on
                lane.error = error
            for parameter in own:
                parameter.grad = None
