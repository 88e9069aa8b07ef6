"""What is not supported is named, with the way out, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning")

import torchmetrics  # noqa: E402
from torch import nn  # noqa: E402
from with_lightning.modules import Classifier, Data, data  # noqa: E402

import hfta_tune  # noqa: E402
from hfta_tune import FusionError, Worker  # noqa: E402


def train(kind: Any, config: dict[str, Any] | None = None, datamodule: Any = None, **options: Any) -> Any:
    made = hfta_tune.lightning.trainable(kind, datamodule or Data(), **options)
    worker = Worker(2, device="cpu", strategy="vmap")
    for name in "ab":
        worker.add(name, made._outside_tune(config or {}), config or {})
    result = worker.run_round()["a"]
    if isinstance(result, Exception):
        raise result
    return result


class Steps(Classifier):
    def optimizer_step(self, *given: Any) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        pass


class Manual(Classifier):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.automatic_optimization = False


class Metric(Classifier):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Rarely(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "frequency": 2}}


class AsksTrainer(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.max_epochs)


class AsksEpoch(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + self.current_epoch)


class AsksNumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 if batch_idx % 2 else 2)


class Sums(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("n", 1.0, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class LogsText(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("text", "no")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (Steps, TypeError, r"overrides on_train_epoch_start, optimizer_step \(hfta_tune steps"),
        (nn.Linear, TypeError, "takes a LightningModule class"),
        (Classifier(), TypeError, "Pass the class, not an instance"),
        (lightning.LightningModule, TypeError, "lacks training_step"),
        (Manual, FusionError, "automatic_optimization is False"),
        (Metric, FusionError, "metric object 'accuracy'"),
        (TwoOptimizers, FusionError, "return one optimizer"),
        (Rarely, FusionError, "frequency=2"),
        (AsksTrainer, FusionError, r"self\.trainer"),
        (AsksEpoch, FusionError, r"self\.current_epoch"),
        (AsksNumber, FusionError, "do without batch_idx"),
        (Sums, FusionError, "reduce_fx='sum'"),
        (LogsText, FusionError, "logs 'text' as a str"),
    ],
)
def test_refusals(kind: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        train(kind)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="precision is '16-mixed'"):
        hfta_tune.lightning.trainable(Classifier, Data(), precision="16-mixed")
    with pytest.raises(FusionError, match=r"config\['learning_rate'\] is no argument of Classifier"):
        train(Classifier, {"learning_rate": 0.1})


def test_data_of_the_modules_own() -> None:
    class Own(Classifier):
        def __init__(self, lr: float = 0.1, samples: int = 40) -> None:
            super().__init__(lr)
            self.samples = samples

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data(self.samples), batch_size=self.batch())

        def batch(self) -> int:
            return 10

    class Bad(Own):
        def batch(self) -> int:
            return self.made_in_init  # type: ignore[no-any-return]

    made = hfta_tune.lightning.trainable(Own)
    worker = Worker(2, device="cpu")
    worker.add("a", made._outside_tune({"samples": 40}), {"samples": 40})
    assert worker.run_round()["a"]["train_loss"] > 0  # type: ignore[index]
    with pytest.raises(FusionError, match=r"makes its data of self\.made_in_init"):
        bad = hfta_tune.lightning.trainable(Bad)
        worker.add("b", bad._outside_tune({"samples": 40}), {"samples": 40})
