"""Fused networks written by hand for one architecture each, in the way of HFTA (arXiv 2102.02344).

Linear layers are batched GEMMs, convolutions grouped ones, and batch norm goes over lanes * channels. Since
the lanes share their batches here, the first layer is one ordinary GEMM or convolution with the outputs of
all lanes.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from _contenders import Contender
from _workloads import Batch, Workload
from torch import Tensor, nn

__all__ = ["HANDWRITTEN", "FusedCNN", "FusedMLP"]


class _Handwritten(Contender):
    """Adam with a learning rate a lane, on parameters that hold all lanes one after the other."""

    def __init__(self, workload: Workload, batches: Sequence[Batch], rates: Sequence[float], device: torch.device):
        self.device, self.lanes, self.betas = device, len(rates), workload.betas
        self.batches = itertools.cycle(batches)
        self.parameters: list[Tensor] = []
        self.build([model.to(device) for model in workload.models(len(rates))])
        for parameter in self.parameters:
            parameter.requires_grad_()
        self.rows = [parameter.detach().view(self.lanes, -1) for parameter in self.parameters]
        self.first = [torch.zeros_like(row) for row in self.rows]
        self.second = [torch.zeros_like(row) for row in self.rows]
        self.rates = torch.tensor(rates, device=device).unsqueeze(1)
        self.steps = 0

    @abstractmethod
    def build(self, models: Sequence[nn.Module]) -> None:
        """Joins the models' parameters."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Returns the logits, [lanes, samples, classes]."""

    def joined(self, models: Sequence[nn.Module], path: str) -> Tensor:
        """Joins a parameter of all lanes along its first dimension."""
        parameter = torch.cat([model.get_parameter(path).detach() for model in models])
        self.parameters.append(parameter)
        return parameter

    def run(self, steps: int) -> list[float]:
        totals = torch.zeros(self.lanes, device=self.device)
        for inputs, labels in itertools.islice(self.batches, steps):
            logits = self.logits(inputs)
            losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(self.lanes), reduction="none")
            lane_losses = losses.view(self.lanes, -1).mean(dim=1)
            gradients = torch.autograd.grad(lane_losses.sum(), self.parameters)
            self._update([gradient.view(self.lanes, -1) for gradient in gradients])
            totals += lane_losses.detach()
        return [total / steps for total in totals.tolist()]

    @torch.no_grad()
    def _update(self, gradients: list[Tensor]) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        minus_rates = self.rates / (beta1**self.steps - 1)
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(self.second)
        torch._foreach_div_(roots, (1 - beta2**self.steps) ** 0.5)
        torch._foreach_add_(roots, 1e-8)
        updates = torch._foreach_div(self.first, roots)
        torch._foreach_addcmul_(self.rows, list(updates), [minus_rates] * len(self.rows))


class FusedMLP(_Handwritten):
    """The workload "mlp"."""

    def build(self, models: Sequence[nn.Module]) -> None:
        self.weights = [self.joined(models, f"{layer}.weight") for layer in (0, 2, 4)]
        self.biases = [self.joined(models, f"{layer}.bias") for layer in (0, 2, 4)]

    def logits(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(inputs, self.weights[0], self.biases[0])
        hidden = hidden.unflatten(1, (self.lanes, -1)).transpose(0, 1).relu()
        hidden = self._linear(hidden, 1).relu()
        return self._linear(hidden, 2)

    def _linear(self, inputs: Tensor, layer: int) -> Tensor:
        weight = self.weights[layer].view(self.lanes, -1, inputs.shape[2])
        return torch.baddbmm(self.biases[layer].view(self.lanes, 1, -1), inputs, weight.transpose(1, 2))


class FusedCNN(_Handwritten):
    """The workload "cnn8"; activations are [samples, lanes * channels, height, width]."""

    def build(self, models: Sequence[nn.Module]) -> None:
        self.convolutions = [self.joined(models, f"{layer}.weight") for layer in (0, 4)]
        self.scales = [self.joined(models, f"{layer}.weight") for layer in (1, 5)]
        self.shifts = [self.joined(models, f"{layer}.bias") for layer in (1, 5)]
        self.means = [torch.zeros_like(scale) for scale in self.scales]
        self.variances = [torch.ones_like(scale) for scale in self.scales]
        self.weight, self.bias = (self.joined(models, f"9.{name}") for name in ("weight", "bias"))

    def logits(self, inputs: Tensor) -> Tensor:
        hidden = self._normalized(F.conv2d(inputs, self.convolutions[0], padding=1), 0)
        hidden = F.conv2d(hidden, self.convolutions[1], padding=1, groups=self.lanes)
        hidden = self._normalized(hidden, 1)
        features = hidden.view(len(inputs), self.lanes, -1).transpose(0, 1)
        weight = self.weight.view(self.lanes, -1, features.shape[2])
        return torch.baddbmm(self.bias.view(self.lanes, 1, -1), features, weight.transpose(1, 2))

    def _normalized(self, hidden: Tensor, block: int) -> Tensor:
        hidden = F.batch_norm(
            hidden, self.means[block], self.variances[block], self.scales[block], self.shifts[block], training=True
        )
        return F.max_pool2d(hidden.relu(), 2)


HANDWRITTEN: dict[str, type[_Handwritten]] = {"mlp": FusedMLP, "cnn8": FusedCNN}
