"""The audit of lanes that are called when their own code says so: their calls one by one against the one for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune.fusion.audit import (
    Difference,
    copies,
    draws_random_numbers,
    largest_difference,
    random_state,
    relative_of,
)
from hfta_tune.fusion.audit import difference_of as compare
from hfta_tune.fusion.calls import Call, CalledArray, call_function
from hfta_tune.fusion.choice import VMAP
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.options import Options

__all__ = ["audit_call", "audit_function"]


def audit_call(
    lanes: Sequence[Lane],
    slot: str,
    calls: Sequence[Call],
    modes: Sequence[bool],
    options: Options,
    device: torch.device,
) -> Difference | None:
    """Call copies of the lanes' models one by one and all at once, and compare outputs, gradients and buffers.

    The gradients are those of a sum of the outputs with weights drawn for it. Dropout is switched off.

    Args:
        lanes: The lanes, which stay as they are.
        slot: Which of a lane's models is called.
        calls: With what, in the order of the lanes.
        modes: Which of a lane's modules are in training mode.
        options: How the call runs.
        device: Where the lanes' tensors are.

    Returns:
        As `audit_vmap`.

    Raises:
        NotAuditable: if the call draws random numbers besides, or a model cannot be copied.
        VmapFailed: if it does not run under vmap.
    """
    bare = [Lane(lane.name, lane.model, {}, {}, lane.values, lane.clipping) for lane in lanes]
    alone, fused = copies(bare), copies(bare)
    for lane in (*alone, *fused):
        for module, training in zip(lane.model.modules(), modes, strict=True):
            module.training = training
    calls = [Call([_own(leaf) for leaf in call.leaves], call.structure) for call in calls]
    before = random_state(device)
    expected = []
    for lane, call in zip(alone, calls, strict=True):
        args, kwargs = call.arguments(call.leaves)
        with options.autocast(device):
            expected.append(_tensors(lane.model.get_submodule(slot)(*args, **kwargs)))
    if not torch.equal(random_state(device), before):
        raise draws_random_numbers("call")
    array = CalledArray(device, number=-1, strategies=(VMAP,), choices={}, check=lambda gradient: None)
    array.change_lanes(join=fused)
    got = [_tensors(value) for value in array.call(slot, calls, tuple(modes), options, "audit")]
    _backward(expected)
    rows = array.gradient_rows()
    rows.collect()
    _backward(got)
    rows.deal_out(array.lanes)
    relative = relative_of(lanes, options)

    def differences() -> Iterator[Difference]:
        for own, other, ones, others in zip(alone, fused, expected, got, strict=True):
            yield from _of_outputs(own.name, ones, others, relative)
            theirs = dict(other.parameters())
            for name, parameter in own.parameters():
                yield _of_gradient(own.name, name, parameter, theirs[name], relative)
            for (name, buffer), (_, its) in zip(own.buffers(), other.buffers(), strict=True):
                yield compare(own.name, f"the buffer {name!r}", buffer, its, relative)

    return largest_difference(differences())


def audit_function(
    function: Callable[..., Any], calls: Sequence[Call], lanes: tuple[Lane, ...], options: Options
) -> Difference | None:
    """Call a function of tensors lane by lane and all at once; compare values and gradients, as `audit_call`."""
    device = torch.device("cpu")
    given = [[Call([_own(leaf) for leaf in call.leaves], call.structure) for call in calls] for _ in range(2)]
    expected = []
    for call in given[0]:
        device = next((leaf.device for leaf in call.leaves if isinstance(leaf, Tensor)), device)
        before = random_state(device)
        args, kwargs = call.arguments(call.leaves)
        with options.autocast(device):
            expected.append(_tensors(function(*args, **kwargs)))
        if not torch.equal(random_state(device), before):
            raise draws_random_numbers("criterion")
    values = call_function(function, given[1], lanes, options, lambda gradient: None)
    got = [_tensors(value) for value in values]
    _backward(expected)
    _backward(got)
    relative = relative_of(lanes, options)

    def differences() -> Iterator[Difference]:
        for lane, ones, others, own, other in zip(lanes, expected, got, *given, strict=True):
            yield from _of_outputs(lane.name, ones, others, relative)
            for place, (leaf, its) in enumerate(zip(own.leaves, other.leaves, strict=True)):
                if isinstance(leaf, Tensor):
                    yield _of_gradient(lane.name, f"argument {place}", leaf, its, relative)

    return largest_difference(differences())


def _own(leaf: Any) -> Any:
    """A leaf of a call that belongs to no other graph."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _backward(outputs: Sequence[Sequence[Tensor]]) -> None:
    """Differentiate a sum of all outputs, with the same weights each time."""
    generator = torch.Generator().manual_seed(0)
    roots, weights = [], []
    for output in (output for own in outputs for output in own):
        weight = torch.randn(output.shape, generator=generator)
        if output.requires_grad:
            roots.append(output)
            weights.append(weight.to(output))
    if roots:
        torch.autograd.backward(roots, weights)


def _of_outputs(trial: str, ones: Sequence[Tensor], others: Sequence[Tensor], relative: float) -> Iterator[Difference]:
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        yield compare(trial, f"output {number}" if len(ones) > 1 else "the output", one, other, relative)


def _of_gradient(
    trial: str, name: str, one: Tensor | nn.Parameter, other: Tensor | nn.Parameter, relative: float
) -> Difference:
    gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in (one, other)]
    return compare(trial, f"the gradient of {name!r}", gradients[0], gradients[1], relative)
