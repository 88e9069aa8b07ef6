"""FusedTrainable: the class that a user writes. And what it has in common with other trials that a Worker hosts."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ray.tune import Trainable
from torch import nn
from torch.optim import Optimizer

from hfta_tune.worker import Worker

__all__ = ["FusedTrainable", "HostedTrainable"]

_ALONE = "alone"


class HostedTrainable(Trainable):
    """A trial that a `Worker` can host beside others: it has a lane there, or alone in a worker of its own."""

    _worker: Worker | None = None
    _lane_name: str = _ALONE
    _lane_round: dict[str, Any] | Exception | None = None

    def step(self) -> dict[str, Any]:
        """Train one round and return its metrics."""
        outcome, self._lane_round = self._lane_round, None
        if outcome is None:
            outcome = self._own_worker().run_round([self._lane_name])[self._lane_name]
        if isinstance(outcome, Exception):
            raise outcome
        return dict(outcome)

    def cleanup(self) -> None:
        """Free the lane."""
        self._leave()

    def _join(self, worker: Worker, name: str) -> None:
        """Take a lane in a worker that hosts other trials too."""
        raise NotImplementedError

    def _leave(self) -> None:
        if self._worker is not None and self._lane_name in self._worker.trial_ids:
            self._worker.remove(self._lane_name)

    def _own_worker(self) -> Worker:
        """The worker that hosts this trial; alone, one of its own."""
        if self._worker is None:
            self._join(Worker(1), self.trial_id)
        assert self._worker is not None
        return self._worker


class FusedTrainable(HostedTrainable):
    """A trial as hooks for one model, which hfta_tune trains alone or with many others as one.

    Every hook is written for one model and one trial, in ordinary PyTorch. The class is a
    `ray.tune.Trainable`, so it runs under any Tune scheduler as it stands, one model a process; only
    `HFTAPacker` and `hfta_tune.optimize` make trials share a worker.

    training_step and validation_step are called once for all lanes of an array. A float that they read
    from config arrives as a 0-d tensor, each lane its own; a key of another type that they read must be
    equal in all lanes, and so must each key that the data loader hooks read.

    Attributes:
        lr_scheduler_interval: When the schedule advances: "epoch" (after each round) or "step".
        lr_scheduler_monitor: The result that ReduceLROnPlateau watches, such as "train_loss".
        seed: Governs build_model (unless config has a "seed") and the order of the data, so that runs repeat.
        gradient_clip_val: To what each trial's gradients are clipped, or None.
        gradient_clip_algorithm: "norm" (of all gradients of an optimizer) or "value".
        precision: "32", or "bf16": steps run under torch.autocast in bfloat16, while parameters and optimizers
            stay in float32.
        accumulate_grad_batches: Of how many batches the gradients are averaged for one step of the optimizer. The
            last batch of a round is followed by a step too.
        steps_per_round: How many batches a round trains on, going on where the last round ended; None for one
            pass over the data.

    A config's "gradient_clip_val", "precision", "accumulate_grad_batches" and "steps_per_round" win over these.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> class Line(FusedTrainable):
        ...     def build_model(self, config):
        ...         return torch.nn.Linear(1, 1)
        ...     def build_optimizer(self, model, config):
        ...         return torch.optim.SGD(model.parameters(), lr=config["lr"])
        ...     def train_dataloader(self, config):
        ...         x = torch.linspace(-1, 1, 8).unsqueeze(1)
        ...         return [(x, 2 * x)]
        ...     def training_step(self, model, batch, config):
        ...         x, y = batch
        ...         return F.mse_loss(model(x), y)
    """

    lr_scheduler_interval: ClassVar[str] = "epoch"
    lr_scheduler_monitor: ClassVar[str | None] = None
    seed: ClassVar[int] = 0
    gradient_clip_val: ClassVar[float | None] = None
    gradient_clip_algorithm: ClassVar[str] = "norm"
    precision: ClassVar[str] = "32"
    accumulate_grad_batches: ClassVar[int] = 1
    steps_per_round: ClassVar[int | None] = None

    _outside: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any] | None = None, storage: Any = None, **of_older_rays: Any) -> None:
        if FusedTrainable._outside:
            # No log directory, no monitor: Tune's bookkeeping has no one to read it here.
            self.config = config or {}
            self._trial_info = self._storage = self._logdir = None
            self._iteration = 0
            self.setup(copy.deepcopy(self.config))
        else:
            super().__init__(config, storage=storage, **of_older_rays)

    @classmethod
    def _outside_tune(cls, config: Mapping[str, Any]) -> FusedTrainable:
        """Make an instance for use without Tune."""
        FusedTrainable._outside = True
        try:
            return cls(dict(config))
        finally:
            FusedTrainable._outside = False

    # Hooks

    @abc.abstractmethod
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        """Return the trial's model. torch is seeded with config["seed"], else with `seed`."""

    @abc.abstractmethod
    def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> Optimizer | dict[str, Optimizer]:
        """Return the trial's optimizer over parameters of `model`, or several by name (for a GAN, say)."""

    def build_lr_scheduler(self, optimizer: Any, config: dict[str, Any]) -> Any:
        """Return a scheduler of torch.optim.lr_scheduler on `optimizer`, or None.

        Where build_optimizer returned several, `optimizer` is that dict; return schedulers by the same names.
        """
        return None

    @abc.abstractmethod
    def train_dataloader(self, config: dict[str, Any]) -> Iterable[Any]:
        """Return the training data: an iterable of batches that can be iterated again each round."""

    def val_dataloader(self, config: dict[str, Any]) -> Iterable[Any] | None:
        """Return the validation data, or None."""
        return None

    @abc.abstractmethod
    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Any:
        """Return the loss of one batch, a 0-d tensor; or that and metrics, `(loss, {name: scalar})`.

        A round reports the metrics' means over its batches.

        Where build_optimizer returned several optimizers, return a dict with a loss for each that is to step. All
        losses are of the same weights, and an optimizer's parameters get the gradient of its own loss alone.
        """

    def validation_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, Any]:
        """Return metrics of one validation batch, {name: scalar}; a round reports their means."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return further metrics at the end of a round; `model` is this trial's plain module."""
        return None

    # What Tune calls

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write checkpoint.pt: model, optimizer, lr_scheduler and epoch in plain PyTorch."""
        self._own_worker().save(self._lane_name, checkpoint_dir)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Read what save_checkpoint wrote."""
        self._own_worker().load(self._lane_name, checkpoint)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start anew with another config in the same lane."""
        self.cleanup()
        self._leave()
        self.setup(copy.deepcopy(new_config))
        if self._worker is not None:
            self._join(self._worker, self.trial_id)
        return True

    def _join(self, worker: Worker, name: str) -> None:
        """Take a lane in a worker that hosts other trials too."""
        self._worker, self._lane_name = worker, name
        worker.add(name, self, self.config, placed=True)
