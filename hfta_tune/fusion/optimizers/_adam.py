"""Adam and AdamW for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers._averages import move_moments, numbers_of_moments, power
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup
from hfta_tune.fusion.stack import LaneStack

__all__ = ["FusedAdam"]


class FusedAdam(ClockedOptimizer):
    """torch.optim.Adam and AdamW, their formulas and their state, with every number and step count a lane's.

    Source of the formulas: torch's documentation of torch.optim.Adam and AdamW (Kingma and Ba 2014,
    Loshchilov and Hutter 2017; amsgrad: Reddi et al. 2018).
    """

    classes = (torch.optim.Adam, torch.optim.AdamW)
    flag_names = ("amsgrad", "maximize", "decoupled_weight_decay")

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack, name: str = ONLY) -> None:
        super().__init__(lanes, stack, name)
        if type(lanes[0].optimizers[name]) is torch.optim.AdamW:
            for group in self.groups:
                group.flags["decoupled_weight_decay"] = True

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        moments = ("exp_avg", "exp_avg_sq")
        return (*moments, "max_exp_avg_sq") if flags["amsgrad"] else moments

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        return {**numbers_of_moments(group), **self._decay(group)}

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        _, flags, _, _ = update.form
        numbers, dtype = update.numbers, parameters[0].dtype
        lr, minus_step, correction = numbers["lr"], [], []
        for clock in update.clocks:
            clock.add_(1)
            count = clock.to(lr.dtype)
            minus_step.append((-lr / (1 - power(numbers["log beta1"], count))).to(dtype))
            correction.append((1 - power(numbers["log beta2"], count)).sqrt().to(dtype))
        gradients = cls._decayed(parameters, gradients, update)
        first, second = move_moments(gradients, update)
        if dict(flags)["amsgrad"]:
            largest = update.entries("max_exp_avg_sq")
            torch._foreach_maximum_(largest, second)
            second = largest
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, update.by_clock(correction))
        torch._foreach_add_(roots, update.number("eps"))
        directions = torch._foreach_div(first, roots)
        torch._foreach_addcmul_(parameters, directions, update.by_clock(minus_step))
