"""Steps of an array under vmap: the losses and gradients of all lanes, or their metrics, from one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfta_tune.fusion.batch import clone_batch, copy_changes, form_of_batch
from hfta_tune.fusion.contract import check_losses, check_metrics, no_graph, without_metrics
from hfta_tune.fusion.failure import LanesDiffer, VmapFailed, place_of
from hfta_tune.fusion.gradients import gradients_by_optimizer
from hfta_tune.fusion.options import Options
from hfta_tune.fusion.signature import python_state
from hfta_tune.fusion.stack import Template
from hfta_tune.fusion.stacking import Stacking
from hfta_tune.fusion.vmapped import Step, call_for_all

__all__ = ["LossesAndGradients", "VmappedSteps"]

LossesAndGradients: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]
"""{optimizer: losses [lanes]} and {name: gradient [lanes, ...]} of those parameters that have one."""


class VmappedSteps:
    """Calls the user's steps once for all lanes of a stacking.

    The first call for a form of batch is an attempt: it must neither change a module's attributes nor leave
    traces if it stops half-way.
    """

    def __init__(self, stacking: Stacking, options: Options, device: torch.device) -> None:
        self._stacking = stacking
        self._options = options
        self._device = device
        self._changes_batch: dict[Any, bool] = {}

    def losses_and_gradients(self, step: Step, batch: Any) -> LossesAndGradients:
        """Run a training step, forward and backward.

        Raises:
            LanesDiffer, VmapFailed, torch.OutOfMemoryError: Nothing has changed.
        """
        with self._stacking.unchanged_buffers(on=Exception):
            result: LossesAndGradients = self._attempt(step, batch, self._forward_and_backward, "training")
        return result

    def metrics(self, step: Step, batch: Any) -> dict[str, Tensor]:
        """Run an evaluation step; return {metric: [lanes]}.

        Raises:
            LanesDiffer, VmapFailed, torch.OutOfMemoryError: Nothing has changed.
        """
        result: dict[str, Tensor] = self._attempt(step, batch, self._forward_for_metrics, "evaluation")
        return result

    def outputs(
        self,
        step: Step,
        batch: Any,
        inputs: Mapping[Any, Tensor],
        finish: Callable[[Any], Any],
        kind: Hashable,
    ) -> Any:
        """Run any call of the models, with a graph where gradients are on.

        Args:
            step: The call. It gets `inputs` as its values.
            batch: What all lanes are given.
            inputs: {name: [lanes, ...]}: what each lane is given for itself.
            finish: Makes tensors of what the call returns.
            kind: What tells such calls apart, the form of `batch` included.

        Returns:
            What `finish` returned, [lanes, ...].

        Raises:
            LanesDiffer, VmapFailed, torch.OutOfMemoryError: Nothing has changed.
        """

        def call(step: Step, batch: Any) -> Any:
            return self._call(step, batch, finish, inputs)

        with self._stacking.unchanged_buffers(on=Exception):
            return self._attempt(step, batch, call, kind, has_form=True)

    def leaves_batch_alone(self, batch: Any) -> bool:
        """Whether training steps are known to run for such a batch and not to change it."""
        return self._changes_batch.get(("training", form_of_batch(batch))) is False

    def probe(self, step: Step, batch: Any) -> None:
        """Run a step of the models' mode, a training step backward too, for its errors only; nothing changes."""
        training = self._stacking.training
        run = self._forward_and_backward if training else self._forward_for_metrics
        with torch.set_grad_enabled(training), self._stacking.unchanged_buffers():
            run(step, clone_batch(batch))

    def checked_losses(self, losses: Any) -> dict[str, Tensor]:
        """What a training step returned, as {optimizer: loss}."""
        first = self._stacking.lanes[0]
        return check_losses(losses, list(first.optimizers), first.name)

    def _checked_metrics(self, metrics: Any) -> dict[str, Tensor]:
        return check_metrics(metrics, self._stacking.lanes[0].name, self._device)

    def _forward_and_backward(self, step: Step, batch: Any) -> LossesAndGradients:
        stack, optimizers, _ = self._stacking.whole()
        losses: dict[str, Tensor] = self._call(step, batch, self.checked_losses)
        for loss in without_metrics(losses).values():
            if not loss.requires_grad:
                raise no_graph(self._stacking.lanes[0].name, loss)
        gradients = gradients_by_optimizer(losses, stack.parameters, optimizers.trains, self._options.accumulate)
        sparse = [name for name, gradient in gradients.items() if gradient.is_sparse]
        if sparse:
            raise NotImplementedError(f"the gradient of {sparse[0]!r} is sparse")
        return {name: loss.detach() for name, loss in losses.items()}, gradients

    def _forward_for_metrics(self, step: Step, batch: Any) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = self._call(step, batch, self._checked_metrics)
        return metrics

    def _call(
        self, step: Step, batch: Any, finish: Callable[[Any], Any], values: Mapping[Any, Tensor] | None = None
    ) -> Any:
        """Call the step once for all lanes; `finish` checks what it returns and makes tensors of it."""
        stack, _, template = self._stacking.whole()
        buffers = {**stack.buffers, **stack.carried}
        result, assigned = call_for_all(
            step,
            self._stacking.lanes,
            template,
            batch,
            stack.parameters,
            buffers,
            stack.values if values is None else values,
            finish,
            self._options,
        )
        for name, buffer in assigned.items():
            stack.buffers[name].copy_(buffer.detach())
        return result

    def _attempt(
        self, step: Step, batch: Any, run: Callable[[Step, Any], Any], kind: Hashable, *, has_form: bool = False
    ) -> Any:
        form = kind if has_form else (kind, form_of_batch(batch))
        changes_batch = self._changes_batch.get(form)
        if changes_batch is False:
            return self._explained(run, step, batch)
        # An attempt may stop half-way, and what it changed must not be seen by the next one.
        tried = clone_batch(batch)
        if changes_batch:
            result = self._explained(run, step, tried)
            copy_changes(tried, batch)
            return result
        _, _, template = self._stacking.whole()
        with self._stacking.unchanged_buffers(on=Exception):
            before = _state_of(template)
            result = self._explained(run, step, tried)
            if _state_of(template) != before:
                error = RuntimeError("a module changes an attribute in its forward pass; keep it in a buffer")
                raise VmapFailed(error, "the model")
        self._changes_batch[form] = copy_changes(tried, batch)
        return result

    def _explained(self, run: Callable[[Step, Any], Any], step: Step, batch: Any) -> Any:
        try:
            return run(step, batch)
        except (LanesDiffer, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise VmapFailed(error, place_of(error, self._stacking.template)) from error


def _state_of(template: Template) -> Any:
    try:
        return python_state(template.model)
    except RuntimeError:  # a tensor of the finished vmap in a container
        return object()
