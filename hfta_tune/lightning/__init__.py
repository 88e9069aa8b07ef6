"""Modules of Lightning as trials that train in fused arrays."""

from __future__ import annotations

from hfta_tune.lightning._trainable import trainable

__all__ = ["trainable"]
