"""Lanes that read the same data are given what each would have read alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from loops.lanes_of_loops import CLASSES, assert_like_alone, data, in_lanes, lanes_of_the_array, loader, mlp, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hfta_tune
from hfta_tune.fusion import FusionError

RATES = (0.05, 0.1, 0.2)
DATA = data()


def setting(lr: float, batches: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net = mlp()
    return hfta_tune.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), batches, nn.CrossEntropyLoss())


def step(net: nn.Module, opt: Any, criterion: Any, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    hfta_tune.backward(criterion(net(x), y))
    opt.step()


def check(function: Any) -> dict[str, Any]:
    return assert_like_alone({str(lr): functools.partial(function, lr) for lr in RATES}, strategy="vmap")


class OfItsOwn(Dataset[Any]):
    """A data set that each trial makes, as those of torchvision are."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


def test_trials_that_make_their_data_themselves_train_together() -> None:
    together: list[int] = []

    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr, DataLoader(OfItsOwn(), batch_size=32))
        for _ in range(2):
            for x, y in batches:
                step(net, opt, criterion, x, y)
                together.append(lanes_of_the_array())
        return weights(net)

    check(own)
    assert together[-18:] == [3] * 18


def collate_dicts(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples]), "names": [[1], [2]]}


def change_tensors(batch: Any, lr: float) -> Any:
    x, y = batch
    return x.mul_(1 + lr).add_(1), y


def change_a_later_batch(batch: Any, lr: float) -> Any:
    x, y = batch
    return (x.mul_(1 + lr) if x[0, 0] > 0 else x), y


def take_out_of_a_dict(batch: Any, lr: float) -> Any:
    assert batch["names"] == [[1], [2]]
    batch["names"][0].append(3)
    return batch["x"], batch.pop("y")


@pytest.mark.parametrize(
    ("change", "collate"),
    [(change_tensors, None), (change_a_later_batch, None), (take_out_of_a_dict, collate_dicts)],
)
def test_a_batch_that_a_lane_changes_is_changed_for_it_alone(change: Any, collate: Any) -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr, DataLoader(DATA, batch_size=32, shuffle=True, collate_fn=collate))
        for _ in range(2):
            for batch in batches:
                step(net, opt, criterion, *change(batch, lr))
        return weights(net)

    check(own)


@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_a_batch(late: bool) -> None:
    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr, loader())
        norms = []
        for x, y in batches:
            if late:
                with torch.no_grad():
                    net(x)  # all lanes have the batch when the first of them asks for gradients of it
            x.requires_grad_()
            hfta_tune.backward(criterion(net(x), y))
            norms.append(x.grad.norm().item())
            step(net, opt, criterion, x.detach() + 0.1 * x.grad.sign(), y)
        return norms, weights(net)

    check(own)


def test_gradients_of_one_tensor_for_all_are_refused() -> None:
    everything = torch.ones(2, 8, requires_grad=True)

    def own(lr: float) -> None:
        setting(lr, loader())[0](everything)

    for end in in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap").values():
        assert isinstance(end.error, FusionError) and "x.detach().requires_grad_()" in str(end.error)


@pytest.mark.parametrize("source", ["loader", "list", "numpy", "workers"])
def test_only_some_lanes_change_a_batch(source: str) -> None:
    """Before or after they have called with it; others use it again meanwhile."""
    batches: Any = {
        "loader": lambda: loader(),
        "list": lambda: list(zip(*(tensor.split(32) for tensor in data().tensors), strict=True)),
        "numpy": lambda: [(torch.from_numpy(x.numpy().copy()), y) for x, y in loader(shuffle=False)],
        "workers": lambda: DataLoader(DATA, batch_size=48, num_workers=1),
    }[source]

    def own(lr: float) -> Any:
        net, opt, given, criterion = setting(lr, batches())
        sums = []
        for x, y in given:
            rows = x.flatten(1)
            if lr == 0.1:
                x.mul_(2)
            with torch.no_grad():
                sums.append(net(rows).sum().item())
            if lr == 0.05:
                x.add_(1)
                y.clamp_(max=1)
            sums.append(rows.sum().item())
            step(net, opt, criterion, rows, y)
        return sums, weights(net)

    check(own)


def test_two_shuffled_loaders_at_once() -> None:
    def own(lr: float) -> Any:
        net, opt, one, criterion = setting(lr, loader())
        other, short = hfta_tune.prepare(loader(), loader(64))
        seen = []
        for _ in range(2):
            for (x, y), (z, labels) in zip(one, other, strict=True):
                seen.append((x[0, 0].item(), z[0, 0].item()))
                step(net, opt, criterion, x, y)
                step(net, opt, criterion, z, labels)
            seen += [(x[0, 0].item(), z[0, 0].item()) for (x, _), (z, _) in zip(one, short, strict=False)]
        return seen, weights(net)

    check(own)


@pytest.mark.parametrize("draws", [False, True])
def test_seeds_of_each_lane_hold_beyond_what_lanes_share(draws: bool) -> None:
    """A pass over data in their own order is one for all; it draws, as torch has it, from each lane's numbers."""

    def own(seed: int) -> Any:
        net, opt, batches, criterion = setting(0.1, loader(), seed)
        in_order = hfta_tune.prepare(loader(shuffle=False))
        firsts = []
        for _ in range(3):
            iterator = iter(batches)
            if draws and seed:
                torch.manual_seed(7)
            for x, y in iterator:
                firsts.append(x[0, 0].item())
                step(net, opt, criterion, x, y)
            with torch.no_grad():
                firsts += [net(x).mean().item() for x, _ in in_order]
        return firsts, weights(net)

    expected = assert_like_alone({f"{lane}": functools.partial(own, lane // 2) for lane in range(4)}, strategy="vmap")
    assert expected["0"][0] == expected["1"][0] != expected["2"][0]


class Broken(OfItsOwn):
    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise OSError("unreadable")
        return DATA[index]


BROKEN = Broken()


def test_an_error_of_a_loader_is_raised_where_it_would_be_alone() -> None:
    def own(lr: float) -> int:
        net, opt, batches, criterion = setting(lr, DataLoader(BROKEN, batch_size=32))
        read = 0
        try:
            for x, y in batches:
                read += 1
                step(net, opt, criterion, x, y)
        except OSError:
            if lr == 0.1:
                raise
        return read

    ended = in_lanes({str(lr): functools.partial(own, lr) for lr in RATES}, strategy="vmap")
    error = ended.pop("0.1").error
    assert isinstance(error, OSError) and error.__notes__ == ["raised by trial 0.1"]
    assert [end.value for end in ended.values()] == [1, 1]


def test_each_trial_has_an_error_of_its_own() -> None:
    """Of a call for all lanes, or of a loader that they share."""

    def of_a_call(lr: float) -> None:
        net = hfta_tune.prepare(mlp())
        net(torch.ones(2, 7))

    def of_a_loader(lr: float) -> None:
        for _ in setting(lr, DataLoader(BROKEN, batch_size=32))[2]:
            pass

    for function in (of_a_call, of_a_loader):
        ended = in_lanes({str(lr): functools.partial(function, lr) for lr in RATES})
        for name, end in ended.items():
            assert end.error is not None and end.error.__notes__ == [f"raised by trial {name}"]


def test_a_loader_of_arrays_and_objects() -> None:
    class Labelled:
        def __init__(self, labels: Tensor) -> None:
            self.labels = labels

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]).numpy(), Labelled(torch.stack([y for _, y in samples]))

    def own(lr: float) -> Any:
        net, opt, batches, criterion = setting(lr, DataLoader(DATA, batch_size=32, collate_fn=collate))
        for x, given in batches:
            x *= 2
            given.labels = (given.labels + 1) % CLASSES
            step(net, opt, criterion, torch.from_numpy(x), given.labels)
        return weights(net)

    check(own)
