"""Kernels for a step under vmap: operations on all lanes at once where torch's batching rule does more work."""

from __future__ import annotations

from hfta_tune.fusion.kernels._mode import LaneKernels

__all__ = ["LaneKernels"]
