"""Running averages of gradients, as Adam and its kin keep them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hfta_tune.fusion.optimizers._native import GroupUpdate, ParameterGroup

__all__ = ["average", "average_squares", "logarithm", "move_moments", "numbers_of_moments", "power", "renew_buffers"]


def logarithm(number: float) -> float:
    """The natural logarithm, of 0 too."""
    return math.log(number) if number else -math.inf


def power(logarithm: Tensor, exponent: Tensor) -> Tensor:
    """A number to a power above 0; inductor computes an exp once, but a pow anew for every element."""
    return (logarithm * exponent).exp()


def average(averages: list[Tensor], values: list[Tensor], weights: list[Tensor]) -> None:
    """Move averages towards values, in place, by a weight."""
    torch._foreach_lerp_(averages, values, weights)


def average_squares(averages: list[Tensor], values: list[Tensor], kept: list[Tensor], taken: list[Tensor]) -> None:
    """Averages <- kept * averages + taken * values ** 2, in place."""
    torch._foreach_mul_(averages, kept)
    torch._foreach_addcmul_(averages, torch._foreach_mul(values, taken), values)


def renew_buffers(buffers: list[Tensor], values: list[Tensor], update: GroupUpdate) -> None:
    """Buffers <- values, in place; a lane whose momentum is 0 leaves its buffer as it is, as torch does."""
    if "moves" in update.numbers:
        moves = update.numbers["moves"] > 0
        values = [torch.where(moves, value, buffer) for value, buffer in zip(values, buffers, strict=True)]
    torch._foreach_copy_(buffers, values)


def numbers_of_moments(group: ParameterGroup) -> dict[str, Tensor]:
    """lr, the betas in the forms that the formulas need, and eps."""
    read, send, dtype = group.numbers.host, group.numbers.device, group.dtype
    beta1, beta2 = read("betas", 0), read("betas", 1)
    return {
        "lr": send("lr", read("lr")),
        "log beta1": send("log beta1", [logarithm(beta) for beta in beta1]),
        "log beta2": send("log beta2", [logarithm(beta) for beta in beta2]),
        "1-beta1": send("1-beta1", [1 - beta for beta in beta1], dtype),
        "kept": send("kept", beta2, group.wide),
        "1-beta2": send("1-beta2", [1 - beta for beta in beta2], dtype),
        "eps": send("eps", read("eps"), dtype),
    }


def move_moments(gradients: list[Tensor], update: GroupUpdate) -> tuple[list[Tensor], list[Tensor]]:
    """Update the averages of gradients and of their squares in place, and return them."""
    first, second = update.entries("exp_avg"), update.entries("exp_avg_sq")
    average(first, gradients, update.number("1-beta1"))
    average_squares(second, gradients, update.number("kept"), update.number("1-beta2"))
    return first, second
