"""What a check found, as fields and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hfta_tune.fusion import LANE_BY_LANE, Difference
from hfta_tune.monitor.check._rounds import LaneMemory

__all__ = ["CheckReport"]

_WIDTH = 110
_LABEL = 14


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. `str(report)` is the report as the command line prints it.

    Attributes:
        trainable: The name of the FusedTrainable class.
        device: Where it was measured.
        lanes: How many lanes trained together.
        trials: How many trials were sampled from the search space.
        built: How many of them were built; the others have structural values that one of these has.
        signature: What the lanes of the measured array had in common, in words: the most common signature.
        signatures: How many different signatures the trials have.
        sharing: How many of the trials have the most common one.
        structural: {key: what it changes}: trials that differ in it cannot share an array.
        free: The keys in which the lanes of an array may differ.
        arrays: How many arrays `lanes` of the trials make, on average.
        lanes_an_array: How many lanes one of these has, on average.
        modules: {path of a module: None if it fuses, else why not}.
        fallbacks: What trains or evaluates lane by lane, and why.
        strategy: The fastest strategy.
        seconds_a_step: {strategy: seconds a training step of all lanes of an array}.
        expected_speed_up: How many times as fast as lane by lane an array of `lanes_an_array` lanes trains, which is
            what to expect of the search; None where that is `speed_up`, for arrays are full or nothing fuses.
        memory: The memory of a lane.
        audits: {strategy: the largest difference from plain PyTorch, or why it could not be audited}.
        advice: What to change, if anything.
    """

    trainable: str
    device: str
    lanes: int
    trials: int
    built: int
    signature: str
    signatures: int
    sharing: int
    structural: Mapping[str, str]
    free: tuple[str, ...]
    arrays: float
    lanes_an_array: float
    modules: Mapping[str, str | None]
    fallbacks: tuple[str, ...]
    strategy: str
    seconds_a_step: Mapping[str, float]
    expected_speed_up: float | None
    memory: LaneMemory
    audits: Mapping[str, Difference | str]
    advice: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the audit found nothing but rounding; also where there was nothing to audit."""
        return not any(isinstance(found, Difference) and found.is_wrong for found in self.audits.values())

    @property
    def speed_up(self) -> float:
        """How many times as fast as lane by lane the fastest strategy trains, in an array of `lanes` lanes."""
        times = self.seconds_a_step
        return times.get(LANE_BY_LANE, times[self.strategy]) / times[self.strategy]

    def __str__(self) -> str:
        title = f"{self.trainable} on {self.device}: {self.trials} trials of the search space, {self.lanes} lanes"
        of = "" if self.signatures == 1 else f" ({self.sharing} of the trials)"
        lines = [title, "", *_labelled("signature", [self.signature + of])]
        no_key = "none of the keys" if self.structural or self.free else "not known, see fallbacks"
        if no_key != "none of the keys" and self.signatures == 1:
            no_key = "no key differs between the trials"
        for label, said in (
            ("structural", [f"{key} {change}" for key, change in self.structural.items()] or [no_key]),
            ("free", [", ".join(self.free) or no_key]),
            ("arrays", [self._say_arrays()]),
            ("modules", list(self._say_modules())),
            ("fallbacks", list(self.fallbacks) or ["none"]),
            ("strategy", [self._say_strategy()]),
            ("memory a lane", [self._say_memory()]),
            ("audit", list(self._say_audits())),
            ("advice", list(self.advice) or ["none"]),
        ):
            lines.extend(_labelled(label, said))
        return "\n".join(lines)

    def _say_arrays(self) -> str:
        share = "" if self.built == self.trials else f" ({self.built} of the trials were built)"
        counted = f"{self.signatures} signature{'s' if self.signatures > 1 else ''} for {self.trials} trials{share}"
        arrays = "1 array" if self.arrays < 1.05 else f"{self.arrays:.1f} arrays"
        return f"{counted}; {self.lanes} lanes make {arrays} of {self.lanes_an_array:.1f} lanes on average"

    def _say_modules(self) -> Iterator[str]:
        failing = {path: why for path, why in self.modules.items() if why is not None}
        fused = len(self.modules) - len(failing)
        if not failing and self.modules:
            yield f"all {fused} fuse" if fused > 1 else "fuses"
        elif failing:
            yield f"{fused} of {len(self.modules)} fuse"
        yield from (f"{path} does not: {why}" for path, why in failing.items())

    def _say_strategy(self) -> str:
        times = sorted(self.seconds_a_step.items(), key=lambda item: item[1])
        figures = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times)
        gain = f"; {self.speed_up:.1f} times as fast as lane by lane" if self.speed_up > 1 else ""
        if self.expected_speed_up is not None:
            gain += f", {self.expected_speed_up:.1f} times in arrays of {self.lanes_an_array:.1f} lanes"
        return f"{self.strategy} (a step of {self.lanes} lanes: {figures}){gain}"

    def _say_memory(self) -> str:
        own = self.memory
        parts = {
            "parameters": own.parameters,
            "buffers": own.buffers,
            "gradients": own.gradients,
            "optimizer state": own.optimizer,
        }
        listed = ", ".join(f"{name} {_in_words(size)}" for name, size in parts.items() if size)
        peak = "" if own.peak is None else f"; at the peak, with activations, {_in_words(own.peak)}"
        return f"{_in_words(own.total)}: {listed}{peak}"

    def _say_audits(self) -> Iterator[str]:
        for strategy, found in self.audits.items():
            if isinstance(found, str):
                yield f"{strategy}: not possible, for {found}"
            elif found.is_wrong:
                yield f"{strategy}: FAILED. {found}"
            elif not found.largest:
                yield f"{strategy}: passed. It equals plain PyTorch to the last digit"
            else:
                yield f"{strategy}: passed. {found} ({found.share:.1%} of what rounding may make)"
        if not self.audits:
            yield "nothing to audit, for nothing trains fused"


def _labelled(label: str, paragraphs: list[str]) -> Iterator[str]:
    for number, paragraph in enumerate(paragraphs):
        head = label if not number else ""
        yield textwrap.fill(
            paragraph,
            _WIDTH,
            initial_indent=f"{head:<{_LABEL}}",
            subsequent_indent=" " * (_LABEL + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )


def _in_words(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
