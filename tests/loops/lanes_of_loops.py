"""Runs training functions in lanes and, for what they must give, plainly one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hfta_tune.loops import Ended, LaneRuns, current_lane

Function = Callable[[], Any]
CLASSES = 3


def in_lanes(functions: Mapping[str, Function], B: int | None = None, **options: Any) -> dict[str, Ended]:
    """How functions end that run in lanes, B at a time."""
    waiting = list(functions.items())
    ended: dict[str, Ended] = {}
    with LaneRuns(**options) as runs:
        while waiting or len(runs):
            while waiting and len(runs) < (B or len(functions)):
                runs.start(*waiting.pop(0))
            for name, end, _ in runs.wait():
                ended[name] = end
    return ended


def values(ended: Mapping[str, Ended]) -> dict[str, Any]:
    """What functions returned that all ended well."""
    for end in ended.values():
        if end.error is not None:
            raise end.error
    return {name: end.value for name, end in ended.items()}


def assert_like_alone(functions: Mapping[str, Function], B: int | None = None, **options: Any) -> dict[str, Any]:
    """Functions return in lanes what they return plainly; returns that."""
    expected = {name: function() for name, function in functions.items()}
    got = values(in_lanes(functions, B, **options))
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return expected


def lanes_of_the_array() -> int:
    """How many lanes the array of the running lane has; 1 outside lanes."""
    lane = current_lane()
    array = None if lane is None else lane.trial.array
    return 1 if array is None else len(array.lanes)


def data(samples: int = 96, shape: tuple[int, ...] = (8,), seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=generator)
    flat = inputs.flatten(1)
    return TensorDataset(inputs, (flat[:, 0] > 0).long() + (flat[:, 1:].sum(1) > 0).long())


def loader(samples: int = 96, shape: tuple[int, ...] = (8,), *, batch_size: int = 32, shuffle: bool = True) -> Any:
    return DataLoader(data(samples, shape), batch_size=batch_size, shuffle=shuffle)


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, CLASSES))


def weights(*models: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for model in models for tensor in model.state_dict().values()]
