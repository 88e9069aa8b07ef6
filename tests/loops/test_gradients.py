"""Gradients reach each lane's own parameters, whatever its code does between a call and a step."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import CLASSES, assert_like_alone, in_lanes, lanes_of_the_array, loader, mlp, values, weights
from torch import Tensor, nn
from torch.nn import functional as F

import hfta_tune
from hfta_tune.fusion import FusionWarning
from hfta_tune.fusion.optimizers import ArrayOptimizers

RATES = (0.05, 0.1, 0.2)


def setting(lr: float) -> Any:
    torch.manual_seed(0)
    net = mlp()
    return hfta_tune.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), loader(), nn.CrossEntropyLoss())


def check(function: Any) -> dict[str, Any]:
    return assert_like_alone({str(lr): functools.partial(function, lr) for lr in RATES}, strategy="vmap")


@pytest.mark.parametrize("accumulated", [False, True])
def test_one_loss_of_calls_before_and_after_a_lane_leaves(accumulated: bool) -> None:
    def own(lr: float) -> Any:
        net, _, batches, criterion = setting(lr)
        (x, labels), (y, others), (z, _) = batches
        if accumulated:
            hfta_tune.backward(criterion(net(z), labels))
        out = net(x)
        if lr == 0.2:
            return 0
        hfta_tune.backward(criterion(out, labels) + criterion(net(y), others))
        return [parameter.grad.clone() for parameter in net.parameters()]

    check(own)


@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_graphs_that_outlive_a_step(toggles: bool, leaves: bool) -> None:
    """A GAN whose generator is called before its discriminator steps, and has its backward pass after it."""
    noise = torch.randn(3, 32, 4, generator=torch.Generator().manual_seed(1))

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        makes, judges = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        opt_makes = torch.optim.SGD(makes.parameters(), lr=lr)
        opt_judges = torch.optim.SGD(judges.parameters(), lr=lr)
        makes, judges, opt_makes, opt_judges, batches = hfta_tune.prepare(
            makes, judges, opt_makes, opt_judges, loader()
        )
        for number, (x, _) in enumerate(batches):
            fakes = makes(noise[number])
            if leaves and lr == 0.2 and number == 1:
                return 0
            if toggles:
                judges.requires_grad_(True)
            opt_judges.zero_grad()
            hfta_tune.backward(F.softplus(-judges(x)).mean() + F.softplus(judges(fakes.detach())).mean())
            opt_judges.step()
            if toggles:
                judges.requires_grad_(False)
            opt_makes.zero_grad()
            hfta_tune.backward(F.softplus(-judges(fakes)).mean())
            opt_makes.step()
        return weights(makes, judges)

    check(own)


def test_what_code_asks_of_an_output() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr)
        norms = []
        for number, (x, y) in enumerate(batches):
            out = net(x)
            if number == 0:
                out.retain_grad()
            else:
                out.register_hook(lambda gradient: gradient * lr)
            loss = criterion(out, y)
            loss.register_hook(lambda gradient: gradient * 2)
            opt.zero_grad()
            hfta_tune.backward(loss)
            norms.append(out.grad.norm().item() if number == 0 else 0.0)
            opt.step()
        return norms, weights(net)

    assert check(own)["0.1"][0][0] > 0


def test_a_penalty_of_gradients_that_torch_returns() -> None:
    """As in WGAN-GP, with respect to the critic's inputs."""

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(critic.parameters(), lr=lr)
        critic, opt, batches = hfta_tune.prepare(critic, opt, loader())
        for x, _ in batches:
            mixed = (x + lr).requires_grad_()
            out = critic(mixed)
            (slope,) = torch.autograd.grad(out.sum(), mixed, create_graph=True)
            opt.zero_grad()
            hfta_tune.backward(out.mean() + (slope.norm(dim=1) - 1).square().mean())
            opt.step()
        return weights(critic)

    check(own)


def backward_with_a_graph(loss: Tensor, net: nn.Module, x: Tensor) -> None:
    loss.backward(create_graph=True)


def gradients_of_inputs(loss: Tensor, net: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(loss, x)


def gradients_of_parameters(loss: Tensor, net: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(loss, list(net.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (backward_with_a_graph, "Call hfta_tune.backward(loss) instead"),
        (gradients_of_inputs, "Call hfta_tune.backward(loss) instead"),
        (gradients_of_parameters, "leave out of prepare() the model"),
    ],
)
def test_what_does_not_reach_the_graph_names_the_way_out(call: Any, remedy: str) -> None:
    def own(lr: float) -> None:
        net, _, batches, criterion = setting(lr)
        for x, y in batches:
            call(criterion(net(x.requires_grad_()), y), net, x)

    for end in in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap").values():
        assert end.error is not None and remedy in "\n".join([str(end.error), *end.error.__notes__])


class SharpnessAware(torch.optim.Optimizer):
    """SAM: a step evaluates the loss a second time, where it is larger."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in trained]
        for parameter in trained:
            parameter.add_(parameter.grad, alpha=0.1)
        torch.enable_grad()(closure)()
        for parameter, old in zip(trained, before, strict=True):
            parameter.copy_(old).sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("optimizer", [SharpnessAware, torch.optim.SGD])
def test_closures(optimizer: Any) -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = mlp()
        opt = optimizer(net.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, loader(), nn.CrossEntropyLoss())
        losses = []
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss: Tensor = criterion(net(x), y)
                hfta_tune.backward(loss)
                return loss

            losses.append(opt.step(closure).item())
        return losses, weights(net)

    check(own)


def test_an_optimizers_own_zero_grad_is_called() -> None:
    class Counting(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.cleared += 1
            super().zero_grad(set_to_none)

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = mlp()
        opt = Counting(net.parameters(), lr=lr)
        net, opt, batches = hfta_tune.prepare(net, opt, loader())
        for x, y in batches:
            opt.zero_grad()
            hfta_tune.backward(F.cross_entropy(net(x), y))
            opt.step()
        return opt.cleared, weights(net)

    assert check(own)["0.1"][0] == 3


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
def test_autocast_of_one_lane_leaves_the_casts_of_others_alone(strategy: str) -> None:
    """One is under autocast all the time while the others train: torch keeps casts until the last has left it."""

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(8, CLASSES)
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, loader(), nn.CrossEntropyLoss())
        if lr == 0.0:
            scores = []
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(2):
                    for x, _ in batches:
                        scores.append(net(x).float().mean().item())
                        opt.step()  # there is no gradient: it only waits for the others here
            return scores
        means = []
        for _ in range(2):
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = net(x)
                means.append(out.float().mean(0).tolist())
                opt.zero_grad()
                hfta_tune.backward(criterion(out.float(), y))
                opt.step()
        return means

    trials = {str(lr): functools.partial(own, lr) for lr in (0.0, 3.0, 5.0)}
    got = values(in_lanes(trials, strategy=strategy))
    torch.testing.assert_close(got, {name: function() for name, function in trials.items()}, rtol=3e-2, atol=3e-2)


def test_accumulate_in_threads() -> None:
    """Outside lanes, as under study.optimize with n_jobs=2: one accumulates in the middle of the other's step."""
    one, other = (torch.ones((), requires_grad=True) for _ in range(2))
    inside, done = threading.Event(), threading.Event()

    def accumulating() -> None:
        with hfta_tune.accumulate(nn.Linear(1, 1), 4):
            inside.set()
            done.wait(30)
            hfta_tune.backward(one * 1)

    thread = threading.Thread(target=accumulating)
    thread.start()
    inside.wait(30)
    hfta_tune.backward(other * 1)
    done.set()
    thread.join()
    assert one.grad == 0.25 and other.grad == 1


@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize("where", ["backward", "step"])
def test_out_of_memory_after_the_calls(where: str, catches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed is lost; lanes that catch it, and those to come, train in arrays of half the size."""
    together: list[int] = []
    owner: Any = torch.autograd if where == "backward" else ArrayOptimizers
    real = owner.backward if where == "backward" else owner.apply
    fails = [True]

    def failing(*given: Any, **options: Any) -> Any:
        if fails[0]:
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
        return real(*given, **options)

    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr)
        for x, y in batches:
            opt.zero_grad()
            loss = criterion(net(x), y)
            try:
                hfta_tune.backward(loss)
                opt.step()
            except torch.OutOfMemoryError:
                if not catches:
                    raise
                fails[0] = False
                continue
            together.append(lanes_of_the_array())
        return weights(net)

    rates = [0.05, 0.1, 0.2, 0.3]
    monkeypatch.setattr(owner, real.__name__, failing)
    with pytest.warns(FusionWarning, match="4 lanes do not fit into memory") as caught:
        ended = in_lanes({str(lr): functools.partial(own, lr) for lr in rates}, strategy="vmap")
    assert len(caught) == 1 and "arrays of 2. Set B to that." in str(caught[0].message)
    if catches:
        assert set(together) == {2} and len(together) == 8
    else:
        for name, end in ended.items():
            assert isinstance(end.error, torch.OutOfMemoryError)
            assert end.error.__notes__ == ["4 trials trained together. Set B to 2.", f"raised by trial {name}"]


def test_out_of_memory_in_a_criterion_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr)
        for x, y in batches:
            opt.zero_grad()
            hfta_tune.backward(criterion(net(x), y))
            opt.step()
        return weights(net)

    expected = {str(lr): own(lr) for lr in RATES}
    monkeypatch.setattr("hfta_tune.loops._fusion.call_function", failing)
    with pytest.warns(FusionWarning, match="do not fit into memory"):
        got = values(in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
