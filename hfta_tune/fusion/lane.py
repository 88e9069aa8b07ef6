"""A lane: one trial's own model, optimizers and schedules, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hfta_tune.fusion.clipping import Clipping

__all__ = ["ONLY", "Lane"]

ONLY = ""
"""The name of the optimizer of a trial that has one."""


@dataclass(eq=False, slots=True)
class Lane:
    """One trial's objects. They are always up to date: in a fused array the tensors are views of the stack.

    So `model.state_dict()` and an optimizer's `state_dict()` are ordinary checkpoints at any time.

    Attributes:
        name: The trial's name, for messages.
        model: The user's model.
        optimizers: The user's optimizers over the parameters of `model` by name; ONLY names a single one.
        schedulers: The user's learning rate schedulers by the names of their optimizers.
        values: Numbers that steps may read, a lane its own; they arrive in a step as 0-d tensors.
        clipping: How its gradients are clipped, or None.
        error: What the lane's own code raised; such a lane trains no further.
    """

    name: str
    model: nn.Module
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any] = field(default_factory=dict)
    values: dict[Any, float] = field(default_factory=dict)
    clipping: Clipping | None = None
    error: Exception | None = None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by name; a tied one once."""
        return list(self.model.named_parameters())

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers by name; a shared one once."""
        return list(self.model.named_buffers())

    def trained_by(self, optimizer: str) -> list[nn.Parameter]:
        """The parameters that an optimizer trains."""
        groups = self.optimizers[optimizer].param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]

    def numbers_on(self, device: torch.device) -> dict[Any, Tensor]:
        """`values` as 0-d tensors, as a step of this lane alone reads them."""
        dtype = torch.get_default_dtype()
        return {name: torch.tensor(value, dtype=dtype, device=device) for name, value in self.values.items()}

    def drop_gradients(self) -> None:
        """Forget gradients that the user's code may have left."""
        for _, parameter in self.parameters():
            parameter.grad = None

    def detach_storage(self) -> None:
        """Give every tensor storage of its own, as before the lane joined a stack."""
        for _, parameter in self.parameters():
            parameter.data = parameter.data.clone()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        for _, buffer in self.buffers():
            buffer.data = buffer.data.clone()
        for optimizer in self.optimizers.values():
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        state[key] = value.detach().clone()

    def mark_optimizers_called(self) -> None:
        """Tell torch's schedulers that the optimizers step, which an array does in their place."""
        for name in self.schedulers:
            self.optimizers[name]._opt_called = True  # type: ignore[attr-defined]

    def step_schedulers(self, metric: float | None = None) -> None:
        """Advance the schedules; `metric` is what ReduceLROnPlateau watches."""
        for scheduler in self.schedulers.values():
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                assert metric is not None
                scheduler.step(metric)
            else:
                scheduler.step()
