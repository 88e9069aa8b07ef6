"""A fused array: lanes with one signature, trained as one, joined and left between steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfta_tune.fusion.alone import evaluate_lane, step_lane, train_lane
from hfta_tune.fusion.audit import Difference, NotAuditable, audit_of_tensors, audit_vmap
from hfta_tune.fusion.batch import constants_of_batch, form_of_batch
from hfta_tune.fusion.choice import BLOCKS, COMPILED, LANE_BY_LANE, OF_TENSORS, RECORDED, VMAP, StrategyChoice
from hfta_tune.fusion.compiled import BoundStep
from hfta_tune.fusion.compiled_steps import CompiledSteps, StepCache
from hfta_tune.fusion.contract import MetricName
from hfta_tune.fusion.failure import TornByOutOfMemory
from hfta_tune.fusion.gradients import clipped_by_optimizer
from hfta_tune.fusion.graphed import GraphedSteps
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import ArrayOptimizers
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.stack import LaneStack
from hfta_tune.fusion.stacking import Stacking
from hfta_tune.fusion.vmapped import Step
from hfta_tune.fusion.vmapped_steps import VmappedSteps

__all__ = ["FusedArray"]

logger = logging.getLogger(__name__)

_DEFAULTS = Options()


class FusedArray:
    """Trains lanes whose models and optimizers have equal signatures.

    Strategies: "vmap" (stacked tensors, one call of the step for all lanes), "recorded" (the tensor operations of
    that, optimizer included, one after the other), "compiled" (the same as one compiled function; "compiled by 8" and
    "compiled by 32" call it for about so many lanes at a time) and "lane by lane" (plain PyTorch on each lane's own
    model, one after the other; native optimizers still step for all lanes at once). Those that can train the array are
    measured on its own steps, and the fastest goes on. A single lane has nothing to share, so it trains in plain
    PyTorch.

    Args:
        device: Where the lanes' tensors are.
        number: Which array of its owner it is.
        options: How the lanes are trained.
        strategies: The candidates, of "vmap", "lane by lane", "recorded" and "compiled".
        pools: Whether lanes whose passes run one by one may have their optimizers step at once.
        compiled: Recorded and compiled steps of arrays with the same signature, by form; shared between arrays.
        audit: Where to say what the audit found; None trains without an audit.

    Attributes:
        audits: {strategy: the largest difference that its audit found, or why there was none}.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        number: int = 0,
        options: Options = _DEFAULTS,
        strategies: Sequence[str] = (VMAP, LANE_BY_LANE, RECORDED, COMPILED),
        pools: bool = True,
        compiled: StepCache | None = None,
        audit: Callable[[str], None] | None = None,
    ) -> None:
        self.number = number
        self.options = options
        self._device = device
        self._stacking = Stacking(device)
        self._choice = StrategyChoice(
            [s for s in strategies if s not in OF_TENSORS],
            may_record=RECORDED in strategies,
            may_compile=COMPILED in strategies,
            by_blocks=device.type == "cpu",
        )
        self._cache: StepCache = {} if compiled is None else compiled
        self._vmapped = VmappedSteps(self._stacking, options, device)
        self._compiled = CompiledSteps(self._stacking, self._vmapped, options, self._cache, device)
        self._graphed = GraphedSteps()
        self._can_vmap_evaluation = VMAP in strategies
        self._with_gradient: frozenset[str] = frozenset()
        self._may_pool = pools
        self._pools = pools and audit is None  # what is audited is found right first
        self._values: dict[Lane, dict[str, Tensor]] = {}
        self._audit = audit
        self._audited: set[str] = set()
        self.audits: dict[str, Difference | str] = {}

    @property
    def lanes(self) -> list[Lane]:
        """The lanes, in the order of their rows."""
        return self._stacking.lanes

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

    def measure_again(self) -> None:
        """Measure the strategies anew from the next step on."""
        self._choice.measure_again()

    def change_lanes(self, *, leave: Sequence[Lane] = (), join: Sequence[Lane] = ()) -> None:
        """Take lanes out and in; the others go on undisturbed. A leaving lane keeps its state for itself."""
        if leave or join:
            self._stacking.change(leave, join)
            for lane in leave:
                self._values.pop(lane, None)

    def give_up_vmap(self, *, training: bool) -> None:
        """Go lane by lane from now on, in the training or the evaluation steps."""
        if training:
            for strategy in (VMAP, *OF_TENSORS):
                self._choice.drop(strategy)
        else:
            self._can_vmap_evaluation = False
            self.set_mode(training=self._stacking.training)

    def set_mode(self, *, training: bool) -> None:
        """Put all models in training or evaluation mode."""
        self._stacking.set_mode(training=training)

    def set_surroundings(self, surroundings: Hashable) -> None:
        """Tell what the training step reads besides its arguments, as far as known; None if it may change unseen."""
        if self._compiled.set_surroundings(surroundings):
            self._graphed.reset()

    def numbers_may_have_changed(self) -> None:
        """Read the numbers of the lanes' optimizers again before the next step."""
        if self._stacking.optimizers is not None:
            self._stacking.optimizers.numbers_may_have_changed()

    def updates_after(self, batch_number: int, *, last: bool) -> bool:
        """Whether the optimizers step after this batch of a round; they do after the last one."""
        return last or (batch_number + 1) % self.options.accumulate == 0

    # Training

    def train_step(self, step: Step, batch: Any, *, batch_number: int = 0, last: bool = False) -> dict[str, Tensor]:
        """Train every lane on one batch.

        Args:
            step: The training step.
            batch: What it trains on.
            batch_number: The batch's number in the round.
            last: Whether it is the round's last.

        Returns:
            {optimizer: losses}, [lanes], and metrics by MetricName; NaN for a lane that raised.

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
        audited = COMPILED if strategy in BLOCKS else strategy
        if self._audit is not None and audited not in (*self._audited, LANE_BY_LANE):
            self._run_audit(audited, step, batch)
            strategy = self.strategy
        run: Callable[[], dict[str, Tensor]]
        if strategy in OF_TENSORS:
            bound = self._compiled.for_batch(batch, strategy)
            if bound is None:
                return self._train_vmap(step, batch, update)
            run = functools.partial(self._train_compiled, bound, batch, update)
        else:
            train = self._train_vmap if strategy == VMAP else self._train_alone
            run = functools.partial(train, step, batch, update)
        if not self._choice.measuring(strategy) or len(self.lanes) == 1:
            return run()
        begin = self._now()
        losses = run()
        self._choice.record(strategy, self._now() - begin)
        if not self._choice.measuring(self.strategy):
            figures = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds_a_step.items())
            logger.info("%d lanes train by the strategy %r; a step: %s.", len(self.lanes), self.strategy, figures)
            gain = self._choice.gain_of_compiling
            if gain is not None:
                self._compiled.note_gain(gain)
        return losses

    def compile_if_it_pays(self, steps_left: float) -> float | None:
        """Between rounds: compile the training step if what is left to train is worth it; else record it, if that is.

        Args:
            steps_left: How many training steps the array has before it, 0 if that is unknown.

        Returns:
            The seconds that it took, or None if neither was done.
        """
        if not self._compiled.can_be_made:
            return None
        choice, lanes = self._choice, len(self.lanes)
        begin = self._now()
        if choice.could_compile(lanes) and choice.compiling_pays(steps_left, self._compiled.expected()):
            choice.compiled(there=self._compiled.compile())
        elif choice.could_record(lanes) and choice.recording_pays(
            steps_left, self._compiled.expected_of_recording(choice.seconds[VMAP])
        ):
            choice.recorded(there=self._compiled.record())
        else:
            return None
        return self._now() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":  # a measured step is waited for; others are not
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _train_vmap(self, step: Step, batch: Any, update: bool) -> dict[str, Tensor]:
        if self._device.type == "cuda" and update and self._vmapped.leaves_batch_alone(batch):
            losses = self._train_graphed(step, batch)
            if losses is not None:
                return losses
        return self._train_eagerly(step, batch, update)

    def _train_graphed(self, step: Step, batch: Any) -> dict[str, Tensor] | None:
        _, optimizers, _ = self._stacking.whole()
        if self._compiled.surroundings is None or not self._compiled.include_updates:
            return None
        form = form_of_batch(batch), constants_of_batch(batch)
        updates = optimizers.prepare(self._with_gradient)  # another object after lanes have moved, too
        return self._graphed.train(form, batch, updates, functools.partial(self._train_eagerly, step, update=True))

    def _train_eagerly(self, step: Step, batch: Any, update: bool) -> dict[str, Tensor]:
        losses, gradients = self._vmapped.losses_and_gradients(step, batch)
        self._with_gradient = frozenset(gradients)
        stack, optimizers, _ = self._stacking.whole()
        try:
            self._use(stack, optimizers, gradients, update)
        except torch.OutOfMemoryError as error:
            raise TornByOutOfMemory(error) from error
        self._compiled.saw(step, batch, gradients)
        return losses

    def _train_compiled(self, bound: BoundStep, batch: Any, update: bool) -> dict[str, Tensor]:
        try:
            losses, gradients = bound(batch)
            if not self._compiled.include_updates:
                stack, optimizers, _ = self._stacking.whole()
                self._use(stack, optimizers, gradients, update)
        except torch.OutOfMemoryError as error:
            raise TornByOutOfMemory(error) from error
        return losses  # type: ignore[no-any-return]

    def _use(self, stack: LaneStack, optimizers: ArrayOptimizers, gradients: dict[str, Tensor], update: bool) -> None:
        """Accumulate gradients, or step the optimizers by them and those that were accumulated."""
        if stack.accumulated or not update:
            for name, gradient in gradients.items():
                if name in stack.accumulated:
                    stack.accumulated[name] += gradient
                else:
                    stack.accumulated[name] = gradient.clone()
            if not update:
                return
            gradients, stack.accumulated = stack.accumulated, {}
        gradients = clipped_by_optimizer(gradients, stack.limits, self.lanes[0].clipping, optimizers.trains)
        optimizers.apply(stack.parameters, gradients, optimizers.prepare(frozenset(gradients)))
        optimizers.step_views(gradients)

    # Lane by lane

    def _train_alone(self, step: Step, batch: Any, update: bool) -> dict[str, Tensor]:
        self._stacking.own_models_in_mode()
        pooled = self._pooled()
        if pooled is None:
            self._stacking.unstack()
        losses = []
        for lane, own in self._shares(batch):
            call = functools.partial(step, [lane], lane.model, own, self._values_of(lane))
            losses.append(train_lane(call, lane, self.options, self._device, update=update and pooled is None))
        if pooled is not None:
            try:
                self._update_pooled(*pooled, update)
            except torch.OutOfMemoryError as error:
                raise TornByOutOfMemory(error) from error
        given = [name for name in self.lanes[0].optimizers if all(name in own for own in losses)]
        sound = [own for own, lane in zip(losses, self.lanes, strict=True) if lane.error is None]
        metrics = [name for name in (sound[0] if sound else ()) if isinstance(name, MetricName)]
        unknown = torch.tensor(float("nan"), device=self._device)
        return {name: torch.stack([own.get(name, unknown) for own in losses]) for name in (*given, *metrics)}

    def _pooled(self) -> tuple[LaneStack, ArrayOptimizers] | None:
        """The stack of parameters that optimizers step on at once, though each lane has its own passes."""
        if not self._pools or len(self.lanes) == 1:
            return None
        stack, optimizers = self._stacking.parameters()
        if not optimizers.are_native:
            self._pools = False
            return None
        return stack, optimizers

    def _update_pooled(self, stack: LaneStack, optimizers: ArrayOptimizers, update: bool) -> None:
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
        self._use(stack, optimizers, gradients, update)

    def _step_unpooled(self, update: bool) -> None:
        self._stacking.unstack()
        for lane in self.lanes:
            if update and lane.error is None:
                step_lane(lane)

    def _shares(self, batch: Any) -> Iterator[tuple[Lane, Any]]:
        """Each lane with the batch; what a lane's step does to it, the next one does not see."""
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        spare = [tensor.clone() for tensor in tensors]
        for lane in list(self.lanes):
            versions = [tensor._version for tensor in tensors]
            yield lane, batch
            if lane is not self.lanes[-1] and versions != [tensor._version for tensor in tensors]:
                for tensor, original in zip(tensors, spare, strict=True):
                    tensor.copy_(original)

    def _values_of(self, lane: Lane) -> dict[str, Tensor]:
        if lane not in self._values:
            self._values[lane] = lane.numbers_on(self._device)
        return self._values[lane]

    # Evaluation

    @torch.no_grad()
    def evaluation_step(self, step: Step, batch: Any) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Evaluate every lane on one batch; return {metric: [lanes]}, or one such dict of 0-d a lane.

        Raises:
            LanesDiffer: from the step.
            VmapFailed: if the step does not run under vmap.
        """
        if self.evaluation_strategy == VMAP:
            return self._vmapped.metrics(step, batch)
        self._stacking.own_models_in_mode()
        return [
            evaluate_lane(
                functools.partial(step, [lane], lane.model, own, self._values_of(lane)),
                lane,
                self.options,
                self._device,
            )
            for lane, own in self._shares(batch)
        ]

    def probe(self, step: Step, batch: Any) -> None:
        """Run a training step, forward and backward, or an evaluation step for its errors only; nothing changes."""
        self._vmapped.probe(step, batch)

    # The audit

    def _run_audit(self, strategy: str, step: Step, batch: Any) -> None:
        """Compare a fused strategy with plain PyTorch before its first step; give it up if they differ."""
        assert self._audit is not None
        self._audited.add(strategy)
        self._stacking.own_models_in_mode()
        audit = audit_vmap if strategy == VMAP else functools.partial(audit_of_tensors, strategy)
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                difference = audit(self.lanes, self.options, step, batch, self._array_of_copies)
        except NotAuditable as error:
            self.audits[strategy] = str(error)
            self._audit(f"{error}, so it could not be audited")
        else:
            if difference is not None:
                self.audits[strategy] = difference
            if difference is not None and difference.is_wrong:
                self._audit(f"{difference}; its array goes on lane by lane")
                self._may_pool = self._pools = False
                self.give_up_vmap(training=True)
                self.give_up_vmap(training=False)
            elif strategy == VMAP:
                self._pools = self._may_pool

    def _array_of_copies(self, lanes: Sequence[Lane], options: Options) -> FusedArray:
        array = FusedArray(self._device, options=options, strategies=(VMAP,), compiled=self._cache)
        array.change_lanes(join=lanes)
        array._stacking.training = self._stacking.training
        array.set_surroundings(self._compiled.surroundings)
        return array

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """{name: gradient [lanes, ...]} of the batches since the optimizers' last step."""
        return dict(self._stacking.whole()[0].accumulated)

    def drop_accumulated_gradients(self) -> None:
        """Forget the gradients of the batches since the optimizers' last step."""
        self._stacking.drop_accumulated()
        for lane in self.lanes:
            lane.drop_gradients()

    def step_optimizers(self) -> None:
        """Step the optimizers by the accumulated gradients."""
        stack, optimizers, _ = self._stacking.whole()
        self._use(stack, optimizers, {}, update=True)

    def train_of_tensors(
        self, strategy: str, step: Step, batch: Any, with_gradient: Iterable[str]
    ) -> dict[str, Tensor] | None:
        """Train the lanes on one batch by the recorded or the compiled step, if there is one.

        Args:
            strategy: By which.
            step: The training step.
            batch: What to train on.
            with_gradient: The names of the parameters that have a gradient.
        """
        self._compiled.saw(step, batch, with_gradient)
        bound = self._compiled.for_batch(batch, strategy)
        return None if bound is None else self._train_compiled(bound, batch, update=True)
