"""What a worker tells about itself with the results of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfta_tune._doubling import Memory
from hfta_tune.rounds import Round
from hfta_tune.worker import Worker

__all__ = ["RoundReport", "report_on"]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round, as the driver needs to know it to place trials.

    Attributes:
        lanes: How many trials took part.
        seconds: How long it took.
        signatures: Of each trial a hash of its signature, comparable within this worker; None where it has none.
        round: What the worker did; None where all of the trials had failed before.
        fitting_lanes: How many trials fit into the worker, or None as long as memory has not run out.
        memory: The device's memory after the round, where it was time to tell it.
    """

    lanes: int
    seconds: float
    signatures: tuple[int | None, ...]
    round: Round | None
    fitting_lanes: int | None = None
    memory: Memory | None = None


def report_on(
    worker: Worker, trials: Sequence[str | None], lanes: int, seconds: float, own: Round | None, memory: Memory | None
) -> RoundReport:
    """Report on a round of `lanes` of the `trials`; None stands for one that failed or did not take part."""
    hosted = set(worker.trial_ids)
    signatures = tuple(None if name is None or name not in hosted else worker.signature_of(name) for name in trials)
    fitting = worker.fitting_lanes if worker.fitting_lanes < worker.lanes else None
    return RoundReport(lanes, seconds, signatures, own, fitting, memory)
