"""Adam and AdamW for all lanes at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers._native import NativeOptimizer, ParameterGroup
from hfta_tune.fusion.stack import LaneStack

__all__ = ["FusedAdam"]


class FusedAdam(NativeOptimizer):
    """torch.optim.Adam and AdamW, their formulas and their state, with every number and step count a lane's.

    Source of the formulas: torch's documentation of torch.optim.Adam and AdamW (Kingma and Ba 2014,
    Loshchilov and Hutter 2017; amsgrad: Reddi et al. 2018).
    """

    classes = (torch.optim.Adam, torch.optim.AdamW)
    flag_names = ("amsgrad", "maximize", "decoupled_weight_decay")

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack) -> None:
        super().__init__(lanes, stack)
        for lane_group, group in enumerate(self.groups):
            if type(lanes[0].optimizer) is torch.optim.AdamW:
                group.flags["decoupled_weight_decay"] = True
            for key in self._moments(group):
                group.stack_state(key)
            self._start_clocks(lanes, lane_group, group)

    @staticmethod
    def _moments(group: ParameterGroup) -> tuple[str, ...]:
        moments = ("exp_avg", "exp_avg_sq")
        return (*moments, "max_exp_avg_sq") if group.flags["amsgrad"] else moments

    def _start_clocks(self, lanes: Sequence[Lane], index: int, group: ParameterGroup) -> None:
        """Step counts, [lanes, 1]: one tensor for all parameters that have been stepped alike."""
        clocks: dict[tuple[float, ...], Tensor] = {}
        group.state["step"] = {}
        for name in group.names:
            counts = group.own_number(name, "step")
            like = group.parameters[name]
            clock = clocks.setdefault(
                tuple(counts), torch.tensor(counts, dtype=torch.float32, device=like.device).unsqueeze(1)
            )
            self._set_clock(group, name, clock)

    @staticmethod
    def _set_clock(group: ParameterGroup, name: str, clock: Tensor) -> None:
        group.state["step"][name] = clock
        for lane, started in enumerate(group.started[name]):
            if started:
                own = group.optimizers[lane].state[group.lanes_parameters[name][lane]]
                own["step"] = clock[lane, 0]

    def _tick(self, group: ParameterGroup, names: list[str]) -> dict[Tensor, list[int]]:
        """Advance the clocks of `names`; return {clock: indices into names}."""
        clocks: dict[Tensor, list[int]] = {}
        for index, name in enumerate(names):
            clocks.setdefault(group.state["step"][name], []).append(index)
        if len(names) < len(group.names):
            resting = {id(group.state["step"][name]) for name in set(group.names) - set(names)}
            for clock in [clock for clock in clocks if id(clock) in resting]:
                indices = clocks.pop(clock)
                own = clock.clone()
                clocks[own] = indices
                for index in indices:
                    self._set_clock(group, names[index], own)
        for clock in clocks:
            clock.add_(1)
        return clocks

    def _update(self, group: ParameterGroup, names: list[str], gradients: list[Tensor]) -> None:
        parameters = [group.parameters[name] for name in names]
        dtype = parameters[0].dtype
        numbers, many = group.numbers, len(names)
        clocks = self._tick(group, names)
        for name in names:
            if not all(group.started[name]):
                self._start(group, name)
        if group.flags["maximize"]:
            gradients = list(torch._foreach_neg(gradients))

        lr = numbers.host("lr")
        decay = numbers.host("weight_decay")
        if any(decay):
            if group.flags["decoupled_weight_decay"]:
                kept = [1 - rate * number for rate, number in zip(lr, decay, strict=True)]
                torch._foreach_mul_(parameters, [numbers.device("1-lr*decay", kept, dtype)] * many)
            else:
                decays = [numbers.device("weight_decay", decay, dtype)] * many
                gradients = list(torch._foreach_addcmul(gradients, parameters, decays))

        beta1, beta2 = numbers.host("betas", 0), numbers.host("betas", 1)
        first = [group.state["exp_avg"][name] for name in names]
        second = [group.state["exp_avg_sq"][name] for name in names]
        torch._foreach_lerp_(first, gradients, [numbers.device("1-beta1", [1 - b for b in beta1], dtype)] * many)
        torch._foreach_mul_(second, [numbers.device("beta2", beta2, dtype)] * many)
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_addcmul_(second, squares, [numbers.device("1-beta2", [1 - b for b in beta2], dtype)] * many)
        if group.flags["amsgrad"]:
            largest = [group.state["max_exp_avg_sq"][name] for name in names]
            torch._foreach_maximum_(largest, second)
            second = largest

        minus_steps: list[Tensor] = [first[0]] * many
        corrections: list[Tensor] = [first[0]] * many
        for clock, indices in clocks.items():
            count = clock.to(numbers.device("lr", lr).dtype)
            correction1 = 1 - numbers.device("beta1", beta1) ** count
            correction2 = (1 - numbers.device("beta2", beta2) ** count).sqrt().to(dtype)
            minus_step = (numbers.device("lr", lr) / correction1).neg_().to(dtype)
            for index in indices:
                minus_steps[index], corrections[index] = minus_step, correction2
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, corrections)
        torch._foreach_add_(roots, [numbers.device("eps", numbers.host("eps"), dtype)] * many)
        torch._foreach_addcmul_(parameters, torch._foreach_div(first, roots), minus_steps)

    def _start(self, group: ParameterGroup, name: str) -> None:
        for lane, started in enumerate(group.started[name]):
            if not started:
                group.started[name][lane] = True
                group.bind_state(name, lane, self._moments(group))
        self._set_clock(group, name, group.state["step"][name])
