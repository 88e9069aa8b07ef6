"""Adam and AdamW for all lanes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers._native import GroupUpdate, NativeOptimizer, ParameterGroup
from hfta_tune.fusion.stack import LaneStack

__all__ = ["FusedAdam"]


def _log(number: float) -> float:
    return math.log(number) if number else -math.inf


class FusedAdam(NativeOptimizer):
    """torch.optim.Adam and AdamW, their formulas and their state, with every number and step count a lane's.

    Source of the formulas: torch's documentation of torch.optim.Adam and AdamW (Kingma and Ba 2014,
    Loshchilov and Hutter 2017; amsgrad: Reddi et al. 2018).
    """

    classes = (torch.optim.Adam, torch.optim.AdamW)
    flag_names = ("amsgrad", "maximize", "decoupled_weight_decay")

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack, name: str = ONLY) -> None:
        super().__init__(lanes, stack, name)
        for group in self.groups:
            if type(lanes[0].optimizers[name]) is torch.optim.AdamW:
                group.flags["decoupled_weight_decay"] = True
            for key in self._moments(group):
                group.stack_state(key)
            group.start_clocks()

    @staticmethod
    def _moments(group: ParameterGroup) -> tuple[str, ...]:
        moments = ("exp_avg", "exp_avg_sq")
        return (*moments, "max_exp_avg_sq") if group.flags["amsgrad"] else moments

    def _prepare(self, group: ParameterGroup, names: tuple[str, ...]) -> GroupUpdate:
        read, send, dtype = group.numbers.host, group.numbers.device, group.dtype
        lr, decay = read("lr"), read("weight_decay")
        beta1, beta2 = read("betas", 0), read("betas", 1)
        numbers = {
            "lr": send("lr", lr),
            "log beta1": send("log beta1", [_log(beta) for beta in beta1]),
            "log beta2": send("log beta2", [_log(beta) for beta in beta2]),
            "1-beta1": send("1-beta1", [1 - beta for beta in beta1], dtype),
            "kept": send("kept", beta2, dtype),
            "1-beta2": send("1-beta2", [1 - beta for beta in beta2], dtype),
            "eps": send("eps", read("eps"), dtype),
        }
        if any(decay) and group.flags["decoupled_weight_decay"]:
            kept = [1 - rate * number for rate, number in zip(lr, decay, strict=True)]
            numbers["1-lr*decay"] = send("1-lr*decay", kept, dtype)
        elif any(decay):
            numbers["decay"] = send("decay", decay, dtype)
        for name in names:
            group.start(name, self._moments(group))
        clocks, clock_of = group.clocks_of(names)
        state = {key: group.state[key] for key in self._moments(group)}
        form = (names, tuple(group.flags.items()), tuple(numbers), clock_of)
        return GroupUpdate(names, numbers, state, clocks, clock_of, form)

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        _, flags, present, _ = update.form
        options, numbers, many = dict(flags), update.numbers, len(parameters)
        dtype = parameters[0].dtype
        for clock in update.clocks:
            clock.add_(1)
        if options["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if "1-lr*decay" in present:
            torch._foreach_mul_(parameters, [numbers["1-lr*decay"]] * many)
        if "decay" in present:
            gradients = list(torch._foreach_addcmul(gradients, parameters, [numbers["decay"]] * many))

        first, second = ([update.state[key][name] for name in update.names] for key in ("exp_avg", "exp_avg_sq"))
        # Not lerp: inductor cannot fuse it with the rest.
        torch._foreach_addcmul_(first, torch._foreach_sub(gradients, first), [numbers["1-beta1"]] * many)
        torch._foreach_mul_(second, [numbers["kept"]] * many)
        torch._foreach_addcmul_(second, torch._foreach_mul(gradients, gradients), [numbers["1-beta2"]] * many)
        if options["amsgrad"]:
            largest = [update.state["max_exp_avg_sq"][name] for name in update.names]
            torch._foreach_maximum_(largest, second)
            second = largest

        minus_step, correction = [], []
        for clock in update.clocks:
            count = clock.to(numbers["lr"].dtype)
            # beta ** count, by exp: inductor computes an exp once and a power anew for every element.
            minus_step.append((-numbers["lr"] / (1 - (count * numbers["log beta1"]).exp())).to(dtype))
            correction.append((1 - (count * numbers["log beta2"]).exp()).sqrt().to(dtype))
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [correction[clock] for clock in update.clock_of])
        torch._foreach_add_(roots, [numbers["eps"]] * many)
        directions = torch._foreach_div(first, roots)
        torch._foreach_addcmul_(parameters, directions, [minus_step[clock] for clock in update.clock_of])
