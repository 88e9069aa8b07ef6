"""A fused array: lanes with one signature, trained as one, joined and left between steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.alone import evaluate_lane, step_lane, train_lane
from hfta_tune.fusion.audit import NotAuditable, audit_compiled, audit_vmap
from hfta_tune.fusion.batch import clone_batch, constants_of_batch, copy_changes, form_of_batch
from hfta_tune.fusion.choice import COMPILED, LANE_BY_LANE, VMAP, StrategyChoice
from hfta_tune.fusion.clipping import clip_lanes
from hfta_tune.fusion.compiled import BoundStep, CompiledStep
from hfta_tune.fusion.contract import check_losses, check_metrics, no_graph
from hfta_tune.fusion.dropout import set_idle_dropouts
from hfta_tune.fusion.failure import LanesDiffer, TornByOutOfMemory, VmapFailed, first_line, place_of
from hfta_tune.fusion.graphed import GraphedSteps
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import ArrayOptimizers, Updates, form_of_updates, tensors_of_updates, with_tensors
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.signature import python_state
from hfta_tune.fusion.stack import LaneStack, Template
from hfta_tune.fusion.vmapped import Step, call_for_all

__all__ = ["FusedArray"]

logger = logging.getLogger(__name__)

_DEFAULTS = Options()
_NO_UPDATES: Updates = {}


class FusedArray:
    """Trains lanes whose models and optimizers have equal signatures.

    Strategies: "vmap" (stacked tensors, one call of the step for all lanes), "compiled" (that as one
    compiled function, optimizer included) and "lane by lane" (plain PyTorch on each lane's own objects, one
    after the other). Those that can train the array are measured on its own steps, and the fastest goes on.
    A single lane has nothing to share, so it trains in plain PyTorch.

    Args:
        device: Where the lanes' tensors are.
        options: How the lanes are trained.
        strategies: The candidates, of "vmap", "lane by lane" and "compiled".
        pools: Whether lanes whose passes run one by one may have their optimizers step at once.
        compiled: Compiled steps of arrays with the same signature, by form; shared between arrays.
        audit: Where to say what the audit found; None trains without an audit.

    Attributes:
        lanes: The lanes, in the order of their rows.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        options: Options = _DEFAULTS,
        strategies: Sequence[str] = (VMAP, LANE_BY_LANE, COMPILED),
        pools: bool = True,
        compiled: dict[Any, CompiledStep | None] | None = None,
        audit: Callable[[str], None] | None = None,
    ) -> None:
        self.lanes: list[Lane] = []
        self.options = options
        self._device = device
        self._stack: LaneStack | None = None
        self._template: Template | None = None
        self._optimizers: ArrayOptimizers | None = None
        self._choice = StrategyChoice([s for s in strategies if s != COMPILED], may_compile=COMPILED in strategies)
        self._compiled: dict[Any, CompiledStep | None] = {} if compiled is None else compiled
        self._can_vmap_evaluation = VMAP in strategies
        self._training_mode = True
        self._proven: dict[Any, bool] = {}
        self._proven_compiled: dict[Any, frozenset[str]] = {}
        self._seen: Counter[Any] = Counter()
        self._usual: tuple[Step, Any, frozenset[str]] | None = None
        self._with_gradient: frozenset[str] = frozenset()
        self._bound_steps: dict[Any, BoundStep | None] = {}
        self._bound_to: Updates | None = None
        self._surroundings: Hashable = ()
        self._bound = False
        self._may_pool = pools
        self._pools = pools and audit is None  # what is audited is found right first
        self._graphed = GraphedSteps()
        self._values: dict[Lane, dict[str, Tensor]] = {}
        self._audit = audit
        self._audited: set[str] = set()

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
        if self._stack is not None:
            # A new stack takes them in again, with those of the lanes that join.
            self._stack.return_gradients(self.lanes)
        for lane in leave:
            self.lanes.remove(lane)
            self._values.pop(lane, None)
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

    def updates_after(self, batch_number: int, *, last: bool) -> bool:
        """Whether the optimizers step after this batch of a round; they do after the last one."""
        return last or (batch_number + 1) % self.options.accumulate == 0

    def train_step(self, step: Step, batch: Any, *, batch_number: int = 0, last: bool = False) -> dict[str, Tensor]:
        """Train every lane on one batch.

        Args:
            step: The training step.
            batch: What it trains on.
            batch_number: The batch's number in the round.
            last: Whether it is the round's last.

        Returns:
            {optimizer: losses}, [lanes], NaN for a lane that raised.

        Raises:
            LanesDiffer: from the step.
            VmapFailed: if the step does not run under vmap.
            torch.OutOfMemoryError: if the lanes do not fit together. Nothing has been trained.
            TornByOutOfMemory: if that showed only when they were being updated.
        """
        self._choice.count_step()
        update = self.updates_after(batch_number, last=last)
        if update:
            for lane in self.lanes:
                lane.mark_optimizers_called()
        strategy = self.strategy
        if self._audit is not None and strategy not in (*self._audited, LANE_BY_LANE):
            self._run_audit(strategy, step, batch)
            strategy = self.strategy
        run: Callable[[], dict[str, Tensor]]
        if strategy == COMPILED:
            bound = self._bound_step(batch)
            if bound is None:  # lanes have changed, or no step was compiled for such a batch
                losses = self._train_vmap(step, batch, update)
                self._proven_compiled[form_of_batch(batch), constants_of_batch(batch)] = self._with_gradient
                return losses
            run = functools.partial(self._train_compiled, bound, batch, update)
        else:
            train = self._train_vmap if strategy == VMAP else self._train_alone
            run = functools.partial(train, step, batch, update)
        if not self._choice.measuring(strategy) or len(self.lanes) == 1:
            return run()
        begin = self._now()
        losses = run()
        self._choice.record(strategy, self._now() - begin)
        return losses

    def _run_audit(self, strategy: str, step: Step, batch: Any) -> None:
        """Compare a fused strategy with plain PyTorch before its first step; give it up if they differ."""
        assert self._audit is not None
        self._audited.add(strategy)
        audit = audit_vmap if strategy == VMAP else audit_compiled
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                difference = audit(self.lanes, self.options, step, batch, self._array_of_copies)
        except NotAuditable as error:
            self._audit(f"{error}, so it could not be audited")
        else:
            if difference is not None:
                self._audit(f"{difference}; its array goes on lane by lane")
                self._may_pool = self._pools = False
                self.give_up_vmap(training=True)
                self.give_up_vmap(training=False)
            elif strategy == VMAP:
                self._pools = self._may_pool

    def _array_of_copies(self, lanes: Sequence[Lane], options: Options) -> FusedArray:
        array = FusedArray(self._device, options=options, strategies=(VMAP,), compiled=self._compiled)
        array.change_lanes(join=lanes)
        array._training_mode, array._surroundings = self._training_mode, self._surroundings
        return array

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """{name: gradient [lanes, ...]} of the batches since the optimizers' last step."""
        return dict(self._stacked()[0].accumulated)

    def step_optimizers(self) -> None:
        """Step the optimizers by the accumulated gradients."""
        self._stacked()
        self._use({}, update=True)

    def train_compiled(self, batch: Any, with_gradient: Iterable[str]) -> dict[str, Tensor] | None:
        """Train the lanes on one batch by the compiled step, if there is one.

        Args:
            batch: What to train on.
            with_gradient: The names of the parameters that have a gradient.
        """
        self._proven_compiled[form_of_batch(batch), constants_of_batch(batch)] = frozenset(with_gradient)
        bound = self._bound_step(batch)
        return None if bound is None else self._train_compiled(bound, batch, update=True)

    def numbers_may_have_changed(self) -> None:
        """Read the numbers of the lanes' optimizers again before the next step."""
        if self._optimizers is not None:
            self._optimizers.numbers_may_have_changed()

    def set_surroundings(self, surroundings: Hashable) -> None:
        """Tell what the training step reads besides its arguments, as far as known.

        A compiled step holds that for constant, so it serves equal surroundings only.
        """
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self._graphed.reset()
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
        begin = self._now()
        there = self._compile(*self._usual)
        seconds = self._now() - begin
        self._choice.compiled(seconds, there=there)
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":  # a measured step is waited for; others are not
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _train_vmap(self, step: Step, batch: Any, update: bool) -> dict[str, Tensor]:
        if self._device.type == "cuda" and update and self._surroundings is not None:
            _, optimizers = self._stacked()
            form = form_of_batch(batch), constants_of_batch(batch)
            if self._compiles_updates and self._proven.get((self._fused_gradients.__name__, form[0])) is False:
                settled = optimizers.prepare(self._with_gradient)
                eager = functools.partial(self._train_eagerly, step, update=True)
                losses = self._graphed.train(form, batch, settled, eager)
                if losses is not None:
                    return losses
        return self._train_eagerly(step, batch, update)

    def _train_eagerly(self, step: Step, batch: Any, update: bool) -> dict[str, Tensor]:
        with self._unchanged_buffers(on=Exception):
            losses, gradients = self._attempt(step, batch, self._fused_gradients)
        self._with_gradient = frozenset(gradients)
        try:
            self._use(gradients, update)
        except torch.OutOfMemoryError as error:
            raise TornByOutOfMemory(error) from error
        self._note_usual(step, batch)
        return losses  # type: ignore[no-any-return]

    def _use(self, gradients: dict[str, Tensor], update: bool) -> None:
        """Accumulate gradients, or step the optimizers by them and those that were accumulated."""
        stack, optimizers = self._stack, self._optimizers
        assert stack is not None and optimizers is not None
        if stack.accumulated or not update:
            for name, gradient in gradients.items():
                if name in stack.accumulated:
                    stack.accumulated[name] += gradient
                else:
                    stack.accumulated[name] = gradient.clone()
            if not update:
                return
            gradients, stack.accumulated = stack.accumulated, {}
        gradients = self._clipped(gradients, stack.limits)
        optimizers.apply(stack.parameters, gradients, optimizers.prepare(frozenset(gradients)))
        optimizers.step_views(gradients)

    def _note_usual(self, step: Step, batch: Any) -> None:
        """Remember a batch of the most frequent form: that is what to compile for."""
        form = form_of_batch(batch)
        self._seen[form] += 1
        if self._seen[form] >= max(self._seen.values()):
            self._usual = (step, batch, self._with_gradient)

    def _bound_step(self, batch: Any) -> BoundStep | None:
        """The compiled step for a batch, with this array's tensors; None if there is none."""
        form = form_of_batch(batch), constants_of_batch(batch)
        if form not in self._proven_compiled:
            # The user's code is run once to see these lanes, and what it reads of their configs.
            return None
        updates = self._prepared(self._proven_compiled[form])
        if self._bound_to is not updates:
            self._bound_steps.clear()
            self._bound_to = updates
        if form not in self._bound_steps:
            compiled = self._compiled.get(self._step_form(batch, updates))
            self._bound_steps[form] = None if compiled is None else compiled.bind(self._step_tensors(batch, updates))
        return self._bound_steps[form]

    def _train_compiled(self, bound: BoundStep, batch: Any, update: bool) -> dict[str, Tensor]:
        try:
            losses, gradients = bound(batch)
            if not self._compiles_updates:
                self._use(gradients, update)
        except torch.OutOfMemoryError as error:
            raise TornByOutOfMemory(error) from error
        return losses  # type: ignore[no-any-return]

    @property
    def _compiles_updates(self) -> bool:
        """Whether a compiled step has the optimizers' step in it."""
        return self.options.accumulate == 1 and self._stacked()[1].are_native

    def _prepared(self, with_gradient: frozenset[str]) -> Updates:
        return self._stacked()[1].prepare(with_gradient) if self._compiles_updates else _NO_UPDATES

    def _compile(self, step: Step, batch: Any, with_gradient: frozenset[str]) -> bool:
        """Compile the training step for batches of this form; return whether it is there."""
        updates = self._prepared(with_gradient)
        form = self._step_form(batch, updates)
        if form not in self._compiled:
            try:
                whole = functools.partial(self._whole_step, step, updates)
                self._compiled[form] = CompiledStep(whole, self._step_tensors(batch, updates))
            except Exception as error:  # whatever torch cannot compile goes on as it was
                logger.info("The training step goes on uncompiled: %s", first_line(error), exc_info=error)
                self._compiled[form] = None
        return self._compiled[form] is not None

    def _whole_step(self, step: Step, updates: Updates, tensors: dict[str, Any]) -> Any:
        """Forward, backward and optimizers as a function of tensors, to be recorded."""
        stack, optimizers = self._stacked()
        leaves = {
            name: tensor.detach().requires_grad_(stack.parameters[name].requires_grad)
            for name, tensor in tensors["parameters"].items()
        }
        buffers = {**tensors["buffers"], **tensors["carried"]}
        losses, assigned = self._call(step, tensors["batch"], leaves, buffers, tensors["values"], self._losses)
        for name, buffer in assigned.items():
            tensors["buffers"][name].copy_(buffer.detach())
        gradients = self._gradients(losses, leaves)
        losses = {name: loss.detach() for name, loss in losses.items()}
        if not self._compiles_updates:
            return losses, gradients
        gradients = self._clipped(gradients, tensors.get("limits"))
        optimizers.apply(tensors["parameters"], gradients, with_tensors(updates, tensors["optimizers"]))
        return losses, {}

    def _gradients(self, losses: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {name: gradient [lanes, ...]} of those parameters that have one, each by its optimizer's loss."""
        trains = self._stacked()[1].trains
        gradients: dict[str, Tensor] = {}
        for number, (optimizer, loss) in enumerate(losses.items(), 1):
            names = trains[optimizer]
            inputs = [leaves[name] for name in names]
            if inputs:
                total = (loss / self.options.accumulate).sum()
                found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=number < len(losses))
                gradients.update({name: g for name, g in zip(names, found, strict=True) if g is not None})
        return gradients

    def _clipped(self, gradients: dict[str, Tensor], limits: Tensor | None) -> dict[str, Tensor]:
        """Each optimizer's gradients, clipped for themselves."""
        clipping = self.lanes[0].clipping
        if clipping is None or limits is None:
            return gradients
        clipped: dict[str, Tensor] = {}
        assert self._optimizers is not None
        for names in self._optimizers.trains.values():
            own = {name: gradients[name] for name in names if name in gradients}
            if own:
                clipped.update(clip_lanes(own, limits, clipping.algorithm))
        return clipped

    def _step_form(self, batch: Any, updates: Updates) -> Any:
        """What a compiled step depends on besides its tensors and the signature."""
        stack, _ = self._stacked()
        return (
            form_of_batch(batch),
            constants_of_batch(batch),
            form_of_updates(updates),
            tuple(stack.values),
            tuple(stack.carried),
            self._surroundings,
        )

    def _step_tensors(self, batch: Any, updates: Updates) -> dict[str, Any]:
        stack, _ = self._stacked()
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

    def _train_alone(self, step: Step, batch: Any, update: bool) -> dict[str, Tensor]:
        optimizers = self._pooled_optimizers()
        if optimizers is None and self._bound:
            self._unstack()
        losses = []
        for lane, own in self._shares(batch):
            call = functools.partial(step, [lane], lane.model, own, self._values_of(lane))
            alone = update and optimizers is None
            losses.append(train_lane(call, lane, self.options, self._device, update=alone))
        if optimizers is not None:
            try:
                self._update_pooled(optimizers, update)
            except torch.OutOfMemoryError as error:
                raise TornByOutOfMemory(error) from error
        given = [name for name in self.lanes[0].optimizers if all(name in own for own in losses)]
        return {name: torch.stack([own[name] for own in losses]) for name in given}

    def _pooled_optimizers(self) -> ArrayOptimizers | None:
        """Optimizers that step for all lanes at once, though each lane has its own forward and backward pass."""
        if not self._pools or len(self.lanes) == 1:
            return None
        if self._stack is None or self._optimizers is None:
            self._stack_up(whole=False)
        assert self._optimizers is not None
        if not self._optimizers.are_native:
            self._pools = False
            self._unstack()
            return None
        return self._optimizers

    def _update_pooled(self, optimizers: ArrayOptimizers, update: bool) -> None:
        """Use the gradients that the lanes' own backward passes left."""
        sound = [lane for lane in self.lanes if lane.error is None]
        gradients: dict[str, Tensor] = {}
        for name in (name for names in optimizers.trains.values() for name in names):
            own = [lane.model.get_parameter(name) for lane in self.lanes]
            given = [lane.model.get_parameter(name).grad for lane in sound]
            if all(gradient is None for gradient in given):
                continue
            if any(gradient is None or gradient.is_sparse for gradient in given):
                self._pools = False  # what the lanes' own optimizers make of that is theirs alone
                self._step_unpooled(update)
                return
            gradients[name] = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in own])
        for lane in self.lanes:
            lane.drop_gradients()
        self._use(gradients, update)

    def _step_unpooled(self, update: bool) -> None:
        self._unstack()
        for lane in self.lanes:
            if update and lane.error is None:
                step_lane(lane)

    @torch.no_grad()
    def evaluation_step(self, step: Step, batch: Any) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Evaluate every lane on one batch; return {metric: [lanes]}, or one such dict of 0-d a lane.

        Raises:
            LanesDiffer: from the step.
            VmapFailed: if the step does not run under vmap.
        """
        if self.evaluation_strategy == LANE_BY_LANE:
            return [
                evaluate_lane(
                    functools.partial(step, [lane], lane.model, own, self._values_of(lane)),
                    lane,
                    self.options,
                    self._device,
                )
                for lane, own in self._shares(batch)
            ]
        metrics: dict[str, Tensor] = self._attempt(step, batch, self._fused_metrics)
        return metrics

    def probe(self, step: Step, batch: Any) -> None:
        """Run the forward pass of a training or evaluation step for its errors only; nothing changes."""
        finish = self._losses if self._training_mode else self._metrics
        with torch.no_grad(), self._unchanged_buffers():
            self._call_stacked(step, clone_batch(batch), finish)

    def _shares(self, batch: Any) -> Iterator[tuple[Lane, Any]]:
        """Each lane with the batch; what a lane's step does to it, the next one does not see."""
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        spare = [tensor.clone() for tensor in tensors]
        for lane in self.lanes:
            versions = [tensor._version for tensor in tensors]
            yield lane, batch
            if lane is not self.lanes[-1] and versions != [tensor._version for tensor in tensors]:
                for tensor, original in zip(tensors, spare, strict=True):
                    tensor.copy_(original)

    def _stacked(self) -> tuple[LaneStack, ArrayOptimizers]:
        if self._stack is None or self._optimizers is None or not self._stack.whole:
            if self._template is None:
                if self._bound:  # a copy of a view would copy all lanes
                    self._unstack()
                try:
                    self._template = Template(self.lanes[0].model)
                except Exception as error:
                    raise VmapFailed(error, "copying the model") from error
                self._template.train(self._training_mode)
            self._stack_up(whole=True)
            assert self._stack is not None
            set_idle_dropouts(self._template.model, self._stack.carried)
        assert self._stack is not None and self._optimizers is not None
        return self._stack, self._optimizers

    def _stack_up(self, *, whole: bool) -> None:
        if self._stack is not None:
            self._unstack()
        self._stack = LaneStack(self.lanes, self._device, whole=whole)
        self._optimizers = ArrayOptimizers(self.lanes, self._stack)
        self._bound = True

    def _unstack(self) -> None:
        if self._stack is not None:
            self._stack.return_gradients(self.lanes)
        for lane in self.lanes:
            lane.detach_storage()
        self._drop_stack()
        self._bound = False

    def _drop_stack(self) -> None:
        self._stack = self._optimizers = None
        self._graphed.reset()
        self._proven_compiled.clear()
        self._bound_steps.clear()

    def _attempt(self, step: Step, batch: Any, fused: Callable[[Step, Any], Any]) -> Any:
        form = (fused.__name__, form_of_batch(batch))
        changes_batch = self._proven.get(form)
        if changes_batch is False:
            return self._explained(fused, step, batch)
        # An attempt may stop half-way, and what it changed must not be seen by the next one.
        tried = clone_batch(batch)
        if changes_batch:
            result = self._explained(fused, step, tried)
            copy_changes(tried, batch)
            return result
        with self._unchanged_buffers(on=Exception):
            before = self._python_state()
            result = self._explained(fused, step, tried)
            if self._python_state() != before:
                error = RuntimeError("a module changes an attribute in its forward pass; keep it in a buffer")
                raise VmapFailed(error, "the model")
        self._proven[form] = copy_changes(tried, batch)
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
        except (LanesDiffer, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise VmapFailed(error, place_of(error, self._template)) from error

    @contextlib.contextmanager
    def _unchanged_buffers(self, *, on: type[BaseException] | None = None) -> Iterator[None]:
        """Undo what a forward pass did to the buffers; with `on` only if it raises that."""
        buffers = self._stacked()[0].buffers
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        keep = False
        try:
            yield
            keep = on is not None
        except BaseException as error:
            keep = on is not None and not isinstance(error, on)
            raise
        finally:
            if not keep:
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])

    def _call_stacked(self, step: Step, batch: Any, finish: Callable[[Any], Any]) -> Any:
        """Call the step once for all lanes; `finish` checks what it returns and makes tensors of it."""
        stack, _ = self._stacked()
        buffers = {**stack.buffers, **stack.carried}
        result, assigned = self._call(step, batch, stack.parameters, buffers, stack.values, finish)
        for name, buffer in assigned.items():
            stack.buffers[name].copy_(buffer.detach())
        return result

    def _call(
        self,
        step: Step,
        batch: Any,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        values: Mapping[Any, Tensor],
        finish: Callable[[Any], Any],
    ) -> tuple[Any, dict[str, Tensor]]:
        assert self._template is not None
        return call_for_all(step, self.lanes, self._template, batch, parameters, buffers, values, finish, self.options)

    def _losses(self, losses: Any) -> dict[str, Tensor]:
        return check_losses(losses, list(self.lanes[0].optimizers), self.lanes[0].name)

    def _metrics(self, metrics: Any) -> dict[str, Tensor]:
        return check_metrics(metrics, self.lanes[0].name, self._device)

    def _fused_gradients(self, step: Step, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return {optimizer: losses [lanes]} and {name: gradient [lanes, ...]} of the parameters that have one."""
        losses: dict[str, Tensor] = self._call_stacked(step, batch, self._losses)
        for loss in losses.values():
            if not loss.requires_grad:
                raise no_graph(self.lanes[0].name, loss)
        gradients = self._gradients(losses, self._stacked()[0].parameters)
        sparse = [name for name, gradient in gradients.items() if gradient.is_sparse]
        if sparse:
            raise NotImplementedError(f"the gradient of {sparse[0]!r} is sparse")
        return {name: loss.detach() for name, loss in losses.items()}, gradients

    def _fused_metrics(self, step: Step, batch: Any) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = self._call_stacked(step, batch, self._metrics)
        return metrics

    def _values_of(self, lane: Lane) -> dict[str, Tensor]:
        if lane not in self._values:
            dtype = torch.get_default_dtype()
            self._values[lane] = {
                name: torch.tensor(v, dtype=dtype, device=self._device) for name, v in lane.values.items()
            }
        return self._values[lane]
