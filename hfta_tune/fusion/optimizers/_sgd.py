"""SGD for all lanes at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers._native import NativeOptimizer, ParameterGroup
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

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack) -> None:
        super().__init__(lanes, stack)
        for group in self.groups:
            group.stack_state(_BUFFER)

    def _update(self, group: ParameterGroup, names: list[str], gradients: list[Tensor]) -> None:
        parameters = [group.parameters[name] for name in names]
        dtype = parameters[0].dtype
        numbers = group.numbers
        if group.flags["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        decay = numbers.host("weight_decay")
        if any(decay):
            decays = [numbers.device("weight_decay", decay, dtype)] * len(names)
            gradients = list(torch._foreach_addcmul(gradients, parameters, decays))
        momentum = numbers.host("momentum")
        if any(momentum):
            gradients = self._with_momentum(group, names, gradients, momentum)
        lr = numbers.device("-lr", [-number for number in numbers.host("lr")], dtype)
        torch._foreach_addcmul_(parameters, gradients, [lr] * len(names))

    def _with_momentum(
        self, group: ParameterGroup, names: list[str], gradients: list[Tensor], momentum: list[float]
    ) -> list[Tensor]:
        buffers = [group.state[_BUFFER][name] for name in names]
        dtype = buffers[0].dtype
        dampening = group.numbers.host("dampening")
        factors: dict[tuple[bool, ...], tuple[Tensor, Tensor]] = {}
        for name in names:
            started = tuple(group.started[name])
            if started not in factors:
                # A lane without momentum steps by its plain gradient; a fresh buffer is its first gradient.
                plain = [not m or not s for m, s in zip(momentum, started, strict=True)]
                keep = [0.0 if p else m for m, p in zip(momentum, plain, strict=True)]
                take = [1.0 if p else 1.0 - d for d, p in zip(dampening, plain, strict=True)]
                number = len(factors)
                factors[started] = (
                    group.numbers.device(f"keep {number}", keep, dtype),
                    group.numbers.device(f"take {number}", take, dtype),
                )
        kept, taken = zip(*(factors[tuple(group.started[name])] for name in names), strict=True)
        moved = list(torch._foreach_mul(buffers, kept))
        torch._foreach_addcmul_(moved, gradients, taken)
        self._keep_buffers(group, names, moved, momentum)
        if not group.flags["nesterov"]:
            return moved
        factor = group.numbers.device("momentum", momentum, dtype)
        return list(torch._foreach_addcmul(gradients, buffers, [factor] * len(names)))

    @staticmethod
    def _keep_buffers(group: ParameterGroup, names: list[str], moved: list[Tensor], momentum: list[float]) -> None:
        """Store the moved buffers; a lane whose momentum is 0 leaves its buffer as it is, as torch does."""
        buffers = [group.state[_BUFFER][name] for name in names]
        if all(momentum):
            torch._foreach_copy_(buffers, moved)
        else:
            moving = [lane for lane, number in enumerate(momentum) if number]
            for buffer, new in zip(buffers, moved, strict=True):
                buffer[moving] = new[moving]
        for name in names:
            if not all(group.started[name]):
                for lane, started in enumerate(group.started[name]):
                    if momentum[lane] and not started:
                        group.started[name][lane] = True
                        group.bind_state(name, lane, (_BUFFER,))
