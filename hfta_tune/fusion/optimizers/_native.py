"""What the native fused optimizers have in common: groups, two-dimensional views, state of a lane."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfta_tune.fusion.lane import Lane
from hfta_tune.fusion.optimizers._base import LaneNumbers, has_plain_steps
from hfta_tune.fusion.stack import LaneStack

__all__ = ["NativeOptimizer", "ParameterGroup"]


class ParameterGroup:
    """One parameter group of all lanes.

    Attributes:
        names: The parameters' names.
        flags: The group's options that are equal in all lanes.
        numbers: The group's numbers, a lane its own.
        parameters: {name: [lanes, elements]}, views of the stack.
        state: {key: {name: [lanes, elements]}}.
        started: {name: [lanes] of bool}: whether a lane's parameter has been stepped.
    """

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack, group: int, flags: dict[str, Any]) -> None:
        optimizers = [lane.optimizer for lane in lanes]
        by_id = {id(parameter): name for name, parameter in lanes[0].parameters()}
        self.names = [by_id[id(p)] for p in optimizers[0].param_groups[group]["params"]]
        self.flags = flags
        device = stack.parameters[self.names[0]].device if self.names else torch.device("cpu")
        self.numbers = LaneNumbers(optimizers, group, device)
        self.parameters = {name: stack.parameters[name].detach().flatten(1) for name in self.names}
        self.lanes_parameters = {name: [lane.model.get_parameter(name) for lane in lanes] for name in self.names}
        self.optimizers = optimizers
        self.state: dict[str, dict[str, Tensor]] = {}
        self.started = {
            name: [bool(o.state.get(p)) for o, p in zip(optimizers, self.lanes_parameters[name], strict=True)]
            for name in self.names
        }

    def stack_state(self, key: str) -> None:
        """Stack one entry of the lanes' optimizer state; zeros where a lane has none yet."""
        self.state[key] = {}
        for name, parameter in self.parameters.items():
            stacked = torch.zeros_like(parameter)
            self.state[key][name] = stacked
            for lane, row in enumerate(self._own_state(name)):
                if row.get(key) is not None:
                    stacked[lane].copy_(row[key].flatten())
                    row[key] = self._view(key, name, lane)

    def bind_state(self, name: str, lane: int, keys: Sequence[str]) -> None:
        """Make the lane's own optimizer state views of the stacked state."""
        own = self.optimizers[lane].state[self.lanes_parameters[name][lane]]
        for key in keys:
            own[key] = self._view(key, name, lane)

    def own_number(self, name: str, key: str) -> list[float]:
        """A number that each lane's own state of a parameter holds, such as its step count; 0 if none."""
        return [float(row.get(key, 0.0)) for row in self._own_state(name)]

    def _own_state(self, name: str) -> list[dict[str, Any]]:
        return [
            optimizer.state.get(parameter, {})
            for optimizer, parameter in zip(self.optimizers, self.lanes_parameters[name], strict=True)
        ]

    def _view(self, key: str, name: str, lane: int) -> Tensor:
        return self.state[key][name][lane].view(self.lanes_parameters[name][lane].shape)


class NativeOptimizer:
    """Base of the native fused optimizers: SGD, Adam and AdamW."""

    classes: ClassVar[tuple[type[Optimizer], ...]]
    flag_names: ClassVar[tuple[str, ...]]

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack) -> None:
        flags = self._flags(lanes[0].optimizer)
        self.groups = [ParameterGroup(lanes, stack, index, flags[index]) for index in range(len(flags))]

    @classmethod
    def serves(cls, optimizer: Optimizer) -> bool:
        """Whether this class computes what `optimizer.step()` would; a subclass may compute anything."""
        return type(optimizer) in cls.classes and has_plain_steps(optimizer)

    @classmethod
    def flags_of(cls, optimizer: Optimizer) -> Hashable:
        """The options that lanes must have in common, a tuple a group."""
        return tuple(tuple(flags.items()) for flags in cls._flags(optimizer))

    @classmethod
    def _flags(cls, optimizer: Optimizer) -> list[dict[str, Any]]:
        return [{name: bool(group.get(name, False)) for name in cls.flag_names} for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor | None]) -> None:
        """Update the stacked parameters in place; a parameter without gradient is left alone."""
        for group in self.groups:
            names = [name for name in group.names if gradients.get(name) is not None]
            if names:
                flat = [gradients[name].flatten(1) for name in names]  # type: ignore[union-attr]
                self._update(group, names, flat)

    def _update(self, group: ParameterGroup, names: list[str], gradients: list[Tensor]) -> None:
        raise NotImplementedError
