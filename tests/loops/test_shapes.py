"""Loops of many shapes at once: each ends as it does alone."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import in_lanes, lanes_of_the_array, loader, mlp, weights
from torch import nn

import hfta_tune


class Failed(Exception):
    pass


def shape(number: int) -> dict[str, Any]:
    """A loop: how long, when it validates, accumulates, clips, stops, and whether it raises."""
    rng = random.Random(number)
    prepares_loader = rng.random() < 0.8
    return {
        "seed": rng.randrange(3),
        "width": rng.choice([8, 8, 8, 12]),
        "lr": rng.uniform(0.01, 0.2),
        "epochs": rng.randint(1, 6),
        "samples": rng.choice([64, 96, 96]),
        "batch_size": rng.choice([16, 32, 32]),
        "shuffle": prepares_loader and rng.random() < 0.5,
        "validates_every": rng.choice([1, 2, 3, 100]),
        "accumulates": rng.choice([1, 1, 1, 2]),
        "clips": rng.choice([None, None, 0.5]),
        "looks_twice": rng.random() < 0.2,
        "prepares_criterion": rng.random() < 0.7,
        "prepares_loader": prepares_loader,
        "leaves_epoch": rng.choice([None, None, None, (rng.randint(0, 3), 1)]),
        "stops_below": rng.choice([None, None, 0.9]),
        "raises": rng.choice([None, None, None, None, (rng.randint(0, 4), 1)]),
    }


def train(own: dict[str, Any]) -> Any:
    torch.manual_seed(own["seed"])
    net, criterion = mlp(own["width"]), nn.CrossEntropyLoss()
    batches = loader(own["samples"], batch_size=own["batch_size"], shuffle=own["shuffle"])
    opt = torch.optim.Adam(net.parameters(), lr=own["lr"], eps=1e-3)
    everything = batches.dataset.tensors[0]
    net, opt = hfta_tune.prepare(net, opt)
    if own["prepares_criterion"]:
        criterion = hfta_tune.prepare(criterion)
    if own["prepares_loader"]:
        batches = hfta_tune.prepare(batches)
    history: list[float] = []
    most = 0
    for epoch in range(own["epochs"]):
        net.train()
        for number, (x, y) in enumerate(batches):
            if own["raises"] == (epoch, number):
                raise Failed(history)
            if own["leaves_epoch"] == (epoch, number):
                break
            with hfta_tune.accumulate(net, own["accumulates"]) as last:
                loss = criterion(net(x), y)
                hfta_tune.backward(loss)
                if own["looks_twice"]:
                    with torch.no_grad():
                        history.append(net(x).square().mean().item())
                if last:
                    if own["clips"] is not None:
                        history.append(hfta_tune.clip_grad_norm_(net.parameters(), own["clips"]).item())
                    opt.step()
                    opt.zero_grad()
            history.append(loss.item())
            most = max(most, lanes_of_the_array())
        if (epoch + 1) % own["validates_every"] == 0:
            net.eval()
            with torch.no_grad():
                history.append(net(everything).std().item())
        if own["stops_below"] is not None and loss.item() < own["stops_below"]:
            break
    return history, weights(net), most


@pytest.mark.parametrize("B", [20, 6])
def test_twenty_loops(B: int) -> None:
    shapes = {str(number): shape(number) for number in range(20)}
    expected, errors = {}, {}
    for name, own in shapes.items():
        try:
            expected[name] = train(own)[:2]
        except Failed as error:
            errors[name] = error.args
    assert len(errors) >= 2 and len(expected) >= 10
    ended = in_lanes({name: functools.partial(train, own) for name, own in shapes.items()}, B, strategy="vmap")
    for name, args in errors.items():
        error = ended[name].error
        assert isinstance(error, Failed)
        torch.testing.assert_close(error.args, args, rtol=1e-4, atol=1e-5)
    for name, value in expected.items():
        if ended[name].error is not None:
            raise ended[name].error
        torch.testing.assert_close(ended[name].value[:2], value, rtol=1e-4, atol=1e-5)
    assert max(end.value[2] for end in ended.values() if end.value is not None) > 1
