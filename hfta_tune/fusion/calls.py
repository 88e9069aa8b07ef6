"""An array whose lanes call their models and step their optimizers when their own code says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfta_tune.fusion.choice import LANE_BY_LANE, VMAP, StrategyChoice
from hfta_tune.fusion.errors import FusionError
from hfta_tune.fusion.failure import VmapFailed
from hfta_tune.fusion.gradient_rows import GradientRows
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.parts import hand_out, shared, stacked
from hfta_tune.fusion.stack import LaneStack, rows
from hfta_tune.fusion.stacking import Stacking
from hfta_tune.fusion.vmapped import function_for_all
from hfta_tune.fusion.vmapped_steps import VmappedSteps

__all__ = ["Call", "CalledArray", "Outputs", "call_function"]

logger = logging.getLogger(__name__)

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(slots=True)
class Call:
    """What a lane's code gives to a model or function: the leaves of its arguments, and how to put them together."""

    leaves: list[Any]
    structure: Any

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments of these leaves."""
        if self.structure is None:  # positional tensors only
            return tuple(leaves), {}
        args, kwargs = pytree.tree_unflatten(list(leaves), self.structure)
        return args, kwargs


class Outputs:
    """Takes apart what one call for all lanes returns, and makes each lane's own return value."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._leaves: list[Any] = []

    def flatten(self, result: Any) -> tuple[Tensor, ...]:
        """The tensors of what a call returns.

        Raises:
            NotImplementedError: if it holds what may hold tensors and cannot be looked into.
        """
        if isinstance(result, Tensor):
            self._structure, self._leaves = None, [None]
            return (result,)
        leaves, self._structure = pytree.tree_flatten(result)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._leaves = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise NotImplementedError(
                    f"the call returns a {type(leaf).__name__}; return tensors, in tuples, lists or dicts"
                )
        return tensors

    def of_lanes(
        self, tensors: Sequence[Tensor], lanes: tuple[Lane, ...], check: Callable[[Tensor], None]
    ) -> list[Any]:
        """Each lane's return value, from the stacked tensors."""
        handed = [hand_out(tensor, lanes, check) for tensor in tensors]
        if self._structure is None:
            return list(handed[0])
        values = []
        for lane in range(len(lanes)):
            own = iter(handed)
            leaves = [next(own)[lane] if leaf is None else leaf[0] for leaf in self._leaves]
            values.append(pytree.tree_unflatten(leaves, self._structure))
        return values


class CalledArray:
    """Lanes with equal signatures that are called, and stepped, together.

    It is what `FusedArray` is for lanes whose training step is known: here each call of a model is a call of its own,
    its graph goes on into the lanes' own code, and comes back with `backward`.

    Strategies: "vmap", one call for all lanes; or "lane by lane", where lanes call their own models themselves, and
    native optimizers still step for all lanes at once. Both are measured from one optimizer step to the next.

    Attributes:
        steps: How often an optimizer has stepped.
        samples: How many samples its lanes' models were called with, where gradients are on and the call is for all.

    Args:
        device: Where the lanes' tensors are.
        number: Which array of its owner it is.
        strategies: The candidates, of "vmap" and "lane by lane".
        choices: What arrays of these lanes' signature have measured so far; shared between them.
        check: Called with a gradient when a backward pass reaches a model's outputs; may raise.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        number: int,
        strategies: Sequence[str] = (VMAP, LANE_BY_LANE),
        choices: dict[int, StrategyChoice],
        check: Callable[[Tensor], None],
    ) -> None:
        self.number = number
        self.steps = 0
        self.samples = 0
        self.lanes: tuple[Lane, ...] = ()
        self._device = device
        self._check = check
        self._stacking = Stacking(device, take_gradients=False)
        self._strategies = tuple(strategies)
        self._choices = choices
        self._steps: dict[Options, VmappedSteps] = {}
        self._rows: GradientRows | None = None
        self._moves = -1
        self._modes: tuple[bool, ...] | None = None
        self._kinds: set[Hashable] = set()

    @property
    def _choice(self) -> StrategyChoice:
        """What was measured with about as many lanes."""
        size = len(self.lanes).bit_length()
        if size not in self._choices:
            self._choices[size] = StrategyChoice(list(self._strategies), may_compile=False)
        return self._choices[size]

    @property
    def strategy(self) -> str:
        """The strategy of the next call."""
        return self._choice.strategy(len(self.lanes))

    @property
    def seconds_a_step(self) -> dict[str, float]:
        """{strategy: seconds from one step of the optimizers to the next}, as measured."""
        return dict(self._choice.seconds)

    @property
    def measuring(self) -> bool:
        """Whether the time of the present strategy is wanted."""
        return len(self.lanes) > 1 and self._choice.measuring(self.strategy)

    def record(self, seconds: float) -> None:
        """Tell how long it took from one step of the optimizers to the next."""
        self._choice.record(self.strategy, seconds)
        if not self.measuring and len(self._choice.seconds) > 1:
            figures = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds_a_step.items())
            logger.info("%d lanes train by the strategy %r; a step: %s.", len(self.lanes), self.strategy, figures)

    def give_up_vmap(self) -> None:
        """Lane by lane from now on, in all arrays of this signature."""
        self._strategies = (LANE_BY_LANE,)
        for choice in self._choices.values():
            choice.drop(VMAP)

    def change_lanes(self, *, leave: Sequence[Lane] = (), join: Sequence[Lane] = ()) -> None:
        """Take lanes out and in. A leaving lane keeps its state for itself; graphs that are there stay usable."""
        if leave or join:
            self._stacking.change(leave, join)
            self.lanes = tuple(self._stacking.lanes)

    @property
    def present(self) -> LaneStack | None:
        """Where the lanes' tensors are now, if they are together."""
        return self._stacking.present

    def places(self, lane: Lane) -> list[int] | None:
        """Where in memory the tensors of a lane are to be: parameters, then buffers; None if anywhere."""
        stack = self._stacking.present
        if stack is None or lane not in stack.lanes:
            return None
        row = stack.lanes.index(lane)
        return [stacked[row].data_ptr() for stacked in (*stack.parameters.values(), *stack.buffers.values())]

    def gradient_rows(self) -> GradientRows:
        """The gradients of the present stack."""
        stack, _, _ = self._stacking.whole()
        return self._rows_of(stack)

    def call(
        self, slot: str, calls: Sequence[Call], modes: tuple[bool, ...], options: Options, kind: Hashable
    ) -> list[Any]:
        """Call a model of every lane.

        Args:
            slot: Which of the models.
            calls: What each lane gives, in the order of the lanes; equal but for the values of tensors.
            modes: Which of all modules are in training mode.
            options: How the call runs.
            kind: What tells such calls apart.

        Returns:
            Each lane's return value.

        Raises:
            VmapFailed, torch.OutOfMemoryError: Nothing has changed.
        """
        stack, _, template = self._stacking.whole()
        if modes != self._modes or self._moves != self._stacking.moves:
            for module, training in zip(template.model.modules(), modes, strict=True):
                module.training = training
            self._modes, self._moves = modes, self._stacking.moves
        steps = self._steps.setdefault(options, VmappedSteps(self._stacking, options, self._device))
        given, own = _sorted_out(calls, self.lanes)
        outputs = Outputs()
        kept = _kept_tensors(template.model) if kind not in self._kinds else None

        def step(_: Sequence[Lane], model: nn.Module, batch: Any, values: Mapping[Any, Tensor]) -> Any:
            leaves = [values[place] if place in own else leaf for place, leaf in enumerate(batch)]
            args, kwargs = calls[0].arguments(leaves)
            result = model.get_submodule(slot)(*args, **kwargs)
            if kept is not None:
                _refuse_kept_tensors(template.model, kept)
            return result

        if torch.is_grad_enabled():
            self._note_samples(calls[0])
        tensors = steps.outputs(step, given, own, outputs.flatten, (kind, tuple(own)))
        if torch.is_grad_enabled():
            self._rows_of(stack).hold_in(tensors)
        self._kinds.add(kind)
        return outputs.of_lanes(tensors, self.lanes, self._check)

    @torch.no_grad()
    def clip(self, names: Sequence[str], limits: Sequence[float], how: float | None) -> Sequence[Tensor | None] | None:
        """Clip gradients in place, each lane's by its own.

        Args:
            names: The parameters whose gradients are clipped.
            limits: Each lane's limit.
            how: The type of the norm; None clips value by value.

        Returns:
            Each lane's norm before, or Nones; None alone if not every lane has all of the gradients.
        """
        stack, _, _ = self._stacking.whole()
        found = [self._rows_of(stack).bound(name) for name in names]
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(found):
            return None
        flat = [rows(gradient) for gradient in gradients]
        column = torch.tensor(limits, dtype=flat[0].dtype, device=flat[0].device).unsqueeze(1)
        if how is None:
            for gradient in flat:
                torch.minimum(torch.maximum(gradient, -column), column, out=gradient)
            return [None] * len(limits)
        norms = torch.stack([torch.linalg.vector_norm(gradient, how, dim=1) for gradient in flat])
        total = torch.linalg.vector_norm(norms, how, dim=0)
        factor = (column / (total.unsqueeze(1) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(flat, [factor.to(gradient.dtype) for gradient in flat])
        return list(total.unbind())

    def step(self, optimizer: str, own_steps: Sequence[Callable[[], None]]) -> None:
        """Step an optimizer of every lane by the gradients of the lanes' own parameters.

        Args:
            optimizer: Which of the optimizers.
            own_steps: Each lane's stock step. What it raises is put into the lane's `error`.
        """
        self.steps += 1
        if len(self.lanes) == 1 or not self._step_at_once(optimizer):
            for lane, own_step in zip(self.lanes, own_steps, strict=True):
                try:
                    own_step()
                except Exception as error:
                    lane.error = error

    @torch.no_grad()
    def _step_at_once(self, optimizer: str) -> bool:
        if self.strategy == VMAP:
            stack, optimizers, _ = self._stacking.whole()
        else:
            stack, optimizers = self._stacking.parameters()
        if not optimizers.is_native(optimizer):
            return False
        own = self._rows_of(stack)
        found = {name: own.gradient(name) for name in optimizers.trains[optimizer]}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        optimizers.numbers_may_have_changed()
        optimizers.apply(stack.parameters, gradients, optimizers.prepare(frozenset(gradients), only=optimizer))
        return True

    def _note_samples(self, call: Call) -> None:
        first = next((leaf for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
        self.samples += 1 if first is None else len(first)

    def _rows_of(self, stack: Any) -> GradientRows:
        if self._rows is None or self._rows.stack is not stack:
            self._rows = GradientRows(stack)
        return self._rows


def call_function(
    function: Callable[..., Any],
    calls: Sequence[Call],
    lanes: tuple[Lane, ...],
    options: Options,
    check: Callable[[Tensor], None],
) -> list[Any]:
    """Call a function of tensors, such as a criterion, once for all lanes; return each lane's value.

    Args:
        function: The function; it has no state that differs between lanes.
        calls: What each lane gives, equal but for the values of tensors.
        lanes: Whose calls they are.
        options: How it runs.
        check: Called with a gradient when a backward pass reaches the values; may raise.

    Raises:
        VmapFailed: if it does not run under vmap.
    """
    given, own = _sorted_out(calls, lanes)
    outputs = Outputs()

    def one_lane(*values: Tensor) -> tuple[Tensor, ...]:
        leaves = list(given)
        for place, value in zip(own, values, strict=True):
            leaves[place] = value
        args, kwargs = calls[0].arguments(leaves)
        return outputs.flatten(function(*args, **kwargs))

    try:
        tensors = function_for_all(one_lane, tuple(own.values()), options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise VmapFailed(error, getattr(function, "__name__", type(function).__name__)) from error
    return outputs.of_lanes(tensors, lanes, check)


def _kept_tensors(model: nn.Module) -> dict[tuple[str, str], int]:
    """{module, attribute: id} of the tensors that modules keep as plain attributes."""
    return {
        (path, name): id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _refuse_kept_tensors(model: nn.Module, before: Mapping[tuple[str, str], int]) -> None:
    """See that a call has left no tensor in a module, where the code of a lane would look for its own in vain.

    Raises:
        NotImplementedError: if it has.
    """
    for (path, name), number in _kept_tensors(model).items():
        if before.get((path, name)) != number:
            raise NotImplementedError(f"forward keeps a tensor in {path}.{name}; return it")


def _sorted_out(calls: Sequence[Call], lanes: tuple[Lane, ...]) -> tuple[list[Any], dict[int, Tensor]]:
    """The leaves that lanes share, and {place: [lanes, ...]} of those that are each lane's own."""
    given = list(calls[0].leaves)
    own: dict[int, Tensor] = {}
    for place, leaf in enumerate(given):
        if isinstance(leaf, Tensor):
            column = [call.leaves[place] for call in calls]
            if leaf.requires_grad and leaf.is_leaf and any(other is leaf for other in column[1:]):
                raise FusionError(
                    "Several trials ask for gradients of one tensor, so they would get its sum. Make each its own: "
                    "x = x.detach().requires_grad_()."
                )
            if not shared(column):
                own[place] = stacked(column, lanes)
                given[place] = None
    return given, own
