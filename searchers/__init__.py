"""Searchers that suggest trials so that arrays are full: trials with equal signatures, one after another.

The folder stands at the top of the repository and is installed as `hfta_tune.searchers`.
"""

from hfta_tune.searchers._structure_first import StructureFirst

__all__ = ["StructureFirst"]
