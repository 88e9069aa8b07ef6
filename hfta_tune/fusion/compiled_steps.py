"""The recorded and compiled training steps of an array: one for each form of batch and update."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfta_tune.fusion.batch import constants_of_batch, form_of_batch
from hfta_tune.fusion.choice import BLOCKS, RECORDED
from hfta_tune.fusion.compile_notes import CompileNotes, Expected
from hfta_tune.fusion.compiled import BoundStep, CompiledStep, RecordedStep
from hfta_tune.fusion.failure import first_line
from hfta_tune.fusion.gradients import clipped_by_optimizer, gradients_by_optimizer
from hfta_tune.fusion.optimizers import Updates, form_of_updates, tensors_of_updates, with_tensors
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.stacking import Stacking
from hfta_tune.fusion.vmapped import Step, call_for_all
from hfta_tune.fusion.vmapped_steps import VmappedSteps

__all__ = ["CompiledSteps", "StepCache"]

logger = logging.getLogger(__name__)

StepCache: TypeAlias = dict[Any, RecordedStep | None]
"""Recorded and compiled steps by all that they depend on besides tensors and signature; None where that failed."""

_NO_UPDATES: Updates = {}

# Seen on two CPU cores, with the benchmark's models: an operation that is called from a record saves 4 to 8 us of vmap
# and autograd, and to record it takes about 1.1 ms; the first record of a process some 0.15 s besides.
_SECONDS_SAVED_AN_OPERATION = 6e-6
_SECONDS_TO_RECORD_AN_OPERATION = 1.1e-3
_SECONDS_TO_RECORD = 0.1
_OPERATIONS_OF_OPTIMIZER = 30


class _Counting(TorchDispatchMode):
    """Counts the operations of a step, as a record of it would have them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


class CompiledSteps:
    """Records and compiles training steps of a stacking and binds them to its tensors.

    After lanes have changed, and for a new form of batch, the user's code is run once before a recorded or compiled
    step may take its place: to see these lanes, and what it reads of their configs.
    """

    def __init__(
        self, stacking: Stacking, vmapped: VmappedSteps, options: Options, cache: StepCache, device: torch.device
    ) -> None:
        self._stacking = stacking
        self._device = device
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
        self._operations: dict[Any, int] = {}

    @property
    def surroundings(self) -> Hashable:
        """What the training step reads besides its arguments, as far as known; None if it may change unseen."""
        return self._surroundings

    def set_surroundings(self, surroundings: Hashable) -> bool:
        """Tell what the training step reads besides its arguments; return whether that is something new.

        A recorded step holds it for constant, so it serves equal surroundings only.
        """
        if surroundings == self._surroundings:
            return False
        self._surroundings = surroundings
        self._forget()
        return True

    @property
    def include_updates(self) -> bool:
        """Whether a recorded or compiled step has the optimizers' step in it."""
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

    def for_batch(self, batch: Any, strategy: str) -> BoundStep | None:
        """Return the step for a batch, with the lanes' tensors, or None.

        Args:
            batch: The batch.
            strategy: How it is to be trained: one of those that run a function of tensors.
        """
        self._forget_after_moves()
        form = form_of_batch(batch), constants_of_batch(batch)
        if form not in self._run_once:
            return None
        updates = self._prepared(self._run_once[form])
        if self._bound_to is not updates:
            self._bound.clear()
            self._bound_to = updates
        if (form, strategy) not in self._bound:
            kind = RecordedStep if strategy == RECORDED else CompiledStep
            made = self._cache.get((kind, self._form(batch, updates)))
            tensors = self._tensors(batch, updates)
            self._bound[form, strategy] = None if made is None else made.bind(tensors, BLOCKS.get(strategy))
        return self._bound[form, strategy]

    @property
    def can_be_made(self) -> bool:
        """Whether there is a step to record or compile: the one for the most frequent form of batch."""
        return self._usual is not None

    def expected(self) -> Expected:
        """What compiling the step for the most frequent form of batch is expected to cost and to gain."""
        form = self._usual_form()
        lanes = len(self._stacking.lanes)
        if (form, lanes) not in self._expected:
            self._expected[form, lanes] = self._notes.expected(self._noted_form(), lanes)
        expected = self._expected[form, lanes]
        return replace(expected, seconds=0.0) if (CompiledStep, form) in self._cache else expected

    def expected_of_recording(self, seconds_a_step: float) -> Expected:
        """What recording that step is expected to cost and to gain.

        Args:
            seconds_a_step: How long it takes under vmap.
        """
        form = self._usual_form()
        if form not in self._operations:
            assert self._usual is not None
            step, batch, _ = self._usual
            counting = _Counting()
            devices = [self._device] if self._device.type == "cuda" else []
            try:
                with torch.random.fork_rng(devices=devices), counting:
                    self._vmapped.probe(step, batch)
                self._operations[form] = counting.operations + _OPERATIONS_OF_OPTIMIZER
            except Exception as error:  # some of torch does not run where operations are counted, nor recorded
                logger.info("The operations of the training step cannot be counted: %s", first_line(error))
                self._operations[form] = 0
        operations = self._operations[form]
        is_there = (RecordedStep, form) in self._cache
        seconds = 0.0 if is_there else _SECONDS_TO_RECORD + operations * _SECONDS_TO_RECORD_AN_OPERATION
        return Expected(seconds, operations * _SECONDS_SAVED_AN_OPERATION / max(seconds_a_step, 1e-9))

    def _usual_form(self) -> Any:
        assert self._usual is not None
        _, batch, with_gradient = self._usual
        return self._form(batch, self._prepared(with_gradient))

    def note_gain(self, gain: float) -> None:
        """Note the part of a step's time that compiling has saved."""
        if self._usual is not None:
            self._notes.measured(self._noted_form(), len(self._stacking.lanes), gain)

    def compile(self) -> bool:
        """Compile the step for the most frequent form of batch; return whether it is there."""
        seconds = self._make(CompiledStep)
        if seconds is not None:
            self._notes.compiled(self._noted_form(), seconds)
        return self._cache[CompiledStep, self._usual_form()] is not None

    def record(self) -> bool:
        """Record the step for the most frequent form of batch; return whether it is there."""
        self._make(RecordedStep)
        return self._cache[RecordedStep, self._usual_form()] is not None

    def _make(self, kind: type[RecordedStep]) -> float | None:
        """Make the step if that was not tried before; return the seconds if it succeeded."""
        assert self._usual is not None
        step, batch, with_gradient = self._usual
        updates = self._prepared(with_gradient)
        form = kind, self._form(batch, updates)
        if form in self._cache:
            return None
        begin = time.perf_counter()
        try:
            whole = functools.partial(self._whole_step, step, updates)
            self._cache[form] = kind(whole, self._tensors(batch, updates))
        except Exception as error:  # whatever torch cannot record or compile goes on as it was
            logger.info("The training step goes on without %s: %s", kind.__name__, first_line(error), exc_info=error)
            self._cache[form] = None
            return None
        return time.perf_counter() - begin

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
