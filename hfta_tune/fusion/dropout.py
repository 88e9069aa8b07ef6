"""Dropout whose probability is a tensor, so that each lane of an array has its own."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

__all__ = ["LANE_DROPOUTS", "LaneDropout", "dropout_probabilities", "replace_dropouts", "set_idle_dropouts"]


class LaneDropout(nn.Module):
    """Stands in for a Dropout module in the template of an array; `p` is a 0-d tensor, a lane its own.

    Kept values are scaled by 1 / (1 - p) as in torch.nn.Dropout. Feature dropouts drop whole channels:
    the mask has one entry for each index of the first `mask_dims` dimensions.

    Attributes:
        idle: Whether p is 0 in every lane, so that there is nothing to draw.
    """

    p: Tensor

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._kind = type(original)
        self.idle = False
        self.inplace = bool(getattr(original, "inplace", False))
        self.register_buffer("p", torch.tensor(float(original.p)), persistent=False)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.idle:
            return input
        draw = torch.rand_like(input if self._kind is nn.Dropout else input[self._one_a_channel(input)])
        kept = draw >= self.p
        scale = torch.where(self.p < 1, 1 / (1 - self.p), 0.0)
        mask = kept * scale.to(input.dtype)
        return input.mul_(mask) if self.inplace else input * mask

    def _one_a_channel(self, input: Tensor) -> tuple[slice, ...]:
        """Index of one value for each channel of `input`."""
        leading = 2
        if self._kind in (nn.Dropout1d, nn.Dropout3d):
            spatial = 1 if self._kind is nn.Dropout1d else 3
            leading = input.dim() - spatial  # without a batch dimension the channels come first
        return (slice(None),) * leading + (slice(0, 1),) * (input.dim() - leading)

    def extra_repr(self) -> str:
        return f"{self._kind.__name__}, p a lane"


LANE_DROPOUTS: frozenset[type[nn.Module]] = frozenset({nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d})


def replace_dropouts(model: nn.Module) -> None:
    """Put a `LaneDropout` in the place of every Dropout module of a template, in place."""
    replacements: dict[int, LaneDropout] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and type(child) in LANE_DROPOUTS:
                module._modules[name] = replacements.setdefault(id(child), LaneDropout(child))


def set_idle_dropouts(model: nn.Module, active: Container[str]) -> None:
    """Tell each LaneDropout of a template whether its "path.p" is among the `active` ones."""
    for path, module in model.named_modules():
        if isinstance(module, LaneDropout):
            module.idle = (f"{path}.p" if path else "p") not in active


def dropout_probabilities(model: nn.Module) -> dict[str, float]:
    """Return {"path.p": p} of every Dropout module of a lane's own model."""
    return {
        f"{path}.p" if path else "p": float(module.p)
        for path, module in model.named_modules()
        if type(module) in LANE_DROPOUTS
    }
