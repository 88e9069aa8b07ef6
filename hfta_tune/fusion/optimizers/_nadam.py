"""NAdam for all lanes at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._averages import move_moments, numbers_of_moments, power
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedNAdam"]

_PRODUCT = "mu_product"
_LOG_OF_BASE = math.log(0.96)


class FusedNAdam(ClockedOptimizer):
    """torch.optim.NAdam, its formula and its state, with every number and step count a lane's.

    Source of the formula: torch's documentation of torch.optim.NAdam (Dozat 2016).
    """

    classes = (torch.optim.NAdam,)
    flag_names = ("decoupled_weight_decay", "maximize")
    dials = (_PRODUCT,)

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        read, send = group.numbers.host, group.numbers.device
        decay = [number * _LOG_OF_BASE for number in read("momentum_decay")]
        return {
            **numbers_of_moments(group),
            "beta1": send("beta1", read("betas", 0)),
            "log momentum": send("log momentum", decay),
            **self._decay(group),
        }

    def _first(self, group: ParameterGroup) -> dict[str, list[float]]:
        return {_PRODUCT: [1.0] * len(group.optimizers)}

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        numbers, dtype = update.numbers, parameters[0].dtype
        lr, beta1 = numbers["lr"], numbers["beta1"]
        of_gradient, of_average, correction = [], [], []
        for clock in update.clocks:
            clock[:, :1].add_(1)
            count = clock[:, :1].to(lr.dtype)
            mu = beta1 * (1 - 0.5 * power(numbers["log momentum"], count))
            next_mu = beta1 * (1 - 0.5 * power(numbers["log momentum"], count + 1))
            clock[:, 1:].mul_(mu.to(clock.dtype))
            product = clock[:, 1:].to(lr.dtype)
            of_gradient.append((-lr * (1 - mu) / (1 - product)).to(dtype))
            of_average.append((-lr * next_mu / (1 - product * next_mu)).to(dtype))
            correction.append((1 - power(numbers["log beta2"], count)).sqrt().to(dtype))
        gradients = cls._decayed(parameters, gradients, update)
        first, second = move_moments(gradients, update)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, update.by_clock(correction))
        torch._foreach_add_(roots, update.number("eps"))
        directions = torch._foreach_mul(gradients, update.by_clock(of_gradient))
        torch._foreach_addcmul_(directions, first, update.by_clock(of_average))
        torch._foreach_addcdiv_(parameters, directions, roots)
