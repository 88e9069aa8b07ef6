"""The workloads "mlp" and "cnn8" in JAX: one lane's step, under vmap and jit."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from _contenders import Contender, Unavailable
from _workloads import Batch, Workload
from torch import Tensor, nn

__all__ = ["IN_JAX", "JaxVmap", "jax_version"]

Arrays: TypeAlias = dict[str, Any]


def jax_version() -> str | None:
    """The version of JAX, or None where it is not installed."""
    try:
        return str(importlib.import_module("jax").__version__)
    except ImportError:
        return None


class JaxVmap(Contender):
    """jit(vmap(step)) with Adam, a learning rate a lane; donated buffers, so that updates are in place."""

    def __init__(self, workload: Workload, batches: Sequence[Batch], rates: Sequence[float], device: torch.device):
        try:
            self.jax = importlib.import_module("jax")
        except ImportError as error:
            raise Unavailable("JAX is not installed: pip install 'hfta-tune[jax]'") from error
        platform = "gpu" if device.type == "cuda" else device.type
        if self.jax.default_backend() != platform:
            raise Unavailable(f"this JAX computes on {self.jax.default_backend()}, not on {platform}")
        self.jnp = importlib.import_module("jax.numpy")
        network = IN_JAX[workload.name](self.jax)
        models = workload.models(len(rates))
        parameters = self._stacked([network.parameters(model) for model in models])
        self.batches = itertools.cycle(
            [(self.jnp.asarray(network.inputs(x)), self.jnp.asarray(y.cpu().numpy())) for x, y in batches]
        )
        zeros = self.jax.tree.map(self.jnp.zeros_like, parameters)
        self.state = {
            "parameters": parameters,
            "buffers": self._stacked([network.buffers() for _ in models]),
            "first": zeros,
            "second": self.jax.tree.map(self.jnp.zeros_like, parameters),
            "losses": self.jnp.zeros(len(rates)),
        }
        self.rates = self.jnp.asarray(rates)
        self.count = self.jnp.zeros((), dtype=self.jnp.int32)
        step = self.jax.vmap(self._one_lane(network.loss, workload.betas), in_axes=(0, 0, None, None, None))

        def all_lanes(state: Arrays, rates: Any, count: Any, inputs: Any, labels: Any) -> tuple[Arrays, Any]:
            return step(state, rates, count + 1, inputs, labels), count + 1

        self.step = self.jax.jit(all_lanes, donate_argnums=(0, 2))

    def run(self, steps: int) -> list[float]:
        self.state["losses"] = self.jnp.zeros_like(self.state["losses"])
        for inputs, labels in itertools.islice(self.batches, steps):
            self.state, self.count = self.step(self.state, self.rates, self.count, inputs, labels)
        losses = np.asarray(self.state["losses"])
        self.jax.block_until_ready(self.state)
        return [float(loss) / steps for loss in losses]

    def _stacked(self, trees: Sequence[Arrays]) -> Any:
        return self.jax.tree.map(lambda *rows: self.jnp.asarray(np.stack(rows)), *trees)

    def _one_lane(self, loss: Callable[..., Any], betas: tuple[float, float]) -> Callable[..., Any]:
        jax, jnp = self.jax, self.jnp
        beta1, beta2 = betas

        def step(state: Arrays, rate: Any, count: Any, inputs: Any, labels: Any) -> Arrays:
            differentiated = jax.value_and_grad(loss, has_aux=True)
            (value, buffers), gradients = differentiated(state["parameters"], state["buffers"], inputs, labels)
            first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["first"], gradients)
            second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state["second"], gradients)
            size = rate / (1 - beta1**count)
            correction = jnp.sqrt(1 - beta2**count)

            def updated(parameter: Any, m: Any, v: Any) -> Any:
                return parameter - size * m / (jnp.sqrt(v) / correction + 1e-8)

            parameters = jax.tree.map(updated, state["parameters"], first, second)
            losses = state["losses"] + value
            return {
                "parameters": parameters,
                "buffers": buffers,
                "first": first,
                "second": second,
                "losses": losses,
            }

        return step


class _Network:
    """One lane's network: how its parameters and inputs come from PyTorch, and its loss."""

    def __init__(self, jax: Any) -> None:
        self.jax = jax
        self.jnp = jax.numpy

    def parameters(self, model: nn.Module) -> Arrays:
        return {name: tensor.detach().cpu().numpy() for name, tensor in model.named_parameters()}

    def buffers(self) -> Arrays:
        return {}

    def inputs(self, inputs: Tensor) -> Any:
        return inputs.cpu().numpy()

    def logits(self, p: Arrays, b: Arrays, inputs: Any) -> tuple[Any, Arrays]:
        raise NotImplementedError

    def loss(self, p: Arrays, b: Arrays, inputs: Any, labels: Any) -> tuple[Any, Arrays]:
        logits, buffers = self.logits(p, b, inputs)
        chosen = self.jnp.take_along_axis(self.jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -chosen.mean(), buffers


class _MLP(_Network):
    def logits(self, p: Arrays, b: Arrays, inputs: Any) -> tuple[Any, Arrays]:
        hidden = inputs
        for layer in (0, 2):
            hidden = self.jax.nn.relu(hidden @ p[f"{layer}.weight"].T + p[f"{layer}.bias"])
        return hidden @ p["4.weight"].T + p["4.bias"], b


class _CNN(_Network):
    """Channels last, the order that XLA's convolutions on a CPU are made for."""

    def parameters(self, model: nn.Module) -> Arrays:
        arrays = super().parameters(model)
        for layer in ("0.weight", "4.weight"):
            arrays[layer] = arrays[layer].transpose(2, 3, 1, 0).copy()
        head = arrays["9.weight"]
        channels = arrays["4.weight"].shape[3]
        side = int((head.shape[1] // channels) ** 0.5)
        arrays["9.weight"] = head.reshape(-1, channels, side, side).transpose(0, 2, 3, 1).reshape(head.shape).copy()
        return arrays

    def buffers(self) -> Arrays:
        sizes = {"1": 8, "5": 16}
        means = {f"{layer}.mean": np.zeros(size, np.float32) for layer, size in sizes.items()}
        return means | {f"{layer}.variance": np.ones(size, np.float32) for layer, size in sizes.items()}

    def inputs(self, inputs: Tensor) -> Any:
        return inputs.cpu().permute(0, 2, 3, 1).contiguous().numpy()

    def logits(self, p: Arrays, b: Arrays, inputs: Any) -> tuple[Any, Arrays]:
        hidden, buffers = inputs, {}
        for convolution, norm in (("0", "1"), ("4", "5")):
            hidden = self.jax.lax.conv_general_dilated(
                hidden,
                p[f"{convolution}.weight"],
                window_strides=(1, 1),
                padding="SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            mean, variance = hidden.mean((0, 1, 2)), hidden.var((0, 1, 2))
            samples = hidden.size // hidden.shape[-1]
            buffers[f"{norm}.mean"] = 0.9 * b[f"{norm}.mean"] + 0.1 * mean
            unbiased = variance * (samples / (samples - 1))
            buffers[f"{norm}.variance"] = 0.9 * b[f"{norm}.variance"] + 0.1 * unbiased
            scale = p[f"{norm}.weight"] / self.jnp.sqrt(variance + 1e-5)
            hidden = self.jax.nn.relu((hidden - mean) * scale + p[f"{norm}.bias"])
            hidden = self.jax.lax.reduce_window(
                hidden, -self.jnp.inf, self.jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            )
        features = hidden.reshape(hidden.shape[0], -1)
        return features @ p["9.weight"].T + p["9.bias"], buffers


IN_JAX: dict[str, type[_Network]] = {"mlp": _MLP, "cnn8": _CNN}
