"""Checkpoints of trials in plain PyTorch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from hfta_tune.fusion import FusionError, Lane

__all__ = ["CHECKPOINT_FILE", "built_numbers", "put_state", "read_checkpoint", "state_of"]

CHECKPOINT_FILE = "checkpoint.pt"
_ENTRIES = frozenset({"model", "optimizer", "lr_scheduler", "epoch"})


def built_numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of each parameter group, as build_optimizer set them.

    A checkpoint keeps them, to tell a number that the config changed from one that the schedule moved.
    """

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    return [
        {
            key: value
            for key, value in group.items()
            if number(value) or (isinstance(value, tuple) and all(number(part) for part in value))
        }
        for group in optimizer.param_groups
    ]


def state_of(lane: Lane, epoch: int, built: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a lane's checkpoint; its tensors are copies on the CPU."""
    state = {
        "model": dict(lane.model.state_dict()),
        "optimizer": lane.optimizer.state_dict(),
        "lr_scheduler": None if lane.scheduler is None else lane.scheduler.state_dict(),
        "epoch": epoch,
        "optimizer_numbers": built,
    }
    copies: dict[str, Any] = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), state)
    return copies


def put_state(lane: Lane, state: Mapping[str, Any], built: list[dict[str, Any]]) -> int:
    """Put a lane into the state of a checkpoint; return its epoch.

    A number that build_optimizer now sets otherwise than in the run that was saved holds from now on, as
    when Tune exploits another trial with a changed config; a schedule goes on in proportion to it.
    """
    epoch = int(state["epoch"])
    lane.model.load_state_dict(state["model"])
    lane.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    if lane.scheduler is not None and state["lr_scheduler"] is not None:
        lane.scheduler.load_state_dict(copy.deepcopy(state["lr_scheduler"]))
    saved = state.get("optimizer_numbers", built)
    for index, (old, new) in enumerate(zip(saved, built, strict=True)):
        for key in new.keys() & old.keys():
            if new[key] != old[key]:
                _change(lane, index, key, old[key], new[key])
    return epoch


def _change(lane: Lane, index: int, key: str, old: Any, new: Any) -> None:
    group = lane.optimizer.param_groups[index]
    if key != "lr" or lane.scheduler is None:
        group[key] = new
        return
    group["lr"] = group["lr"] * new / old if old else new
    if "initial_lr" in group:
        group["initial_lr"] = group["initial_lr"] * new / old if old else new
    schedulers = [lane.scheduler]
    while schedulers:
        scheduler = schedulers.pop()
        schedulers.extend(getattr(scheduler, "_schedulers", ()))
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs[index] = group.get("initial_lr", new)


def read_checkpoint(name: str, directory: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    """Read the checkpoint of trial `name` from a directory.

    Raises:
        FusionError: if the file is missing, corrupt, or something else.
    """
    path = Path(directory) / CHECKPOINT_FILE
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise FusionError(
            f"trial {name}: the checkpoint {path} cannot be read ({type(error).__name__}: "
            f"{str(error).split('. ')[0]}). Delete it to restore from an earlier one."
        ) from error
    if not isinstance(state, dict) or not state.keys() >= _ENTRIES:
        raise FusionError(
            f"trial {name}: the file {path} is no checkpoint of hfta_tune (it lacks model, optimizer, "
            "lr_scheduler or epoch). Restore from a checkpoint that a FusedTrainable saved."
        )
    return state
