"""Optimizers of an array: one update for all lanes, with every number a lane's own."""

from __future__ import annotations

from hfta_tune.fusion.optimizers._adadelta import FusedAdadelta
from hfta_tune.fusion.optimizers._adagrad import FusedAdagrad
from hfta_tune.fusion.optimizers._adam import FusedAdam
from hfta_tune.fusion.optimizers._adamax import FusedAdamax
from hfta_tune.fusion.optimizers._array import (
    ArrayOptimizers,
    Updates,
    form_of_updates,
    tensors_of_updates,
    with_tensors,
)
from hfta_tune.fusion.optimizers._asgd import FusedASGD
from hfta_tune.fusion.optimizers._base import FusedOptimizer
from hfta_tune.fusion.optimizers._choice import (
    form_of_optimizer,
    fuse_optimizer,
    obstacle_of_optimizer,
    obstacle_of_optimizers,
)
from hfta_tune.fusion.optimizers._nadam import FusedNAdam
from hfta_tune.fusion.optimizers._native import GroupUpdate, NativeOptimizer
from hfta_tune.fusion.optimizers._radam import FusedRAdam
from hfta_tune.fusion.optimizers._rmsprop import FusedRMSprop
from hfta_tune.fusion.optimizers._rprop import FusedRprop
from hfta_tune.fusion.optimizers._sgd import FusedSGD
from hfta_tune.fusion.optimizers._views import OptimizerViews

__all__ = [
    "ArrayOptimizers",
    "FusedASGD",
    "FusedAdadelta",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamax",
    "FusedNAdam",
    "FusedOptimizer",
    "FusedRAdam",
    "FusedRMSprop",
    "FusedRprop",
    "FusedSGD",
    "GroupUpdate",
    "NativeOptimizer",
    "OptimizerViews",
    "Updates",
    "form_of_optimizer",
    "form_of_updates",
    "fuse_optimizer",
    "obstacle_of_optimizer",
    "obstacle_of_optimizers",
    "tensors_of_updates",
    "with_tensors",
]
