"""What to know of a sampler that is asked for many trials at once."""

from typing import Any

from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, GridSampler, TPESampler


def advice_for_batches(sampler: BaseSampler, B: int, n_trials: int | None) -> str | None:
    """What a sampler does worse with B trials running than with one, and the remedy; None if there is nothing.

    Sources: the docstrings of the classes in Optuna 5.0 (`constant_liar` of TPESampler, the notes of
    CmaEsSampler and GridSampler). The other samplers of Optuna see the running trials, or need none: random, QMC,
    brute force, GPSampler (from Optuna 4.8 on) and the genetic ones, which only breed from generations that have ended.

    Args:
        sampler: The study's sampler.
        B: How many trials run at once.
        n_trials: How many trials the run asks for; None without a limit.
    """
    if B == 1:
        return None
    sampler = _innermost(sampler)
    if isinstance(sampler, TPESampler) and _attribute(sampler, "_constant_liar") is False:
        return (
            f"TPESampler without constant_liar does not see the trials that run, so {B} at once are suggested close "
            "to each other. Use TPESampler(constant_liar=True)."
        )
    if isinstance(sampler, CmaEsSampler):
        # Before Optuna 4.4 it is called "_initial_popsize".
        size = _attribute(sampler, "_popsize") or _attribute(sampler, "_initial_popsize")
        if size is None or size < B:
            return (
                f"CmaEsSampler learns from popsize trials a generation (popsize={size}) and not from those that are "
                f"asked for beyond it, so {B} at once waste some. Use CmaEsSampler(popsize={B}), or a multiple of it."
            )
    if isinstance(sampler, GridSampler):
        points = _attribute(sampler, "_n_min_trials")
        if points is not None and (n_trials is None or n_trials > points):
            return (
                f"GridSampler repeats points that still run when all {points} of the grid have been suggested. "
                f"Pass n_trials={points}, less the trials that the study has."
            )
    return None


def startup_trials(sampler: BaseSampler) -> int:
    """How many trials a sampler must have seen end before it learns; until then it suggests at random.

    That is n_startup_trials of TPESampler and GPSampler. CmaEsSampler has one, too, but learns a generation at a time.
    """
    sampler = _innermost(sampler)
    return _attribute(sampler, "_n_startup_trials") or 0 if isinstance(sampler, (TPESampler, GPSampler)) else 0


def _innermost(sampler: BaseSampler) -> BaseSampler:
    """The sampler in PartialFixedSampler or StructureFirst."""
    while (inner := _attribute(sampler, "_base_sampler")) is not None:
        sampler = inner
    return sampler


def _attribute(sampler: BaseSampler, name: str) -> Any:
    # Private, so it may be gone; then there is no advice.
    return getattr(sampler, name, None)
