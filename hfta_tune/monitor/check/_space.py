"""Configs of a search space, and configs that differ from one of them in a single key."""

from __future__ import annotations

import contextlib
import itertools
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from ray.tune.search.variant_generator import generate_variants

from hfta_tune._recording import MISSING, ConfigPath, copied
from hfta_tune.fusion import comparable, first_line

__all__ = ["Config", "Space", "callers_randomness", "sample", "spread", "value_at", "varied", "with_value"]

Config: TypeAlias = dict[str, Any]
Space: TypeAlias = Mapping[str, Any] | Callable[[Any], Config]
"""A dict as Tune's `config`, or a function of an Optuna trial that returns the config."""

# A grid with more points than this is sampled from its first ones.
_MOST_OF_A_GRID = 10_000


@contextlib.contextmanager
def callers_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's generators for what follows, and leave them as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def sample(space: Space, trials: int, seed: int) -> list[Config]:
    """Draw the configs of so many trials; a grid is repeated as often as it takes, or sampled if it is larger.

    Raises:
        TypeError: if `space` is neither a dict nor a function that returns one.
        ValueError: if it has no config, or is a function that raises.
    """
    if isinstance(space, Mapping):
        return _sample_tune(dict(space), trials, seed)
    if callable(space):
        return _sample_optuna(space, trials, seed)
    raise TypeError(
        f"space must be a dict as Tune's config, or a function of an Optuna trial that returns one, but got {space!r}."
    )


def _sample_tune(space: Config, trials: int, seed: int) -> list[Config]:
    drawn: list[Config] = []
    for repeat in itertools.count():
        variants = generate_variants({"config": space}, random_state=np.random.default_rng([seed, repeat]))
        drawn.extend(spec["config"] for _, spec in itertools.islice(variants, _MOST_OF_A_GRID))
        if not drawn:
            raise ValueError(f"space has no config: a grid in it is empty; got {space!r}.")
        if len(drawn) >= trials:
            break
    return drawn if len(drawn) == trials else [drawn[i] for i in sorted(random.sample(range(len(drawn)), trials))]


def _sample_optuna(space: Callable[[Any], Config], trials: int, seed: int) -> list[Config]:
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        configs = [_asked(space, study.ask()) for _ in range(trials)]
    finally:
        optuna.logging.set_verbosity(level)
    for config in configs:
        if not isinstance(config, dict):
            raise TypeError(f"space must return the config as a dict but returned {config!r}.")
    return configs


def _asked(space: Callable[[Any], Config], trial: Any) -> Config:
    try:
        return space(trial)
    except Exception as error:
        name, place = getattr(space, "__name__", repr(space)), traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"space must be a function that returns the config of an Optuna trial, but {name} raised "
            f"{first_line(error)} ({Path(place.filename).name}, line {place.lineno})."
        ) from error


def varied(configs: Sequence[Config]) -> dict[ConfigPath, list[Any]]:
    """The paths at which configs differ, each with the different values there; MISSING where there is none."""
    values: dict[ConfigPath, dict[Any, Any]] = {}
    paths = dict.fromkeys(path for config in configs for path in _leaves(config))
    for path in paths:
        for config in configs:
            value = value_at(config, path)
            values.setdefault(path, {}).setdefault(comparable(value), value)
    return {path: list(own.values()) for path, own in values.items() if len(own) > 1}


def value_at(config: Mapping[Any, Any], path: ConfigPath) -> Any:
    """The value at a path, a dict too; MISSING if there is none."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def _leaves(config: Mapping[Any, Any], path: ConfigPath = ()) -> Iterator[ConfigPath]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def with_value(config: Config, path: ConfigPath, value: Any) -> Config:
    """A copy of a config with another value at a path; MISSING takes it out."""
    changed: Config = copied(config)
    place: Any = changed
    for key in path[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    if value is MISSING:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return changed


def spread(values: Sequence[Any]) -> list[Any]:
    """Some of the values of a key to try: of floats the least, a middle one and the greatest, else the first 8."""
    if all(isinstance(value, float) for value in values):
        ordered = sorted(values)
        return list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))
    return list(values)[:8]
