"""Prepared models, optimizers, loaders and criteria behave as the bare ones do."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import CLASSES, assert_like_alone, data, in_lanes, loader, mlp, values, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import hfta_tune

RATES = (0.05, 0.1, 0.2)


def setting(seed: int = 0, lr: float = 0.1) -> Any:
    torch.manual_seed(seed)
    net = mlp()
    return net, torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9), loader(), nn.CrossEntropyLoss()


def step(net: nn.Module, opt: Any, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss: Tensor = criterion(net(x), y)
    hfta_tune.backward(loss)
    opt.step()
    return loss


def check(function: Any, strategy: str = "vmap") -> dict[str, Any]:
    """With three learning rates, in lanes and plainly."""
    return assert_like_alone({str(lr): functools.partial(function, lr) for lr in RATES}, strategy=strategy)


def test_outside_lanes_everything_comes_back_as_it_was() -> None:
    net, opt, batches, criterion = setting()
    assert hfta_tune.prepare(net, opt, batches, criterion) == (net, opt, batches, criterion)
    assert hfta_tune.prepare(net) is net and hfta_tune.unprepare(net) is net
    assert type(net) is nn.Sequential and "step" not in vars(opt)


def test_what_prepare_gives() -> None:
    def own(lr: float) -> str:
        net, opt, batches, criterion = setting(lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
        ready = hfta_tune.prepare(criterion, batches, scheduler, opt, net)
        assert ready[0] is criterion and ready[2] is scheduler and ready[3] is opt and ready[4] is net
        assert len(ready[1]) == len(batches) and ready[1].dataset is batches.dataset
        assert isinstance(net, nn.Sequential) and net[0].weight is next(net.parameters())
        assert isinstance(net[1], nn.ReLU) and str(net).startswith("Sequential(")
        assert isinstance(opt, torch.optim.SGD) and hfta_tune.prepare(ready[1]) is ready[1]
        return "right"

    assert set(values(in_lanes({str(lr): functools.partial(own, lr) for lr in RATES})).values()) == {"right"}


def test_state_dicts_checkpoints_and_pickles() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        for x, y in batches:
            step(net, opt, criterion, x, y)
        buffer = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, buffer)
        with torch.random.fork_rng():
            alone = mlp()
        alone.load_state_dict(net.state_dict())
        assert buffer.tell() < 12_000  # of one model, not of three
        parameters = [*net.parameters()]
        assert all(own is net.state_dict(keep_vars=True)[name] for name, own in net.named_parameters())
        whole = pickle.dumps((net, opt))
        assert len(whole) < 12_000
        pickled, its = pickle.loads(whole)
        assert type(pickled) is nn.Sequential and its.param_groups[0]["params"][0] is pickled[0].weight
        assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
        for x, y in batches:
            step(net, opt, criterion, x, y)
        spoilt = weights(net)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        net.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        torch.testing.assert_close(weights(net), weights(alone))
        torch.testing.assert_close(weights(pickled), weights(alone))
        for x, y in batches:
            step(net, opt, criterion, x, y)
        return spoilt, weights(net), [own["momentum_buffer"] for own in opt.state_dict()["state"].values()]

    check(own)


def test_hooks_and_submodules() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr=lr)
        seen: list[float] = []
        net[0].register_forward_hook(lambda module, args, out: out * 0.5)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, criterion)
        late = None
        for number, (x, y) in enumerate(batches):
            if number == 1:
                late = net[2].register_forward_hook(lambda module, args, out: out * 3)
            if number == 2:
                assert late is not None
                late.remove()
            step(net, opt, criterion, x, y)
            with torch.no_grad():
                seen.append(net[0](x).mean().item())  # a part, called by itself
        return seen, weights(net)

    check(own)


def test_freezing_and_thawing() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        for epoch in range(3):
            net[0].requires_grad_(epoch != 1)
            for x, y in batches:
                step(net, opt, criterion, x, y)
        return weights(net), [parameter.grad is None for parameter in net.parameters()]

    check(own)


def test_parameter_groups_are_edited_and_added() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = mlp()
        opt = torch.optim.Adam(net[0].parameters(), lr=lr, eps=1e-3)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, loader(), nn.CrossEntropyLoss())
        for epoch in range(3):
            if epoch == 1:
                opt.add_param_group({"params": list(net[2].parameters()), "lr": lr / 2, "weight_decay": 0.1})
            if epoch == 2:
                for group in opt.param_groups:
                    group["lr"] *= 0.5
            for x, y in batches:
                step(net, opt, criterion, x, y)
        return weights(net)

    check(own)


def test_gradients_are_the_lanes_own() -> None:
    """zero_grad(set_to_none=False), gradients read, changed in place and replaced."""

    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        norms = []
        for number, (x, y) in enumerate(batches):
            opt.zero_grad(set_to_none=number == 0)
            hfta_tune.backward(criterion(net(x), y))
            first, second, *_ = net.parameters()
            assert first.grad is not None and second.grad is not None
            norms.append(first.grad.norm().item())
            first.grad.mul_(1 + lr)
            second.grad = torch.zeros_like(second)
            opt.step()
        return norms, weights(net)

    check(own)


def test_penalties_over_parameters() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        for x, y in batches:
            opt.zero_grad()
            penalty = sum(parameter.square().sum() for parameter in net.parameters())
            hfta_tune.backward(criterion(net(x), y) + 0.01 * penalty)
            opt.step()
        return weights(net)

    check(own)


@pytest.mark.parametrize("averages", ["deepcopy", "swa_utils"])
def test_averages_of_weights(averages: str) -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        if averages == "deepcopy":
            average = copy.deepcopy(net)
            assert type(average) is nn.Sequential
        else:
            average = AveragedModel(net, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new)
        for x, y in batches:
            step(net, opt, criterion, x, y)
            if isinstance(average, AveragedModel):
                average.update_parameters(net)
            else:
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), net.parameters(), strict=True):
                        mean.lerp_(parameter, 0.1)
        with torch.no_grad():
            return average(x).mean().item(), weights(average)

    check(own)


def test_inference_mode_and_evaluation() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, CLASSES))
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, loader(), nn.CrossEntropyLoss())
        scores = []
        for _ in range(2):
            net.train()
            for x, y in batches:
                step(net, opt, criterion, x, y)
            net.eval()
            with torch.inference_mode():
                out = net(x)
                assert out.is_inference() or not out.requires_grad
                scores.append(out.mean().item())
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return scores, weights(net)

    check(own)


class Several(nn.Module):
    """Named inputs, and a tuple and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleDict({"a": nn.Linear(8, CLASSES), "b": nn.Linear(8, 1)})

    def forward(self, x: Tensor, *, scale: float = 1.0, offset: Tensor | None = None) -> Any:
        hidden = self.body(x).tanh() * scale + (0 if offset is None else offset)
        return hidden, {name: head(hidden) for name, head in self.heads.items()}, "text"


def test_inputs_and_outputs_of_any_structure() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = Several()
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches = hfta_tune.prepare(net, opt, loader())
        for x, y in batches:
            hidden, outputs, text = net(x, scale=0.5, offset=torch.full((8,), lr))
            assert text == "text"
            opt.zero_grad()
            hfta_tune.backward(F.cross_entropy(outputs["a"], y) + outputs["b"].square().mean() + hidden.abs().mean())
            opt.step()
        return weights(net)

    check(own)


def test_a_graph_that_is_kept() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            hfta_tune.backward(criterion(out, y), retain_graph=True)
            hfta_tune.backward(lr * out.square().mean())
            opt.step()
        return weights(net)

    check(own)


def test_unprepared_models_are_bare() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        for x, y in batches:
            step(net, opt, criterion, x, y)
        bare = hfta_tune.unprepare(net)
        assert bare is net and type(bare) is nn.Sequential
        assert next(bare.parameters()).untyped_storage().nbytes() == 4 * 8 * 16
        out = bare(x)
        out.sum().backward()  # a plain model again
        assert next(bare.parameters()).grad is not None
        return weights(bare)

    check(own)


def test_accumulate_and_clip() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        norms = []
        for epoch in range(2):
            for x, y in batches:
                with hfta_tune.accumulate(net, 2) as last:
                    hfta_tune.backward(criterion(net(x), y))
                    if last:
                        if epoch:
                            hfta_tune.clip_grad_value_(net, 0.01 * (1 + lr))
                        norms.append(hfta_tune.clip_grad_norm_(net.parameters(), 0.1 + lr).item())
                        norms.append(hfta_tune.clip_grad_norm_(net[0].parameters(), 1e9, norm_type=1).item())
                        opt.step()
                        opt.zero_grad()
        return norms, weights(net)

    expected = check(own)
    assert max(expected["0.05"][0]) > 0.15


def plainly(lr: float) -> list[Tensor]:
    """accumulate and clip_grad_norm_ by torch alone."""
    net, opt, batches, criterion = setting(lr=lr)
    for number, (x, y) in enumerate(list(batches)[:2]):
        (criterion(net(x), y) / 2).backward()
        if number == 1:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
    return weights(net)


def test_accumulate_is_an_average() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = hfta_tune.prepare(*setting(lr=lr))
        for x, y in list(batches)[:2]:
            with hfta_tune.accumulate(net, 2) as last:
                hfta_tune.backward(criterion(net(x), y))
                if last:
                    hfta_tune.clip_grad_norm_(net, 0.1)
                    opt.step()
        return weights(net)

    for ran in (own, lambda lr: values(in_lanes({"a": lambda: own(lr), "b": lambda: own(lr / 2)}))["a"]):
        torch.testing.assert_close(ran(0.1), plainly(0.1), rtol=1e-4, atol=1e-6)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
def test_a_gan(strategy: str) -> None:
    noise = torch.randn(3, 32, 4, generator=torch.Generator().manual_seed(1))

    def own(lr: float) -> Any:
        torch.manual_seed(0)
        makes, judges = Generator(), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        opt_makes = torch.optim.Adam(makes.parameters(), lr=lr / 10, betas=(0.5, 0.9), eps=1e-3)
        opt_judges = torch.optim.Adam(judges.parameters(), lr=lr / 5, betas=(0.5, 0.9), eps=1e-3)
        criterion = nn.BCEWithLogitsLoss()
        makes, judges, opt_makes, opt_judges, batches, criterion = hfta_tune.prepare(
            makes, judges, opt_makes, opt_judges, loader(), criterion
        )
        losses = []
        for number, (x, _) in enumerate(batches):
            fakes = makes(noise[number])
            opt_judges.zero_grad()
            on_x, on_fakes = judges(x), judges(fakes.detach())
            loss = criterion(on_x, torch.ones_like(on_x)) + criterion(on_fakes, torch.zeros_like(on_fakes))
            hfta_tune.backward(loss)
            opt_judges.step()
            opt_makes.zero_grad()
            fooled = judges(fakes)
            other = criterion(fooled, torch.ones_like(fooled))
            hfta_tune.backward(other)
            opt_makes.step()
            losses += [loss.item(), other.item()]
        return losses, weights(makes, judges)

    check(own, strategy)


def test_distillation_from_a_frozen_teacher() -> None:
    def own(lr: float) -> Any:
        net, opt, batches, _ = setting(lr=lr)
        teacher = mlp(32).eval().requires_grad_(False)
        net, teacher, opt, batches = hfta_tune.prepare(net, teacher, opt, batches)
        for x, _ in batches:
            with torch.no_grad():
                aim = teacher(x).softmax(1)
            opt.zero_grad()
            hfta_tune.backward(F.kl_div(net(x).log_softmax(1), aim, reduction="batchmean"))
            opt.step()
        return weights(net, teacher)

    check(own)


def test_one_optimizer_over_two_models_and_two_calls_of_prepare() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        body, head = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        opt = torch.optim.RMSprop([*body.parameters(), *head.parameters()], lr=lr / 10, eps=1e-3)
        body = hfta_tune.prepare(body)
        head = hfta_tune.prepare(head)
        opt, batches = hfta_tune.prepare(opt, loader())
        for x, y in batches:
            opt.zero_grad()
            hfta_tune.backward(F.cross_entropy(head(body(x).relu()), y))
            opt.step()
        return weights(body, head)

    check(own)


def test_tied_weights() -> None:
    def own(lr: float) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        net[2].weight = net[0].weight
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, loader(), nn.CrossEntropyLoss())
        for x, y in batches:
            step(net, opt, criterion, x, y)
        assert net[2].weight is net[0].weight
        return weights(net)

    check(own)


def test_a_model_that_is_not_prepared_takes_part() -> None:
    """An embedding of the inputs by a plain module, trained by an optimizer of its own."""

    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr=lr)
        before = nn.Linear(8, 8)
        opt_before = torch.optim.SGD(before.parameters(), lr=lr)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, criterion)
        for x, y in batches:
            opt.zero_grad()
            opt_before.zero_grad()
            hfta_tune.backward(criterion(net(before(x)), y))
            opt.step()
            opt_before.step()
        return weights(net, before)

    check(own)


def test_each_lane_has_data_of_its_own() -> None:
    def own(lr: float) -> Any:
        net, opt, _, criterion = setting(lr=lr)
        batches = [tuple(t.split(32)[n] for t in data(seed=int(100 * lr)).tensors) for n in range(3)]
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, criterion)
        for x, y in batches:
            step(net, opt, criterion, x, y)
        return weights(net)

    check(own)


def test_shuffled_orders_are_those_of_each_seed() -> None:
    def own(seed: int) -> Any:
        net, opt, batches, criterion = setting(seed=seed)
        net, opt, batches, criterion = hfta_tune.prepare(net, opt, batches, criterion)
        firsts = []
        for _ in range(3):
            for x, y in batches:
                firsts.append(x[0, 0].item())
                step(net, opt, criterion, x, y)
        return firsts, weights(net)

    expected = assert_like_alone({f"{lane}": functools.partial(own, lane // 2) for lane in range(6)}, strategy="vmap")
    assert expected["0"][0] == expected["1"][0] != expected["2"][0]
