"""hfta_tune: train many hyperparameter trials at once on one accelerator, with Ray Tune or Optuna."""

from __future__ import annotations

from hfta_tune.fusion import FusionError, FusionWarning
from hfta_tune.optuna import optimize
from hfta_tune.trainable import FusedTrainable
from hfta_tune.tune import HFTAPacker
from hfta_tune.worker import Worker

__all__ = ["FusedTrainable", "FusionError", "FusionWarning", "HFTAPacker", "Worker", "optimize"]
