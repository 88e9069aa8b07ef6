"""What compiled steps draw, and their gradients of embeddings, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from hfta_tune.fusion.compiled import CompiledStep
from hfta_tune.fusion.kernels import LaneKernels

pytestmark = pytest.mark.slow

LANES, SHAPE = 8, (64, 512)
# Of the tests of one set of numbers, all must pass; they are a few hundred.
LEAST = 1e-5


def draws(tensors: dict[str, Any]) -> dict[str, Tensor]:
    x = tensors["x"]
    uniform, again = torch.rand_like(x), torch.rand_like(x.transpose(1, 2)).transpose(1, 2)
    return {
        "uniform": uniform,
        "again": again,
        "lower": torch.rand_like(x, dtype=torch.bfloat16),
        "kept": torch.empty_like(x).bernoulli_(0.9),
        "normal": torch.randn_like(x),
    }


@pytest.fixture(scope="module")
def step() -> Any:
    tensors = {"x": torch.zeros(LANES, *SHAPE), "batch": torch.zeros(1)}
    return CompiledStep(draws, tensors).bind(tensors)


@pytest.fixture
def drawn(step: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [step(torch.zeros(1)) for _ in range(2)]


def test_the_generator_decides(step: Any, drawn: list[dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    for once in drawn:
        for name, tensor in step(torch.zeros(1)).items():
            assert tensor.equal(once[name]), name
    assert not drawn[0]["uniform"].equal(drawn[1]["uniform"])


def test_uniform(drawn: list[dict[str, Tensor]]) -> None:
    for numbers in (drawn[0]["uniform"], drawn[0]["again"], drawn[1]["uniform"]):
        assert numbers.shape == (LANES, *SHAPE) and numbers.dtype == torch.float32
        assert numbers.min() >= 0 and numbers.max() < 1
        assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > LEAST
        for p in (0.1, 0.5):
            dropped = (numbers < p).double()
            for width in (16, 64, 512, 4096):  # sums of neighbours, and of numbers that far apart
                rows = dropped.reshape(-1, width)
                for sums, of in ((rows.sum(1), width), (rows.sum(0), len(rows))):
                    spread = float(((sums - p * of) ** 2).sum() / (p * (1 - p) * of))
                    assert 2 * min(stats.chi2.cdf(spread, len(sums)), stats.chi2.sf(spread, len(sums))) > LEAST
    assert drawn[0]["lower"].dtype == torch.bfloat16
    assert float(drawn[0]["lower"].double().mean()) == pytest.approx(0.5, abs=5e-3)


def correlation(a: Tensor, b: Tensor) -> float:
    """As a normal deviate, if they are independent."""
    return float(((a.double() - 0.5) * (b.double() - 0.5)).sum() * 12 / a.numel() ** 0.5)


def test_numbers_are_independent(drawn: list[dict[str, Tensor]]) -> None:
    first, other = drawn[0]["uniform"], drawn[0]["again"]
    pairs = [(first, other), (first, drawn[1]["uniform"]), *((first[0], first[lane]) for lane in range(1, LANES))]
    flat = first.flatten()
    pairs += [(flat[:-lag], flat[lag:]) for lag in (1, 2, 3, 7, 16, 64, 511, 512, 513, 4096, 32768, 65536, 131072)]
    for bit in (1, 2, 64, 512, 4096, 65536):  # places that differ in one bit
        without = torch.arange(len(flat))[torch.arange(len(flat)) & bit == 0]
        pairs.append((flat[without], flat[without | bit]))
    for a, b in pairs:
        assert 2 * stats.norm.sf(abs(correlation(a, b))) > LEAST
    for a, b in pairs:  # all pairs of intervals are as frequent
        cells = torch.bincount((a.flatten() * 32).long() * 32 + (b.flatten() * 32).long(), minlength=1024)
        assert stats.chisquare(cells.numpy()).pvalue > LEAST


def test_bernoulli(drawn: list[dict[str, Tensor]]) -> None:
    kept = drawn[0]["kept"]
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert stats.binomtest(int(kept.sum()), kept.numel(), 0.9).pvalue > LEAST


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("rows", [20, 2000])
def test_gradient_of_an_embedding(rows: int, padding: int | None) -> None:
    tokens = torch.randint(rows, (16, 5))
    tokens[0, :4] = 3

    def step(tensors: dict[str, Any]) -> dict[str, Tensor]:
        def loss(weight: Tensor) -> Tensor:
            return (F.embedding(tensors["batch"], weight, padding) ** 3).sum()

        weight = tensors["weight"].detach().requires_grad_()
        with LaneKernels():
            losses = torch.func.vmap(loss)(weight)
        return {"gradient": torch.autograd.grad(losses.sum(), weight)[0]}

    tensors = {"weight": torch.randn(4, rows, 6), "batch": tokens}
    compiled = CompiledStep(step, tensors).bind(tensors)(tokens)["gradient"]
    weight = tensors["weight"].requires_grad_()
    sum((F.embedding(tokens, own, padding) ** 3).sum() for own in weight.unbind()).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(compiled, weight.grad)
    assert compiled[:, 3].any() == (padding is None)
