"""Says which trials of a search would train together, before it runs: `hfta_tune.check` and `hfta-tune check`."""

from __future__ import annotations

from hfta_tune.monitor.check._check import check
from hfta_tune.monitor.check._command import add_arguments, run
from hfta_tune.monitor.check._report import CheckReport
from hfta_tune.monitor.check._rounds import LaneMemory

__all__ = ["CheckReport", "LaneMemory", "add_arguments", "check", "run"]
