"""The same results on a CUDA device; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainables import Points

from hfta_tune import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class OnDevice(Points):
    """Reports where its parameters live."""

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        return {"cuda": float(next(model.parameters()).is_cuda)}


def test_an_array_on_cuda_trains_as_on_the_cpu() -> None:
    workers = {device: Worker(4, device=device) for device in ("cpu", "cuda")}
    for worker in workers.values():
        for number in range(4):
            config = {"lr": 0.003 * (number + 1)}
            worker.add(str(number), OnDevice._outside_tune(config), config)
    for _ in range(3):
        on_cpu, on_cuda = (worker.run_round() for worker in workers.values())
    for name, result in on_cuda.items():
        expected = on_cpu[name]
        assert isinstance(result, dict) and isinstance(expected, dict)
        assert result["cuda"] == 1 and expected["cuda"] == 0
        assert result["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)
    state = workers["cuda"].state_dict("2")
    assert all(tensor.device.type == "cpu" for tensor in state["model"].values())


def test_no_round_waits_for_the_device() -> None:
    """Within a round nothing is read back: the means are, once, at its end."""
    worker = Worker(4, device="cuda")
    for number in range(4):
        config = {"lr": 0.003 * (number + 1)}
        worker.add(str(number), Points._outside_tune(config), config)
    worker.run_round()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation") as waits:
            worker.run_round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {Path(wait.filename).name for wait in waits} == {"_metrics.py"}


class Anew(Points):
    """An epoch of one batch twenty times over, so that its step is captured as a CUDA graph."""

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        return list(super().train_dataloader(config)) * 20


def test_captured_steps_train_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    real = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), real(graph)))
    workers = {device: Worker(4, device=device, strategy="vmap") for device in ("cpu", "cuda")}
    for worker in workers.values():
        for number in range(4):
            config = {"lr": 0.001 * (number + 1)}
            worker.add(str(number), Anew._outside_tune(config), config)
    for round_ in range(3):
        if round_ == 2:  # other tensors, so another graph
            for worker in workers.values():
                worker.remove("1")
        on_cpu, on_cuda = (worker.run_round() for worker in workers.values())
        for name, result in on_cuda.items():
            expected = on_cpu[name]
            assert isinstance(result, dict) and isinstance(expected, dict)
            assert result["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)
    assert len(set(replayed)) > 1 and len(replayed) > 100


def test_batches_arrive_whole_and_in_order() -> None:
    from hfta_tune._prefetch import on_device

    batches = [(torch.full((1000, 1000), float(number)), {"number": number}) for number in range(10)]
    for number, (tensor, rest) in enumerate(on_device(batches, torch.device("cuda"))):
        assert tensor.is_cuda and rest == {"number": number}
        assert bool((tensor == number).all())
