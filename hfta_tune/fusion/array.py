"""A fused array: lanes with one signature, trained as one, joined and left between steps."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from hfta_tune.fusion.errors import FusionError
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import FusedOptimizer, fuse_optimizers, obstacle_of_optimizer
from hfta_tune.fusion.stack import LaneStack, Template

__all__ = ["FusedArray", "LanesDiffer", "Step", "VmapFailed", "clone_batch"]

Step: TypeAlias = Callable[[Sequence[Lane], nn.Module, Any, Mapping[str, Tensor]], Any]
"""step(lanes, model, batch, values): one call of the user's code that stands for all of `lanes`.

Under vmap it is called once for all lanes of the array, lane by lane once for each. `values` are the
lanes' numbers as 0-d tensors.
"""


class LanesDiffer(Exception):
    """Raised by a step that finds that its lanes cannot share one call. Nothing has been trained."""


class VmapFailed(Exception):
    """The step does not run under vmap. Nothing has been trained; `place` says where it stopped."""

    def __init__(self, cause: Exception, place: str) -> None:
        super().__init__(f"{place}: {_first_line(cause)}")
        self.cause = cause
        self.place = place


class FusedArray:
    """Trains lanes whose models and optimizers have equal signatures.

    Strategies: "vmap" (stacked tensors, one call of the step for all lanes) and "lane by lane" (plain
    PyTorch on each lane's own objects, one after the other), for training and evaluation apart. A single
    lane has nothing to share, so it trains in plain PyTorch.

    Attributes:
        lanes: The lanes, in the order of their rows.
    """

    def __init__(self, device: torch.device, *, fusible: bool = True) -> None:
        self.lanes: list[Lane] = []
        self._device = device
        self._stack: LaneStack | None = None
        self._template: Template | None = None
        self._optimizer: FusedOptimizer | None = None
        self._can_vmap_training = fusible
        self._can_vmap_evaluation = fusible
        self._training_mode = True
        self._proven: set[Any] = set()

    @property
    def _vmap_training(self) -> bool:
        return self._can_vmap_training and len(self.lanes) > 1

    @property
    def _vmap_evaluation(self) -> bool:
        return self._can_vmap_evaluation and len(self.lanes) > 1

    @property
    def strategy(self) -> str:
        """The strategy of the training steps."""
        return "vmap" if self._vmap_training else "lane by lane"

    @property
    def evaluation_strategy(self) -> str:
        """The strategy of the evaluation steps."""
        return "vmap" if self._vmap_evaluation else "lane by lane"

    def change_lanes(self, *, leave: Sequence[Lane] = (), join: Sequence[Lane] = ()) -> None:
        """Take lanes out and in; the others go on undisturbed. A leaving lane keeps its state for itself."""
        if not leave and not join:
            return
        for lane in leave:
            self.lanes.remove(lane)
            lane.detach_storage()
        self.lanes.extend(join)
        self._stack = self._optimizer = None
        if not self._vmap_training:
            self._unstack()

    def train_lane_by_lane(self) -> None:
        """Give up vmap for the training steps; each lane's own optimizer goes on from the stacked state."""
        self._can_vmap_training = False
        self._unstack()
        self.set_mode(training=self._training_mode)

    def evaluate_lane_by_lane(self) -> None:
        """Give up vmap for the evaluation steps."""
        self._can_vmap_evaluation = False
        if not self._vmap_training:
            self._unstack()
        self.set_mode(training=self._training_mode)

    def set_mode(self, *, training: bool) -> None:
        """Put all models in training or evaluation mode."""
        self._training_mode = training
        if self._template is not None:
            self._template.train(training)
        if self.strategy != "vmap" or self.evaluation_strategy != "vmap":
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
        if not self._vmap_training:
            return torch.stack([self._train_alone(step, lane, own) for lane, own in self._shares(batch)])
        losses: Tensor = self._attempt(step, batch, self._fused_losses)
        if not losses.requires_grad:
            raise VmapFailed(_no_graph(self.lanes[0].name, losses), "training_step")
        stack = self._stacked()
        names = list(stack.trainable())
        gradients = torch.autograd.grad(losses.sum(), list(stack.trainable().values()), allow_unused=True)
        assert self._optimizer is not None
        self._optimizer.step(dict(zip(names, gradients, strict=True)))
        return losses.detach()

    @torch.no_grad()
    def evaluation_step(self, step: Step, batch: Any) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Evaluate every lane on one batch; return {metric: [lanes]}, or one such dict of 0-d a lane.

        Raises:
            LanesDiffer: from the step.
            VmapFailed: if the step does not run under vmap.
        """
        if not self._vmap_evaluation:
            return [self._evaluate_alone(step, lane, own) for lane, own in self._shares(batch)]
        metrics: dict[str, Tensor] = self._attempt(step, batch, self._fused_metrics)
        return metrics

    def probe(self, step: Step, batch: Any) -> None:
        """Run the forward pass of a training or evaluation step for its errors only; nothing changes."""
        fused = self._fused_losses if self._training_mode else self._fused_metrics
        with torch.no_grad(), self._unchanged_buffers():
            fused(step, clone_batch(batch))

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
            self._optimizer = fuse_optimizers(self.lanes, self._stack) if self._vmap_training else None
        return self._stack

    def _unstack(self) -> None:
        for lane in self.lanes:
            lane.detach_storage()
        self._stack = self._optimizer = self._template = None

    def _attempt(self, step: Step, batch: Any, fused: Callable[[Step, Any], Any]) -> Any:
        form = (fused.__name__, _form(batch))
        if form in self._proven:
            return self._explained(fused, step, batch)
        # The first attempt may stop half-way, and what it changed must not be seen by the next one.
        tried = clone_batch(batch)
        with self._unchanged_buffers(on_error=True):
            result = self._explained(fused, step, tried)
        _copy_changes(tried, batch)
        self._proven.add(form)
        return result

    def _explained(self, fused: Callable[[Step, Any], Any], step: Step, batch: Any) -> Any:
        try:
            return fused(step, batch)
        except LanesDiffer:
            raise
        except Exception as error:
            raise VmapFailed(error, _place(error, self._template)) from error

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
        template = self._template
        assert template is not None
        lanes = self.lanes

        def one_call(model: nn.Module, batch: Any, values: Mapping[str, Tensor]) -> Any:
            return step(lanes, model, batch, values)

        def one_lane(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], values: dict[str, Tensor]
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

        with _quiet_and_batchable():
            result, assigned = vmap(one_lane, in_dims=(0, 0, 0), randomness="different")(
                stack.parameters, {**stack.buffers, **stack.carried}, stack.values
            )
        for name, buffer in assigned.items():
            stack.buffers[name].copy_(buffer.detach())
        return result

    def _fused_losses(self, step: Step, batch: Any) -> Tensor:
        losses: Tensor = self._call(step, batch, lambda loss: check_loss(loss, self.lanes[0].name))
        return losses

    def _fused_metrics(self, step: Step, batch: Any) -> dict[str, Tensor]:
        name, device = self.lanes[0].name, self._device
        metrics: dict[str, Tensor] = self._call(step, batch, lambda own: check_metrics(own, name, device))
        return metrics

    def _train_alone(self, step: Step, lane: Lane, batch: Any) -> Tensor:
        if lane.error is not None:
            return torch.tensor(float("nan"), device=self._device)
        values = self._values_of(lane)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            lane.optimizer.zero_grad()
            loss = check_loss(step([lane], lane.model, batch, values), lane.name)
            if not loss.requires_grad:
                raise _no_graph(lane.name, loss)
            loss.backward()
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


def check_loss(loss: Any, trial: str) -> Tensor:
    """Return a training step's loss as a 0-d tensor.

    Raises:
        FusionError: if it is no tensor of one element.
    """
    if not isinstance(loss, Tensor):
        raise FusionError(
            f"{trial}: training_step returned {_say(loss)}; return the loss, a 0-d tensor "
            "such as F.cross_entropy(model(x), y)."
        )
    if loss.numel() != 1:
        raise FusionError(
            f"{trial}: training_step returned a tensor of shape {list(loss.shape)}; "
            "return one number, such as loss.mean()."
        )
    return loss.reshape(())


def check_metrics(metrics: Any, trial: str, device: torch.device) -> dict[str, Tensor]:
    """Return an evaluation step's metrics as 0-d tensors.

    Raises:
        FusionError: if they are no dict of scalars.
    """
    if not isinstance(metrics, Mapping):
        raise FusionError(
            f'{trial}: validation_step returned {_say(metrics)}; return a dict of scalars such as {{"accuracy": ...}}.'
        )
    checked = {}
    for name, value in metrics.items():
        scalar = value if isinstance(value, Tensor) else None
        if scalar is None and isinstance(value, (bool, int, float)):
            scalar = torch.tensor(float(value), device=device)
        if scalar is None or scalar.numel() != 1:
            raise FusionError(
                f"{trial}: validation_step returned {_say(value)} as {name!r}; "
                "each metric is one number, such as correct.float().mean()."
            )
        checked[str(name)] = scalar.reshape(()).to(torch.get_default_dtype())
    return checked


def _say(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:80]!r}"


def _no_graph(trial: str, loss: Tensor) -> FusionError:
    return FusionError(
        f"{trial}: training_step returned a loss without a graph (requires_grad is False); "
        "compute it from model(...) without detach(), item() or no_grad()."
    )


def _form(batch: Any) -> Any:
    leaves, structure = pytree.tree_flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


def _place(error: BaseException, template: Template | None) -> str:
    """Say where a step stopped: the path of the innermost module and the line of code."""
    paths = {id(m): name.removeprefix("model.") for name, m in template.named_modules()} if template else {}
    place, line = "the step", ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths and module is not template:
            place = f"module {paths[id(module)]!r} ({type(module).__name__})"
        if "hfta_tune/fusion" not in frame.f_code.co_filename:
            line = linecache.getline(frame.f_code.co_filename, trace.tb_lineno).strip() or line
        trace = trace.tb_next
    return f"{place}, at `{line}`" if line else place


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


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


def clone_batch(batch: Any) -> Any:
    """Copy the tensors of a batch."""
    return pytree.tree_map_only(Tensor, torch.clone, batch)


def _copy_changes(tried: Any, batch: Any) -> None:
    """Do to `batch` what a step did to its copy."""
    for new, old in zip(pytree.tree_leaves(tried), pytree.tree_leaves(batch), strict=True):
        if isinstance(new, Tensor) and new._version:
            old.copy_(new)
