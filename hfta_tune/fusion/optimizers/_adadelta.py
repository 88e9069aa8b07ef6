"""Adadelta for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._averages import average_squares
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedAdadelta"]


class FusedAdadelta(ClockedOptimizer):
    """torch.optim.Adadelta, its formula and its state, with every number and step count a lane's.

    Source of the formula: torch's documentation of torch.optim.Adadelta (Zeiler 2012).
    """

    classes = (torch.optim.Adadelta,)
    flag_names = ("maximize",)

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        read, send, dtype = group.numbers.host, group.numbers.device, group.dtype
        rho = read("rho")
        return {
            "-lr": send("-lr", [-number for number in read("lr")], dtype),
            "rho": send("rho", rho, group.wide),
            "1-rho": send("1-rho", [1 - number for number in rho], dtype),
            "eps": send("eps", read("eps"), dtype),
            **self._decay(group),
        }

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        for clock in update.clocks:
            clock.add_(1)
        kept, taken, eps = update.number("rho"), update.number("1-rho"), update.number("eps")
        gradients = cls._decayed(parameters, gradients, update)
        squares, steps = update.entries("square_avg"), update.entries("acc_delta")
        average_squares(squares, gradients, kept, taken)
        roots = torch._foreach_add(squares, eps)
        torch._foreach_sqrt_(roots)
        deltas = torch._foreach_add(steps, eps)
        torch._foreach_sqrt_(deltas)
        torch._foreach_div_(deltas, roots)
        torch._foreach_mul_(deltas, gradients)
        average_squares(steps, list(deltas), kept, taken)
        torch._foreach_addcmul_(parameters, deltas, update.number("-lr"))
