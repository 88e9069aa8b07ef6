"""The Ray Tune front end: trials of a FusedTrainable share workers under any Tune scheduler."""

from __future__ import annotations

import ray

try:
    from hfta_tune.tune._packer import HFTAPacker
except ImportError as error:
    if (error.name or "").partition(".")[0] != "ray":
        raise
    raise ImportError(
        f"HFTAPacker does not work with Ray {ray.__version__} ({error}). It is tested with Ray 2.47.1 to 2.60; install "
        'one of these, as in pip install "ray[tune]==2.60.0".',
        name=error.name,
    ) from error

__all__ = ["HFTAPacker"]
