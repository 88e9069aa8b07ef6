"""The Ray Tune front end: trials of a FusedTrainable share workers under any Tune scheduler."""

from __future__ import annotations

from hfta_tune.tune._packer import HFTAPacker

__all__ = ["HFTAPacker"]
