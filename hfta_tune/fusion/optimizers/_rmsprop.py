"""RMSprop for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._averages import average, average_squares, renew_buffers
from hfta_tune.fusion.optimizers._clocked import ClockedOptimizer
from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["FusedRMSprop"]

_BUFFER = "momentum_buffer"


class FusedRMSprop(ClockedOptimizer):
    """torch.optim.RMSprop, its formula and its state, with every number and step count a lane's.

    A lane has a momentum buffer from its first step with momentum on. Where a schedule raises momentum from 0
    later, torch's own optimizer ends in a KeyError; here the buffer then starts from zeros.

    Source of the formula: torch's documentation of torch.optim.RMSprop (Hinton's lecture notes; centered:
    Graves 2013).
    """

    classes = (torch.optim.RMSprop,)
    flag_names = ("centered", "maximize")

    @classmethod
    def _keys(cls, flags: Mapping[str, bool]) -> tuple[str, ...]:
        return ("square_avg", "grad_avg") if flags["centered"] else ("square_avg",)

    def _numbers(self, group: ParameterGroup) -> dict[str, Tensor]:
        read, send, dtype = group.numbers.host, group.numbers.device, group.dtype
        alpha, momentum = read("alpha"), read("momentum")
        numbers = {
            "-lr": send("-lr", [-number for number in read("lr")], dtype),
            "alpha": send("alpha", alpha, group.wide),
            "1-alpha": send("1-alpha", [1 - number for number in alpha], dtype),
            "eps": send("eps", read("eps"), dtype),
            **self._decay(group),
        }
        if any(momentum):
            numbers["momentum"] = send("momentum", momentum, group.wide)
            if not all(momentum):
                numbers["moves"] = send("moves", [float(bool(number)) for number in momentum], dtype)
        return numbers

    def _prepare(self, group: ParameterGroup, names: tuple[str, ...]) -> GroupUpdate:
        update = super()._prepare(group, names)
        if "momentum" not in update.numbers:
            return update
        if _BUFFER not in group.state:
            group.stack_state(_BUFFER)
        moves = [bool(number) for number in group.numbers.host("momentum")]
        for name in names:
            group.give(_BUFFER, name, moves)
        return replace(update, state=update.state | {_BUFFER: group.state[_BUFFER]})

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        _, flags, present, _ = update.form
        for clock in update.clocks:
            clock.add_(1)
        gradients = cls._decayed(parameters, gradients, update)
        squares = update.entries("square_avg")
        average_squares(squares, gradients, update.number("alpha"), update.number("1-alpha"))
        if dict(flags)["centered"]:
            means = update.entries("grad_avg")
            average(means, gradients, update.number("1-alpha"))
            squares = list(torch._foreach_addcmul(squares, means, means, value=-1))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, update.number("eps"))
        directions = list(torch._foreach_div(gradients, roots))
        if "momentum" in present:
            buffers = update.entries(_BUFFER)
            torch._foreach_add_(directions, torch._foreach_mul(buffers, update.number("momentum")))
            renew_buffers(buffers, directions, update)
        torch._foreach_addcmul_(parameters, directions, update.number("-lr"))
