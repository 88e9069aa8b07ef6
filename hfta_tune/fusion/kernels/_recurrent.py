"""Recurrent layers, which have no batching rule, written in operations that have one.

A layer is one GEMM over all time steps for its input, then one batched GEMM a time step for its state.
Formulas: torch's documentation of torch.nn.RNN, LSTM and GRU, and of their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.kernels._linear import linear as _lane_linear
from hfta_tune.fusion.kernels._rule import is_batched

__all__ = ["RECURRENT"]

State: TypeAlias = tuple[Tensor, ...]
Cell: TypeAlias = Callable[[Tensor, Tensor, State], State]
"""cell(gates of the input, gates of the state, state) -> next state, its first entry the output."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result = _lane_linear(input, weight, bias)
    return F.linear(input, weight, bias) if result is NotImplemented else result


def _lstm_cell(of_input: Tensor, of_state: Tensor, state: State) -> State:
    take, forget, new, show = (of_input + of_state).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + take.sigmoid() * new.tanh()
    return show.sigmoid() * cell.tanh(), cell


def _gru_cell(of_input: Tensor, of_state: Tensor, state: State) -> State:
    reset_x, update_x, new_x = of_input.chunk(3, -1)
    reset_h, update_h, new_h = of_state.chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return ((1 - update) * new + update * state[0],)


def _tanh_cell(of_input: Tensor, of_state: Tensor, state: State) -> State:
    return ((of_input + of_state).tanh(),)


def _relu_cell(of_input: Tensor, of_state: Tensor, state: State) -> State:
    return ((of_input + of_state).relu(),)


def _run_direction(
    cell: Cell, input: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over [time, samples, features]."""
    of_input, of_state = weights[0], weights[1]
    bias_input, bias_state = (weights[2], weights[3]) if has_biases else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    gates = _linear(input, of_input, bias_input).unbind(0)
    outputs: list[Tensor] = []
    for gate in reversed(gates) if reverse else gates:
        state = cell(gate, _linear(state[0], of_state, bias_state), state)
        if projection is not None:
            state = (_linear(state[0], projection, None), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _layers(cell: Cell, states: int) -> Callable[..., Any]:
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
        packed = not isinstance(params, (list, tuple)) or isinstance(hx, Tensor) == (states > 1)
        if packed or not any(map(is_batched, params)):
            return NotImplemented
        first = tuple(hx) if states > 1 else (hx,)
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
                side, state = _run_direction(
                    cell,
                    output,
                    tuple(part[number] for part in first),
                    params[number * a_direction : (number + 1) * a_direction],
                    has_biases,
                    reverse=direction == 1,
                )
                sides.append(side)
                last.append(state)
            output = torch.cat(sides, -1) if directions > 1 else sides[0]
        output = output.transpose(0, 1) if batch_first else output
        return (output, *(torch.stack([state[part] for state in last]) for part in range(states)))

    return run


def _single(cell: Cell, states: int) -> Callable[..., Any]:
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
        state = tuple(hx) if states > 1 else (hx,)
        state = cell(_linear(input, w_ih, b_ih), _linear(state[0], w_hh, b_hh), state)
        return state if states > 1 else state[0]

    return run


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _layers(_lstm_cell, 2),
    torch.gru: _layers(_gru_cell, 1),
    torch.rnn_tanh: _layers(_tanh_cell, 1),
    torch.rnn_relu: _layers(_relu_cell, 1),
    torch.lstm_cell: _single(_lstm_cell, 2),
    torch.gru_cell: _single(_gru_cell, 1),
    torch.rnn_tanh_cell: _single(_tanh_cell, 1),
    torch.rnn_relu_cell: _single(_relu_cell, 1),
}
