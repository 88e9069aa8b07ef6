"""The engine: lanes stacked into arrays and trained as one. It imports torch only and knows no driver."""

from __future__ import annotations

from hfta_tune.fusion.array import FusedArray
from hfta_tune.fusion.audit import Difference
from hfta_tune.fusion.batch import clone_batch, form_of_batch
from hfta_tune.fusion.choice import COMPILED, LANE_BY_LANE, RECORDED, VMAP
from hfta_tune.fusion.clipping import Clipping
from hfta_tune.fusion.comparison import Incomparable, comparable, first_incomparable
from hfta_tune.fusion.compiled_steps import StepCache
from hfta_tune.fusion.contract import LastOfRound, MetricName, without_metrics
from hfta_tune.fusion.errors import FusionError, FusionWarning
from hfta_tune.fusion.failure import LanesDiffer, TornByOutOfMemory, VmapFailed, first_line, line_of
from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers import form_of_optimizer, obstacle_of_optimizer, obstacle_of_optimizers
from hfta_tune.fusion.options import PRECISIONS, Options
from hfta_tune.fusion.signature import Signature, model_signature, optimizer_split
from hfta_tune.fusion.signature_words import change_of_model, change_of_optimizers
from hfta_tune.fusion.vmapped import Step

__all__ = [
    "COMPILED",
    "LANE_BY_LANE",
    "ONLY",
    "PRECISIONS",
    "RECORDED",
    "VMAP",
    "Clipping",
    "Difference",
    "FusedArray",
    "FusionError",
    "FusionWarning",
    "Incomparable",
    "Lane",
    "LanesDiffer",
    "LastOfRound",
    "MetricName",
    "Options",
    "Signature",
    "Step",
    "StepCache",
    "TornByOutOfMemory",
    "VmapFailed",
    "change_of_model",
    "change_of_optimizers",
    "clone_batch",
    "comparable",
    "first_incomparable",
    "first_line",
    "form_of_batch",
    "form_of_optimizer",
    "line_of",
    "model_signature",
    "obstacle_of_optimizer",
    "obstacle_of_optimizers",
    "optimizer_split",
    "without_metrics",
]
