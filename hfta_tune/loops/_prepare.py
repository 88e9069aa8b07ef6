"""What a training function calls: prepare() and its like. Outside fused runs they do what plain PyTorch does."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hfta_tune.fusion import FusionError
from hfta_tune.loops._classes import make_bare, make_prepared, prepared_class_of
from hfta_tune.loops._criteria import Criterion, PreparedFunction, is_criterion
from hfta_tune.loops._hub import LoopLane, current_lane
from hfta_tune.loops._loader import PreparedLoader
from hfta_tune.loops._trial import LoopTrial

__all__ = ["accumulate", "backward", "clip_grad_norm_", "clip_grad_value_", "prepare", "unprepare"]

_accumulated: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
# Threads and lanes each have their own.
_scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
_owners: weakref.WeakKeyDictionary[nn.Module, LoopLane] = weakref.WeakKeyDictionary()


def prepare(*objects: Any) -> Any:
    """Make models, optimizers, schedulers, loaders and criteria ready to train with those of other trials as one.

    In a function that `hfta_tune.optimize` or a packed Tune run trains as a lane, what is returned is used like what
    was given: models, criteria that are modules, optimizers and schedulers are the same objects, and loaders and other
    criteria are wrapped. Anywhere else everything comes back as it was given.

    Lanes read a shared loader's batches in one order, that of the first of them. A model's outputs are views; change
    them out of place (`y = y / t`, not `y /= t`). The training function calls `hfta_tune.backward(loss)` in place of
    `loss.backward()`.

    Args:
        objects: Any number of them, in any order. A model is a torch.nn.Module; a criterion is a loss module of torch,
            a module without parameters and buffers, or a function of tensors; a loader is any other iterable.

    Returns:
        One object for one, else a tuple in the order of the arguments.

    Raises:
        TypeError: if an object is none of these.
        FusionError: if another trial has prepared the same model or optimizer.

    Example:
        >>> import torch, hfta_tune
        >>> model = torch.nn.Linear(2, 1)
        >>> model is hfta_tune.prepare(model)  # outside a fused run
        True
    """
    for number, given in enumerate(objects, 1):
        if not _is_preparable(given):
            raise TypeError(
                f"prepare got {given!r:.80} as argument {number}; pass models, optimizers, schedulers, loaders "
                "and criteria."
            )
    lane = current_lane()
    ready = objects if lane is None else _prepare_in(lane, objects)
    return ready[0] if len(ready) == 1 else tuple(ready)


def _is_preparable(given: Any) -> bool:
    known = isinstance(given, (nn.Module, Optimizer, LRScheduler)) or callable(given)
    return known or hasattr(given, "__iter__") or hasattr(given, "__getitem__")


def _prepare_in(lane: LoopLane, objects: Iterable[Any]) -> list[Any]:
    fusion = lane.hub.fusion
    if lane.trial is None:
        lane.trial = LoopTrial(lane, fusion)
    trial: LoopTrial = lane.trial
    ready, models, optimizers = [], [], []
    for given in objects:
        if isinstance(given, nn.Module) and is_criterion(given):
            criterion = Criterion(given, fusion.function_key)
            if criterion.key is not None:  # else it is called as it is
                make_prepared(given, criterion)
                fusion.criteria.add(given)
        elif isinstance(given, nn.Module):
            _own(lane, given)
            try:
                make_prepared(given)
            except TypeError as error:
                fusion.warn_once(f"{type(given).__name__} cannot be prepared, and trains lane by lane: {error}")
            models.append(given)
        elif isinstance(given, Optimizer):
            if "zero_grad" in vars(given) and not trial.has(given):
                raise FusionError(
                    f"{trial.name}: another trial has prepared the same {type(given).__name__}; build the optimizer "
                    "inside the function that is trained."
                )
            optimizers.append(given)
        elif isinstance(given, (LRScheduler, PreparedLoader)):
            pass
        elif callable(given) and not hasattr(given, "__iter__"):
            criterion = Criterion(given, fusion.function_key)
            if criterion.key is not None:
                given = PreparedFunction(given, criterion)
        else:
            given = PreparedLoader(given)
        ready.append(given)
    if models or optimizers:
        trial.add(models, optimizers)
        if trial.obstacle is not None and trial.can_be_judged:
            fusion.warn_once(f"train one by one: {trial.obstacle}.", trial.name)
    return ready


def _own(lane: LoopLane, module: nn.Module) -> None:
    owner = _owners.get(module)
    if owner is not None and owner is not lane and owner.ended is None:
        raise FusionError(
            f"trial {lane.name}: trial {owner.name} has prepared the same {type(module).__name__}; build the model "
            "inside the function that is trained, or leave out of prepare() what is not trained."
        )
    _owners[module] = lane


def unprepare(model: nn.Module) -> nn.Module:
    """Return the bare module of a prepared one, with this trial's weights in tensors of their own.

    It is the same object, no longer prepared: calls of it are this trial's alone. Prepare it again to go on.
    """
    lane = current_lane()
    if lane is not None and lane.trial is not None and prepared_class_of(model) is not None:
        lane.trial.own_storage()
    make_bare(model)
    return model


def backward(loss: Tensor, *, retain_graph: bool | None = None) -> None:
    """Compute gradients of a loss: `loss.backward()`, with those of other trials as one.

    Within `accumulate`, of the loss divided by its steps.
    """
    lane = current_lane()
    scale = _scale.get()
    if lane is None or lane.trial is None:
        (loss if scale == 1 else loss * scale).backward(retain_graph=retain_graph)
        return
    lane.trial.backward(loss, scale, retain_graph)


@contextlib.contextmanager
def accumulate(model: nn.Module, steps: int) -> Iterator[bool]:
    """Average gradients over `steps` batches: in it, `backward` divides the loss by `steps`.

    Yields whether this is the last of the batches, so that the optimizer is to step:

        with hfta_tune.accumulate(model, 4) as last:
            hfta_tune.backward(criterion(model(x), y))
            if last:
                optimizer.step()
                optimizer.zero_grad()

    Raises:
        ValueError: if `steps` is no positive integer.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer but got {steps!r}. It is over how many batches to average.")
    count = _accumulated[model] = _accumulated.get(model, 0) + 1
    before = _scale.get()
    _scale.set(before / steps)
    try:
        yield count % steps == 0
    finally:
        _scale.set(before)


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, for this trial's gradients; `parameters` may be a model. Returns their norm."""
    own = _parameters(parameters)

    def bare() -> Any:
        return nn.utils.clip_grad_norm_(own, max_norm, norm_type, error_if_nonfinite)

    lane = current_lane()
    if lane is None or lane.trial is None:
        norm: Tensor = bare()
        return norm
    norm = lane.trial.clip(own, float(max_norm), float(norm_type), bare)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} of the gradients is {norm}, so it cannot be clipped.")
    return norm


def clip_grad_value_(parameters: nn.Module | Tensor | Iterable[Tensor], clip_value: float) -> None:
    """torch.nn.utils.clip_grad_value_, for this trial's gradients; `parameters` may be a model."""
    own = _parameters(parameters)
    lane = current_lane()
    if lane is None or lane.trial is None:
        nn.utils.clip_grad_value_(own, clip_value)
    else:
        lane.trial.clip(own, float(clip_value), None, lambda: nn.utils.clip_grad_value_(own, clip_value))


def _parameters(given: nn.Module | Tensor | Iterable[Tensor]) -> list[Any]:
    if isinstance(given, nn.Module):
        return list(given.parameters())
    return [given] if isinstance(given, Tensor) else list(given)
