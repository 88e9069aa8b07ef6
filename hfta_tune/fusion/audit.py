"""The audit: what a fused step does to copies of the lanes, compared with plain PyTorch, lane by lane."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hfta_tune.fusion.alone import clip_lane, train_lane
from hfta_tune.fusion.batch import clone_batch
from hfta_tune.fusion.contract import MetricName
from hfta_tune.fusion.failure import first_line
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.vmapped import Step

if TYPE_CHECKING:
    from hfta_tune.fusion.array import FusedArray

__all__ = [
    "Difference",
    "NotAuditable",
    "audit_of_tensors",
    "audit_vmap",
    "copies",
    "difference_of",
    "draws_random_numbers",
    "largest_difference",
    "random_state",
    "relative_of",
]

# Sums of some thousand terms, in another order, part by about this much of their largest.
_RELATIVE = 1e-3
_RELATIVE_LOWER = 5e-2  # in bfloat16 or float16
_ABSOLUTE = 1e-6
# Updates are differences of parameters, which are rounded a few times.
_ROUNDINGS = 4
# Elements whose gradient is rounding only: an adaptive optimizer makes whole steps of it, in any direction.
_ROUNDING = 1e-3


class NotAuditable(Exception):
    """Why no two runs of a step can be compared, as a clause."""


def draws_random_numbers(what: str = "step") -> NotAuditable:
    """What to raise where draws would differ."""
    return NotAuditable(f"the {what} draws random numbers besides its Dropout modules'")


ArrayOf: TypeAlias = Callable[[Sequence[Lane], Options], "FusedArray"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a fused step departs from the same step lane by lane.

    Attributes:
        trial: Whose.
        what: What was compared, such as "the gradient of 'conv.weight'".
        largest: The largest absolute difference of an element.
        scale: The largest absolute value that plain PyTorch has there.
        allowed: Up to what `largest` is rounding.
    """

    trial: str
    what: str
    largest: float
    scale: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding."""
        return self.largest > self.allowed

    @property
    def share(self) -> float:
        """`largest` as a part of `allowed`; nothing of nothing is 0."""
        return self.largest / self.allowed if self.allowed else self.largest and float("inf")

    def __str__(self) -> str:
        return (
            f"{self.trial}: {self.what} differs by up to {self.largest:.3g}, where plain PyTorch has {self.scale:.3g}"
        )


def audit_vmap(lanes: Sequence[Lane], options: Options, step: Step, batch: Any, array_of: ArrayOf) -> Difference | None:
    """Train copies of lanes on a batch, under vmap and lane by lane, and compare them.

    First losses, gradients and buffers, then what the optimizers make of the same gradients. Dropout is
    switched off.

    Args:
        lanes: The lanes, which stay as they are.
        options: How they are trained.
        step: The training step.
        batch: What it trains on.
        array_of: array_of(lanes, options) -> an empty array's worth of them, to train under vmap.

    Returns:
        The first difference that is wrong, else the one that comes nearest to it. None if a lane's own code raises.

    Raises:
        NotAuditable: if the step draws random numbers besides, or a lane cannot be copied.
        VmapFailed: if it does not run under vmap.
    """
    options = _keeping_gradients(options)
    alone, fused = copies(lanes), copies(lanes)
    originals = dict(zip((*alone, *fused), (*lanes, *lanes), strict=True))
    device = next(iter(lanes[0].model.parameters())).device
    before = random_state(device)
    expected = []
    for lane in alone:
        call = functools.partial(step, [originals[lane]], lane.model, clone_batch(batch), lane.numbers_on(device))
        expected.append(train_lane(call, lane, options, device, update=False))
        if lane.error is not None:
            return None  # it fails alone too, and will be told so
    if not torch.equal(random_state(device), before):
        raise draws_random_numbers()
    array = array_of(fused, options)
    relative = relative_of(lanes, options)
    got = array.train_step(_for_copies(step, originals), clone_batch(batch))
    gradients = array.accumulated_gradients()

    def differences() -> Iterator[Difference]:
        for row, (own, other) in enumerate(zip(alone, fused, strict=True)):
            for name, loss in expected[row].items():
                yield _of_loss(own, name, loss, got[name][row], relative)
            of_own = {name: parameter.grad for name, parameter in own.parameters()}
            for name, gradient in of_own.items():
                one = torch.zeros(()) if gradient is None else gradient
                its = gradients[name][row] if name in gradients else one * 0
                yield difference_of(own.name, f"the gradient of {name!r}", one, its, relative)
            yield from _of_buffers(own, other, relative)
        started = [_parameters(own) for own in alone]
        for row, own in enumerate(alone):
            for name, parameter in own.parameters():
                parameter.grad = gradients[name][row].clone() if name in gradients else None
            _step(own)
        array.step_optimizers()
        for own, other, before in zip(alone, fused, started, strict=True):
            theirs = dict(other.parameters())
            for name, parameter in own.parameters():
                yield _of_update(own.name, name, before[name], parameter, theirs[name], _RELATIVE)

    return largest_difference(differences())


def audit_of_tensors(
    strategy: str, lanes: Sequence[Lane], options: Options, step: Step, batch: Any, array_of: ArrayOf
) -> Difference | None:
    """Train copies of lanes on a batch, under vmap and by the recorded or compiled step, and compare them.

    As `audit_vmap`, with the strategy to compare besides.
    """
    if any(_draws_inside(lane.model) for lane in lanes):
        raise draws_random_numbers()
    relative = relative_of(lanes, options)
    started = [_parameters(lane) for lane in lanes]
    vmapped, compiled, probe = copies(lanes), copies(lanes), copies(lanes)
    originals = dict(zip((*vmapped, *probe), (*lanes, *lanes), strict=True))
    step_of_copies = _for_copies(step, originals)
    probing = array_of(probe, _keeping_gradients(options))
    probing.train_step(step_of_copies, clone_batch(batch))
    gradients = probing.accumulated_gradients()
    expected = array_of(vmapped, options).train_step(step_of_copies, clone_batch(batch), last=True)
    got = array_of(compiled, options).train_of_tensors(strategy, step_of_copies, clone_batch(batch), gradients)
    if got is None:
        return None

    def differences() -> Iterator[Difference]:
        for row, (own, other) in enumerate(zip(vmapped, compiled, strict=True)):
            for name, losses in expected.items():
                yield _of_loss(own, name, losses[row], got[name][row], relative)
            yield from _of_buffers(own, other, relative)
            theirs = dict(other.parameters())
            for name, parameter in own.parameters():
                if name in gradients:
                    sizes = gradients[name][row].abs()
                    counts = sizes > _ROUNDING * sizes.max()
                    before = started[row][name][counts]
                    # Adaptive optimizers magnify the rounding of small gradients.
                    yield _of_update(own.name, name, before, parameter[counts], theirs[name][counts], 10 * relative)

    return largest_difference(differences())


def largest_difference(differences: Iterable[Difference]) -> Difference | None:
    """The first that is wrong, else the largest part of what is allowed; what follows a wrong one is its effect."""
    worst = None
    for difference in differences:
        if difference.is_wrong:
            return difference
        if worst is None or difference.share > worst.share:
            worst = difference
    return worst


def _keeping_gradients(options: Options) -> Options:
    """Options with which a first batch's gradients are accumulated and not used up."""
    return replace(options, accumulate=max(2, options.accumulate))


def _for_copies(step: Step, originals: Mapping[Lane, Lane]) -> Step:
    """A step that speaks for the originals of the lanes that it is called for."""

    def step_of_copies(members: Sequence[Lane], model: nn.Module, batch: Any, values: Mapping[Any, Tensor]) -> Any:
        return step([originals[member] for member in members], model, batch, values)

    return step_of_copies


def copies(lanes: Sequence[Lane]) -> list[Lane]:
    """Copy lanes, without dropout, whose draws nobody could compare."""
    copied = []
    for lane in lanes:
        memo: dict[int, Any] = {}
        try:
            model = copy.deepcopy(lane.model, memo)
            optimizers = {name: _copy_of(optimizer, memo) for name, optimizer in lane.optimizers.items()}
        except Exception as error:
            raise NotAuditable(f"model and optimizer cannot be copied ({first_line(error)})") from error
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.dropout = 0.0
        copied.append(Lane(lane.name, model, optimizers, {}, lane.values, lane.clipping))
    return copied


def _copy_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer; torch's way of copying leaves out what a class of the user's own keeps besides."""
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and name != "step":  # a scheduler wraps it, for the original
            setattr(copied, name, copy.deepcopy(value, memo))
    return copied


def _step(lane: Lane) -> None:
    clip_lane(lane)
    for optimizer in lane.optimizers.values():
        try:
            optimizer.step()
        except Exception as error:
            raise NotAuditable(f"a copy of {type(optimizer).__name__} does not step ({first_line(error)})") from error


def relative_of(lanes: Sequence[Lane], options: Options) -> float:
    """Which part of the largest value may be rounding."""
    lower = any(parameter.dtype in (torch.bfloat16, torch.float16) for _, parameter in lanes[0].parameters())
    return _RELATIVE_LOWER if lower or options.precision == "bf16" else _RELATIVE


def _parameters(lane: Lane) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in lane.parameters()}


def _draws_inside(model: nn.Module) -> bool:
    """Whether layers of a model have dropout that is no module of its own: a compiled step has its number inside."""
    return any(
        isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and bool(module.dropout) for module in model.modules()
    )


def random_state(device: torch.device) -> Tensor:
    """The state of the device's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _of_loss(lane: Lane, optimizer: str, expected: Tensor, got: Tensor, relative: float) -> Difference:
    kind = "metric" if isinstance(optimizer, MetricName) else "loss"
    return difference_of(
        lane.name, f"the {kind} {str(optimizer)!r}" if optimizer else "the loss", expected, got, relative
    )


def _of_buffers(one: Lane, other: Lane, relative: float) -> Iterator[Difference]:
    for (name, tensor), (_, its) in zip(one.buffers(), other.buffers(), strict=True):
        yield difference_of(one.name, f"the buffer {name!r}", tensor, its, relative)


def _of_update(trial: str, name: str, before: Tensor, expected: Tensor, got: Tensor, relative: float) -> Difference:
    """Compare what was added to a parameter: of the parameter it is a small part."""
    largest = float(before.abs().max()) if before.numel() else 0.0
    rounded = _ROUNDINGS * torch.finfo(before.dtype).eps * largest
    what = f"the update of the parameter {name!r}"
    return difference_of(trial, what, expected - before, got - before, relative, rounded)


def difference_of(
    trial: str, what: str, expected: Tensor, got: Tensor, relative: float, absolute: float = _ABSOLUTE
) -> Difference:
    """Compare what should be the same."""
    one, other = expected.detach().double(), got.detach().double()
    if not one.numel():
        return Difference(trial, what, 0.0, 0.0, absolute)
    same = (one == other) | (one.isnan() & other.isnan())
    scale = float(one.abs().nan_to_num().max())
    largest = float(torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=float("inf")).max())
    return Difference(trial, what, largest, scale, relative * scale + absolute)
