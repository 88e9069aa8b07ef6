"""Functions that run at once in this thread, each the loop of one trial: what the front ends use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from hfta_tune.loops._fusion import Fusion
from hfta_tune.loops._hub import Ended, Hub, LoopLane
from hfta_tune.loops._output import lines_name_trials

__all__ = ["LaneRuns"]


class LaneRuns:
    """The functions of trials, each in a lane, trained together where they prepare what they train.

    Args:
        strategy: "auto", "vmap" or "lane by lane".
        audit: Whether the first call of every kind is compared with each lane's own.
    """

    def __init__(self, *, strategy: str = "auto", audit: bool = False) -> None:
        self._hub = Hub()
        self._hub.fusion = self.fusion = Fusion(self._hub, strategy=strategy, audit=audit)
        self._output = contextlib.ExitStack()

    def __enter__(self) -> LaneRuns:
        self._output.enter_context(lines_name_trials())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._hub.close()
        finally:
            self._output.close()

    def __len__(self) -> int:
        return len(self._hub.lanes)

    def start(self, name: str, function: Callable[[], Any]) -> LoopLane:
        """Give a trial a lane; its function begins when others are waited for."""
        return self._hub.start(name, function)

    def wait(self) -> Iterator[tuple[str, Ended, dict[str, Any] | None]]:
        """Run until some of the trials end; yield each with how it ended, and with where it was trained last."""
        for lane in self._hub.run():
            if lane.ended is not None:
                if lane.ended.error is not None:
                    _explain(lane)
                elif lane.trial is None:
                    self.fusion.warn_once(
                        "The function never called hfta_tune.prepare, so its trials ran one by one: make models, "
                        "optimizers, loaders and criteria ready with it, and call hfta_tune.backward(loss)."
                    )
                yield lane.name, lane.ended, None if lane.trial is None else lane.trial.place


def _explain(lane: LoopLane) -> None:
    """Say in an error's notes whose it is, and what to do about those that come of training together."""
    assert lane.ended is not None and lane.ended.error is not None
    error = lane.ended.error
    error.add_note(f"raised by trial {lane.name}")
    if "is a view and is being modified inplace" in str(error):
        error.add_note("what a prepared model returns cannot be changed in place: y = y / t, not y /= t")
