"""Signatures: what must be equal for two trials to share an array.

Tensors of a lane (parameters, buffers) and what the engine carries a lane (the p of Dropout modules)
may differ; everything else that a forward pass could see is part of the signature.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from hfta_tune.fusion.comparison import comparable, first_incomparable
from hfta_tune.fusion.dropout import LANE_DROPOUTS

__all__ = ["Signature", "model_signature", "optimizer_split", "python_state"]

# Hooks on state_dict and load_state_dict do nothing in a forward pass.
_NOT_COMPARED = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "training",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)


@dataclass(frozen=True, slots=True)
class Signature:
    """A hashable key; equal signatures fuse.

    Attributes:
        key: What is compared.
        obstacle: What made the key equal to nothing but itself ("encoder.norm: attribute 'policy' ..."),
            or None.
    """

    key: Hashable
    obstacle: str | None = None


def model_signature(model: nn.Module) -> Signature:
    """Return the signature of a model: its module tree, plain attributes, and the form of its tensors.

    Args:
        model: A model as build_model returned it.
    """
    names = {id(module): name for name, module in model.named_modules()}
    places = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    obstacle = None
    modules = []
    for name, module in model.named_modules(remove_duplicate=False):
        carried = {"p"} if type(module) in LANE_DROPOUTS else set()
        if isinstance(module, nn.RNNBase):
            carried = {"_flat_weights", "_flat_weight_refs"}  # it renews them when its parameters change
        attributes = []
        for attribute, value in sorted(vars(module).items()):
            if attribute in _NOT_COMPARED or attribute in carried:
                continue
            if "_hooks" in attribute and isinstance(value, dict):
                value = list(value.values())  # their keys are running numbers of the process
            key = comparable(value, names, places)
            found = first_incomparable(key)
            if found is not None and obstacle is None:
                obstacle = f"{name or type(module).__name__}: attribute {attribute!r} ({found.what})"
            attributes.append((attribute, key))
        modules.append((name, names[id(module)], _kind(module), tuple(attributes)))

    tensors: list[Hashable] = []
    first_name: dict[int, str] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            tied_to = first_name.setdefault(id(tensor), name)
            form = (tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad)
            tensors.append((kind, name, tied_to, *form))
            if type(tensor) not in (nn.Parameter, nn.Buffer) and kind == "parameter" and obstacle is None:
                obstacle = f"{name}: parameter of type {type(tensor).__name__}"
    return Signature((tuple(modules), tuple(tensors)), obstacle)


def python_state(model: nn.Module) -> Hashable:
    """Return what a module keeps in plain attributes, less tensors: it must not change in a forward pass."""
    return tuple(
        (name, attribute, comparable(value))
        for name, module in model.named_modules()
        for attribute, value in sorted(vars(module).items())
        if attribute not in _NOT_COMPARED | {"_flat_weights", "_flat_weight_refs"} and not isinstance(value, Tensor)
    )


def _kind(module: nn.Module) -> Any:
    """The class of a module; parametrizing makes a class for each module, which stands for the original."""
    if parametrize.is_parametrized(module):
        parametrizations: Any = module.parametrizations
        return (parametrize.type_before_parametrizations(module), tuple(parametrizations))
    return type(module)


def optimizer_split(model: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters in each parameter group of an optimizer.

    Raises:
        KeyError: with the foreign parameter, where the optimizer holds one that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    split = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise KeyError(parameter)
        split.append(tuple(names[id(parameter)] for parameter in group["params"]))
    return tuple(split)
