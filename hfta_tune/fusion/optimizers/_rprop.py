"""Rprop for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedRprop"]


class FusedRprop(ClockedOptimizer):
    """torch.optim.Rprop, its formula and its state, with every number and step count a lane's.

    Source of the formula: torch's documentation of torch.optim.Rprop (Riedmiller and Braun 1993). lr is where an
    element's step size starts from, and is not read again.
    """

    classes = (torch.optim.Rprop,)
    flag_names = ("maximize",)

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("prev", "step_size")

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        read, send, dtype = group.numbers.host, group.numbers.device, group.dtype
        return {
            "shrink": send("shrink", read("etas", 0), dtype),
            "grow": send("grow", read("etas", 1), dtype),
            "least": send("least", read("step_sizes", 0), dtype),
            "most": send("most", read("step_sizes", 1), dtype),
        }

    def _first(self, group: ParameterGroup) -> dict[str, list[float]]:
        return {"step_size": group.numbers.host("lr")}

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        for clock in update.clocks:
            clock.add_(1)
        gradients = cls._decayed(parameters, gradients, update)
        before, sizes = update.entries("prev"), update.entries("step_size")
        shrink, grow = update.numbers["shrink"], update.numbers["grow"]
        products = torch._foreach_mul(gradients, before)
        factors = [torch.where(p > 0, grow, torch.where(p < 0, shrink, 1)) for p in products]
        torch._foreach_mul_(sizes, factors)
        torch._foreach_maximum_(sizes, update.number("least"))
        torch._foreach_minimum_(sizes, update.number("most"))
        # An element whose gradient has changed its sign rests for this step.
        gradients = [torch.where(p < 0, 0, gradient) for p, gradient in zip(products, gradients, strict=True)]
        torch._foreach_copy_(before, gradients)
        torch._foreach_addcmul_(parameters, torch._foreach_sign(gradients), sizes, value=-1)
