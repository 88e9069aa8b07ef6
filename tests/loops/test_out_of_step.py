"""Lanes that do not go in step: right always, and together wherever they ask for the same thing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from loops.lanes_of_loops import assert_like_alone, in_lanes, lanes_of_the_array, loader, mlp, values, weights
from torch import nn

import hfta_tune
from hfta_tune.loops import LaneRuns, current_lane


def train(
    lr: float,
    epochs: int = 3,
    *,
    validates: Callable[[int], bool] = lambda epoch: True,
    together: list[int] | None = None,
    width: int = 16,
    seed: int = 0,
) -> Any:
    torch.manual_seed(seed)
    net, batches = mlp(width), loader(shuffle=False)
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss())
    scores = []
    for epoch in range(epochs):
        for x, y in batches:
            opt.zero_grad()
            loss = criterion(net(x), y)
            hfta_tune.backward(loss)
            opt.step()
            if together is not None:
                together.append(lanes_of_the_array())
        if validates(epoch):
            with torch.no_grad():
                scores += [net(x).mean().item() for x, _ in batches]
    return loss.item(), scores, weights(net)


def test_one_validates_while_others_train() -> None:
    together: dict[str, list[int]] = {name: [] for name in "abc"}
    trials = {
        name: functools.partial(train, lr, 4, validates=validates, together=together[name])
        for name, lr, validates in [
            ("a", 0.1, lambda epoch: True),
            ("b", 0.2, lambda epoch: False),
            ("c", 0.3, lambda epoch: epoch == 1),
        ]
    }
    expected = {name: function() for name, function in trials.items()}
    for own in together.values():
        own.clear()
    torch.testing.assert_close(values(in_lanes(trials, strategy="vmap")), expected, rtol=1e-4, atol=1e-5)
    # Who validates meets the others again at the next epoch: no step is made apart.
    assert together == {name: [3] * 12 for name in "abc"}


def test_one_has_more_epochs_and_one_returns_early() -> None:
    lengths = {"short": 1, "middle": 3, "long": 5}
    together: dict[str, list[int]] = {name: [] for name in lengths}
    trials = {name: functools.partial(train, 0.1, epochs) for name, epochs in lengths.items()}
    expected = assert_like_alone(trials, strategy="vmap")
    assert len({str(value) for value in expected.values()}) == 3
    counted = {name: functools.partial(trials[name], together=together[name]) for name in lengths}
    values(in_lanes(counted, strategy="vmap"))
    assert together["long"] == [3] * 3 + [2] * 6 + [1] * 6


def test_who_starts_late_begins_with_the_others_next_epoch() -> None:
    """Two lanes; the third trial takes the lane of one that has ended in the middle of the other's epochs."""
    together: dict[str, list[int]] = {name: [] for name in ("first", "long", "late")}
    trials = {
        "first": functools.partial(train, 0.1, 1, together=together["first"]),
        "long": functools.partial(train, 0.2, 4, together=together["long"]),
        "late": functools.partial(train, 0.3, 3, together=together["late"]),
    }
    values(in_lanes(trials, B=2, strategy="vmap"))
    assert together == {"first": [2] * 3, "long": [2] * 12, "late": [2] * 9}


def test_signatures_take_turns_and_each_has_an_array() -> None:
    together: dict[str, list[int]] = {str(n): [] for n in range(6)}
    trials = {
        str(n): functools.partial(train, 0.1 + n / 50, width=8 + 8 * (n % 2), together=together[str(n)])
        for n in range(6)
    }
    assert_like_alone({name: functools.partial(own, together=None) for name, own in trials.items()}, strategy="vmap")
    values(in_lanes(trials, strategy="vmap"))
    assert {count for own in together.values() for count in own} == {3}


def test_a_lane_that_never_meets_the_others_does_not_block_them() -> None:
    """One steps by itself, on data of its own, for as long as it likes; another never trains."""
    order: list[str] = []

    def hermit() -> float:
        torch.manual_seed(0)
        net = mlp()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        net, opt = hfta_tune.prepare(net, opt)
        for _ in range(200):
            opt.zero_grad()
            loss = net(torch.ones(5, 8)).square().mean()
            hfta_tune.backward(loss)
            opt.step()
        order.append("hermit")
        return loss.item()

    def idle() -> str:
        hfta_tune.prepare(mlp())
        order.append("idle")
        return "nothing"

    def ordinary(lr: float) -> Any:
        result = train(lr)
        order.append("ordinary")
        return result

    trials: dict[str, Any] = {"hermit": hermit, "idle": idle}
    trials |= {str(lr): functools.partial(ordinary, lr) for lr in (0.1, 0.2)}
    expected = {name: function() for name, function in trials.items()}
    order.clear()
    torch.testing.assert_close(
        {name: value for name, value in values(in_lanes(trials)).items() if name != "idle"},
        {name: value for name, value in expected.items() if name != "idle"},
        rtol=1e-4,
        atol=1e-5,
    )
    assert order == ["idle", "ordinary", "ordinary", "hermit"]


def test_different_lengths_of_an_epoch() -> None:
    def own(samples: int, lr: float) -> Any:
        torch.manual_seed(0)
        net, batches = mlp(), loader(samples, shuffle=True)
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss())
        for _ in range(3):
            for x, y in batches:
                opt.zero_grad()
                hfta_tune.backward(criterion(net(x), y))
                opt.step()
        return weights(net)

    sizes = [(96, 0.1), (64, 0.1), (64, 0.2), (100, 0.1), (96, 0.3)]
    assert_like_alone({str(given): functools.partial(own, *given) for given in sizes}, strategy="vmap")


def test_prepared_again_in_mid_run() -> None:
    """A function that begins anew, with a model that all lanes make: warm restarts."""

    def own(lr: float) -> Any:
        return [train(lr, 1, seed=seed) for seed in range(3)]

    assert_like_alone({str(lr): functools.partial(own, lr) for lr in (0.1, 0.2, 0.3)}, strategy="vmap")


def test_stopping_a_lane_runs_its_finally_clauses_and_leaves_the_others() -> None:
    ended: list[str] = []

    def own(lr: float) -> Any:
        try:
            torch.manual_seed(0)
            net, batches = mlp(), loader(shuffle=False)
            opt = torch.optim.SGD(net.parameters(), lr=lr)
            net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss())
            for epoch in range(3):
                for x, y in batches:
                    opt.zero_grad()
                    hfta_tune.backward(criterion(net(x), y))
                    opt.step()
                if (lane := current_lane()) is not None:
                    lane.park(epoch)
            return weights(net)
        finally:
            ended.append(str(lr))

    with LaneRuns(strategy="vmap") as runs:
        lanes = {lr: runs.start(str(lr), functools.partial(own, lr)) for lr in (0.1, 0.2, 0.3)}
        assert [lane.parked for lane, _ in runs.run_until_parked(lanes.values())] == [0, 0, 0]
        runs.stop(lanes.pop(0.2))
        assert ended == ["0.2"] and len(runs) == 2
        for _ in range(2):
            list(runs.run_until_parked(lanes.values()))
        results = {lane.name: end.value for lane, end in runs.run_until_parked(lanes.values()) if end is not None}
    torch.testing.assert_close(results, {str(lr): own(lr) for lr in lanes}, rtol=1e-4, atol=1e-5)
