"""Which metrics of the results are the study's objectives. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence

TRAIN_LOSS = "train_loss"


def choose_metrics(metric: str | Sequence[str] | None, results: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Names the study's metrics, from what the user asked for and the first results there are.

    Args:
        metric: One name, one name for each direction of the study, or None for the only metric besides
            the training loss (the training loss itself, if it is alone).
        results: The metrics of each trial that has any.

    Raises:
        ValueError: No result has a metric that was asked for; or none was asked for and there is a choice.
    """
    # A dict keeps the order in which the user's validation_step names them.
    found = list(dict.fromkeys(name for result in results for name in result))
    if metric is None:
        own = [name for name in found if name != TRAIN_LOSS]
        if len(own) > 1:
            raise ValueError(
                f"The results have several metrics: {_listed(own)}. "
                f"Say which one the study optimizes, for example optimize(..., metric={own[0]!r})."
            )
        return (own[0],) if own else (TRAIN_LOSS,)
    names = (metric,) if isinstance(metric, str) else tuple(metric)
    for name in names:
        if name not in found:
            raise ValueError(
                f"No result has the metric {name!r}. The results have: {_listed(found)}. "
                "Pass one of these as metric, or return it from validation_step."
            )
    return names


def values_of(names: Sequence[str], result: Mapping[str, float]) -> list[float]:
    """The values of the study's metrics in one trial's result, in the order of the study's directions."""
    for name in names:
        if name not in result:
            raise ValueError(
                f"The result of this trial lacks the metric {name!r}, which other trials have. "
                f"It has: {_listed(result)}. Return the metric for every config."
            )
    return [float(result[name]) for name in names]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
