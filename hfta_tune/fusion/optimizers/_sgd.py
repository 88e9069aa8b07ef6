"""SGD for all lanes at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers._averages import renew_buffers
from hfta_tune.fusion.optimizers._native import GroupUpdate, NativeOptimizer, ParameterGroup
from hfta_tune.fusion.stack import LaneStack

__all__ = ["FusedSGD"]

_BUFFER = "momentum_buffer"


class FusedSGD(NativeOptimizer):
    """torch.optim.SGD, its formula and its state, with lr, momentum, dampening and weight decay a lane.

    Source of the formula: torch's documentation of torch.optim.SGD (the buffer starts as the first
    gradient; Sutskever's form of momentum).
    """

    classes = (torch.optim.SGD,)
    flag_names = ("nesterov", "maximize")

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack, name: str = ONLY) -> None:
        super().__init__(lanes, stack, name)
        for group in self.groups:
            group.stack_state(_BUFFER)

    def _prepare(self, group: ParameterGroup, names: tuple[str, ...]) -> GroupUpdate:
        read, send = group.numbers.host, group.numbers.device
        dtype = group.dtype
        momentum = read("momentum")
        numbers = {"-lr": send("-lr", [-number for number in read("lr")], dtype), **self._decay(group)}
        histories: list[tuple[bool, ...]] = []
        which: list[int] = []
        if any(momentum):
            numbers["momentum"] = send("momentum", momentum, dtype)
            if not all(momentum):
                numbers["moves"] = send("moves", [float(bool(number)) for number in momentum], dtype)
            dampening = read("dampening")
            for name in names:
                started = tuple(group.started[name])
                if started not in histories:
                    # Without momentum the step is the plain gradient; a fresh buffer is its first gradient.
                    plain = [not m or not s for m, s in zip(momentum, started, strict=True)]
                    keep = [0.0 if p else m for m, p in zip(momentum, plain, strict=True)]
                    take = [1.0 if p else 1.0 - d for d, p in zip(dampening, plain, strict=True)]
                    number = len(histories)
                    numbers[f"keep {number}"] = send(f"keep {number}", keep, dtype)
                    numbers[f"take {number}"] = send(f"take {number}", take, dtype)
                    histories.append(started)
                which.append(histories.index(started))
            self._start(group, names, momentum)
        form = (names, tuple(group.flags.items()), tuple(numbers), tuple(which))
        return GroupUpdate(names, numbers, group.state, [], tuple(which), form)

    @staticmethod
    def _start(group: ParameterGroup, names: tuple[str, ...], momentum: list[float]) -> None:
        for name in names:
            if not all(group.started[name]):
                for lane, started in enumerate(group.started[name]):
                    if momentum[lane] and not started:
                        group.started[name][lane] = True
                        group.bind_state(name, lane, (_BUFFER,))

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        _, flags, present, which = update.form
        numbers = update.numbers
        gradients = cls._decayed(parameters, gradients, update)
        if "momentum" in present:
            buffers = update.entries(_BUFFER)
            moved = list(torch._foreach_mul(buffers, [numbers[f"keep {number}"] for number in which]))
            torch._foreach_addcmul_(moved, gradients, [numbers[f"take {number}"] for number in which])
            renew_buffers(buffers, moved, update)
            if dict(flags)["nesterov"]:
                moved = list(torch._foreach_addcmul(gradients, buffers, update.number("momentum")))
            gradients = moved
        torch._foreach_addcmul_(parameters, gradients, update.number("-lr"))
