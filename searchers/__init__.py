"""Searchers that suggest trials so that arrays are full: trials with equal signatures, one after another.

The folder stands at the top of the repository and is installed as `hfta_tune.searchers`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfta_tune.searchers._structure_first import StructureFirst

if TYPE_CHECKING:
    from hfta_tune.searchers._fused_optuna import FusedOptunaSearch
    from hfta_tune.searchers._structure_first_search import StructureFirstSearch

__all__ = ["FusedOptunaSearch", "StructureFirst", "StructureFirstSearch"]

# Imported when they are first used: a study without Ray Tune need not import it.
_OF_TUNE = {"FusedOptunaSearch": "_fused_optuna", "StructureFirstSearch": "_structure_first_search"}


def __getattr__(name: str) -> Any:
    if name not in _OF_TUNE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"hfta_tune.searchers.{_OF_TUNE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
