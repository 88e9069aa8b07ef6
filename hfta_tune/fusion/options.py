"""How the lanes of an array are trained, besides their hooks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

__all__ = ["PRECISIONS", "Options"]

PRECISIONS = ("32", "bf16")


@dataclass(frozen=True, slots=True)
class Options:
    """What the lanes of an array have in common besides their code.

    Attributes:
        precision: "32", or "bf16": steps run under torch.autocast in bfloat16, parameters and optimizers stay
            as they are.
        accumulate: Of how many batches the gradients are averaged for one step of the optimizers.
    """

    precision: str = "32"
    accumulate: int = 1

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context that a step of one lane runs in."""
        if self.precision == "32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)
