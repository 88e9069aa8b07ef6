"""Gradient clipping, each lane by its own gradients and its own limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["ALGORITHMS", "Clipping", "clip_lanes"]

ALGORITHMS = ("norm", "value")


@dataclass(frozen=True, slots=True)
class Clipping:
    """A lane's clipping: by the norm of all its gradients, or value by value.

    Attributes:
        limit: The largest norm, or the largest absolute value.
        algorithm: "norm" or "value".
    """

    limit: float
    algorithm: str = "norm"

    def clip(self, parameters: Sequence[nn.Parameter]) -> None:
        """Clip the gradients of one lane's own parameters in place."""
        if all(parameter.grad is None for parameter in parameters):  # of which torch can make a problem
            return
        if self.algorithm == "norm":
            nn.utils.clip_grad_norm_(parameters, self.limit)
        else:
            nn.utils.clip_grad_value_(parameters, self.limit)


def clip_lanes(gradients: Mapping[str, Tensor], limits: Tensor, algorithm: str) -> dict[str, Tensor]:
    """Return gradients [lanes, ...] clipped to the lanes' `limits`, [lanes].

    Formulas: torch's documentation of clip_grad_norm_ (with its 1e-6) and clip_grad_value_.
    """
    names = list(gradients)
    flat = [gradients[name].reshape(gradients[name].shape[0], -1) for name in names]
    column = limits.unsqueeze(1)
    if algorithm == "norm":
        norms = torch.stack([torch.linalg.vector_norm(gradient, dim=1) for gradient in flat])
        total = torch.linalg.vector_norm(norms, dim=0).unsqueeze(1)
        factor = (column / (total + 1e-6)).clamp(max=1.0)
        clipped = [gradient * factor for gradient in flat]
    else:
        clipped = [torch.minimum(torch.maximum(gradient, -column), column) for gradient in flat]
    return {name: own.view_as(gradients[name]) for name, own in zip(names, clipped, strict=True)}
