"""Checkpoints of trials in plain PyTorch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from hfta_tune.fusion import ONLY, FusionError, Lane

__all__ = [
    "CHECKPOINT_FILE",
    "BuiltNumbers",
    "built_numbers",
    "has_entries_of",
    "live_state_of",
    "put_state",
    "read_checkpoint",
    "state_of",
]

CHECKPOINT_FILE = "checkpoint.pt"
BuiltNumbers: TypeAlias = dict[str, list[dict[str, Any]]]
"""{optimizer: the numbers of its groups}."""

_ENTRIES = frozenset({"model", "optimizer", "lr_scheduler", "epoch"})


def built_numbers(optimizers: Mapping[str, Optimizer]) -> BuiltNumbers:
    """Return the numbers of each optimizer's parameter groups, as build_optimizer set them.

    A checkpoint keeps them, to tell a number that the config changed from one that the schedule moved.
    """

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    return {
        name: [
            {
                key: value
                for key, value in group.items()
                if number(value) or (isinstance(value, tuple) and all(number(part) for part in value))
            }
            for group in optimizer.param_groups
        ]
        for name, optimizer in optimizers.items()
    }


def state_of(lane: Lane, epoch: int, built: BuiltNumbers) -> dict[str, Any]:
    """Return a lane's checkpoint; its tensors are copies on the CPU.

    Of several optimizers, the entries about them are dicts by their names.
    """
    state = live_state_of(lane, epoch, built)
    copies: dict[str, Any] = pytree.tree_map_only(Tensor, lambda t: t.cpu().clone(), state)
    return copies


def live_state_of(lane: Lane, epoch: int, built: BuiltNumbers) -> dict[str, Any]:
    """Return a lane's checkpoint of the moment: the tensors in it go on changing, all else does not."""
    schedulers = {name: scheduler.state_dict() for name, scheduler in lane.schedulers.items()}
    state = {
        "model": dict(lane.model.state_dict()),
        "optimizer": _plain({name: optimizer.state_dict() for name, optimizer in lane.optimizers.items()}),
        "lr_scheduler": _plain(schedulers) if schedulers else None,
        "epoch": epoch,
        "optimizer_numbers": _plain(built),
    }
    detached: dict[str, Any] = _detached(state)
    return detached


def _detached(value: Any) -> Any:
    """What pytree.tree_map would do with Tensor.detach, several times as fast: a worker does this every round."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) is dict:
        return {key: _detached(own) for key, own in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    if value is None or type(value) in (int, float, bool, str):
        return value
    return pytree.tree_map_only(Tensor, Tensor.detach, value)


def _plain(by_name: Mapping[str, Any]) -> Any:
    """What a checkpoint has of a dict by optimizer: a single one's value as it is."""
    return by_name[ONLY] if list(by_name) == [ONLY] else dict(by_name)


def _by_name(value: Any, lane: Lane) -> Mapping[str, Any]:
    return {ONLY: value} if list(lane.optimizers) == [ONLY] else value


def has_entries_of(lane: Lane, state: Mapping[str, Any]) -> bool:
    """Whether a lane's optimizers have the very entries of state that a checkpoint has."""
    saved = _by_name(state["optimizer"], lane)
    return all(
        {index: own.keys() for index, own in optimizer.state_dict()["state"].items() if own}
        == {index: own.keys() for index, own in saved[name]["state"].items() if own}
        for name, optimizer in lane.optimizers.items()
    )


def put_state(lane: Lane, state: Mapping[str, Any], built: BuiltNumbers, *, in_place: bool = False) -> int:
    """Put a lane into the state of a checkpoint; return its epoch.

    A number that build_optimizer now sets otherwise than in the run that was saved holds from now on, as
    when Tune exploits another trial with a changed config; a schedule goes on in proportion to it.

    Args:
        lane: The lane.
        state: The checkpoint.
        built: The numbers of the lane's optimizers as built.
        in_place: Write into the tensors of the optimizers' state, which are all there and may be those of an
            array, instead of replacing them.
    """
    epoch = int(state["epoch"])
    lane.model.load_state_dict(state["model"])
    optimizers = _by_name(state["optimizer"], lane)
    for name, optimizer in lane.optimizers.items():
        if in_place:
            _copy_into(optimizer, optimizers[name])
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizers[name]))
    if state["lr_scheduler"] is not None:
        schedulers = _by_name(state["lr_scheduler"], lane)
        for name, scheduler in lane.schedulers.items():
            if name in schedulers:
                scheduler.load_state_dict(copy.deepcopy(schedulers[name]))
    saved = _by_name(state.get("optimizer_numbers", _plain(built)), lane)
    for name, groups in built.items():
        for index, (old, new) in enumerate(zip(saved[name], groups, strict=True)):
            for key in new.keys() & old.keys():
                if new[key] != old[key]:
                    _change(lane, name, index, key, old[key], new[key])
    return epoch


def _copy_into(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: copy.deepcopy(value) for key, value in old.items() if key != "params"})
    for index, entries in saved["state"].items():
        own = optimizer.state[parameters[index]]
        for key, old in entries.items():
            if isinstance(old, Tensor) and isinstance(own[key], Tensor):
                own[key].copy_(old)
            else:
                own[key] = copy.deepcopy(old)


def _change(lane: Lane, name: str, index: int, key: str, old: Any, new: Any) -> None:
    group = lane.optimizers[name].param_groups[index]
    if key != "lr" or name not in lane.schedulers:
        group[key] = new
        return

    def scaled(lr: Any) -> Any:
        return lr * new / old if old and lr != old else new  # the division alone may be an ulp off the new number

    group["lr"] = scaled(group["lr"])
    if "initial_lr" in group:
        group["initial_lr"] = scaled(group["initial_lr"])
    schedulers = [lane.schedulers[name]]
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
