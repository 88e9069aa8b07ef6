"""RAdam for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._averages import move_moments, numbers_of_moments, power
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedRAdam"]


class FusedRAdam(ClockedOptimizer):
    """torch.optim.RAdam, its formula and its state, with every number and step count a lane's.

    Source of the formula: torch's documentation of torch.optim.RAdam (Liu et al. 2019). Whether the variance
    is rectified yet (rho_t > 5) depends on a lane's step count and beta2, so it is chosen a lane.
    """

    classes = (torch.optim.RAdam,)
    flag_names = ("decoupled_weight_decay", "maximize")

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        longest = [2 / (1 - beta) - 1 for beta in group.numbers.host("betas", 1)]
        return {
            **numbers_of_moments(group),
            "rho_inf": group.numbers.device("rho_inf", longest),
            **self._decay(group),
        }

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        numbers, dtype = update.numbers, parameters[0].dtype
        lr, rho_inf = numbers["lr"], numbers["rho_inf"]
        minus_step, rectified = [], []
        for clock in update.clocks:
            clock.add_(1)
            count = clock.to(lr.dtype)
            decayed = power(numbers["log beta2"], count)
            rho = rho_inf - 2 * count * decayed / (1 - decayed)
            ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
            rectifies = rho > 5
            # Below that the ratio may be negative or infinite, of which there is no root.
            factor = torch.where(rectifies, ratio * (1 - decayed), 1).sqrt()
            minus_step.append((-lr / (1 - power(numbers["log beta1"], count)) * factor).to(dtype))
            rectified.append(rectifies)
        gradients = cls._decayed(parameters, gradients, update)
        first, second = move_moments(gradients, update)
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, update.number("eps"))
        divisors = [torch.where(own, root, 1) for own, root in zip(update.by_clock(rectified), roots, strict=True)]
        directions = torch._foreach_div(first, divisors)
        torch._foreach_addcmul_(parameters, directions, update.by_clock(minus_step))
