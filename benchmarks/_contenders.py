"""Who trains a workload's lanes: stock PyTorch in a loop, plain torch.func.vmap, and hfta_tune.

A contender starts from the workload's own models, goes through the same batches in the same order, and
reports each lane's mean loss, for which it waits once at the end of `run`.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _workloads import Batch, Workload
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from hfta_tune import FusedTrainable
from hfta_tune.worker import Worker

__all__ = ["Contender", "Ours", "PlainVmap", "Settled", "StockLoop", "Unavailable"]

LONGEST_ROUND = 64
# The engine is told that much is left to train, for a steady state is what these benchmarks ask about.
LONG_RUN = 10_000


class Unavailable(Exception):
    """A contender cannot train this workload here; the message says why."""


class Contender(ABC):
    """Trains the lanes of a workload.

    Attributes:
        own_rates: Whether each lane trains with its own learning rate; else all train with one.
    """

    own_rates = True

    @abstractmethod
    def run(self, steps: int) -> list[float]:
        """Trains `steps` steps; returns each lane's mean loss over them."""


class StockLoop(Contender):
    """One model after the other in one process, as a user writes it."""

    def __init__(self, workload: Workload, batches: Sequence[Batch], rates: Sequence[float], device: torch.device):
        self.workload, self.device = workload, device
        self.batches = itertools.cycle(batches)
        self.models = [model.to(device) for model in workload.models(len(rates))]
        self.optimizers = [workload.optimizers(model, rate) for model, rate in zip(self.models, rates, strict=True)]
        self.parameters = [
            {name: list(model.get_submodule(part).parameters()) for name, part in workload.parts}
            for model in self.models
        ]

    def run(self, steps: int) -> list[float]:
        totals = [torch.zeros((), device=self.device) for _ in self.models]
        train = self._train_one if len(self.workload.parts) == 1 else self._train_several
        for batch in itertools.islice(self.batches, steps):
            for lane in range(len(self.models)):
                totals[lane] += train(lane, batch)
        return [total / steps for total in torch.stack(totals).tolist()]

    def _train_one(self, lane: int, batch: Batch) -> Tensor:
        (optimizer,) = self.optimizers[lane].values()
        optimizer.zero_grad()
        (loss,) = self.workload.losses(self.models[lane], batch).values()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def _train_several(self, lane: int, batch: Batch) -> Tensor:
        optimizers = self.optimizers[lane]
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        losses = self.workload.losses(self.models[lane], batch)
        for name, loss in losses.items():
            loss.backward(inputs=self.parameters[lane][name])
        for optimizer in optimizers.values():
            optimizer.step()
        return sum(loss.detach() for loss in losses.values())  # type: ignore[return-value]


class PlainVmap(Contender):
    """torch.func's way to train an ensemble; stock optimizers on stacked parameters know one learning rate."""

    own_rates = False

    def __init__(self, workload: Workload, batches: Sequence[Batch], rates: Sequence[float], device: torch.device):
        self.workload, self.device, self.lanes = workload, device, len(rates)
        self.batches = itertools.cycle(batches)
        models = [model.to(device) for model in workload.models(len(rates))]
        self.template = _Losses(workload, copy.deepcopy(models[0]))
        self.parameters, self.buffers = stack_module_state([_Losses(workload, model) for model in models])
        rate = statistics.geometric_mean(rates)
        self.parts: dict[str, list[Tensor]] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for name, part in workload.parts:
            prefix = f"model.{part}." if part else "model."
            own = [tensor for path, tensor in self.parameters.items() if path.startswith(prefix)]
            self.parts[name] = own
            self.optimizers[name] = torch.optim.Adam(own, lr=rate, betas=workload.betas)

    def run(self, steps: int) -> list[float]:
        totals = torch.zeros(self.lanes, device=self.device)
        for batch in itertools.islice(self.batches, steps):
            totals += self._step(batch)
        return [total / steps for total in totals.tolist()]

    def _step(self, batch: Batch) -> Tensor:
        def one_lane(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
            losses: dict[str, Tensor] = functional_call(self.template, (parameters, buffers), (batch,))
            return losses

        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operations that vmap batches by a loop are slow, not wrong
            losses = vmap(one_lane, randomness="different")(self.parameters, self.buffers)
        for name, loss in losses.items():
            loss.sum().backward(inputs=self.parts[name])
        for optimizer in self.optimizers.values():
            optimizer.step()
        return sum(loss.detach() for loss in losses.values())  # type: ignore[no-any-return]


class _Losses(nn.Module):
    """A workload's losses as a forward pass, for functional_call."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.workload.losses(self.model, batch)


@dataclass(frozen=True)
class Settled:
    """How an array came to the strategy that it kept.

    Attributes:
        strategy: As Worker.describe() names it.
        seconds: From the first step to the end of the round after which the strategy stayed.
        chosen: Whether the choice was made by then.
    """

    strategy: str
    seconds: float
    chosen: bool


class Ours(Contender):
    """hfta_tune: a Worker, whose lanes are FusedTrainables; a round has at most LONGEST_ROUND steps."""

    def __init__(self, workload: Workload, batches: Sequence[Batch], rates: Sequence[float], device: torch.device):
        self.rounds = _Rounds(batches)
        kind = _trainable(workload, self.rounds)
        self.worker = Worker(len(rates), device=device)
        for lane, rate in enumerate(rates):
            config = {"lr": rate, "seed": lane}
            self.worker.add(str(lane), kind._outside_tune(config), config)

    @property
    def strategy(self) -> str:
        """The strategy of the training steps."""
        return ", ".join(dict.fromkeys(array["strategy"] for array in self.worker.describe()["arrays"]))

    def run(self, steps: int) -> list[float]:
        totals = [0.0] * self.worker.lanes
        for start in range(0, steps, LONGEST_ROUND):
            self.rounds.steps = min(LONGEST_ROUND, steps - start)
            for lane, outcome in self.worker.run_round(rounds_left=LONG_RUN).items():
                if isinstance(outcome, Exception):
                    raise outcome
                totals[int(lane)] += outcome.get("train_loss", math.nan) * self.rounds.steps
        return [total / steps for total in totals]

    @property
    def measured(self) -> dict[str, float]:
        """{strategy: seconds a step}, as the engine measured them."""
        return {name: s for array in self.worker.describe()["arrays"] for name, s in array["seconds_a_step"].items()}

    def settle(self, limit: float) -> Settled:
        """Trains until the worker has chosen its strategy, or `limit` seconds have passed.

        At the end of a round, an array whose strategy has not been measured is about to try it; one whose
        strategy has been measured has made its choice.
        """
        start = since = time.perf_counter()
        strategy, steps = "", 1
        while True:
            began = time.perf_counter()
            self.run(steps)
            now = time.perf_counter()
            if now - began < 0.25:
                steps = min(2 * steps, LONGEST_ROUND)
            if self.strategy != strategy:
                strategy, since = self.strategy, now
            chosen = self.worker.lanes == 1 or all(
                array["strategy"] in array["seconds_a_step"] for array in self.worker.describe()["arrays"]
            )
            if chosen or now - start > limit:
                return Settled(strategy, since - start, chosen)


class _Rounds:
    """A data loader whose rounds have `steps` batches and go on where the last one stopped."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.steps = 1
        self._batches = itertools.cycle(batches)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(self._batches, self.steps)


def _trainable(workload: Workload, rounds: _Rounds) -> type[FusedTrainable]:
    class Trial(FusedTrainable):
        def build_model(self, config: dict[str, Any]) -> nn.Module:
            return workload.build()

        def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> Any:
            optimizers = workload.optimizers(model, config["lr"])
            return optimizers if len(optimizers) > 1 else optimizers["all"]

        def train_dataloader(self, config: dict[str, Any]) -> _Rounds:
            return rounds

        def training_step(self, model: nn.Module, batch: Batch, config: dict[str, Any]) -> Any:
            losses = workload.losses(model, batch)
            return losses if len(losses) > 1 else losses["all"]

    Trial.__name__ = Trial.__qualname__ = workload.name
    return Trial
