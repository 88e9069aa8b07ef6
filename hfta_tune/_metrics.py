"""Means over a round, kept on the device and read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfta_tune.fusion import Lane

__all__ = ["RoundMeans"]


class RoundMeans:
    """Means of metrics over a round's batches, weighted by batch size, for every lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[tuple[str, tuple[Lane, ...]], Tensor] = {}
        self._weights: dict[tuple[str, tuple[Lane, ...]], int] = {}

    def add(self, name: str, lanes: Sequence[Lane], values: Tensor, size: int) -> None:
        """Add one batch: `values` is [lanes], `size` the number of its samples."""
        key = (name, tuple(lanes))
        if key not in self._sums:
            self._sums[key] = torch.zeros(len(lanes), dtype=torch.float32, device=self._device)
            self._weights[key] = 0
        self._sums[key].add_(values, alpha=size)
        self._weights[key] += size

    def replace(self, name: str, lanes: Sequence[Lane], values: Tensor) -> None:
        """Note the values of one batch, [lanes], in the place of those before it."""
        key = (name, tuple(lanes))
        self._sums[key], self._weights[key] = values.float(), 1

    def read(self, lanes: Sequence[Lane]) -> dict[Lane, dict[str, float]]:
        """Return {lane: {metric: mean}}; the one place where a round waits for the device."""
        results: dict[Lane, dict[str, float]] = {lane: {} for lane in lanes}
        if not self._sums:
            return results
        numbers = torch.cat(list(self._sums.values())).tolist()
        totals: dict[tuple[Lane, str], tuple[float, int]] = {}
        position = 0
        for name, members in self._sums:
            weight = self._weights[name, members]
            for lane in members:
                total, count = totals.get((lane, name), (0.0, 0))
                totals[lane, name] = (total + numbers[position], count + weight)
                position += 1
        for (lane, name), (total, count) in totals.items():
            if lane in results:
                results[lane][name] = total / count
        return results
