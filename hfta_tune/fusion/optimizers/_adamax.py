"""Adamax for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._averages import average, logarithm, power
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedAdamax"]


class FusedAdamax(ClockedOptimizer):
    """torch.optim.Adamax, its formula and its state, with every number and step count a lane's.

    Source of the formula: torch's documentation of torch.optim.Adamax (Kingma and Ba 2014).
    """

    classes = (torch.optim.Adamax,)
    flag_names = ("maximize",)

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        read, send, dtype = group.numbers.host, group.numbers.device, group.dtype
        beta1 = read("betas", 0)
        return {
            "lr": send("lr", read("lr")),
            "log beta1": send("log beta1", [logarithm(beta) for beta in beta1]),
            "1-beta1": send("1-beta1", [1 - beta for beta in beta1], dtype),
            "beta2": send("beta2", read("betas", 1), group.wide),
            "eps": send("eps", read("eps"), dtype),
            **self._decay(group),
        }

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        lr, minus_step = update.numbers["lr"], []
        for clock in update.clocks:
            clock.add_(1)
            correction = 1 - power(update.numbers["log beta1"], clock.to(lr.dtype))
            minus_step.append((-lr / correction).to(parameters[0].dtype))
        gradients = cls._decayed(parameters, gradients, update)
        averages, norms = update.entries("exp_avg"), update.entries("exp_inf")
        average(averages, gradients, update.number("1-beta1"))
        sizes = torch._foreach_abs(gradients)
        torch._foreach_add_(sizes, update.number("eps"))
        torch._foreach_mul_(norms, update.number("beta2"))
        torch._foreach_maximum_(norms, sizes)
        directions = torch._foreach_div(averages, norms)
        torch._foreach_addcmul_(parameters, directions, update.by_clock(minus_step))
