"""Where the tensors of an array's lanes are: in a stack, or each lane's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from hfta_tune.fusion.dropout import set_idle_dropouts
from hfta_tune.fusion.failure import VmapFailed
from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers import ArrayOptimizers
from hfta_tune.fusion.stack import LaneStack, Template

__all__ = ["Stacking"]


class Stacking:
    """Stacks the lanes of an array when that is asked for, and gives their tensors back.

    Args:
        device: Where the lanes' tensors are.
        take_gradients: Whether a stack takes over the gradients that lanes have accumulated; else they stay the `grad`
            of the lanes' own parameters.

    Attributes:
        lanes: The lanes, in the order of their rows.
        training: Whether the models are in training mode.
        moves: How often tensors have moved: what was made for tensors of another count is void.
    """

    def __init__(self, device: torch.device, *, take_gradients: bool = True) -> None:
        self.lanes: list[Lane] = []
        self.training = True
        self.moves = 0
        self._device = device
        self._take_gradients = take_gradients
        self._stack: LaneStack | None = None
        self._optimizers: ArrayOptimizers | None = None
        self._template: Template | None = None
        self._are_views = False
        self._mode_of_lanes: bool | None = None

    @property
    def optimizers(self) -> ArrayOptimizers | None:
        """The optimizers of the present stack."""
        return self._optimizers

    @property
    def present(self) -> LaneStack | None:
        """The present stack, if there is one."""
        return self._stack

    @property
    def template(self) -> Template | None:
        """The code of one lane, if it was needed yet."""
        return self._template

    def change(self, leave: Sequence[Lane], join: Sequence[Lane]) -> None:
        """Take lanes out and in. A leaving lane keeps its state for itself."""
        if self._stack is not None:
            # A new stack takes them in again, with those of the lanes that join.
            self._stack.return_gradients(self.lanes)
        for lane in leave:
            self.lanes.remove(lane)
            lane.detach_storage()
        self.lanes.extend(join)
        self._mode_of_lanes = None
        self._drop()
        if len(self.lanes) == 1:
            self.unstack()

    def set_mode(self, *, training: bool) -> None:
        """Put the models in training or evaluation mode; the lanes' own follow when they are called."""
        self.training = training
        self._mode_of_lanes = None
        if self._template is not None:
            self._template.train(training)

    def own_models_in_mode(self) -> None:
        """Put the lanes' own models in the present mode, before they are called."""
        if self._mode_of_lanes is not self.training:
            self._mode_of_lanes = self.training
            for lane in self.lanes:
                lane.model.train(self.training)

    def whole(self) -> tuple[LaneStack, ArrayOptimizers, Template]:
        """Everything stacked, as vmap needs it.

        Raises:
            VmapFailed: if the model cannot be copied.
        """
        if self._template is None:
            self.unstack()  # a copy of a view would copy all lanes
            try:
                self._template = Template(self.lanes[0].model)
            except Exception as error:
                raise VmapFailed(error, "copying the model") from error
            self._template.train(self.training)
        if self._stack is None or not self._stack.whole:
            self._stack_up(whole=True)
            assert self._stack is not None
            set_idle_dropouts(self._template.model, self._stack.carried)
        assert self._stack is not None and self._optimizers is not None
        return self._stack, self._optimizers, self._template

    def parameters(self) -> tuple[LaneStack, ArrayOptimizers]:
        """At least the parameters stacked: each lane's model computes with views of them."""
        if self._stack is None:
            self._stack_up(whole=False)
        assert self._stack is not None and self._optimizers is not None
        return self._stack, self._optimizers

    def unstack(self) -> None:
        """Give every lane tensors of its own."""
        if self._are_views:
            if self._stack is not None:
                self._stack.return_gradients(self.lanes)
            for lane in self.lanes:
                lane.detach_storage()
            self._drop()
            self._are_views = False

    def drop_accumulated(self) -> None:
        """Forget gradients that the stack has accumulated."""
        if self._stack is not None:
            self._stack.accumulated = {}

    @contextlib.contextmanager
    def unchanged_buffers(self, *, on: type[BaseException] | None = None) -> Iterator[None]:
        """Undo what a forward pass did to the buffers; with `on` only if it raises that."""
        buffers = self.whole()[0].buffers
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

    def _stack_up(self, *, whole: bool) -> None:
        self.unstack()
        self._stack = LaneStack(self.lanes, self._device, whole=whole, take_gradients=self._take_gradients)
        self._optimizers = ArrayOptimizers(self.lanes, self._stack)
        self._are_views = True

    def _drop(self) -> None:
        self._stack = self._optimizers = None
        self.moves += 1
