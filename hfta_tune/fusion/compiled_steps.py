"""The compiled training steps of an array: one for each form of batch and update."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from hfta_tune.fusion.batch import constants_of_batch, form_of_batch
from hfta_tune.fusion.compile_notes import CompileNotes, Expected
from hfta_tune.fusion.compiled import BoundStep, CompiledStep
from hfta_tune.fusion.failure import first_line
from hfta_tune.fusion.gradients import clipped_by_optimizer, gradients_by_optimizer
from hfta_tune.fusion.optimizers import Updates, form_of_updates, tensors_of_updates, with_tensors
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.stacking import Stacking
from hfta_tune.fusion.vmapped import Step, call_for_all
from hfta_tune.fusion.vmapped_steps import VmappedSteps

__all__ = ["CompiledSteps", "StepCache"]

logger = logging.getLogger(__name__)

StepCache: TypeAlias = dict[Any, CompiledStep | None]
"""Compiled steps by all that they depend on besides tensors and signature; None where torch could not compile."""

_NO_UPDATES: Updates = {}


class CompiledSteps:
    """Compiles training steps of a stacking and binds them to its tensors.

    After lanes have changed, and for a new form of batch, the user's code is run once before a compiled step
    may take its place: to see these lanes, and what it reads of their configs.
    """

    def __init__(self, stacking: Stacking, vmapped: VmappedSteps, options: Options, cache: StepCache) -> None:
        self._stacking = stacking
        self._vmapped = vmapped
        self._options = options
        self._cache = cache
        self._surroundings: Hashable = ()
        self._seen: Counter[Any] = Counter()
        self._usual: tuple[Step, Any, frozenset[str]] | None = None
        self._run_once: dict[Any, frozenset[str]] = {}
        self._bound: dict[Any, BoundStep | None] = {}
        self._bound_to: Updates | None = None
        self._moves = -1
        self._notes = CompileNotes()
        self._expected: dict[Any, Expected] = {}

    @property
    def surroundings(self) -> Hashable:
        """What the training step reads besides its arguments, as far as known; None if it may change unseen."""
        return self._surroundings

    def set_surroundings(self, surroundings: Hashable) -> bool:
        """Tell what the training step reads besides its arguments; return whether that is something new.

        A compiled step holds it for constant, so it serves equal surroundings only.
        """
        if surroundings == self._surroundings:
            return False
        self._surroundings = surroundings
        self._forget()
        return True

    @property
    def include_updates(self) -> bool:
        """Whether a compiled step has the optimizers' step in it."""
        return self._options.accumulate == 1 and self._stacking.whole()[1].are_native

    def saw(self, step: Step, batch: Any, with_gradient: Iterable[str]) -> None:
        """Note that the user's code was run for these lanes and this batch, and which parameters had a gradient."""
        names = frozenset(with_gradient)
        form = form_of_batch(batch)
        self._forget_after_moves()
        self._run_once[form, constants_of_batch(batch)] = names
        self._seen[form] += 1
        if self._seen[form] >= max(self._seen.values()):
            self._usual = (step, batch, names)

    def for_batch(self, batch: Any, block: int | None = None) -> BoundStep | None:
        """Return the compiled step for a batch, with the lanes' tensors, or None.

        Args:
            batch: The batch.
            block: How many lanes it is to train at a time; by default all.
        """
        self._forget_after_moves()
        form = form_of_batch(batch), constants_of_batch(batch)
        if form not in self._run_once:
            return None
        updates = self._prepared(self._run_once[form])
        if self._bound_to is not updates:
            self._bound.clear()
            self._bound_to = updates
        if (form, block) not in self._bound:
            compiled = self._cache.get(self._form(batch, updates))
            self._bound[form, block] = None if compiled is None else compiled.bind(self._tensors(batch, updates), block)
        return self._bound[form, block]

    @property
    def can_compile(self) -> bool:
        """Whether there is a step to compile: the one for the most frequent form of batch."""
        return self._usual is not None

    def expected(self) -> Expected:
        """What compiling the step for the most frequent form of batch is expected to cost and to gain."""
        assert self._usual is not None
        _, batch, with_gradient = self._usual
        form = self._form(batch, self._prepared(with_gradient))
        lanes = len(self._stacking.lanes)
        if (form, lanes) not in self._expected:
            self._expected[form, lanes] = self._notes.expected(self._noted_form(), lanes)
        expected = self._expected[form, lanes]
        return replace(expected, seconds=0.0) if form in self._cache else expected

    def note_gain(self, gain: float) -> None:
        """Note the part of a step's time that compiling has saved."""
        if self._usual is not None:
            self._notes.measured(self._noted_form(), len(self._stacking.lanes), gain)

    def compile(self) -> bool:
        """Compile the step for the most frequent form of batch; return whether it is there."""
        assert self._usual is not None
        step, batch, with_gradient = self._usual
        updates = self._prepared(with_gradient)
        form = self._form(batch, updates)
        if form not in self._cache:
            begin = time.perf_counter()
            try:
                whole = functools.partial(self._whole_step, step, updates)
                self._cache[form] = CompiledStep(whole, self._tensors(batch, updates))
                self._notes.compiled(self._noted_form(), time.perf_counter() - begin)
            except Exception as error:  # whatever torch cannot compile goes on as it was
                logger.info("The training step goes on uncompiled: %s", first_line(error), exc_info=error)
                self._cache[form] = None
        return self._cache[form] is not None

    def _forget_after_moves(self) -> None:
        if self._moves != self._stacking.moves:
            self._moves = self._stacking.moves
            self._forget()

    def _forget(self) -> None:
        self._run_once.clear()
        self._bound.clear()

    def _prepared(self, with_gradient: frozenset[str]) -> Updates:
        return self._stacking.whole()[1].prepare(with_gradient) if self.include_updates else _NO_UPDATES

    def _form(self, batch: Any, updates: Updates) -> Any:
        """What a compiled step depends on besides its tensors and the signature."""
        stack, _, _ = self._stacking.whole()
        return (
            form_of_batch(batch),
            constants_of_batch(batch),
            form_of_updates(updates),
            tuple(stack.values),
            tuple(stack.carried),
            self._surroundings,
        )

    def _noted_form(self) -> Any:
        """About what tells the step from others, as other processes can tell it, too."""
        assert self._usual is not None
        _, batch, with_gradient = self._usual
        stack, _, template = self._stacking.whole()
        tensors = {**stack.parameters, **stack.buffers}
        shapes = [(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()]
        device = next(iter(tensors.values())).device.type
        updates = form_of_updates(self._prepared(with_gradient))
        return repr(template.model), shapes, device, form_of_batch(batch), updates, list(stack.values), self._options

    def _tensors(self, batch: Any, updates: Updates) -> dict[str, Any]:
        stack, _, _ = self._stacking.whole()
        limits = {} if stack.limits is None else {"limits": stack.limits}
        return {
            **limits,
            "parameters": {name: parameter.detach() for name, parameter in stack.parameters.items()},
            "buffers": stack.buffers,
            "carried": stack.carried,
            "values": stack.values,
            "optimizers": tensors_of_updates(updates),
            "batch": batch,
        }

    def _whole_step(self, step: Step, updates: Updates, tensors: dict[str, Any]) -> Any:
        """Forward, backward and optimizers as a function of tensors, to be recorded."""
        stack, optimizers, template = self._stacking.whole()
        leaves = {
            name: tensor.detach().requires_grad_(stack.parameters[name].requires_grad)
            for name, tensor in tensors["parameters"].items()
        }
        lanes, buffers = self._stacking.lanes, {**tensors["buffers"], **tensors["carried"]}
        finish = self._vmapped.checked_losses
        losses, assigned = call_for_all(
            step, lanes, template, tensors["batch"], leaves, buffers, tensors["values"], finish, self._options
        )
        for name, buffer in assigned.items():
            tensors["buffers"][name].copy_(buffer.detach())
        gradients = gradients_by_optimizer(losses, leaves, optimizers.trains, self._options.accumulate)
        losses = {name: loss.detach() for name, loss in losses.items()}
        if not self.include_updates:
            return losses, gradients
        gradients = clipped_by_optimizer(gradients, tensors.get("limits"), lanes[0].clipping, optimizers.trains)
        optimizers.apply(tensors["parameters"], gradients, with_tensors(updates, tensors["optimizers"]))
        return losses, {}
