"""One `self` for several trials."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hfta_tune._guard import AttributeUse, shared_self, watched_self
from hfta_tune.fusion import FusionError


class Base:
    limit = 3

    def __init__(self, width: int, criterion: Any = None) -> None:
        self.width = width
        self.criterion = criterion
        self.config = {"width": width}

    @property
    def double(self) -> int:
        return 2 * self.width

    def scaled(self) -> int:
        return self.limit * self.width


class Derived(Base):
    def scaled(self) -> int:
        return super().scaled() + 1


def shared(*trainables: Base) -> Any:
    return shared_self(
        trainables, [f"t{i}" for i in range(len(trainables))], "training_step", {"shared": True}, AttributeUse()
    )


def test_equal_attributes_methods_and_super() -> None:
    guard = shared(Derived(4), Derived(4))
    assert (guard.width, guard.double, guard.scaled(), guard.limit) == (4, 8, 13, 3)
    assert isinstance(guard, Derived)
    assert guard.config == {"shared": True}


@pytest.mark.parametrize("read", [lambda g: g.width, lambda g: g.double, lambda g: g.scaled()])
def test_a_difference_is_an_error_that_names_it(read: Any) -> None:
    guard = shared(Derived(4), Derived(4), Derived(5))
    with pytest.raises(FusionError, match=r"training_step reads self\.width.*trial t0 and trial t2"):
        read(guard)


def test_an_attribute_that_only_some_have() -> None:
    one, other = Base(1), Base(1)
    one.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(FusionError, match=r"self\.extra"):
        _ = shared(other, one).extra
    with pytest.raises(AttributeError, match="nowhere"):
        _ = shared(other, one).nowhere


def test_modules_are_compared_by_their_form_and_tensors() -> None:
    weights = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])]
    losses = [Base(1, nn.CrossEntropyLoss(weight=weight)) for weight in weights]
    assert isinstance(shared(*losses[:2]).criterion, nn.CrossEntropyLoss)
    with pytest.raises(FusionError, match=r"self\.criterion"):
        _ = shared(*losses).criterion


def test_the_same_object_is_equal_whatever_it_is() -> None:
    thing = object()
    assert shared(Base(1, thing), Base(1, thing)).criterion is thing
    with pytest.raises(FusionError, match=r"self\.criterion"):
        _ = shared(Base(1, object()), Base(1, object())).criterion


def test_assignment_reaches_every_trial() -> None:
    trainables = [Base(1), Base(2)]
    guard = shared(*trainables)
    guard.width = 9
    assert [t.width for t in trainables] == [9, 9] and guard.width == 9


def test_a_watched_self_notes_reads_and_writes() -> None:
    trainable, read, written = Derived(4), {}, {}
    guard = watched_self(trainable, {"c": 1}, read, written)
    guard.classes = 10
    assert (guard.scaled(), guard.classes, guard.config) == (13, 10, {"c": 1})
    assert read == {"width": 4} and written == {"classes": 10}
    assert trainable.classes == 10  # type: ignore[attr-defined]
