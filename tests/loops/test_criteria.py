"""Prepared criteria: called once for all lanes whose criteria are equal, at the time of the call."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import assert_like_alone, in_lanes, loader, mlp, values, weights
from torch import Tensor, nn
from torch.nn import functional as F

import hfta_tune
from hfta_tune.loops import _fusion

RATES = (0.05, 0.1, 0.2)


class Penalized(nn.Module):
    def __init__(self, beta: float = 0.0) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels) + self.beta * out.square().mean()


class Plain:
    def __init__(self, beta: float = 0.0) -> None:
        self.beta = beta

    def __call__(self, out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels) + self.beta * out.square().mean()


class Judging(nn.Module):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.layers, self.beta = mlp(), beta

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def loss(self, out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels) + self.beta * out.square().mean()


def train(lr: float, kind: str) -> Any:
    torch.manual_seed(0)
    net, batches = Judging(lr), loader()
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    beta = 0.0

    def closure(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels) + beta * out.square().mean()

    made: dict[str, Any] = {
        "module": Penalized(),
        "object": Plain(),
        "method": net.loss,
        "method of an object": Plain(lr).__call__,
        "closure": closure,
        "smoothing": nn.CrossEntropyLoss(label_smoothing=lr),
        "weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, lr])),
        "partial": functools.partial(F.cross_entropy, label_smoothing=lr),
        "each sample's": nn.CrossEntropyLoss(reduction="none"),
    }
    criterion = made[kind]
    net, opt, batches, ready = hfta_tune.prepare(net, opt, batches, criterion)
    for number, (x, y) in enumerate(batches):
        beta = lr * number
        if kind in ("module", "object"):
            criterion.beta = beta
        opt.zero_grad()
        hfta_tune.backward((ready(net(x), y) * torch.linspace(0.5, 1, len(x))).mean())
        opt.step()
    return weights(net)


KINDS = ["module", "object", "method", "method of an object", "closure", "smoothing", "weights", "partial"]


@pytest.mark.parametrize("kind", [*KINDS, "each sample's"])
def test_criteria_are_each_lanes_own(kind: str) -> None:
    trials = {str(lr): functools.partial(train, lr, kind) for lr in RATES}
    assert_like_alone(trials, strategy="vmap")


def test_one_criterion_of_all_trials_is_called_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    criterion = nn.CrossEntropyLoss()
    counts: list[int] = []
    real = _fusion.call_function

    def counting(function: Any, calls: Any, *others: Any) -> Any:
        counts.append(len(calls))
        return real(function, calls, *others)

    monkeypatch.setattr(_fusion, "call_function", counting)

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net, batches = mlp(), loader()
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, ready = hfta_tune.prepare(net, opt, batches, criterion)
        for x, y in batches:
            opt.zero_grad()
            hfta_tune.backward(ready(net(x), y))
            opt.step()
        return weights(net)

    got = values(in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap"))
    assert counts == [3, 3, 3]
    torch.testing.assert_close(got, {str(lr): own(lr) for lr in RATES}, rtol=1e-4, atol=1e-5)
