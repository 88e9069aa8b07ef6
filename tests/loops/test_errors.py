"""What goes wrong in one lane, or in all: said clearly, and nothing of the other lanes is lost."""

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
from hfta_tune.fusion.calls import CalledArray
from hfta_tune.fusion.kernels import _mode
from hfta_tune.loops import LaneRuns, current_lane

RATES = (0.05, 0.1, 0.2, 0.3)
Trouble = Callable[[str, nn.Module, Any, int], None]


def train(
    name: str,
    trouble: Trouble = lambda name, net, opt, number: None,
    build: Callable[[], nn.Module] = mlp,
    epochs: int = 2,
    together: list[int] | None = None,
) -> Any:
    torch.manual_seed(0)
    net, batches = build(), loader()
    opt = torch.optim.SGD(net.parameters(), lr=float(name))
    net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, nn.CrossEntropyLoss())
    for _ in range(epochs):
        for number, (x, y) in enumerate(batches):
            trouble(name, net, opt, number)
            opt.zero_grad()
            loss = criterion(net(x), y)
            hfta_tune.backward(loss)
            opt.step()
            if together is not None:
                together.append(lanes_of_the_array())
    return loss.item(), weights(net)


def others_are_right(trouble: Trouble, whose: str, error: type[Exception], match: str) -> None:
    """One lane's function raises the error; the others are as they are alone."""
    trials = {str(lr): functools.partial(train, str(lr), trouble) for lr in RATES}
    ended = in_lanes(trials, strategy="vmap")
    with pytest.raises(error, match=match):
        raise ended.pop(whose).error or AssertionError("it ended well")
    torch.testing.assert_close(values(ended), {name: train(name) for name in ended}, rtol=1e-4, atol=1e-5)


def test_one_raises() -> None:
    def trouble(name: str, net: nn.Module, opt: Any, number: int) -> None:
        if name == "0.1" and number == 1:
            raise KeyError("lost")

    others_are_right(trouble, "0.1", KeyError, "lost")


def test_one_leaves_by_sys_exit() -> None:
    def trouble(name: str, net: nn.Module, opt: Any, number: int) -> None:
        if name == "0.1" and number == 1:
            raise SystemExit(3)

    ended = in_lanes({str(lr): functools.partial(train, str(lr), trouble) for lr in RATES})
    assert isinstance(ended.pop("0.1").error, SystemExit)
    torch.testing.assert_close(values(ended), {name: train(name) for name in ended}, rtol=1e-4, atol=1e-5)


def test_one_goes_nan() -> None:
    def trouble(name: str, net: nn.Module, opt: Any, number: int) -> None:
        if name == "0.1" and number == 1:
            with torch.no_grad():
                next(net.parameters()).fill_(float("nan"))

    trials = {str(lr): functools.partial(train, str(lr), trouble) for lr in RATES}
    got = values(in_lanes(trials, strategy="vmap"))
    assert torch.isnan(torch.tensor(got.pop("0.1")[0]))
    torch.testing.assert_close(got, {name: train(name) for name in got}, rtol=1e-4, atol=1e-5)


def test_loss_backward_names_the_way_out() -> None:
    def own() -> None:
        net, batches = hfta_tune.prepare(mlp(), loader())
        for x, y in batches:
            F.cross_entropy(net(x), y).backward()

    ended = in_lanes({"a": own, "b": own}, strategy="vmap")
    for end in ended.values():
        assert isinstance(end.error, FusionError) and "hfta_tune.backward(loss)" in str(end.error)


def test_changing_an_output_in_place_names_the_way_out() -> None:
    def own() -> None:
        net, batches = hfta_tune.prepare(mlp(), loader())
        for x, y in batches:
            out = net(x)
            out /= 2
            hfta_tune.backward(F.cross_entropy(out, y))

    for end in in_lanes({"a": own, "b": own}, strategy="vmap").values():
        assert isinstance(end.error, RuntimeError)
        assert any("not y /= t" in note for note in end.error.__notes__)


def test_a_parameter_that_is_replaced() -> None:
    def trouble(name: str, net: Any, opt: Any, number: int) -> None:
        if name == "0.1" and number == 0:
            net[2].weight = nn.Parameter(torch.zeros(CLASSES, 16))

    others_are_right(trouble, "0.1", FusionError, "parameter of a prepared model was replaced")


def test_models_and_optimizers_of_everybody() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def own(given: Any) -> None:
        hfta_tune.prepare(given)
        lane = current_lane()
        assert lane is not None
        lane.park("ready")

    for given in (model, optimizer):
        with LaneRuns() as runs:
            lanes = [runs.start(name, functools.partial(own, given)) for name in ("first", "second")]
            ends = dict(runs.run_until_parked(lanes))
            assert ends[lanes[0]] is None and lanes[0].parked == "ready"
            end = ends[lanes[1]]
            assert end is not None and isinstance(end.error, FusionError)
            assert "inside the function" in str(end.error)


@pytest.mark.parametrize("given", [3, None, object()])
def test_what_prepare_does_not_take(given: Any) -> None:
    with pytest.raises(TypeError, match="argument 2; pass models"):
        hfta_tune.prepare(mlp(), given)


@pytest.mark.parametrize("steps", [0, -1, 1.0, True])
def test_what_accumulate_does_not_take(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps must be a positive integer"), hfta_tune.accumulate(mlp(), steps):
        pass


def test_functions_that_prepare_nothing() -> None:
    def own(lr: float) -> float:
        torch.manual_seed(0)
        net = mlp()
        opt = torch.optim.SGD(net.parameters(), lr)
        for x, y in loader(shuffle=False):
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        return loss.item()

    with pytest.warns(FusionWarning, match=r"never called hfta_tune\.prepare") as caught:
        assert_like_alone({str(lr): functools.partial(own, lr) for lr in RATES})
    assert len(caught) == 1


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out if out.sum() > 0 else -out


def lbfgs(lr: float) -> Any:
    torch.manual_seed(0)
    net = mlp()
    opt = torch.optim.LBFGS(net.parameters(), lr=lr, max_iter=3)
    net, opt, batches, criterion = hfta_tune.prepare(net, opt, loader(), nn.CrossEntropyLoss())
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss: Tensor = criterion(net(x), y)
            hfta_tune.backward(loss)
            return loss

        opt.step(closure)
    return weights(net)


def foreign(lr: float) -> Any:
    """The optimizer also trains a model that was not prepared."""
    torch.manual_seed(0)
    net, other = mlp(), nn.Linear(8, 8)
    opt = torch.optim.SGD([*net.parameters(), *other.parameters()], lr)
    net, opt, batches = hfta_tune.prepare(net, opt, loader())
    for x, y in batches:
        opt.zero_grad()
        hfta_tune.backward(F.cross_entropy(net(other(x)), y))
        opt.step()
    return weights(net, other)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda lr: train(str(lr), build=Branching), "vmap stopped at"),
        (lbfgs, "LBFGS"),
        (foreign, "no prepared model"),
    ],
    ids=["branching", "lbfgs", "foreign"],
)
def test_what_cannot_be_fused_trains_one_by_one(function: Any, reason: str) -> None:
    with pytest.warns(FusionWarning, match=reason) as caught:
        assert_like_alone({str(lr): functools.partial(function, lr) for lr in RATES})
    assert len(caught) == 1


def test_out_of_memory_in_a_call_halves_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CalledArray.call

    def call(self: CalledArray, *given: Any) -> Any:
        if len(self.lanes) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
        return real(self, *given)

    monkeypatch.setattr(CalledArray, "call", call)
    names = [f"{lr:.2f}" for lr in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)]
    together: dict[str, list[int]] = {name: [] for name in names}
    trials = {name: functools.partial(train, name, together=together[name]) for name in names}
    with pytest.warns(FusionWarning, match="do not fit into memory") as caught:
        got = values(in_lanes(trials, strategy="vmap"))
    assert [str(warning.message).split(" (")[0] for warning in caught] == [
        "6 lanes do not fit into memory",
        "3 lanes do not fit into memory",
    ]
    torch.testing.assert_close(got, {name: train(name) for name in names}, rtol=1e-4, atol=1e-5)
    assert {count for own in together.values() for count in own} <= {1, 2}


def test_the_audit_is_silent_about_what_is_right() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trials = {str(lr): functools.partial(train, str(lr), build=dropping) for lr in RATES}
        values(in_lanes(trials, strategy="vmap", audit=True))
        assert_like_alone({str(lr): functools.partial(train, str(lr)) for lr in RATES}, strategy="vmap", audit=True)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, CLASSES))


@pytest.mark.parametrize("wrong", ["forward", "backward", "criterion"])
def test_the_audit_finds_a_wrong_kernel(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = F.cross_entropy if wrong == "criterion" else torch._C._nn.linear
    right = _mode._KERNELS[key]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if out is NotImplemented:
            return out
        return out + 0.02 * (out - out.detach()) if wrong == "backward" else 1.02 * out

    monkeypatch.setitem(_mode._KERNELS, key, kernel)
    trials = {str(lr): functools.partial(train, str(lr)) for lr in RATES}
    with pytest.warns(FusionWarning, match="lane by lane") as caught:
        assert_like_alone(trials, strategy="vmap", audit=True)
    [warning] = caught
    what = {"forward": "the output differs", "backward": "the gradient of '0.", "criterion": "the output differs"}[
        wrong
    ]
    assert what in str(warning.message) and "0.05" in str(warning.message)


def test_the_audit_says_what_it_cannot_compare() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + 0.01 * torch.randn_like(x))

    with pytest.warns(FusionWarning, match="draws random numbers"):
        values(in_lanes({str(lr): functools.partial(train, str(lr), build=Noisy) for lr in RATES}, audit=True))


def test_errors_of_torch_in_all_lanes_from_any_depth() -> None:
    """torch walks the whole C++ stack for each; that of a lane ends in its hub's."""

    def own(number: int) -> int:
        net, batches = hfta_tune.prepare(mlp(), loader(shuffle=False))
        caught = 0
        for x, _ in batches:
            out = net(x)
            for _ in range(number % 3):
                with pytest.raises(RuntimeError, match="must match the size"):
                    out + torch.ones(7)
                caught += 1
            lane = current_lane()
            assert lane is not None
            lane.park(caught)
        return torch.ones(2, number + 2) @ torch.ones(number + 3, 1)  # type: ignore[return-value]

    def at_depth(depth: int, call: Callable[[], Any]) -> Any:
        return call() if depth == 0 else max([depth], key=lambda _: 0) and at_depth(depth - 1, call)

    with LaneRuns(strategy="vmap") as runs:
        lanes = [runs.start(str(number), functools.partial(own, number)) for number in range(12)]
        for round_ in range(3):
            at_depth(7 * round_, lambda: list(runs.run_until_parked(lanes)))
            assert [lane.parked for lane in lanes] == [(round_ + 1) * (number % 3) for number in range(12)]
        ends = at_depth(2, lambda: dict(runs.run_until_parked(lanes)))
        assert {type(end.error) for end in ends.values()} == {RuntimeError}
