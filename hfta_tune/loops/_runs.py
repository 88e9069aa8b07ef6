"""Functions that run at once in this thread, each the loop of one trial: what the front ends use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any

from hfta_tune.loops._errors import note
from hfta_tune.loops._fusion import Fusion
from hfta_tune.loops._hub import Ended, Hub, LoopLane
from hfta_tune.loops._output import lines_name_trials

__all__ = ["LaneRuns"]

_REMEDIES = {
    "is a view and is being modified inplace": (
        "what a prepared model returns cannot be changed in place: y = y / t, not y /= t"
    ),
    "appears to not have been used in the graph": (
        "torch.autograd.grad does not reach the parameters of a prepared model: leave out of prepare() the model "
        "whose gradients it returns, and its optimizer"
    ),
}


class LaneRuns:
    """The functions of trials, each in a lane, trained together where they prepare what they train.

    Args:
        strategy: "auto", "vmap" or "lane by lane".
        audit: Whether the first call of every kind is compared with each lane's own.
        numbers: Numbers the arrays; by default from 0.
    """

    def __init__(self, *, strategy: str = "auto", audit: bool = False, numbers: Iterator[int] | None = None) -> None:
        self._hub = Hub()
        self._hub.fusion = self.fusion = Fusion(self._hub, strategy=strategy, audit=audit, numbers=numbers)
        self._output = contextlib.ExitStack()

    def __enter__(self) -> LaneRuns:
        self._output.enter_context(lines_name_trials())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all trials."""
        try:
            self._hub.close()
        finally:
            self.fusion.close()
            self._output.close()

    def __len__(self) -> int:
        return len(self._hub.lanes)

    def start(self, name: str, function: Callable[[], Any]) -> LoopLane:
        """Give a trial a lane; its function begins when others are waited for."""
        return self._hub.start(name, function)

    def stop(self, lane: LoopLane) -> None:
        """End a trial's function where it waits; its finally clauses run."""
        self._hub.stop(lane)

    def run_until_parked(self, lanes: Collection[LoopLane]) -> Iterator[tuple[LoopLane, Ended | None]]:
        """Wake lanes that are parked and run until each of these has parked again or ended; yield each then."""
        for lane in lanes:
            if lane.is_parked:
                self._hub.wake(lane)
        awaited = set(lanes)
        with lines_name_trials():
            while awaited:
                for lane in self._hub.run():
                    awaited.discard(lane)
                    if lane.ended is not None:
                        self._say_how_it_ended(lane)
                    yield lane, lane.ended

    def wait(self) -> Iterator[tuple[str, Ended, dict[str, Any] | None]]:
        """Run until some of the trials end; yield each with how it ended, and with where it was trained last."""
        for lane in self._hub.run():
            if lane.ended is not None:
                self._say_how_it_ended(lane)
                if lane.ended.error is not None:
                    note(lane.ended.error, f"raised by trial {lane.name}")
                yield lane.name, lane.ended, None if lane.trial is None else lane.trial.place

    def _say_how_it_ended(self, lane: LoopLane) -> None:
        assert lane.ended is not None
        if lane.ended.error is not None:
            _explain(lane.ended.error)
        elif lane.trial is None:
            self.fusion.warn_once(
                "The function never called hfta_tune.prepare, so its trials ran one by one: make models, "
                "optimizers, loaders and criteria ready with it, and call hfta_tune.backward(loss)."
            )


def _explain(error: BaseException) -> None:
    """Note in an error what to do about it, if it comes of training together."""
    for said, remedy in _REMEDIES.items():
        if said in str(error):
            note(error, remedy)
