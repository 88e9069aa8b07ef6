"""Random programs: lanes that do unlike things at once each end as they do alone."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import CLASSES, in_lanes, loader, mlp, weights
from torch import nn

import hfta_tune

UNUSUAL = [
    "changes the batch",
    "clips",
    "copies",
    "evaluates",
    "freezes",
    "keeps the graph",
    "leaves the epoch",
    "loads",
    "loads the optimizer",
    "looks",
    "lowers the rate",
    "raises",
    "replaces data",
    "calls twice",
    "accumulates",
    "sets the dropout",
    "zeroes",
]


class Failed(Exception):
    pass


class Program:
    """A training function that does something unusual in every second step or so."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)
        torch.manual_seed(number % 4)
        self.net = self.rng.choice([with_batch_norm, with_dropout, mlp])()
        self.head = nn.Linear(CLASSES, CLASSES)
        lr, momentum = self.rng.uniform(0.01, 0.1), self.rng.choice([0.0, 0.9])
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=momentum)
        self.opt_head = torch.optim.Adam(self.head.parameters(), lr=lr / 10, eps=1e-2)
        self.criterion: Any = nn.CrossEntropyLoss()
        batches = loader(self.rng.choice([48, 64]), batch_size=16, shuffle=self.rng.random() < 0.5)
        self.net, self.opt, self.batches = hfta_tune.prepare(self.net, self.opt, batches)
        if self.rng.random() < 0.6:
            self.criterion = hfta_tune.prepare(self.criterion)
        if self.rng.random() < 0.6:
            self.head, self.opt_head = hfta_tune.prepare(self.head, self.opt_head)
        self.seen: list[float] = []

    def run(self) -> Any:
        for _ in range(self.rng.randint(1, 4)):
            for x, y in self.batches:
                does = self.rng.choice(UNUSUAL) if self.rng.random() < 0.5 else ""
                if does == "leaves the epoch":
                    break
                if does == "raises" and self.rng.random() < 0.5:
                    raise Failed(self.seen)
                self.step(does, x, y)
            if self.rng.random() < 0.4:
                self.evaluate(torch.ones(4, 8))
        return self.seen, weights(self.net, self.head)

    @torch.no_grad()
    def evaluate(self, x: Any) -> None:
        self.net.eval()
        self.seen.append(self.net(x).mean().item())
        self.net.train()

    def step(self, does: str, x: Any, y: Any) -> None:
        net, backward = self.net, hfta_tune.backward
        if does == "changes the batch":
            x.mul_(1.5)
        elif does == "copies":
            self.seen.append(copy.deepcopy(net).eval()(x).mean().item())
        elif does == "evaluates":
            self.evaluate(x)
        elif does == "freezes":
            net[0].requires_grad_(not net[0].weight.requires_grad)
        elif does == "loads":
            net.load_state_dict({name: own * 0.9 if own.dim() else own for name, own in net.state_dict().items()})
        elif does == "loads the optimizer":
            self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))
        elif does == "lowers the rate":
            self.opt.param_groups[0]["lr"] *= 0.9
        elif does == "replaces data":
            for parameter in net.parameters():
                parameter.data = parameter.data * 0.95
        elif does == "sets the dropout" and isinstance(net[1], nn.Dropout):
            net[1].p = 1 - net[1].p
        self.opt.zero_grad(set_to_none=does != "zeroes")
        self.opt_head.zero_grad()
        out = self.head(net(x))
        loss = self.criterion(out, y)
        if does == "looks":
            self.seen.append(net(x[:3]).sum().item())
        elif does == "calls twice":
            loss = loss + self.criterion(net(0.5 * x), y)
        backward(loss, retain_graph=does == "keeps the graph")
        if does == "keeps the graph":
            backward(0.5 * out.square().mean())
        elif does == "accumulates":
            backward(self.criterion(self.head(net(x + 1)), y))
        elif does == "clips":
            self.seen.append(hfta_tune.clip_grad_norm_(net.parameters(), 0.3).item())
        self.opt.step()
        self.opt_head.step()
        self.seen.append(loss.item())


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, CLASSES))


def run(number: int) -> Any:
    return Program(number).run()


@pytest.mark.filterwarnings("ignore::hfta_tune.fusion.FusionWarning")
@pytest.mark.parametrize(("B", "strategy"), [(12, "vmap"), (5, "vmap"), (12, "lane by lane"), (12, "auto")])
def test_programs(B: int, strategy: str) -> None:
    for first in range(0, 48, 12):
        trials = {str(number): functools.partial(run, number) for number in range(first, first + 12)}
        ended = in_lanes(trials, B, strategy=strategy)
        for name, function in trials.items():
            try:
                expected = function()
            except Failed as error:
                got = ended[name].error
                assert isinstance(got, Failed), got
                torch.testing.assert_close(got.args, error.args, rtol=1e-4, atol=1e-4)
                continue
            if ended[name].error is not None:
                raise ended[name].error
            torch.testing.assert_close(ended[name].value, expected, rtol=1e-4, atol=1e-4)
