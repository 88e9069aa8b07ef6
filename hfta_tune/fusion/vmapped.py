"""The user's step under vmap: called once for all lanes of a stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch.vmap import lazy_load_decompositions

from hfta_tune.fusion.kernels import LaneKernels
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.stack import Template

__all__ = ["Step", "call_for_all", "function_for_all"]

Step: TypeAlias = Callable[[Sequence[Lane], nn.Module, Any, Mapping[Any, Tensor]], Any]
"""step(lanes, model, batch, values): one call of the user's code that stands for all of `lanes`.

Under vmap it is called once for all lanes of the array, lane by lane once for each. `values` are the
lanes' numbers as 0-d tensors.
"""


def call_for_all(
    step: Step,
    lanes: Sequence[Lane],
    template: Template,
    batch: Any,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    values: Mapping[Any, Tensor],
    finish: Callable[[Any], Any],
    options: Options,
) -> tuple[Any, dict[str, Tensor]]:
    """Call a step once for all lanes.

    Args:
        step: The step.
        lanes: The lanes that it stands for.
        template: The code of one lane.
        batch: What all lanes train on.
        parameters: {name: [lanes, ...]}.
        buffers: {name: [lanes, ...]}, changed in place where the model does so.
        values: {name: [lanes]}.
        finish: Checks what one lane's step returned, and makes tensors of it.
        options: How the lanes are trained.

    Returns:
        What `finish` returned, [lanes, ...], and {name: [lanes, ...]} of the buffers that the model assigned anew.
    """
    # One flat argument for each tensor: vmap spends much of a small step's time on nested ones.
    names = (*parameters, *buffers)
    stacked = (*parameters.values(), *buffers.values(), *values.values())

    def one_lane(*own: Tensor) -> tuple[Any, dict[str, Tensor]]:
        tensors = dict(zip(names, own[: len(names)], strict=True))
        held = {name: tensors[name] for name in buffers}
        with template.holding(tensors):
            result = finish(step(lanes, template.model, batch, dict(zip(values, own[len(names) :], strict=True))))
        # What is another tensor now was assigned anew, not changed in place.
        return result, {name: tensors[name] for name, buffer in held.items() if tensors[name] is not buffer}

    with _quiet_and_batchable(), options.autocast(stacked[0].device), LaneKernels():
        result: tuple[Any, dict[str, Tensor]] = _over_lanes(one_lane, stacked)
    return result


def function_for_all(function: Callable[..., Any], stacked: Sequence[Tensor], options: Options) -> Any:
    """Call a function of tensors once for all lanes; every tensor is [lanes, ...], and so is what it returns."""
    with _quiet_and_batchable(), options.autocast(stacked[0].device), LaneKernels():
        return _over_lanes(function, stacked)


def _over_lanes(function: Callable[..., Any], stacked: Sequence[Tensor]) -> Any:
    """What torch.vmap(function, randomness="different")(*stacked) returns, a tenth of a millisecond sooner.

    The function returns tensors, in dicts and tuples.
    """
    lazy_load_decompositions()
    lanes = len(stacked[0])
    level = _functorch._vmap_increment_nesting(lanes, "different")

    def unwrapped(result: Any) -> Any:
        if isinstance(result, Tensor):
            return _functorch._remove_batch_dim(result, level, lanes, 0)
        if isinstance(result, dict):
            return {name: unwrapped(part) for name, part in result.items()}
        return tuple(map(unwrapped, result))

    try:
        return unwrapped(function(*[_functorch._add_batch_dim(tensor, 0, level) for tensor in stacked]))
    finally:
        _functorch._vmap_decrement_nesting()


@contextlib.contextmanager
def _quiet_and_batchable() -> Iterator[None]:
    """Keep attention layers off their fused inference path, which has no batching rule.

    And keep torch from asking the user to report operations that it batches by a loop.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]
