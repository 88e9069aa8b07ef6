"""Recurrent layers, which have no batching rule, as batched GEMMs over the lanes.

A layer is one batched GEMM a time step, and the gradient of its weights is one over all time steps.
Formulas: torch's documentation of torch.nn.RNN, LSTM and GRU, and of their cells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hfta_tune.fusion.kernels._autocast import autocast_dtype
from hfta_tune.fusion.kernels._linear import LaneLinear
from hfta_tune.fusion.kernels._linear import linear as _lane_linear
from hfta_tune.fusion.kernels._rule import by_rule, is_batched, lanes_at

__all__ = ["RECURRENT"]

State: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A recurrent cell.

    Attributes:
        step: step(gates of the input, gates of the state, state) -> next state, its first entry the output. A
            cell that reads nothing but the sum of its gates: step(sum, state).
        states: How many tensors a state has.
        sums: Whether it reads nothing but the sum of its gates.
    """

    step: Callable[..., State]
    states: int
    sums: bool


def _tanh(input: Tensor) -> Tensor:
    # On a CPU tanh takes three times as long, and inductor computes it again for every reader.
    return 2 * (2 * input).sigmoid() - 1 if input.device.type == "cpu" else input.tanh()


def _lstm_step(gates: Tensor, state: State) -> State:
    take, forget, new, show = gates.chunk(4, -1)
    cell = forget.sigmoid() * state[1] + take.sigmoid() * _tanh(new)
    return show.sigmoid() * _tanh(cell), cell


def _gru_step(of_input: Tensor, of_state: Tensor, state: State) -> State:
    reset_x, update_x, new_x = of_input.chunk(3, -1)
    reset_h, update_h, new_h = of_state.chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    new = _tanh(new_x + (reset_x + reset_h).sigmoid() * new_h)
    return ((1 - update) * new + update * state[0],)


def _tanh_step(gates: Tensor, state: State) -> State:
    return (_tanh(gates),)


def _relu_step(gates: Tensor, state: State) -> State:
    return (gates.relu(),)


_LSTM, _GRU = _Cell(_lstm_step, 2, sums=True), _Cell(_gru_step, 1, sums=False)
_TANH, _RELU = _Cell(_tanh_step, 1, sums=True), _Cell(_relu_step, 1, sums=True)


class _Multiplications:
    """What the multiplications with one weight leave for its gradient: their inputs, and their results' gradients."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._gradients: dict[int, tuple[int, Tensor]] = {}

    def keep_input(self, input: Tensor) -> int:
        self._inputs.append(input)
        return len(self._inputs) - 1

    def keep_gradient(self, step: int, gradient: Tensor) -> None:
        self._gradients[step] = (torch._C._current_graph_task_id(), gradient)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Those of weight and bias in this backward pass; another pass may have left gradients behind."""
        this = torch._C._current_graph_task_id()
        kept = [(step, gradient) for step, (task, gradient) in self._gradients.items() if task == this]
        self._gradients.clear()
        if not kept:
            return None, None
        of_results = torch.cat([gradient for _, gradient in kept], 1)
        inputs = torch.cat([self._inputs[step] for step, _ in kept], 1)
        return torch.bmm(of_results.transpose(1, 2), inputs), of_results.sum(1, keepdim=True)


class _Deferred(torch.autograd.Function):
    """Weight and bias as they are; its backward pass runs after those of all multiplications."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, multiplications: _Multiplications) -> Any:
        ctx.multiplications = multiplications
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        of_weight, of_bias = ctx.multiplications.gradients()
        return of_weight, of_bias if ctx.needs_input_grad[1] else None, None


class _Multiply(torch.autograd.Function):
    """[lanes, samples, in] times [lanes, out, in], plus a bias; the input is in two parts, the first maybe empty."""

    @staticmethod
    def forward(
        ctx: Any, first: Tensor | None, second: Tensor, weight: Tensor, bias: Tensor | None, left: _Multiplications
    ) -> Tensor:
        input = second if first is None else torch.cat([first, second], 2)
        ctx.left, ctx.step = left, left.keep_input(input.detach())
        ctx.width = input.shape[2] - second.shape[2]
        ctx.save_for_backward(weight)
        result = torch.bmm(input, weight.transpose(1, 2))
        return result if bias is None else result + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        ctx.left.keep_gradient(ctx.step, gradient)
        of_first = torch.bmm(gradient, weight[..., : ctx.width]) if ctx.needs_input_grad[0] else None
        of_second = torch.bmm(gradient, weight[..., ctx.width :]) if ctx.needs_input_grad[1] else None
        return of_first, of_second, None, None, None


def _step_weight(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor | None, Tensor], Tensor]:
    """Return multiply([lanes, samples, in] in two parts) -> [lanes, samples, out] for a weight of all time steps.

    The weight's gradient is one GEMM over all steps instead of a sum of one for each.
    """
    left = _Multiplications()
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (weight, bias)):
        weight, bias = _Deferred.apply(weight, bias, left)

    def multiply(first: Tensor | None, second: Tensor) -> Tensor:
        result: Tensor = _Multiply.apply(first, second.to(weight.dtype), weight, bias, left)
        return result

    return multiply


def _run_direction(
    cell: _Cell, input: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over [lanes, time, samples, features]; every weight is [lanes, ...]."""
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weights = input.to(dtype), [weight.to(dtype) for weight in weights]
    biases = [bias.unsqueeze(1) for bias in weights[2:4]] if has_biases else None
    projection = _step_weight(weights[-1]) if len(weights) in (3, 5) else None
    if cell.sums:
        gates_of = _step_weight(torch.cat([weights[0], weights[1]], 2), None if biases is None else sum(biases))  # type: ignore[arg-type]
        steps = input.unbind(1)
    else:
        of_input: Tensor = LaneLinear.apply(input.flatten(1, 2), weights[0])
        gates_of = _step_weight(weights[1], None if biases is None else biases[1])
        steps = (of_input if biases is None else of_input + biases[0]).unflatten(1, input.shape[1:3]).unbind(1)
    outputs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        if cell.sums:
            state = cell.step(gates_of(step, state[0]), state)
        else:
            state = cell.step(step, gates_of(None, state[0]), state)
        if projection is not None:
            state = (projection(None, state[0]), *state[1:])
        outputs.append(state[0])
    output = torch.stack(outputs[::-1] if reverse else outputs, 1)
    if dtype is not None and cell is _LSTM and projection is None:
        # From one time step to the next the cell state stays in the precision that it came in.
        return output.to(dtype), tuple(part.to(dtype) for part in state)
    return output, state


@functools.cache
def _direction(cell: _Cell, has_biases: bool, reverse: bool) -> Callable[..., Any]:
    def lanes_rule(lanes: int, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Any, Any]:
        input, *others = (lanes_at(tensor, dim, lanes, 0) for tensor, dim in zip(tensors, in_dims, strict=True))
        state, weights = tuple(others[: cell.states]), others[cell.states :]
        outputs, state = _run_direction(cell, input, state, weights, has_biases, reverse)
        return (outputs, *state), (0,) * (1 + cell.states)

    def one_lane(*tensors: Tensor) -> Any:
        whole, _ = lanes_rule(1, (None,) * len(tensors), *tensors)
        return tuple(tensor.squeeze(0) for tensor in whole)

    return by_rule(one_lane, lanes_rule)


def _layers(cell: _Cell) -> Callable[..., Any]:
    def run(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        packed = not isinstance(params, (list, tuple)) or isinstance(hx, Tensor) == (cell.states > 1)
        if packed or not any(map(is_batched, params)):
            return NotImplemented
        first = tuple(hx) if cell.states > 1 else (hx,)
        directions = 2 if bidirectional else 1
        a_direction = len(params) // (num_layers * directions)
        output = input.transpose(0, 1) if batch_first else input
        last: list[State] = []
        for layer in range(num_layers):
            if layer and dropout and train:
                output = F.dropout(output, dropout, train)
            sides = []
            for direction in range(directions):
                number = layer * directions + direction
                weights = params[number * a_direction : (number + 1) * a_direction]
                run_direction = _direction(cell, has_biases, direction == 1)
                side, *state = run_direction(output, *(part[number] for part in first), *weights)
                sides.append(side)
                last.append(tuple(state))
            output = torch.cat(sides, -1) if directions > 1 else sides[0]
        output = output.transpose(0, 1) if batch_first else output
        return (output, *(torch.stack([state[part] for state in last]) for part in range(cell.states)))

    return run


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result = _lane_linear(input, weight, bias)
    return F.linear(input, weight, bias) if result is NotImplemented else result


def _single(cell: _Cell) -> Callable[..., Any]:
    def run(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        if not is_batched(w_ih):
            return NotImplemented
        state = tuple(hx) if cell.states > 1 else (hx,)
        gates = _linear(input, w_ih, b_ih), _linear(state[0], w_hh, b_hh)
        state = cell.step(gates[0] + gates[1], state) if cell.sums else cell.step(*gates, state)
        return state if cell.states > 1 else state[0]

    return run


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _layers(_LSTM),
    torch.gru: _layers(_GRU),
    torch.rnn_tanh: _layers(_TANH),
    torch.rnn_relu: _layers(_RELU),
    torch.lstm_cell: _single(_LSTM),
    torch.gru_cell: _single(_GRU),
    torch.rnn_tanh_cell: _single(_TANH),
    torch.rnn_relu_cell: _single(_RELU),
}
