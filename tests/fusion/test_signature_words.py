"""What tells two signatures apart, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from hfta_tune.fusion import change_of_model, change_of_optimizers, model_signature


def stack(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


def tied(shared: bool) -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if shared:
        second.weight = first.weight
    return stack(first, second)


def frozen() -> nn.Module:
    return stack(nn.Linear(2, 3)).requires_grad_(False)


def marked(mark: Any) -> nn.Module:
    model = nn.Linear(2, 3)
    model.mark = mark
    return model


CHANGES: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = [
    (
        lambda: stack(nn.Linear(2, 3), nn.ReLU()),
        lambda: stack(nn.Linear(2, 4), nn.ReLU()),
        "changes the shape of 0.weight from [3, 2] to [4, 2]",
    ),
    (lambda: stack(nn.ReLU()), lambda: stack(nn.Tanh()), "changes module 0 from ReLU to Tanh"),
    (lambda: nn.Linear(2, 3), lambda: stack(nn.Linear(2, 3)), "changes the model from Linear to Sequential"),
    (lambda: stack(nn.ReLU()), lambda: stack(nn.ReLU(), nn.Tanh()), "adds module 1 (Tanh)"),
    (
        lambda: stack(*(nn.ReLU() for _ in range(6))),
        lambda: stack(nn.ReLU()),
        "removes modules 1 (ReLU), 2 (ReLU), 3 (ReLU) and 2 more",
    ),
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3, bias=False), "removes bias of shape [3]"),
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3).double(), "changes the dtype of weight from torch.float32 to "),
    (lambda: stack(nn.Linear(2, 3)), frozen, "changes the requires_grad of 0.weight from True to False"),
    (
        lambda: stack(nn.BatchNorm1d(3, eps=1e-5)),
        lambda: stack(nn.BatchNorm1d(3, eps=0.5)),
        "changes attribute 'eps' of module 0 (BatchNorm1d) from 1e-05 to 0.5",
    ),
    (lambda: marked("a"), lambda: marked("b"), "changes attribute 'mark' of the model (Linear) from 'a' to 'b'"),
    (lambda: marked([1]), lambda: marked([2]), "changes attribute 'mark' of the model (Linear)"),
    (lambda: marked(object()), lambda: marked(object()), "or makes another object of it"),
    (lambda: tied(False), lambda: tied(True), "which of them are shared"),
    (
        lambda: stack(nn.Linear(2, 3)),
        lambda: stack(parametrizations.weight_norm(nn.Linear(2, 3))),
        "changes module 0 from Linear to parametrized Linear",
    ),
]


@pytest.mark.parametrize(("build", "build_other", "words"), CHANGES)
def test_changes_of_models(build: Callable[[], nn.Module], build_other: Callable[[], nn.Module], words: str) -> None:
    change = change_of_model(model_signature(build()), model_signature(build_other()))
    assert change is not None and words in change


@pytest.mark.parametrize("build", [build for build, _, words in CHANGES if "another object" not in words])
def test_no_change(build: Callable[[], nn.Module]) -> None:
    assert change_of_model(model_signature(build()), model_signature(build())) is None


class Adam:
    pass


class SGD:
    pass


FORM = (Adam, "native", ((("amsgrad", False), ("maximize", False)),))
AMSGRAD = (Adam, "native", ((("amsgrad", True), ("maximize", False)),))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (((FORM,), (), None), (((SGD, "views"),), (), None), "changes the optimizer from Adam to SGD"),
        (((FORM,), (), None), ((AMSGRAD,), (), None), "changes amsgrad of Adam from False to True"),
        (((FORM,), (), None), (((Adam, "views"),), (), None), "changes how Adam updates"),
        (((FORM,), ("a",), None), ((FORM,), ("b",), None), "changes which parameters the optimizer's groups hold"),
        (((FORM,), (), None), ((FORM,), (), "norm"), "changes the clipping of gradients from None to norm"),
        (((FORM,), (), None), ((FORM,), (), None), None),
    ],
)
def test_changes_of_optimizers(one: Any, other: Any, words: str | None) -> None:
    assert change_of_optimizers(one, other) == words
