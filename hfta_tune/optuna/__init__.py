"""The Optuna front end: tune many fused trials of an Optuna study in this process, without Ray."""

from hfta_tune.optuna._optimize import optimize

__all__ = ["optimize"]
