"""What the native fused optimizers have in common: groups, two-dimensional views, state of a lane."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfta_tune.fusion.lane import ONLY, Lane
from hfta_tune.fusion.optimizers._base import LaneNumbers, has_plain_steps
from hfta_tune.fusion.stack import LaneStack, rows

__all__ = ["GroupUpdate", "NativeOptimizer", "ParameterGroup"]


class ParameterGroup:
    """One parameter group of all lanes.

    Attributes:
        names: The parameters' names.
        flags: The group's options that are equal in all lanes.
        numbers: The group's numbers, a lane its own.
        parameters: {name: [lanes, elements]}, views of the stack.
        state: {key: {name: [lanes, elements]}}.
        started: {name: [lanes] of bool}: whether a lane's parameter has been stepped.
        dtype: That of the parameters.
        wide: The dtype of factors near 1, which bfloat16 would round to another time constant.
    """

    def __init__(
        self, lanes: Sequence[Lane], stack: LaneStack, optimizer: str, group: int, flags: dict[str, Any]
    ) -> None:
        optimizers = [lane.optimizers[optimizer] for lane in lanes]
        by_id = {id(parameter): name for name, parameter in lanes[0].parameters()}
        self.names = [by_id[id(p)] for p in optimizers[0].param_groups[group]["params"]]
        self.flags = flags
        device = stack.parameters[self.names[0]].device if self.names else torch.device("cpu")
        self.numbers = LaneNumbers(optimizers, group, device)
        self.parameters = {name: rows(stack.parameters[name].detach()) for name in self.names}
        self.lanes_parameters = {name: [lane.model.get_parameter(name) for lane in lanes] for name in self.names}
        self.optimizers = optimizers
        self.dtype = next(iter(self.parameters.values())).dtype if self.names else torch.float32
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.state: dict[str, dict[str, Tensor]] = {}
        self._clocks: dict[str, Tensor] = {}
        self._dials: tuple[str, ...] = ("step",)
        self._given: dict[tuple[str, str], list[bool]] = {}
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

    def start(self, name: str, keys: Sequence[str], first: Mapping[str, Sequence[float]] | None = None) -> None:
        """Note that a parameter is stepped: lanes that had no state of it yet have it now.

        Args:
            name: The parameter's name.
            keys: The entries of state, besides what clocks show.
            first: What entries and dials start from, a lane its own number; the others start from 0.
        """
        if not all(self.started[name]):
            for lane, started in enumerate(self.started[name]):
                if not started:
                    self.started[name][lane] = True
                    for key, numbers in (first or {}).items():
                        if key in self.state:
                            self.state[key][name][lane] = numbers[lane]
                        else:
                            self._clocks[name][lane, self._dials.index(key)] = numbers[lane]
                    self.bind_state(name, lane, keys)
            if name in self._clocks:
                self._set_clock(name, self._clocks[name])

    def give(self, key: str, name: str, lanes: list[bool]) -> None:
        """Bind an entry of state that not every lane has, in those of `lanes` that have none yet."""
        if self._given.get((key, name)) != lanes:
            for lane, own in enumerate(self._own_state(name)):
                if lanes[lane] and key not in own:
                    own[key] = self._view(key, name, lane)
            self._given[key, name] = lanes

    def start_clocks(self, dials: Sequence[str] = ()) -> None:
        """Stack the lanes' step counts; parameters that have been stepped alike share one clock.

        `dials` are further 0-d entries of state, which change with every step as the count does. A clock
        shows them in its columns after the first.
        """
        self._dials = ("step", *dials)
        clocks: dict[Hashable, Tensor] = {}
        for name in self.names:
            shown = [tuple(float(row.get(dial, 0.0)) for dial in self._dials) for row in self._own_state(name)]
            clock = torch.tensor(shown, dtype=torch.float32, device=self.parameters[name].device)
            self._set_clock(name, clocks.setdefault((*shown, *self.started[name]), clock))

    def clocks_of(self, names: Sequence[str]) -> tuple[list[Tensor], tuple[int, ...]]:
        """Return the clocks that tick in a step over `names`, and which of them each name goes by."""
        if len(names) < len(self.names):
            resting = {id(self._clocks[name]) for name in self.names if name not in names}
            parted: dict[int, Tensor] = {}
            for name in names:
                clock = self._clocks[name]
                if id(clock) in resting:
                    self._set_clock(name, parted.setdefault(id(clock), clock.clone()))
        clocks: dict[int, Tensor] = {}
        for name in names:
            clocks.setdefault(id(self._clocks[name]), self._clocks[name])
        places = {identity: number for number, identity in enumerate(clocks)}
        return list(clocks.values()), tuple(places[id(self._clocks[name])] for name in names)

    def _set_clock(self, name: str, clock: Tensor) -> None:
        self._clocks[name] = clock
        for lane, started in enumerate(self.started[name]):
            if started:
                own = self.optimizers[lane].state[self.lanes_parameters[name][lane]]
                for column, dial in enumerate(self._dials):
                    own[dial] = clock[lane, column]

    def _own_state(self, name: str) -> list[dict[str, Any]]:
        return [
            optimizer.state.get(parameter, {})
            for optimizer, parameter in zip(self.optimizers, self.lanes_parameters[name], strict=True)
        ]

    def _view(self, key: str, name: str, lane: int) -> Tensor:
        return self.state[key][name][lane].view(self.lanes_parameters[name][lane].shape)


Form: TypeAlias = tuple[tuple[str, ...], tuple[tuple[str, bool], ...], tuple[str, ...], tuple[int, ...]]
"""Names with a gradient, flags, the numbers that are there, and which of several each name goes by."""


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """One update of a parameter group: everything that the computation reads besides parameters and gradients.

    Attributes:
        names: The parameters that have a gradient.
        numbers: The group's numbers for this step, [lanes, 1] on the device.
        state: {key: {name: [lanes, elements]}}, updated in place.
        clocks: Step counts, [lanes, 1], or [lanes, 1 + dials], updated in place.
        clock_of: Which of `clocks` counts each of `names`.
        form: What the sequence of operations depends on. Equal forms compute alike.
    """

    names: tuple[str, ...]
    numbers: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    clocks: list[Tensor]
    clock_of: tuple[int, ...]
    form: Form

    def number(self, name: str) -> list[Tensor]:
        """A number, once for each parameter."""
        return [self.numbers[name]] * len(self.names)

    def entries(self, key: str) -> list[Tensor]:
        """An entry of state, of each parameter."""
        return [self.state[key][name] for name in self.names]

    def by_clock(self, of_clocks: Sequence[Tensor]) -> list[Tensor]:
        """What was computed of each clock, for each parameter by its clock."""
        return [of_clocks[clock] for clock in self.clock_of]


class NativeOptimizer:
    """Base of the native fused optimizers.

    A step has two parts: `prepare` reads the lanes' numbers and keeps the books, on the host; `apply`
    is tensor operations only, so that it can be compiled together with the forward and backward pass.
    """

    classes: ClassVar[tuple[type[Optimizer], ...]]
    flag_names: ClassVar[tuple[str, ...]]

    def __init__(self, lanes: Sequence[Lane], stack: LaneStack, name: str = ONLY) -> None:
        flags = self._flags(lanes[0].optimizers[name])
        self.groups = [ParameterGroup(lanes, stack, name, index, flags[index]) for index in range(len(flags))]

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

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the stacked parameters in place; a parameter without gradient is left alone."""
        parameters = {name: parameter for group in self.groups for name, parameter in group.parameters.items()}
        self.apply(parameters, gradients, self.prepare(gradients))

    def prepare(self, names: Iterable[str]) -> list[GroupUpdate]:
        """Do the host's part of a step over the parameters `names`."""
        names = set(names)
        return [self._prepare(group, tuple(name for name in group.names if name in names)) for group in self.groups]

    @classmethod
    @torch.no_grad()
    def apply(
        cls, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], updates: Sequence[GroupUpdate]
    ) -> None:
        """Update parameters and state in place; both dicts hold tensors of shape [lanes, ...]."""
        for update in updates:
            if update.names:
                flat = [rows(parameters[name].detach()) for name in update.names]
                cls._apply(flat, [rows(gradients[name]) for name in update.names], update)

    @staticmethod
    def _decay(group: ParameterGroup) -> dict[str, Tensor]:
        """The number of weight decay, coupled or decoupled; none where no lane decays."""
        decay = group.numbers.host("weight_decay")
        if not any(decay):
            return {}
        if group.flags.get("decoupled_weight_decay"):
            kept = [1 - rate * number for rate, number in zip(group.numbers.host("lr"), decay, strict=True)]
            return {"1-lr*decay": group.numbers.device("1-lr*decay", kept, group.wide)}
        return {"decay": group.numbers.device("decay", decay, group.dtype)}

    @staticmethod
    def _decayed(parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> list[Tensor]:
        """Return the gradients as formulas read them: with the sign of a descent and the coupled decay.

        A decoupled decay is done to the parameters, in place.
        """
        _, flags, present, _ = update.form
        if dict(flags)["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if "1-lr*decay" in present:
            torch._foreach_mul_(parameters, update.number("1-lr*decay"))
        if "decay" in present:
            gradients = list(torch._foreach_addcmul(gradients, parameters, update.number("decay")))
        return gradients

    def _prepare(self, group: ParameterGroup, names: tuple[str, ...]) -> GroupUpdate:
        raise NotImplementedError

    @classmethod
    def _apply(cls, parameters: list[Tensor], gradients: list[Tensor], update: GroupUpdate) -> None:
        raise NotImplementedError
