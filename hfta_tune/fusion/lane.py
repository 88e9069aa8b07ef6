"""A lane: one trial's own model, optimizer and schedule, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hfta_tune.fusion.clipping import Clipping

__all__ = ["Lane"]


@dataclass(eq=False, slots=True)
class Lane:
    """One trial's objects. They are always up to date: in a fused array the tensors are views of the stack.

    So `model.state_dict()` and `optimizer.state_dict()` are ordinary checkpoints at any time.

    Attributes:
        name: The trial's name, for messages.
        model: The user's model.
        optimizer: The user's optimizer over the parameters of `model`.
        scheduler: The user's learning rate scheduler on `optimizer`, or None.
        values: Numbers that steps may read, a lane its own; they arrive in a step as 0-d tensors.
        clipping: How its gradients are clipped, or None.
        error: What the lane's own code raised; such a lane trains no further.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any = None
    values: dict[Any, float] = field(default_factory=dict)
    clipping: Clipping | None = None
    error: Exception | None = None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by name; a tied one once."""
        return list(self.model.named_parameters())

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers by name; a shared one once."""
        return list(self.model.named_buffers())

    def detach_storage(self) -> None:
        """Give every tensor storage of its own, as before the lane joined a stack."""
        for _, parameter in self.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        for _, buffer in self.buffers():
            buffer.data = buffer.data.clone()
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.detach().clone()

    def mark_optimizer_called(self) -> None:
        """Tell torch's schedulers that the optimizer steps, which an array does in the optimizer's place."""
        if self.scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def step_scheduler(self, metric: float | None = None) -> None:
        """Advance the schedule; `metric` is what ReduceLROnPlateau watches."""
        if self.scheduler is None:
            return
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            assert metric is not None
            self.scheduler.step(metric)
        else:
            self.scheduler.step()
