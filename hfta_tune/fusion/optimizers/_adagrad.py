"""Adagrad for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedAdagrad"]


class FusedAdagrad(ClockedOptimizer):
    """torch.optim.Adagrad, its formula and its state, with every number and step count a lane's.

    Source of the formula: torch's documentation of torch.optim.Adagrad (Duchi et al. 2011).
    """

    classes = (torch.optim.Adagrad,)
    flag_names = ("maximize",)

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("sum",)

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        read, send = group.numbers.host, group.numbers.device
        return {
            "lr": send("lr", read("lr")),
            "lr_decay": send("lr_decay", read("lr_decay")),
            "eps": send("eps", read("eps"), group.dtype),
            **self._decay(group),
        }

    def _first(self, group: ParameterGroup) -> dict[str, list[float]]:
        # Only of parameters that were added later: the constructor makes the state of the others.
        return {"sum": [float(optimizer.defaults["initial_accumulator_value"]) for optimizer in group.optimizers]}

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        minus_step = []
        for clock in update.clocks:
            lr = update.numbers["lr"]
            minus_step.append((-lr / (1 + clock.to(lr.dtype) * update.numbers["lr_decay"])).to(parameters[0].dtype))
            clock.add_(1)
        gradients = cls._decayed(parameters, gradients, update)
        sums = update.entries("sum")
        torch._foreach_addcmul_(sums, gradients, gradients)
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, update.number("eps"))
        directions = torch._foreach_div(gradients, roots)
        torch._foreach_addcmul_(parameters, directions, update.by_clock(minus_step))
