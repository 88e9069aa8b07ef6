"""What a lane's own code may change of its models between calls, seen at each call."""

from __future__ import annotations

import types
from operator import getitem, is_
from typing import Any

from torch import Tensor, nn

__all__ = ["Watched", "obstacle_of_hooks"]

_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ALWAYS = frozenset(vars(nn.Module()))
_RENEWED = ("_flat_weights", "_flat_weight_refs")  # by recurrent layers themselves
_HARMLESS = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Module, types.ModuleType, type)


class Watched:
    """Attributes, submodules, tensors and hooks of models as they are now.

    A lane asks at each call whether they still are, so it is done by few calls of C.

    Args:
        model: The models.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._attributes: tuple[list[dict[Any, Any]], list[Any], list[Any]] = [], [], []
        self._members: tuple[list[dict[Any, Any]], list[Any], list[Any]] = [], [], []
        self._paths: list[str] = []
        for path, module in model.named_modules():
            own = vars(module)
            self._dicts.append(own)
            for name, value in own.items():
                if name in _MEMBERS or name in _HOOKS:
                    # What is added is seen by its number, where it takes part in calls.
                    if name in _HOOKS or (name == "_modules" and value):
                        self._dicts.append(value)
                    for key, member in value.items():
                        _note(self._members, value, key, member)
                elif name not in _ALWAYS and name not in _RENEWED:
                    _note(self._attributes, own, name, value)
                    self._paths.append(f"{path}.{name}" if path else name)
        self._lengths = list(map(len, self._dicts))

    def have_changed(self) -> bool:
        """Whether anything is another object, or a number of another value."""
        if list(map(len, self._dicts)) != self._lengths:
            return True
        owners, names, values = self._attributes
        members, keys, kept = self._members
        try:
            return list(map(getitem, owners, names)) != values or not all(map(is_, map(getitem, members, keys), kept))
        except Exception:  # one is gone, or they cannot be compared
            return True

    def changed_attribute(self) -> str | None:
        """Which attribute has changed, if any has."""
        for owner, name, value, path in zip(*self._attributes, self._paths, strict=True):
            if owner.get(name) is not value:
                return path
        return None


def _note(table: tuple[list[Any], list[Any], list[Any]], owner: Any, name: Any, value: Any) -> None:
    for column, entry in zip(table, (owner, name, value), strict=True):
        column.append(entry)


def obstacle_of_hooks(model: nn.Module) -> str | None:
    """Which hook does what one call for all lanes would not do for each, or None.

    Forward hooks that compute are part of the call. Those that could keep what they see, in a list say, must be called
    by each lane; so must those of the backward pass.
    """
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"{path} has a hook of the backward pass"
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _only_computes(hook):
                return f"a hook of {path} ({getattr(hook, '__qualname__', type(hook).__name__)}) may keep what it sees"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"{name} has a hook on its gradient"
    return None


def _only_computes(hook: Any) -> bool:
    if not isinstance(hook, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in hook.__closure__ or ()]
    return all(isinstance(kept, _HARMLESS) or _only_computes(kept) for kept in (*cells, *(hook.__defaults__ or ())))
