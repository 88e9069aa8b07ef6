"""ASGD for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._averages import average
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedASGD"]


class FusedASGD(ClockedOptimizer):
    """torch.optim.ASGD, its formula and its state, with every number and step count a lane's.

    A step is done with the eta and mu that the step before has left; only then do the lane's numbers make new ones.

    Source of the formula: torch's documentation of torch.optim.ASGD (Polyak and Juditsky 1992) and, for what it
    does not spell out, Bottou's sgd (eta_t = lr / (1 + lambd lr t) ** alpha, mu_t = 1 / max(1, t - t0)).
    """

    classes = (torch.optim.ASGD,)
    flag_names = ("maximize",)
    dials = ("eta", "mu")

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("ax",)

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        own = {key: group.numbers.device(key, group.numbers.host(key)) for key in ("lr", "lambd", "alpha", "t0")}
        return {**own, **self._decay(group)}

    def _first(self, group: ParameterGroup) -> dict[str, list[float]]:
        return {"eta": group.numbers.host("lr"), "mu": [1.0] * len(group.optimizers)}

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        numbers, dtype = update.numbers, parameters[0].dtype
        lr, lambd = numbers["lr"], numbers["lambd"]
        kept, minus_eta, weights = [], [], []
        for clock in update.clocks:
            eta = clock[:, 1:2].to(lr.dtype)
            kept.append((1 - lambd * eta).to(torch.promote_types(dtype, torch.float32)))
            minus_eta.append((-eta).to(dtype))
            weights.append(clock[:, 2:].to(dtype, copy=True))
            clock[:, :1].add_(1)
            count = clock[:, :1].to(lr.dtype)
            clock[:, 1:2].copy_(lr / (1 + lambd * lr * count) ** numbers["alpha"])
            clock[:, 2:].copy_(1 / (count - numbers["t0"]).clamp(min=1))
        gradients = cls._decayed(parameters, gradients, update)
        torch._foreach_mul_(parameters, update.by_clock(kept))
        torch._foreach_addcmul_(parameters, gradients, update.by_clock(minus_eta))
        average(update.entries("ax"), parameters, update.by_clock(weights))
