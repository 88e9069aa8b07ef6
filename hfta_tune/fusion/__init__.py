"""The engine: lanes stacked into arrays and trained as one. It imports torch only and knows no driver."""

from __future__ import annotations

from hfta_tune.fusion.array import FusedArray, Step
from hfta_tune.fusion.batch import clone_batch
from hfta_tune.fusion.choice import COMPILED, LANE_BY_LANE, VMAP
from hfta_tune.fusion.clipping import Clipping
from hfta_tune.fusion.comparison import Incomparable, comparable, first_incomparable
from hfta_tune.fusion.compiled import CompiledStep
from hfta_tune.fusion.errors import FusionError, FusionWarning
from hfta_tune.fusion.failure import LanesDiffer, VmapFailed
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import form_of_optimizer, obstacle_of_optimizer
from hfta_tune.fusion.signature import Signature, model_signature, optimizer_split

__all__ = [
    "COMPILED",
    "LANE_BY_LANE",
    "VMAP",
    "Clipping",
    "CompiledStep",
    "FusedArray",
    "FusionError",
    "FusionWarning",
    "Incomparable",
    "Lane",
    "LanesDiffer",
    "Signature",
    "Step",
    "VmapFailed",
    "clone_batch",
    "comparable",
    "first_incomparable",
    "form_of_optimizer",
    "model_signature",
    "obstacle_of_optimizer",
    "optimizer_split",
]
