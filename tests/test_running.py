"""A worker says which hook it runs, and for which trials, while it runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainables import Points

from hfta_tune._running import Running
from hfta_tune.worker import Worker

HOOKS = ["build_model", "build_optimizer", "build_lr_scheduler", "train_dataloader", "val_dataloader"]
HOOKS += ["training_step", "validation_step", "evaluate"]


class Asks(Points):
    """Each hook asks its worker what runs; once a number is forced out of a tensor, steps run lane by lane."""

    seen: dict[str, Any]
    worker: Worker

    def ask(self, hook: str) -> None:
        type(self).seen[hook] = type(self).worker.describe()["running"]

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        self.ask("build_model")
        return super().build_model(config)

    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        self.ask("build_optimizer")
        return super().build_optimizer(model, config)

    def build_lr_scheduler(self, optimizer: Any, config: dict[str, Any]) -> None:
        self.ask("build_lr_scheduler")

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        self.ask("train_dataloader")
        return super().train_dataloader(config)

    def val_dataloader(self, config: dict[str, Any]) -> Any:
        self.ask("val_dataloader")
        return super().val_dataloader(config)

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        type(self).seen["training_step"] = type(self).worker.describe()["running"]
        return super().training_step(model, batch, config)

    def validation_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, Tensor]:
        type(self).seen["validation_step"] = type(self).worker.describe()["running"]
        return super().validation_step(model, batch, config)

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> None:
        self.ask("evaluate")


@pytest.mark.parametrize(("strategy", "trials"), [("vmap", ["a", "b"]), ("lane by lane", ["b"])])
def test_each_hook(strategy: str, trials: list[str]) -> None:
    worker = Worker(2, device="cpu", strategy=strategy)
    Asks.seen, Asks.worker = {}, worker
    for name in ("a", "b"):
        config = {"lr": 0.1}
        worker.add(name, Asks._outside_tune(config), config)
        assert worker.describe()["running"] is None
    outcomes = worker.run_round()
    assert all(isinstance(outcome, dict) for outcome in outcomes.values()), outcomes
    assert worker.describe()["running"] is None
    for hook in HOOKS:
        running = Asks.seen[hook]
        assert hook in running["hook"], hook
        shared = hook.endswith("_step")
        expected = trials if shared else ["a"] if hook.endswith("loader") else ["b"]
        assert running["trials"] == expected, hook


def test_the_data_loader_s_batches() -> None:
    class Batches(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            seen.append(worker.describe()["running"])
            return super().__iter__()

    class Loads(Points):
        def train_dataloader(self, config: dict[str, Any]) -> Any:
            return Batches(super().train_dataloader(config))

    seen: list[Any] = []
    worker = Worker(2, device="cpu")
    for name in ("a", "b"):
        worker.add(name, Loads._outside_tune({"lr": 0.1}), {"lr": 0.1})
    worker.run_round()
    assert seen == [{"hook": "train_dataloader", "trials": ["a", "b"]}]


def test_hooks_within_hooks() -> None:
    running = Running()
    with running.hook("round", ["a", "b"]):
        with pytest.raises(KeyError), running.hook("evaluate", ["a"]):
            assert running.now == ("evaluate", ["a"])
            raise KeyError
        assert running.now == ("round", ["a", "b"])
    assert running.now is None


def test_a_hook_that_exits_fails_where_others_share_the_process() -> None:
    running = Running()

    def exits() -> None:
        with running.hook("evaluate", ["a"]):
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        exits()
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(exits).exception()
    assert str(error) == "evaluate called sys.exit(3); raise an error instead."
    assert running.now is None
