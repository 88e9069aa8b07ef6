"""The stacked tensors of an array: [lanes, ...], with the lanes' own objects as views of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_tune.fusion.dropout import dropout_probabilities, replace_dropouts
from hfta_tune.fusion.lane import Lane

__all__ = ["LaneStack", "Template", "rows"]


def rows(stacked: Tensor) -> Tensor:
    """Return a stacked tensor as [lanes, elements]."""
    return stacked.reshape(stacked.shape[0], -1)


class Template(nn.Module):
    """The code of one lane: a copy of the first lane's model that runs with any lane's tensors.

    `holding` swaps the tensors in for the whole step, so a step may use `model` in any way: call it, call its
    parts, or go over its parameters.

    Attributes:
        model: The copy.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        replace_dropouts(self)
        for module in self.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.register_forward_pre_hook(_refuse_padding, with_kwargs=True)

        names: dict[int, str] = {}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=True):
            for members in (module._parameters, module._buffers):
                for key, tensor in members.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                        self._places.setdefault(name, []).append((members, key))

    @contextlib.contextmanager
    def holding(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Put tensors in the place of the model's own, a tied one wherever it is.

        Does what torch.func.functional_call does, with the looking up done once.

        Args:
            tensors: Parameters and buffers by name. In the end it has what the model then holds: another
                tensor where a forward pass assigned a buffer anew.
        """
        before = {name: self._places[name][0][0][self._places[name][0][1]] for name in tensors}
        try:
            for name, tensor in tensors.items():
                for members, key in self._places[name]:
                    members[key] = tensor
            yield
            for name in tensors:
                members, key = self._places[name][0]
                tensors[name] = members[key]
        finally:
            for name, tensor in before.items():
                for members, key in self._places[name]:
                    members[key] = tensor


def _refuse_padding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Stop an evaluation whose padded places torch's fused path would fill with zeros, and vmap would not."""
    mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    if mask is not None and not module.training and module.use_nested_tensor:
        raise NotImplementedError("nested tensors, which a padding mask makes in evaluation, do not run under vmap")


class LaneStack:
    """Parameters, buffers and numbers of lanes with one signature, stacked along dimension 0.

    Attributes:
        lanes: The lanes; lane i owns row i of every tensor.
        whole: Whether the buffers are stacked too.
        parameters: {name: leaf of shape [lanes, ...]}, with requires_grad as in the lanes' models.
        buffers: {name: [lanes, ...]}.
        carried: {name: [lanes]}: what the template's own modules read a lane (the p of dropouts that drop).
        values: {name: [lanes]}: numbers that a step may read, a lane its own.
        limits: [lanes]: to what the lanes' gradients are clipped, or None.
        accumulated: {name: [lanes, ...]}: gradients of the batches since the optimizers' last step.
    """

    def __init__(
        self, lanes: Sequence[Lane], device: torch.device, *, whole: bool = True, take_gradients: bool = True
    ) -> None:
        self.lanes = list(lanes)
        self.whole = whole
        first = self.lanes[0]
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.accumulated: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in first.parameters():
                rows = [lane.model.get_parameter(name) for lane in self.lanes]
                if take_gradients:
                    self._take_gradients(name, rows)
                self.parameters[name] = torch.stack([row.data for row in rows]).contiguous()
                self._bind(rows, self.parameters[name])
                self.parameters[name].requires_grad_(parameter.requires_grad)
            for name, _ in first.buffers() if whole else ():
                own = [lane.model.get_buffer(name) for lane in self.lanes]
                self.buffers[name] = torch.stack([row.data for row in own]).contiguous()
                self._bind(own, self.buffers[name])
        probabilities = [dropout_probabilities(lane.model) for lane in self.lanes]
        dropping = [name for name in probabilities[0] if any(own[name] for own in probabilities)]
        self.carried = self._numbers([{name: own[name] for name in dropping} for own in probabilities], device)
        self.values = self._numbers([lane.values for lane in self.lanes], device)
        limits = [lane.clipping.limit for lane in self.lanes if lane.clipping is not None]
        self.limits = torch.tensor(limits, device=device) if limits else None

    @staticmethod
    def _bind(rows: Sequence[Tensor], stacked: Tensor) -> None:
        for row, view in zip(rows, stacked.detach().unbind(), strict=True):
            row.data = view

    def _take_gradients(self, name: str, rows: Sequence[nn.Parameter]) -> None:
        if any(row.grad is not None for row in rows):
            given = [torch.zeros_like(row) if row.grad is None else row.grad for row in rows]
            self.accumulated[name] = torch.stack(given)
            for row in rows:
                row.grad = None

    def return_gradients(self, lanes: Sequence[Lane]) -> None:
        """Give accumulated gradients to lanes that leave the stack, as the `grad` of their own parameters."""
        for name, gradients in self.accumulated.items():
            for lane, gradient in zip(self.lanes, gradients, strict=True):
                if lane in lanes:
                    own = lane.model.get_parameter(name)
                    own.grad = gradient.clone() if own.grad is None else own.grad + gradient

    @staticmethod
    def _numbers(rows: Sequence[dict[Any, float]], device: torch.device) -> dict[Any, Tensor]:
        shared = [name for name in rows[0] if all(name in row for row in rows)]
        dtype = torch.get_default_dtype()
        return {name: torch.tensor([row[name] for row in rows], dtype=dtype, device=device) for name in shared}
