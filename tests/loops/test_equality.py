"""Ordinary training functions give in lanes what they give alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import CLASSES, assert_like_alone, in_lanes, loader, mlp, values, weights
from torch import Tensor, nn

import hfta_tune

EPOCHS = 5


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def cnn() -> nn.Module:
    first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "cnn": (cnn, (1, 4, 4)),
    "lstm": (Sequences, (5, 4)),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=10 * lr, momentum=0.9, nesterov=True),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=1e-4, weight_decay=0.1),
    "rmsprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr / 5, eps=1e-3),
}


class Pruned(Exception):
    pass


def train(model: str, optimizer: str, lr: float, seed: int = 0, pruned_after: int | None = None) -> Any:
    torch.manual_seed(seed)
    build, shape = MODELS[model]
    net, batches = build(), loader(shape=shape)
    opt = OPTIMIZERS[optimizer](net.parameters(), lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=lr, total_steps=EPOCHS * len(batches))
    net, opt, batches, criterion, scheduler = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss(), scheduler)
    history = []
    for epoch in range(EPOCHS):
        net.train()
        for x, y in batches:
            opt.zero_grad()
            loss = criterion(net(x), y)
            hfta_tune.backward(loss)
            opt.step()
            scheduler.step()
        net.eval()
        with torch.no_grad():
            score = (net(batches.dataset.tensors[0]) * torch.arange(CLASSES)).mean()
        history.append((loss.item(), score.item(), scheduler.get_last_lr()[0]))
        if epoch + 1 == pruned_after:
            raise Pruned(history)
    return history, weights(net)


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_losses_scores_and_weights(model: str, optimizer: str) -> None:
    trials = {str(n): functools.partial(train, model, optimizer, 0.002 * 1.5**n, seed=n % 2) for n in range(4)}
    expected = {name: function() for name, function in trials.items()}
    pruned = {f"pruned {n}": functools.partial(trials[str(n)], pruned_after=n) for n in (1, 3)}
    ended = in_lanes({**pruned, **trials})
    for name, function in pruned.items():
        error = ended.pop(name).error
        assert isinstance(error, Pruned)
        with pytest.raises(Pruned) as alone:
            function()
        torch.testing.assert_close(error.args, alone.value.args, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values(ended), expected, rtol=1e-4, atol=1e-5)
    assert len({str(history) for history, _ in expected.values()}) == 4


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane", "auto"])
def test_strategies(strategy: str) -> None:
    trials = {str(n): functools.partial(train, "mlp", "adamw", 0.002 * 1.5**n, seed=n) for n in range(5)}
    assert_like_alone(trials, B=3, strategy=strategy)


def test_a_criterion_that_is_not_prepared() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(1)
        net, batches = mlp(), loader()
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches = hfta_tune.prepare(net, opt, batches)
        for x, y in batches:
            out = net(x)
            loss = nn.functional.cross_entropy(out, y) + lr * out.square().mean()
            opt.zero_grad()
            hfta_tune.backward(loss)
            opt.step()
        return loss.item(), weights(net)

    assert_like_alone({str(lr): functools.partial(own, lr) for lr in (0.01, 0.1, 0.3)})


def test_bfloat16_autocast() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(1)
        net, batches = mlp(), loader(shuffle=False)
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss())
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(x)
                assert out.dtype == torch.bfloat16
                loss = criterion(out.float(), y)
            opt.zero_grad()
            hfta_tune.backward(loss)
            opt.step()
        return loss.item(), weights(net)

    expected = {str(lr): own(lr) for lr in (0.01, 0.1)}
    got = values(in_lanes({str(lr): functools.partial(own, lr) for lr in (0.01, 0.1)}, strategy="vmap"))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
