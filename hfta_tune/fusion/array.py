"""A fused array: lanes with one signature, trained as one, joined and left between steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from hfta_tune.fusion.batch import clone_batch, constants_of_batch, copy_changes, form_of_batch
from hfta_tune.fusion.choice import COMPILED, LANE_BY_LANE, VMAP, StrategyChoice
from hfta_tune.fusion.clipping import clip_lanes
from hfta_tune.fusion.compiled import BoundStep, CompiledStep
from hfta_tune.fusion.contract import check_loss, check_metrics, no_graph
from hfta_tune.fusion.failure import LanesDiffer, VmapFailed, first_line, place_of
from hfta_tune.fusion.kernels import LaneKernels
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import (
    FusedOptimizer,
    GroupUpdate,
    NativeOptimizer,
    OptimizerViews,
    fuse_optimizers,
    obstacle_of_optimizer,
)
from hfta_tune.fusion.signature import python_state
from hfta_tune.fusion.stack import LaneStack, Template

__all__ = ["FusedArray", "Step"]

logger = logging.getLogger(__name__)

Step: TypeAlias = Callable[[Sequence[Lane], nn.Module, Any, Mapping[str, Tensor]], Any]
"""step(lanes, model, batch, values): one call of the user's code that stands for all of `lanes`.

Under vmap it is called once for all lanes of the array, lane by lane once for each. `values` are the
lanes' numbers as 0-d tensors.
"""


class FusedArray:
    """Trains lanes whose models and optimizers have equal signatures.

    Strategies: "vmap" (stacked tensors, one call of the step for all lanes), "compiled" (that as one
    compiled function, optimizer included) and "lane by lane" (plain PyTorch on each lane's own objects, one
    after the other). Those that can train the array are measured on its own steps, and the fastest goes on.
    A single lane has nothing to share, so it trains in plain PyTorch.

    Args:
        device: Where the lanes' tensors are.
        strategies: The candidates, of "vmap", "lane by lane" and "compiled".
        compiled: Compiled steps of arrays with the same signature, by form; shared between arrays.

    Attributes:
        lanes: The lanes, in the order of their rows.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        strategies: Sequence[str] = (VMAP, LANE_BY_LANE, COMPILED),
        compiled: dict[Any, CompiledStep | None] | None = None,
    ) -> None:
        self.lanes: list[Lane] = []
        self._device = device
        self._stack: LaneStack | None = None
        self._template: Template | None = None
        self._optimizer: FusedOptimizer | None = None
        self._choice = StrategyChoice([s for s in strategies if s != COMPILED], may_compile=COMPILED in strategies)
        self._compiled: dict[Any, CompiledStep | None] = {} if compiled is None else compiled
        self._can_vmap_evaluation = VMAP in strategies
        self._training_mode = True
        self._proven: set[Any] = set()
        self._proven_compiled: set[Any] = set()
        self._seen: Counter[Any] = Counter()
        self._usual: tuple[Step, Any] | None = None
        self._with_gradient: tuple[str, ...] = ()
        self._updates: list[GroupUpdate] | None = None
        self._last_updates: list[GroupUpdate] = []
        self._bound_steps: dict[Any, BoundStep | None] = {}
        self._bound_to: list[GroupUpdate] | None = None
        self._surroundings: Hashable = ()
        self._bound = False

    @property
    def strategy(self) -> str:
        """The strategy of the next training step."""
        return self._choice.strategy(len(self.lanes))

    @property
    def evaluation_strategy(self) -> str:
        """The strategy of the evaluation steps."""
        fused = self._can_vmap_evaluation and self.strategy != LANE_BY_LANE
        return VMAP if fused else LANE_BY_LANE

    @property
    def seconds_a_step(self) -> dict[str, float]:
        """{strategy: seconds of a training step}, as measured on this array."""
        return dict(self._choice.seconds)

    def change_lanes(self, *, leave: Sequence[Lane] = (), join: Sequence[Lane] = ()) -> None:
        """Take lanes out and in; the others go on undisturbed. A leaving lane keeps its state for itself."""
        if not leave and not join:
            return
        for lane in leave:
            self.lanes.remove(lane)
            lane.detach_storage()
        self.lanes.extend(join)
        self._drop_stack()
        if len(self.lanes) == 1:
            self._unstack()

    def give_up_vmap(self, *, training: bool) -> None:
        """Go lane by lane from now on, in the training or the evaluation steps."""
        if training:
            self._choice.drop(VMAP)
            self._choice.drop(COMPILED)
        else:
            self._can_vmap_evaluation = False
            self.set_mode(training=self._training_mode)

    def set_mode(self, *, training: bool) -> None:
        """Put all models in training or evaluation mode."""
        self._training_mode = training
        if self._template is not None:
            self._template.train(training)
        for lane in self.lanes:
            lane.model.train(training)

    def train_step(self, step: Step, batch: Any) -> Tensor:
        """Train every lane on one batch; return the losses, [lanes], NaN for a lane that raised.

        Raises:
            LanesDiffer: from the step.
            VmapFailed: if the step does not run under vmap.
        """
        for lane in self.lanes:
            lane.mark_optimizer_called()
        strategy = self.strategy
        run: Callable[[], Tensor] | None = None
        if strategy == COMPILED:
            updates = self._prepare_optimizer()
            bound = self._bound_step(batch, updates)
            if bound is None:  # lanes have changed, or no step was compiled for such a batch
                return self._train_vmap(step, batch, updates)
            run = functools.partial(self._train_compiled, bound, batch)
        else:
            run = functools.partial(self._train_vmap if strategy == VMAP else self._train_alone, step, batch)
        if not self._choice.measuring(strategy) or len(self.lanes) == 1:
            return run()
        begin = self._now()
        losses = run()
        self._choice.record(strategy, self._now() - begin)
        return losses

    def numbers_may_have_changed(self) -> None:
        """Read the numbers of the lanes' optimizers again before the next step."""
        self._updates = None

    def set_surroundings(self, surroundings: Hashable) -> None:
        """Tell what the training step reads besides its arguments, as far as known.

        A compiled step holds that for constant, so it serves equal surroundings only.
        """
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self._proven_compiled.clear()
            self._bound_steps.clear()

    def compile_if_it_pays(self, steps_left: float) -> float | None:
        """Between rounds: compile the training step if what is left to train is worth it.

        Args:
            steps_left: How many training steps the array has before it.

        Returns:
            The seconds that it took, or None if nothing was compiled.
        """
        if self._usual is None or not self._choice.compiling_pays(len(self.lanes), steps_left):
            return None
        step, batch = self._usual
        begin = self._now()
        there = self._compile(step, batch)
        seconds = self._now() - begin
        self._choice.compiled(seconds, there=there)
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":  # a measured step is waited for; others are not
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _train_vmap(self, step: Step, batch: Any, updates: list[GroupUpdate] | None = None) -> Tensor:
        losses, given = self._attempt(step, batch, self._fused_gradients)
        given = self._clipped(given, self._stacked().limits)
        if tuple(given) != self._with_gradient:
            self._with_gradient = tuple(given)
            self._updates = updates = None
        if isinstance(self._optimizer, NativeOptimizer):
            updates = updates or self._prepare_optimizer()
            self._optimizer.apply(self._stacked().parameters, given, updates)
        elif self._optimizer is not None:
            self._optimizer.step(given)
        self._note_usual(step, batch)
        return losses  # type: ignore[no-any-return]

    def _note_usual(self, step: Step, batch: Any) -> None:
        """Remember a batch of the most frequent form: that is what to compile for."""
        form = form_of_batch(batch)
        self._seen[form] += 1
        if self._seen[form] >= max(self._seen.values()):
            self._usual = (step, batch)

    def _bound_step(self, batch: Any, updates: list[GroupUpdate]) -> BoundStep | None:
        """The compiled step for a batch, with this array's tensors; None if there is none."""
        form = form_of_batch(batch), constants_of_batch(batch)
        if form not in self._proven_compiled:
            # The user's code is run once to see these lanes, and what it reads of their configs.
            self._proven_compiled.add(form)
            return None
        if self._bound_to is not updates:
            self._bound_steps.clear()
            self._bound_to = updates
        if form not in self._bound_steps:
            compiled = self._compiled.get(self._step_form(batch, updates))
            self._bound_steps[form] = None if compiled is None else compiled.bind(self._step_tensors(batch, updates))
        return self._bound_steps[form]

    def _train_compiled(self, bound: BoundStep, batch: Any) -> Tensor:
        losses, gradients = bound(batch)
        if isinstance(self._optimizer, OptimizerViews):
            self._optimizer.step(gradients)
        return losses  # type: ignore[no-any-return]

    def _compile(self, step: Step, batch: Any) -> bool:
        """Compile the training step for batches of this form; return whether it is there."""
        updates = self._prepare_optimizer()
        form = self._step_form(batch, updates)
        if form not in self._compiled:
            try:
                whole = functools.partial(self._whole_step, step, updates)
                self._compiled[form] = CompiledStep(whole, self._step_tensors(batch, updates))
            except Exception as error:  # whatever torch cannot compile goes on as it was
                logger.info("The training step goes on uncompiled: %s", first_line(error), exc_info=error)
                self._compiled[form] = None
        return self._compiled[form] is not None

    def _whole_step(self, step: Step, updates: Sequence[GroupUpdate], tensors: dict[str, Any]) -> Any:
        """Forward, backward and optimizer as a function of tensors, to be recorded."""
        stack = self._stacked()
        leaves = {
            name: tensor.detach().requires_grad_(stack.parameters[name].requires_grad)
            for name, tensor in tensors["parameters"].items()
        }
        losses, assigned = self._forward(
            step, tensors["batch"], leaves, {**tensors["buffers"], **tensors["carried"]}, tensors["values"], self._loss
        )
        for name, buffer in assigned.items():
            tensors["buffers"][name].copy_(buffer.detach())
        trainable = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        found = torch.autograd.grad(losses.sum(), list(trainable.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(trainable, found, strict=True) if g is not None}
        gradients = self._clipped(gradients, tensors.get("limits"))
        if not isinstance(self._optimizer, NativeOptimizer):
            return losses.detach(), gradients
        self._optimizer.apply(
            tensors["parameters"],
            gradients,
            [replace(update, **given) for update, given in zip(updates, tensors["optimizer"], strict=True)],
        )
        return losses.detach(), {}

    def _clipped(self, gradients: dict[str, Tensor], limits: Tensor | None) -> dict[str, Tensor]:
        clipping = self.lanes[0].clipping
        if clipping is None or limits is None or not gradients:
            return gradients
        return clip_lanes(gradients, limits, clipping.algorithm)

    def _prepare_optimizer(self) -> list[GroupUpdate]:
        """The updates of the next step; the same object as long as nothing in them has changed."""
        if self._updates is None:
            self._stacked()
            optimizer = self._optimizer
            updates = optimizer.prepare(self._with_gradient) if isinstance(optimizer, NativeOptimizer) else []
            if _same_updates(updates, self._last_updates):
                updates = self._updates = self._last_updates
            self._last_updates = updates
            return updates
        return self._updates

    def _step_form(self, batch: Any, updates: Sequence[GroupUpdate]) -> Any:
        """What a compiled step depends on besides its tensors and the signature."""
        return (
            form_of_batch(batch),
            constants_of_batch(batch),
            tuple(update.form for update in updates),
            tuple(self._stacked().values),
            self._surroundings,
        )

    def _step_tensors(self, batch: Any, updates: Sequence[GroupUpdate]) -> dict[str, Any]:
        stack = self._stacked()
        limits = {} if stack.limits is None else {"limits": stack.limits}
        return {
            **limits,
            "parameters": {name: parameter.detach() for name, parameter in stack.parameters.items()},
            "buffers": stack.buffers,
            "carried": stack.carried,
            "values": stack.values,
            "optimizer": [
                {"numbers": update.numbers, "state": update.state, "clocks": update.clocks} for update in updates
            ],
            "batch": batch,
        }

    def _train_alone(self, step: Step, batch: Any) -> Tensor:
        if self._bound:
            self._unstack()
        return torch.stack([self._train_lane(step, lane, own) for lane, own in self._shares(batch)])

    @torch.no_grad()
    def evaluation_step(self, step: Step, batch: Any) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Evaluate every lane on one batch; return {metric: [lanes]}, or one such dict of 0-d a lane.

        Raises:
            LanesDiffer: from the step.
            VmapFailed: if the step does not run under vmap.
        """
        if self.evaluation_strategy == LANE_BY_LANE:
            return [self._evaluate_alone(step, lane, own) for lane, own in self._shares(batch)]
        metrics: dict[str, Tensor] = self._attempt(step, batch, self._fused_metrics)
        return metrics

    def probe(self, step: Step, batch: Any) -> None:
        """Run the forward pass of a training or evaluation step for its errors only; nothing changes."""
        finish = self._loss if self._training_mode else self._metrics
        with torch.no_grad(), self._unchanged_buffers():
            self._call(step, clone_batch(batch), finish)

    def _shares(self, batch: Any) -> Iterator[tuple[Lane, Any]]:
        """Each lane with a batch that is its own to change; the last gets the original."""
        for number, lane in enumerate(self.lanes, 1):
            yield lane, batch if number == len(self.lanes) else clone_batch(batch)

    def _stacked(self) -> LaneStack:
        if self._stack is None:
            if self._template is None:  # before stacking: a copy of a view would copy all lanes
                try:
                    self._template = Template(self.lanes[0].model)
                except Exception as error:
                    raise VmapFailed(error, "copying the model") from error
                self._template.train(self._training_mode)
            self._stack = LaneStack(self.lanes, self._device)
            self._optimizer = fuse_optimizers(self.lanes, self._stack)
            self._bound = True
        return self._stack

    def _unstack(self) -> None:
        for lane in self.lanes:
            lane.detach_storage()
        self._drop_stack()
        self._bound = False

    def _drop_stack(self) -> None:
        self._stack = self._optimizer = None
        self._updates, self._last_updates = None, []
        self._proven_compiled.clear()
        self._bound_steps.clear()

    def _attempt(self, step: Step, batch: Any, fused: Callable[[Step, Any], Any]) -> Any:
        form = (fused.__name__, form_of_batch(batch))
        if form in self._proven:
            return self._explained(fused, step, batch)
        # The first attempt may stop half-way, and what it changed must not be seen by the next one.
        tried = clone_batch(batch)
        with self._unchanged_buffers(on_error=True):
            before = self._python_state()
            result = self._explained(fused, step, tried)
            if self._python_state() != before:
                error = RuntimeError("a module changes an attribute in its forward pass; keep it in a buffer")
                raise VmapFailed(error, "the model")
        copy_changes(tried, batch)
        self._proven.add(form)
        return result

    def _python_state(self) -> Any:
        self._stacked()
        assert self._template is not None
        try:
            return python_state(self._template.model)
        except RuntimeError:  # a tensor of the finished vmap in a container
            return object()

    def _explained(self, fused: Callable[[Step, Any], Any], step: Step, batch: Any) -> Any:
        try:
            return fused(step, batch)
        except LanesDiffer:
            raise
        except Exception as error:
            raise VmapFailed(error, place_of(error, self._template)) from error

    @contextlib.contextmanager
    def _unchanged_buffers(self, *, on_error: bool = False) -> Iterator[None]:
        """Undo what a forward pass did to the buffers; with `on_error` only if it raises."""
        buffers = self._stacked().buffers
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        keep = False
        try:
            yield
            keep = on_error
        finally:
            if not keep:
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])

    def _call(self, step: Step, batch: Any, finish: Callable[[Any], Any]) -> Any:
        """Call the step once for all lanes; `finish` checks what it returns and makes tensors of it."""
        stack = self._stacked()
        result, assigned = self._forward(
            step, batch, stack.parameters, {**stack.buffers, **stack.carried}, stack.values, finish
        )
        for name, buffer in assigned.items():
            stack.buffers[name].copy_(buffer.detach())
        return result

    def _forward(
        self,
        step: Step,
        batch: Any,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        values: dict[Any, Tensor],
        finish: Callable[[Any], Any],
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return what the step returns for stacked tensors, and the buffers that it assigned anew."""
        template = self._template
        assert template is not None
        lanes = self.lanes

        def one_call(model: nn.Module, batch: Any, values: Mapping[Any, Tensor]) -> Any:
            return step(lanes, model, batch, values)

        def one_lane(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], values: dict[Any, Tensor]
        ) -> tuple[Any, dict[str, Tensor]]:
            tensors = {f"model.{name}": tensor for name, tensor in (*parameters.items(), *buffers.items())}
            result = finish(functional_call(template, tensors, (one_call, batch, values)))
            # A forward that assigns a buffer anew, instead of in place, has put it into `tensors`.
            assigned = {
                name: tensors[f"model.{name}"]
                for name, buffer in buffers.items()
                if tensors[f"model.{name}"] is not buffer
            }
            return result, assigned

        with _quiet_and_batchable(), LaneKernels():
            result: tuple[Any, dict[str, Tensor]] = vmap(one_lane, in_dims=(0, 0, 0), randomness="different")(
                parameters, buffers, values
            )
        return result

    def _loss(self, loss: Any) -> Tensor:
        return check_loss(loss, self.lanes[0].name)

    def _fused_gradients(self, step: Step, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses, [lanes], and {name: gradient [lanes, ...]} of those parameters that have one."""
        losses: Tensor = self._call(step, batch, self._loss)
        if not losses.requires_grad:
            raise no_graph(self.lanes[0].name, losses)
        trainable = self._stacked().trainable()
        found = torch.autograd.grad(losses.sum(), list(trainable.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(trainable, found, strict=True) if g is not None}
        sparse = [name for name, gradient in gradients.items() if gradient.is_sparse]
        if sparse:
            raise NotImplementedError(f"the gradient of {sparse[0]!r} is sparse")
        return losses.detach(), gradients

    def _fused_metrics(self, step: Step, batch: Any) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = self._call(step, batch, self._metrics)
        return metrics

    def _metrics(self, metrics: Any) -> dict[str, Tensor]:
        return check_metrics(metrics, self.lanes[0].name, self._device)

    def _train_lane(self, step: Step, lane: Lane, batch: Any) -> Tensor:
        if lane.error is not None:
            return torch.tensor(float("nan"), device=self._device)
        values = self._values_of(lane)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            lane.optimizer.zero_grad()
            loss = check_loss(step([lane], lane.model, batch, values), lane.name)
            if not loss.requires_grad:
                raise no_graph(lane.name, loss)
            loss.backward()
            if lane.clipping is not None:
                lane.clipping.clip(lane.model)
            losses.append(loss.detach())
            return loss

        try:
            if obstacle_of_optimizer(lane.optimizer) is not None:
                lane.optimizer.step(closure)  # type: ignore[arg-type]
            else:
                closure()
                lane.optimizer.step()
        except LanesDiffer:
            raise
        except Exception as error:
            lane.error = error
            return torch.tensor(float("nan"), device=self._device)
        return losses[0]

    def _evaluate_alone(self, step: Step, lane: Lane, batch: Any) -> dict[str, Tensor]:
        if lane.error is None:
            try:
                metrics = step([lane], lane.model, batch, self._values_of(lane))
                return check_metrics(metrics, lane.name, self._device)
            except LanesDiffer:
                raise
            except Exception as error:
                lane.error = error
        return {}

    def _values_of(self, lane: Lane) -> dict[str, Tensor]:
        dtype = torch.get_default_dtype()
        return {name: torch.tensor(v, dtype=dtype, device=self._device) for name, v in lane.values.items()}


def _same_updates(one: list[GroupUpdate], other: list[GroupUpdate]) -> bool:
    """Whether two preparations came to the same tensors, so that a third one would too."""
    return [_identity(update) for update in one] == [_identity(update) for update in other]


def _identity(update: GroupUpdate) -> Any:
    tensors = (update.numbers, update.state, update.clocks)
    return update.form, [id(tensor) for tensor in pytree.tree_leaves(tensors)]


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
