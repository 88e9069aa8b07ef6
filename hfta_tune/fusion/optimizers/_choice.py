"""The choice among the optimizers of an array."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence

from torch.optim import Optimizer

from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers._adadelta import FusedAdadelta
from hfta_tune.fusion.optimizers._adagrad import FusedAdagrad
from hfta_tune.fusion.optimizers._adam import FusedAdam
from hfta_tune.fusion.optimizers._adamax import FusedAdamax
from hfta_tune.fusion.optimizers._asgd import FusedASGD
from hfta_tune.fusion.optimizers._base import FusedOptimizer
from hfta_tune.fusion.optimizers._nadam import FusedNAdam
from hfta_tune.fusion.optimizers._native import NativeOptimizer
from hfta_tune.fusion.optimizers._radam import FusedRAdam
from hfta_tune.fusion.optimizers._rmsprop import FusedRMSprop
from hfta_tune.fusion.optimizers._rprop import FusedRprop
from hfta_tune.fusion.optimizers._sgd import FusedSGD
from hfta_tune.fusion.optimizers._views import OptimizerViews
from hfta_tune.fusion.stack import LaneStack

__all__ = ["form_of_optimizer", "fuse_optimizer", "obstacle_of_optimizer", "obstacle_of_optimizers"]

_NATIVE: tuple[type[NativeOptimizer], ...] = (
    FusedSGD,
    FusedAdam,
    FusedRMSprop,
    FusedAdagrad,
    FusedNAdam,
    FusedRAdam,
    FusedAdamax,
    FusedAdadelta,
    FusedASGD,
    FusedRprop,
)

_OBSTACLES: dict[type[Optimizer], str | None] = {}


def fuse_optimizer(lanes: Sequence[Lane], stack: LaneStack, name: str = ONLY) -> FusedOptimizer:
    """Return the best optimizer in the place of the lanes' own called `name`: a native one, or those on views."""
    for native in _NATIVE:
        if native.serves(lanes[0].optimizers[name]):
            return native(lanes, stack, name)
    return OptimizerViews(lanes, name)


def form_of_optimizer(optimizer: Optimizer) -> Hashable:
    """Return what of an optimizer, besides its split into groups, lanes of an array must have in common."""
    for native in _NATIVE:
        if native.serves(optimizer):
            return (type(optimizer), native, native.flags_of(optimizer))
    return (type(optimizer), OptimizerViews)


def obstacle_of_optimizer(optimizer: Optimizer) -> str | None:
    """Return why an optimizer's trials must train lane by lane, or None."""
    kind = type(optimizer)
    if kind not in _OBSTACLES:
        closure = inspect.signature(kind.step).parameters.get("closure")
        needed = closure is not None and closure.default is inspect.Parameter.empty
        _OBSTACLES[kind] = f"{kind.__name__}.step evaluates the loss itself, through a closure" if needed else None
    return _OBSTACLES[kind]


def obstacle_of_optimizers(optimizers: Mapping[str, Optimizer]) -> str | None:
    """Return the first obstacle among a trial's optimizers, or None."""
    return next(filter(None, map(obstacle_of_optimizer, optimizers.values())), None)
