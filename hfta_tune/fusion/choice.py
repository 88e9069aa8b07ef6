"""The choice of a strategy by measurement. A pure state machine: it is told durations and asked what to run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from hfta_tune.fusion.compile_notes import Expected

__all__ = ["BLOCKS", "COMPILED", "LANE_BY_LANE", "OF_TENSORS", "RECORDED", "VMAP", "StrategyChoice"]

VMAP = "vmap"
RECORDED = "recorded"
COMPILED = "compiled"
LANE_BY_LANE = "lane by lane"
BLOCKS = {"compiled by 8": 8, "compiled by 32": 32}
"""{strategy: how many lanes train at a time}: what a block of lanes computes stays in a CPU's cache."""
OF_TENSORS = (RECORDED, COMPILED, *BLOCKS)
"""The strategies that run a step as a function of tensors, without the user's code."""

_SAMPLES = {LANE_BY_LANE: 2}
_SAMPLES_OF_OTHERS = 3
# Where nobody knows how long a run will be, compiling may cost this part of what it has taken so far.
_UNKNOWN_RUN_SHARE = 0.05
# A smaller part of a step's time is not worth recording it: what is expected is not that sure.
_LEAST_GAIN_OF_RECORDING = 0.1


@dataclass
class StrategyChoice:
    """Which strategy the next training step of an array takes.

    Each candidate trains a few real steps and the fastest goes on; again when the number of lanes has
    halved or doubled. The first step of a candidate warms up and is not counted.

    Attributes:
        candidates: The strategies that can train this array, best guess first.
        may_record: Whether recording may still be tried.
        may_compile: Whether compiling may still be tried.
        by_blocks: Whether a compiled step may train the lanes block by block.
        seconds: {strategy: median seconds a step}, as far as measured.
    """

    candidates: list[str] = field(default_factory=lambda: [VMAP, LANE_BY_LANE])
    may_record: bool = True
    may_compile: bool = True
    by_blocks: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _samples: dict[str, list[float]] = field(default_factory=dict)
    _lanes: int = 0
    _steps: int = 0

    def count_step(self) -> None:
        """Note that a step was trained, in whatever strategy."""
        self._steps += 1

    def strategy(self, lanes: int) -> str:
        """The strategy of the next step with this number of lanes."""
        if lanes == 1:
            return LANE_BY_LANE
        if self._lanes and not self._lanes / 2 < lanes < self._lanes * 2:
            self.measure_again()
        if not self.seconds:
            self._lanes = lanes
        usable = [name for name in self.candidates if 2 * BLOCKS.get(name, 0) <= lanes]
        for candidate in usable:
            if candidate not in self.seconds:
                return candidate
        return min(usable, key=self.seconds.__getitem__)

    def measuring(self, strategy: str) -> bool:
        """Whether the duration of a step in this strategy is wanted."""
        return strategy not in self.seconds

    def record(self, strategy: str, seconds: float) -> None:
        """Note how long a step took."""
        samples = self._samples.setdefault(strategy, [])
        samples.append(seconds)
        if len(samples) == _SAMPLES.get(strategy, _SAMPLES_OF_OTHERS) + 1:
            self.seconds[strategy] = statistics.median(samples[1:])

    def measure_again(self) -> None:
        """Forget what was measured."""
        self.seconds.clear()
        self._samples.clear()

    def drop(self, strategy: str) -> None:
        """A candidate turned out not to be able to train this array."""
        if strategy in self.candidates:
            self.candidates.remove(strategy)
        if not self.candidates:
            self.candidates.append(LANE_BY_LANE)

    def could_record(self, lanes: int) -> bool:
        """Whether recording may be tried now: the other strategies are measured, and it was not tried before."""
        return self.may_record and self._is_settled(lanes) and self.seconds[VMAP] < 2 * min(self.seconds.values())

    def could_compile(self, lanes: int) -> bool:
        """Whether compiling may be tried now: the other strategies are measured, and it was not tried before."""
        return self.may_compile and self._is_settled(lanes)

    def _is_settled(self, lanes: int) -> bool:
        usable = lanes > 1 and VMAP in self.candidates
        return usable and all(candidate in self.seconds for candidate in self.candidates)

    def recording_pays(self, steps_left: float, expected: Expected) -> bool:
        """Whether recording is worth its time."""
        return expected.gain >= _LEAST_GAIN_OF_RECORDING and self.compiling_pays(steps_left, expected)

    def compiling_pays(self, steps_left: float, expected: Expected) -> bool:
        """Whether compiling is worth its time.

        `steps_left` is 0 where it is unknown; then a long run may compile, on the grounds that it goes on.
        """
        best = min(self.seconds.values(), default=0.0)
        return max(steps_left * expected.gain, self._steps * _UNKNOWN_RUN_SHARE) * best > expected.seconds

    def recorded(self, *, there: bool) -> None:
        """Recording was tried; if the recorded step is there, it is measured next."""
        self.may_record = False
        if there:
            self.candidates.append(RECORDED)

    def compiled(self, *, there: bool) -> None:
        """Compiling was tried; if the compiled step is there, it is measured next."""
        self.may_compile = False
        if there:
            self.candidates += [COMPILED, *(BLOCKS if self.by_blocks else ())]

    @property
    def gain_of_compiling(self) -> float | None:
        """The part of the time of the best other strategy that the compiled step saves, once it is measured."""
        compiled = [seconds for name, seconds in self.seconds.items() if name in (COMPILED, *BLOCKS)]
        others = [seconds for name, seconds in self.seconds.items() if name not in (COMPILED, *BLOCKS)]
        return 1 - min(compiled) / min(others) if compiled and others else None
