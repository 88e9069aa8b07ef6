"""The check of a trainable and a search space, before they are tuned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hfta_tune._recording import ConfigPath
from hfta_tune._steps import dotted
from hfta_tune.fusion import LANE_BY_LANE, comparable
from hfta_tune.monitor.check._report import CheckReport
from hfta_tune.monitor.check._rounds import Measured, measure, speed_up_of
from hfta_tune.monitor.check._signatures import Builder, Built, Keys, arrays_expected, keys_of, signatures_of
from hfta_tune.monitor.check._space import Config, Space, callers_randomness, sample, value_at, varied, with_value
from hfta_tune.trainable import FusedTrainable
from hfta_tune.worker import Worker

__all__ = ["check"]

# A key with so many values among the trials leaves few of them to share an array.
_MANY_VALUES = 0.5


def check(
    trainable: type[FusedTrainable],
    space: Space,
    *,
    lanes: int = 8,
    trials: int = 64,
    device: str | torch.device | None = None,
    compile: bool = False,
    seed: int = 0,
) -> CheckReport:
    """Say which trials of a search would train together, whether that is right, and how much faster it is.

    Trials are sampled from the search space and built; one key at a time is varied, which tells the keys that
    are structural from those that are free. Then an array of the most common signature trains for a few steps of the
    trainable's own data, beside plain PyTorch. Random numbers of the caller stay as they are.

    Args:
        trainable: The FusedTrainable class.
        space: A dict as Tune's `config`, with fixed values, domains and grids, or a function of an Optuna trial that
            returns the config.
        lanes: B, how many trials would share a worker.
        trials: How many trials to sample.
        device: Where to measure; by default the CUDA device if there is one, else the CPU.
        compile: Measure the compiled step too. Compiling may take a minute.
        seed: Governs what is sampled.

    Raises:
        TypeError: if `trainable` is no FusedTrainable class, or `space` is neither of the two.
        ValueError: if `lanes` or `trials` is no positive integer, or `device` no device.
        FusionError: if a hook raises: with its name, the trial, its config, and what to do.

    Example:
        >>> from ray import tune
        >>> space = {"lr": tune.loguniform(1e-4, 1e-1), "hidden": tune.choice([32, 64])}
        >>> report = hfta_tune.check(Digits, space)  # doctest: +SKIP
        >>> report.structural  # doctest: +SKIP
        {'hidden': 'changes the shape of 0.weight from [64, 64] to [32, 64]'}
    """
    if not (isinstance(trainable, type) and issubclass(trainable, FusedTrainable)):
        raise TypeError(
            f"trainable must be a subclass of hfta_tune.FusedTrainable but got {trainable!r}. Pass the class itself."
        )
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ValueError(f"trials must be a positive integer but got {trials!r}.")
    where = Worker(lanes, device=device).device
    with callers_randomness(seed, where):
        configs = sample(space, trials, seed)
        builder = Builder(trainable, where)
        keys = keys_of(configs, builder)
        built, count = signatures_of(configs, keys, builder)
        most_common, _ = Counter(own.key for own in built).most_common(1)[0]
        base = next(number for number, own in enumerate(built) if own.key == most_common)
        measured = None
        while measured is None or any(path in measured.step_keys for path in keys.free):
            if measured is not None:
                for path in measured.step_keys:
                    keys.is_read_in_step(path)
            together = _lanes_of(base, configs, built, keys, lanes)
            measured = measure(trainable, together, where, compiling=compile)
        read_in_steps = sorted(measured.step_keys, key=repr)
        signatures = [
            (own.key, tuple(comparable(value_at(config, path)) for path in read_in_steps))
            for own, config in zip(built, configs, strict=True)
        ]
        arrays = arrays_expected(signatures, lanes)
        lanes_an_array = min(lanes, trials) / arrays
        expected = None
        if measured.strategy != LANE_BY_LANE and round(lanes_an_array) < lanes:
            few = max(1, round(lanes_an_array))
            expected = speed_up_of(trainable, together[:few], where, compiling=compile)
    structural = {dotted(path): value_at(configs[base], path) for path in keys.structural}
    obstacle = built[base].obstacle
    said = [] if obstacle is None else [f"{trainable.__name__} trains lane by lane: {obstacle}."]
    fallbacks = dict.fromkeys([*said, *(text for text in measured.said if _is_fallback(text))])
    report = CheckReport(
        trainable=trainable.__name__,
        device=str(where),
        lanes=lanes,
        trials=trials,
        built=count,
        signature=_signature_in_words(built[base], structural, builder.loader_keys, read_in_steps),
        signatures=len(set(signatures)),
        sharing=signatures.count(signatures[base]),
        structural={dotted(path): change for path, change in keys.structural.items()},
        free=tuple(sorted(map(dotted, keys.free))),
        arrays=arrays,
        lanes_an_array=lanes_an_array,
        modules=measured.modules,
        fallbacks=tuple(fallbacks),
        strategy=measured.strategy,
        seconds_a_step=measured.seconds,
        expected_speed_up=expected,
        memory=measured.memory,
        audits=measured.audits,
        advice=(),
    )
    many = [dotted(path) for path, values in varied(configs).items() if len(values) > _MANY_VALUES * trials]
    return replace(report, advice=tuple(_advice(report, measured, many)))


def _lanes_of(base: int, configs: Sequence[Config], built: Sequence[Built], keys: Keys, lanes: int) -> list[Config]:
    """Configs of lanes that may share an array: trials like `base`, and `base` with other trials' free values."""

    def is_like_base(number: int) -> bool:
        return built[number].key == built[base].key and all(
            comparable(value_at(configs[number], path)) == comparable(value_at(configs[base], path))
            for path in keys.structural
        )

    chosen = [configs[number] for number in range(len(configs)) if is_like_base(number)][:lanes]
    for number in range(base, base + lanes - len(chosen)):
        config = configs[base]
        for path in keys.free:
            config = with_value(config, path, value_at(configs[(number + 1) % len(configs)], path))
        chosen.append(config)
    return chosen


def _signature_in_words(
    built: Built, structural: Mapping[str, Any], of_loaders: Sequence[ConfigPath], of_steps: Sequence[ConfigPath]
) -> str:
    values = ", ".join(f"{key}={value!r:.40}" for key, value in structural.items())
    said = [f"{values}: {built.summary}" if values else built.summary]
    if built.options.precision != "32":
        said.append(f"precision {built.options.precision}")
    if built.options.accumulate > 1:
        said.append(f"{built.options.accumulate} batches an optimizer step")
    if built.steps_per_round is not None:
        said.append(f"{built.steps_per_round} steps a round")
    for what, paths in (("the data loaders", of_loaders), ("the steps", of_steps)):
        if paths:
            said.append(f"{', '.join(dict.fromkeys(map(dotted, paths)))} as {what} read it")
    return "; ".join(said)


def _is_fallback(text: str) -> bool:
    return f" {LANE_BY_LANE}: " in text


def _advice(report: CheckReport, measured: Measured, many: Sequence[str]) -> Iterator[str]:
    """What to do about it.

    Args:
        report: What was found.
        measured: How it trained.
        many: The keys with many values among the trials.
    """
    names = ", ".join(report.structural)
    if report.arrays > 1.05 and report.structural:
        yield (
            f"{names} {'is' if len(report.structural) == 1 else 'are'} structural: {report.signatures} signatures for "
            f"{report.trials} trials; hfta_tune.searchers.StructureFirst would fill arrays."
        )
    for key in report.structural:
        if key in many:
            yield f"{key} is structural and has many values; suggest it from a few, so that trials share them."
    for key, change in report.structural.items():
        if "data loader" in change:
            yield f"The data loader hooks read {key}, so a worker keeps a data set for each of its values."
    yield from (text for text in measured.said if not _is_fallback(text) and not text.startswith("audit of "))
    if report.lanes == 1:
        yield "One lane has nothing to share; check with more lanes to see what fusing gains."
    elif not report.passed:
        yield "The audit failed: train with audit=True, which goes on lane by lane, and report the model as a bug."
    elif report.strategy == LANE_BY_LANE and not report.fallbacks:
        yield (
            f"Lane by lane is fastest: fusing gains nothing for {report.lanes} lanes of this model on {report.device}. "
            "More lanes may."
        )
    elif report.fallbacks and report.strategy == LANE_BY_LANE:
        yield "Trials share a process, but not its kernels, until what is listed under fallbacks is changed."
