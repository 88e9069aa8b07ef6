"""What tells two signatures apart, in words."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from hfta_tune.fusion.comparison import first_incomparable
from hfta_tune.fusion.signature import Signature

__all__ = ["change_of_model", "change_of_optimizers"]

_NAMED = 3
_FORM_OF_TENSOR = ("shape", "dtype", "layout", "requires_grad")


def change_of_model(one: Signature, other: Signature) -> str | None:
    """Say what changes from one model to another, such as "changes the shape of 0.weight from [64, 64] to [32, 64]".

    Args:
        one: The signature of the first model.
        other: That of the other.

    Returns:
        The first change, of those that say most: modules before tensors before attributes. None if there is none.
    """
    (modules, tensors), (others_modules, others_tensors) = _parts(one), _parts(other)
    return (
        _change_of_modules(modules, others_modules)
        or _change_of_tensors(tensors, others_tensors)
        or _change_of_attributes(modules, others_modules)
        or (None if one.key == other.key else "changes the order of modules or parameters, or which of them are shared")
    )


def change_of_optimizers(one: Any, other: Any) -> str | None:
    """Say what changes from one trial's optimizers to another's.

    Args:
        one: (the forms of the optimizers, the parameters in their groups, the clipping algorithm), as a Worker has it.
        other: That of the other trial.
    """
    (forms, split, clipping), (others_forms, others_split, others_clipping) = one, other
    kinds, others_kinds = ([form[0].__name__ for form in own] for own in (forms, others_forms))
    if kinds != others_kinds:
        return f"changes the optimizer from {', '.join(kinds)} to {', '.join(others_kinds)}"
    for form, its in zip(forms, others_forms, strict=True):
        if form != its:
            return _change_of_flags(form, its)
    if split != others_split:
        return "changes which parameters the optimizer's groups hold"
    if clipping != others_clipping:
        return f"changes the clipping of gradients from {clipping} to {others_clipping}"
    return None


def _change_of_flags(form: Any, other: Any) -> str:
    name = form[0].__name__
    flags, others = (own[2] if len(own) == 3 else () for own in (form, other))
    for group, its in zip(flags, others, strict=False):
        for (flag, value), (_, others_value) in zip(group, its, strict=True):
            if value != others_value:
                return f"changes {flag} of {name} from {value} to {others_value}"
    return f"changes how {name} updates"


def _parts(signature: Signature) -> tuple[dict[str, Any], dict[str, Any]]:
    """{path: (kind, {attribute: key})} of the modules and {name: form} of the tensors."""
    key: Any = signature.key
    modules, tensors = key
    return (
        {path: (kind, dict(attributes)) for path, _, kind, attributes in modules},
        {name: form for _, name, _, *form in tensors},
    )


def _change_of_modules(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for path, (kind, _) in one.items():
        if path in other and other[path][0] != kind:
            what = f"module {path}" if path else "the model"
            return f"changes {what} from {_name(kind)} to {_name(other[path][0])}"
    for verb, present, absent in (("adds", other, one), ("removes", one, other)):
        paths = [path for path in present if path not in absent]
        if paths:
            more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
            listed = ", ".join(f"{path} ({_name(present[path][0])})" for path in paths[:_NAMED])
            return f"{verb} {'modules' if len(paths) > 1 else 'module'} {listed}{more}"
    return None


def _change_of_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, form in one.items():
        for what, value, others in zip(_FORM_OF_TENSOR, form, other.get(name, form), strict=True):
            if value != others:
                before, after = (list(v) if what == "shape" else v for v in (value, others))
                return f"changes the {what} of {name} from {before} to {after}"
    for verb, present, absent in (("adds", other, one), ("removes", one, other)):
        for name in present:
            if name not in absent:
                return f"{verb} {name} of shape {list(present[name][0])}"
    return None


def _change_of_attributes(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    absent = object()
    for path, (kind, attributes) in one.items():
        theirs = other[path][1]
        for name in dict.fromkeys([*attributes, *theirs]):
            before, after = attributes.get(name, absent), theirs.get(name, absent)
            if before != after:
                what = f"attribute {name!r} of {f'module {path}' if path else 'the model'} ({_name(kind)})"
                shown, others_shown = _shown(before), _shown(after)
                if first_incomparable((before, after)) is not None:
                    return f"changes {what}, or makes another object of it"
                return f"changes {what}" + (f" from {shown} to {others_shown}" if shown and others_shown else "")
    return None


def _name(kind: Any) -> str:
    """The name of a module's class; that of a parametrized one comes with the names of what is parametrized."""
    return str(kind.__name__) if isinstance(kind, type) else f"parametrized {kind[0].__name__}"


def _shown(key: Hashable) -> str | None:
    """A value as the user wrote it, if its key holds it."""
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], type):
        return None
    kind, value = key
    if kind is nn.Module:
        return f"module {value}"
    if issubclass(kind, float):
        return str(value) if value == "nan" else str(float.fromhex(value))
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (type(None), bool, int, str, complex)):
        return repr(value)
    return None
