"""FusedTrainables that fail on purpose, and what must hold of a run whatever failed in it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from ray import tune
from torch import Tensor, nn
from torch.nn import functional as F
from trainables import Points, points


class Faulty(Points):
    """Points in which one hook fails, once, in the trials whose config names it.

    config: lr, seed, fault (the hook, or ""), how ("raise", "kill" or "hang") and markers (a directory in which a
    file says that it has failed).
    """

    at_iteration = 3

    def fail(self, config: Any, hook: str) -> None:
        """Fail if this hook is to."""
        if config["fault"] != hook:
            return
        try:
            (Path(config["markers"]) / f"{self.trial_id}.{config['how']}").touch(exist_ok=False)
        except FileExistsError:
            return
        if config["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif config["how"] == "hang":
            threading.Event().wait()
        raise ValueError(f"{hook} is faulty")

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        self.fail(config, "build_model")
        return super().build_model(config)

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> None:
        if self.iteration == self.at_iteration:
            self.fail(config, "evaluate")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        super().save_checkpoint(checkpoint_dir)
        if self.iteration > self.at_iteration:
            file = Path(checkpoint_dir) / "checkpoint.pt"
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            self.fail(self.config, "save_checkpoint")
            file.write_bytes(whole)

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.fail(self.config, "load_checkpoint")
        super().load_checkpoint(checkpoint)


class FaultySteps(Faulty):
    """The same, where training_step may be the hook: its trials train in an array of their own."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        if config["fault"] == "training_step":
            self.fail(config, "training_step")
        return super().training_step(model, batch, config)


class KeepsPythonToItself(Faulty):
    """A hook that hangs keeps the interpreter's lock."""

    def fail(self, config: Any, hook: str) -> None:
        real, threading.Event = threading.Event, Locked  # type: ignore[assignment, misc]
        try:
            super().fail(config, hook)
        finally:
            threading.Event = real  # type: ignore[misc]


class Locked:
    """Waits as threading.Event does, with the interpreter's lock."""

    def wait(self) -> None:
        ctypes.PyDLL(None).pause()


class Unportable(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class RaisesAnywhere(Points):
    """Its config's fault is the hook that raises, each time."""

    def fail(self, config: Any, hook: str) -> None:
        if config["fault"] == hook:
            raise ValueError(f"{hook} is faulty")
        if config["fault"] == f"unportable {hook}":
            raise Unportable(hook, "is faulty")
        if config["fault"] == f"exit in {hook}":
            sys.exit(f"{hook} is faulty")
        if config["fault"] == f"stop in {hook}":
            raise StopIteration(f"{hook} is faulty")

    def setup(self, config: dict[str, Any]) -> None:
        self.fail(config, "setup")

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        self.fail(config, "build_model")
        return super().build_model(config)

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        self.fail(config, "build_optimizer")
        return super().build_optimizer(model, config)

    def build_lr_scheduler(self, optimizer: Any, config: dict[str, Any]) -> None:
        self.fail(config, "build_lr_scheduler")

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        self.fail(config, "train_dataloader")
        return super().train_dataloader(config)

    def val_dataloader(self, config: dict[str, Any]) -> Any:
        self.fail(config, "val_dataloader")
        return super().val_dataloader(config)

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        self.fail(config, "training_step")
        return super().training_step(model, batch, config)

    def validation_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, Tensor]:
        self.fail(config, "validation_step")
        return super().validation_step(model, batch, config)

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> None:
        self.fail(config, "evaluate")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self.fail(self.config, "save_checkpoint")
        super().save_checkpoint(checkpoint_dir)

    def cleanup(self) -> None:
        self.fail(self.config, "cleanup")


class FullOnce(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]
    """The local disk, but full, once, when something is written to a path that contains all the given texts."""

    def __init__(self, marker: str | Path, *texts: str) -> None:
        super().__init__(LocalFileSystem())
        self._marker, self._texts = Path(marker), texts

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if all(text in path for text in self._texts) and not self._marker.exists():
            self._marker.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super().open_output_stream(path, metadata)


class Recorder(tune.Callback):
    """The results of each trial, as callbacks are told them."""

    def __init__(self) -> None:
        self.results: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.results[trial.trial_id].append(dict(result))


def environment(**variables: str) -> dict[str, str]:
    """The environment of a script that imports what the tests do."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def alone(config: dict[str, Any], rounds: int) -> list[float]:
    """The training loss of each round, in plain PyTorch."""
    hooks = Points._outside_tune(config)
    torch.manual_seed(config["seed"])
    model = hooks.build_model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    x, y = points()
    means = []
    for _ in range(rounds):
        losses = []
        for own, target in zip(x.split(32), y.split(32), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(own), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        means.append(sum(losses) / len(losses))
    return means


def logged(directory: str | Path) -> list[dict[str, Any]]:
    """A trial's result.json."""
    file = Path(directory) / "result.json"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def assert_nothing_lost(trial: Any, results: list[dict[str, Any]], rounds: int | None = None) -> None:
    """Each reported result is in result.json, in order, and is that of a run of its own, also where trained twice."""
    on_disk = [(r["training_iteration"], r["train_loss"]) for r in logged(trial.path)]
    reported = [(r["training_iteration"], r["train_loss"]) for r in results]
    assert on_disk == reported
    if rounds is not None:
        assert trial.status == "TERMINATED"
        assert {r["training_iteration"] for r in results} == set(range(1, rounds + 1))
    expected = alone(trial.config, max((r["training_iteration"] for r in results), default=0))
    for result in results:
        assert result["train_loss"] == pytest.approx(expected[result["training_iteration"] - 1], rel=1e-4)
