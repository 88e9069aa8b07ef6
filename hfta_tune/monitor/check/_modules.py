"""Which modules of a model run under vmap, each tried by itself on what it is given in a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune.fusion import (
    ONLY,
    VMAP,
    FusedArray,
    FusionError,
    Lane,
    Options,
    VmapFailed,
    clone_batch,
    first_line,
    line_of,
)

__all__ = ["what_fuses"]


class _Fed(nn.Module):
    """A module with what it is called with as buffers, so that each lane has its own.

    Args:
        module: The module.
        call: (args, kwargs) of a call of it.
    """

    def __init__(self, module: nn.Module, call: Any) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        # Something to train, also where the module has nothing.
        self.weight = nn.Parameter(torch.ones((), device=_device_of(call)))
        self._leaves, structure = pytree.tree_flatten(call)
        self._arguments = lambda leaves: pytree.tree_unflatten(leaves, structure)
        self._tensors = [number for number, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        for number in self._tensors:
            self.register_buffer(f"given_{number}", self._leaves[number].detach().clone())
            self._leaves[number] = None

    def forward(self) -> Tensor:
        leaves = list(self._leaves)
        for number in self._tensors:
            given = self.get_buffer(f"given_{number}")
            leaves[number] = given * self.weight if given.is_floating_point() else given.clone()
        args, kwargs = self._arguments(leaves)
        outputs = pytree.tree_leaves(self.module(*args, **kwargs))
        sums = [own.float().sum() for own in outputs if isinstance(own, Tensor) and own.is_floating_point()]
        return self.weight + sum(sums)


def what_fuses(
    trained: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any, options: Options, *, probe: bool
) -> dict[str, str | None]:
    """Say of each module that a training step calls whether it fuses.

    Args:
        trained: A trial's model, which stays as it is.
        step: step(model, batch): the trial's training step.
        batch: A batch, on the model's device.
        options: How the trial is trained.
        probe: Whether any may not; else all of them do.

    Returns:
        {path of the module: None, or at which line it stops vmap and why}. Of a module within which another one
        stops it, only that one is said.
    """
    model = copy.deepcopy(trained).train()
    device = next(model.parameters()).device
    calls: dict[str, Any] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(path, clone_batch((args, kwargs)) if probe else None)

        return hook

    for path, module in model.named_modules():
        module.register_forward_pre_hook(note(path), with_kwargs=True)
    with options.autocast(device):
        step(model, clone_batch(batch))
    found: dict[str, str | None] = {}
    # Inner modules come after outer ones.
    for path in sorted(calls, key=lambda path: path.count(".") + bool(path), reverse=True):
        inside = [
            inner for inner, why in found.items() if why is not None and (not path or inner.startswith(f"{path}."))
        ]
        fails = probe and not inside
        found[path] = _why_not(trained.get_submodule(path), calls[path], device, options) if fails else None
    return {path or "the model": found[path] for path in calls if path or found[path] or len(calls) == 1}


def _why_not(module: nn.Module, call: Any, device: torch.device, options: Options) -> str | None:
    def step(lanes: Any, model: nn.Module, batch: Any, values: Any) -> Tensor:
        return model()  # type: ignore[no-any-return]

    try:
        lanes = []
        for name in ("0", "1"):
            fed = _Fed(module, call).to(device)
            lanes.append(Lane(name, fed, {ONLY: torch.optim.SGD(fed.parameters(), lr=0.0)}))
        array = FusedArray(device, options=Options(options.precision), strategies=(VMAP,))
        array.change_lanes(join=lanes)
        array.train_step(step, ())
    except VmapFailed as failure:
        line = line_of(failure.cause)
        return f"{type(module).__name__}, at `{line}`: {first_line(failure.cause)}"
    except (FusionError, RuntimeError, TypeError, ValueError):  # it cannot be tried by itself
        return None
    return None


def _device_of(call: Any) -> torch.device | None:
    return next((leaf.device for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)), None)
