"""hfta_tune: train many hyperparameter trials at once on one accelerator, with Ray Tune or Optuna."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfta_tune.fusion import FusionError, FusionWarning
from hfta_tune.trainable import FusedTrainable
from hfta_tune.worker import Worker

if TYPE_CHECKING:
    from hfta_tune.loops import accumulate, backward, clip_grad_norm_, clip_grad_value_, prepare, unprepare
    from hfta_tune.monitor.check import check
    from hfta_tune.monitor.timeline import plot_timeline
    from hfta_tune.optuna import optimize
    from hfta_tune.tune import HFTAPacker
    from hfta_tune.tune._fusible import fusible

__all__ = [
    "FusedTrainable",
    "FusionError",
    "FusionWarning",
    "HFTAPacker",
    "Worker",
    "accumulate",
    "backward",
    "check",
    "clip_grad_norm_",
    "clip_grad_value_",
    "fusible",
    "optimize",
    "plot_timeline",
    "prepare",
    "unprepare",
]

# The front ends are imported when they are first used: a worker process needs neither.
_FRONT_ENDS = {
    "HFTAPacker": "hfta_tune.tune",
    "fusible": "hfta_tune.tune._fusible",
    **dict.fromkeys(
        ("accumulate", "backward", "clip_grad_norm_", "clip_grad_value_", "prepare", "unprepare"), "hfta_tune.loops"
    ),
    "check": "hfta_tune.monitor.check",
    "optimize": "hfta_tune.optuna",
    "plot_timeline": "hfta_tune.monitor.timeline",
}


def __getattr__(name: str) -> Any:
    if name == "lightning":
        return import_module("hfta_tune.lightning")
    if name not in _FRONT_ENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_FRONT_ENDS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
