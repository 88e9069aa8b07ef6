"""Training loops of the user's own: `prepare` and its like, and the hub that brings lanes together."""

from __future__ import annotations

from hfta_tune.loops._host import LoopHost
from hfta_tune.loops._hub import Ended, LoopLane, current_lane
from hfta_tune.loops._prepare import accumulate, backward, clip_grad_norm_, clip_grad_value_, prepare, unprepare
from hfta_tune.loops._runs import LaneRuns

__all__ = [
    "Ended",
    "LaneRuns",
    "LoopHost",
    "LoopLane",
    "accumulate",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "current_lane",
    "prepare",
    "unprepare",
]
