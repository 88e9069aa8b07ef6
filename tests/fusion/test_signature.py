"""Signatures of models: what splits arrays, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfta_tune.fusion import form_of_optimizer, model_signature, obstacle_of_optimizer, optimizer_split


class Scaled(nn.Module):
    """A module with plain attributes."""

    def __init__(self, scale: Any = 1.0, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = scale
        self.act = act
        self.me = [self.linear]  # a reference to a part of the same tree

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * self.scale


def tied(tie: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tie:
        model[1].weight = model[0].weight
    return model


def frozen(freeze: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(not freeze)
    return model


def hooked(hook: Callable[..., Any] | None) -> nn.Module:
    model = nn.Linear(3, 3)
    if hook is not None:
        model.register_forward_hook(hook)
    return model


def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_models_with_other_weights_are_alike() -> None:
    one, other = Scaled(), Scaled()
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert model_signature(one) == model_signature(other)
    assert model_signature(one).obstacle is None


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_the_p_of_dropout_may_differ(kind: type[nn.Dropout]) -> None:
    assert model_signature(nn.Sequential(kind(0.1))) == model_signature(nn.Sequential(kind(0.5)))


def test_training_mode_is_the_engines() -> None:
    assert model_signature(nn.Linear(2, 2).eval()) == model_signature(nn.Linear(2, 2))


DIFFERENT: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 4)),
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3, bias=False)),
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3).double()),
    (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.Tanh())),
    (lambda: nn.Sequential(nn.ReLU()), lambda: nn.ModuleList([nn.ReLU()])),
    (lambda: nn.Conv1d(2, 2, 3, padding=1), lambda: nn.Conv1d(2, 2, 3, padding=2)),
    (lambda: nn.AlphaDropout(0.1), lambda: nn.AlphaDropout(0.2)),
    (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, momentum=0.3)),
    (lambda: Scaled(1.0), lambda: Scaled(2.0)),
    (lambda: Scaled(act=F.relu), lambda: Scaled(act=torch.tanh)),
    (lambda: tied(True), lambda: tied(False)),
    (lambda: frozen(True), lambda: frozen(False)),
    (lambda: hooked(double), lambda: hooked(None)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_what_splits_arrays(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    assert model_signature(one()) == model_signature(one())
    assert model_signature(one()) != model_signature(other())


def test_an_attribute_that_cannot_be_compared_never_fuses_and_is_named() -> None:
    signature = model_signature(nn.Sequential(Scaled(object())))
    assert signature.obstacle is not None and "0: attribute 'scale'" in signature.obstacle
    assert signature != model_signature(nn.Sequential(Scaled(object())))


def test_the_split_into_groups_is_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": [model[1].bias]}]
    assert optimizer_split(model, torch.optim.SGD(groups, lr=1.0)) == (("0.weight", "0.bias"), ("1.bias",))
    with pytest.raises(KeyError):
        optimizer_split(model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


def form(kind: type[torch.optim.Optimizer], **arguments: Any) -> Any:
    return form_of_optimizer(kind(nn.Linear(1, 1).parameters(), **arguments))


def test_numbers_of_an_optimizer_may_differ_and_flags_may_not() -> None:
    sgd, adam, adamw, rmsprop = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
    assert form(sgd, lr=0.1, momentum=0.9) == form(sgd, lr=0.2, weight_decay=0.1)
    assert form(sgd, lr=0.1, momentum=0.9) != form(sgd, lr=0.1, momentum=0.9, nesterov=True)
    assert form(adam, lr=0.1, betas=(0.5, 0.9)) == form(adam, eps=1e-3)
    assert form(adam, amsgrad=True) != form(adam)
    assert form(adam) != form(adamw)
    assert form(rmsprop, momentum=0.9) == form(rmsprop)
    assert form(rmsprop, centered=True) != form(rmsprop)
    assert form(torch.optim.Adafactor) == form(torch.optim.Adafactor, maximize=True)  # each lane's own code


def test_an_optimizer_that_needs_the_loss_again() -> None:
    lbfgs = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    assert "LBFGS" in (obstacle_of_optimizer(lbfgs) or "")
    assert obstacle_of_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())) is None
