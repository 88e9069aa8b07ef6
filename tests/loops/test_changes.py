"""What a lane's own code changes of its models in mid-run is seen by the next call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import CLASSES, assert_like_alone, in_lanes, lanes_of_the_array, loader, mlp, values, weights
from torch import Tensor, nn
from torch.nn import functional as F

import hfta_tune
from hfta_tune.fusion import FusionError, FusionWarning
from hfta_tune.loops import current_lane

RATES = (0.05, 0.1, 0.2)
STRATEGIES = ("vmap", "lane by lane")


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.dropout = nn.Dropout(0.0)
        self.temperature = 1.0
        self.register_buffer("scales", torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.layers(x)) / self.temperature * self.scales
        return out


Change = Callable[[Any, float, int, int], Any]
HANDLES: dict[int, Any] = {}


def train(
    lr: float,
    change: Change = lambda net, lr, epoch, number: None,
    build: Callable[[], nn.Module] = Tempered,
    prepares_loader: bool = True,
    batch_size: int = 32,
) -> Any:
    torch.manual_seed(0)
    net, batches = build(), loader(batch_size=batch_size, shuffle=False)
    opt = torch.optim.Adam(net.parameters(), lr=lr, eps=1e-3)
    net, opt, criterion = hfta_tune.prepare(net, opt, nn.CrossEntropyLoss())
    if prepares_loader:
        batches = hfta_tune.prepare(batches)
    returned = []
    for epoch in range(2):
        for number, (x, y) in enumerate(batches):
            returned.append(change(net, lr, epoch, number))
            opt.zero_grad()
            hfta_tune.backward(criterion(net(x), y))
            opt.step()
    return returned, weights(net)


def attribute(net: Any, lr: float, epoch: int, number: int) -> None:
    net.temperature = 1.0 + lr * number


def attribute_alike(net: Any, lr: float, epoch: int, number: int) -> None:
    net.temperature = 1.0 + epoch


def buffer(net: Any, lr: float, epoch: int, number: int) -> None:
    if number == 1:
        net.scales = torch.tensor([1.0, 2.0, lr + epoch])


def dropout(net: Any, lr: float, epoch: int, number: int) -> None:
    net.dropout.p = float(lr == 0.1 and (epoch, number) == (1, 1))


def masks(net: Any, lr: float, epoch: int, number: int) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * (parameter.data.abs() > lr / 10)


def swapped(net: Any, lr: float, epoch: int, number: int) -> float:
    """Averaged weights are put in the place of the model's for a while, and taken out again."""
    kept = [parameter.data for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.data = torch.full_like(parameter, lr)
    with torch.no_grad():
        score: float = net(torch.ones(2, 8)).mean().item()
    for parameter, data in zip(net.parameters(), kept, strict=True):
        parameter.data = data
    return score


def hook(net: Any, lr: float, epoch: int, number: int) -> None:
    if number == 1:
        HANDLES[id(net)] = net.layers[2].register_forward_hook(lambda module, args, out: out * (1 + lr))
    if number == 2:
        HANDLES.pop(id(net)).remove()


def hook_anew(net: Any, lr: float, epoch: int, number: int) -> None:
    if epoch or number:
        HANDLES.pop(id(net)).remove()
    HANDLES[id(net)] = net.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * (1 + lr * number),))


def layer(net: Any, lr: float, epoch: int, number: int) -> None:
    if (epoch, number) == (1, 0):
        net.layers.append(nn.Tanh())


CHANGES = [attribute, attribute_alike, buffer, dropout, masks, swapped, hook, hook_anew, layer]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prepares_loader", [True, False])
def test_changes_are_followed(change: Change, prepares_loader: bool) -> None:
    strategy = STRATEGIES[0] if prepares_loader else STRATEGIES[CHANGES.index(change) % 2]
    trials = {str(lr): functools.partial(train, lr, change, prepares_loader=prepares_loader) for lr in RATES}
    changed = assert_like_alone(trials, strategy=strategy)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(changed["0.1"], train(0.1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_that_are_replaced_train_on(strategy: str) -> None:
    assert_like_alone({str(lr): functools.partial(train, lr, masks) for lr in RATES}, strategy=strategy)


def test_lanes_that_change_alike_stay_together() -> None:
    together: list[int] = []

    def own(lr: float) -> Any:
        def change(net: Any, lr: float, epoch: int, number: int) -> None:
            net.temperature = 1.0 + epoch
            together.append(lanes_of_the_array())

        return train(lr, change)

    values(in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap"))
    assert together.count(3) >= len(together) - 6  # before the first call, and where a change is still to be seen


def test_what_changes_in_every_batch_trains_one_by_one() -> None:
    def change(net: Any, lr: float, epoch: int, number: int) -> None:
        net.temperature = 1.0 + number

    trials = {str(lr): functools.partial(train, lr, change, batch_size=6) for lr in RATES}
    with pytest.warns(FusionWarning, match=r"one by one: the attribute '0\.temperature' changes from batch to batch"):
        assert_like_alone(trials, strategy="vmap")


def test_a_layer_that_is_replaced_names_the_way_out() -> None:
    def change(net: Any, lr: float, epoch: int, number: int) -> None:
        if lr == 0.1 and number == 1:
            net.layers[2] = nn.Linear(16, CLASSES)

    trials = {str(lr): functools.partial(train, lr, change, prepares_loader=False) for lr in RATES}
    ended = in_lanes(trials, strategy="vmap")
    error = ended.pop("0.1").error
    assert isinstance(error, FusionError) and "make the new model ready with prepare()" in str(error)
    torch.testing.assert_close(values(ended), {name: trials[name]() for name in ended}, rtol=1e-4, atol=1e-5)


def with_hook(kind: str, seen: list[Any]) -> nn.Module:
    net = mlp()
    if kind == "features":
        net[1].register_forward_hook(lambda module, args, out: seen.append(out))
    elif kind == "backward":
        net[2].register_full_backward_hook(lambda module, given, got: seen.append(got[0].norm()))
    elif kind == "parameter":
        net[0].weight.register_hook(lambda gradient: gradient * 2)
    return net


class Keeping(nn.Module):
    """Leaves in itself what the loss is to have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        self.penalty = out.square().mean()
        return out


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("features", "a hook of .* may keep what it sees"),
        ("backward", "has a hook of the backward pass"),
        ("parameter", "has a hook on its gradient"),
        ("late parameter", "has a hook on its gradient"),
        ("keeping", r"forward keeps a tensor in 0\.penalty; return it"),
    ],
)
def test_what_is_to_be_done_in_each_lane_is_done_there(kind: str, reason: str) -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        seen: list[Any] = []
        net = Keeping() if kind == "keeping" else with_hook(kind, seen)
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches = hfta_tune.prepare(net, opt, loader())
        if kind == "late parameter":
            net[0].weight.register_hook(lambda gradient: gradient * 2)
        sizes = []
        for x, y in batches:
            loss = F.cross_entropy(net(x), y)
            if kind == "features":
                loss = loss + seen.pop().square().mean()
            if kind == "keeping":
                loss = loss + net.penalty
            opt.zero_grad()
            hfta_tune.backward(loss)
            sizes += [size.item() for size in seen]
            opt.step()
        return sizes, weights(net)

    with pytest.warns(FusionWarning, match=reason) as caught:
        assert_like_alone({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap")
    assert len(caught) == 1


def test_models_that_are_dropped_leave_the_array() -> None:
    """A function that trains anew on each fold of its data."""
    counts: list[int] = []

    def own(lr: float) -> Any:
        results = []
        for fold in range(4):
            torch.manual_seed(fold)
            net, batches = mlp(), loader()
            opt = torch.optim.SGD(net.parameters(), lr=lr)
            net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss())
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
            for x, y in batches:
                opt.zero_grad()
                hfta_tune.backward(criterion(net(x), y))
                opt.step()
                scheduler.step()
            results.append(weights(net))
            if (lane := current_lane()) is not None:
                counts.append(len(lane.trial.lane.optimizers) + len(lane.trial.lane.model))
        return results

    assert_like_alone({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap")
    assert max(counts) <= 4  # the fold before may still have been held when the next one was made ready


def test_models_and_criteria_are_ordinary_ones_afterwards() -> None:
    criterion = nn.CrossEntropyLoss()

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net, batches = mlp(), loader()
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, loss = hfta_tune.prepare(net, opt, batches, criterion)
        for x, y in batches:
            opt.zero_grad()
            hfta_tune.backward(loss(net(x), y))
            opt.step()
        return net, opt

    for _ in range(2):  # the criterion is that of a second run, too
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ended = values(in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap"))
        for name, (net, opt) in ended.items():
            assert type(net) is nn.Sequential and type(criterion) is nn.CrossEntropyLoss
            assert not {"step", "zero_grad"} & set(vars(opt))
            torch.testing.assert_close(weights(net), weights(own(float(name))[0]), rtol=1e-4, atol=1e-5)
