"""The tables of modules, functions and losses: each trains in an array as it trains alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from fusion.breadth import (
    FUSED,
    LANES,
    Applied,
    Maker,
    Row,
    assert_equal_to_alone,
    floats,
    integers,
    lane_by_lane,
    named,
    of,
    score,
    task_of,
    training,
)
from reference import Config, assert_same
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils import checkpoint

ROUNDS = 3  # of one step each

VECTORS = floats(5, 6)
SEQUENCES = floats(5, 4, 6)  # [samples, time, features]
SPACE = {1: floats(5, 4, 9), 2: floats(5, 4, 7, 6), 3: floats(3, 4, 5, 4, 5)}
PLANE = SPACE[2]
DIMS = (1, 2, 3)


def in_dims(name: str, dims: int) -> Any:
    """The class of torch.nn for so many spatial dimensions."""
    return getattr(nn, name.replace("Nd", f"{dims}d"))


# Convolutions


def _convolutions(dims: int) -> list[Row]:
    conv = functools.partial(of, in_dims("ConvNd", dims), on=SPACE[dims])
    transposed = functools.partial(of, in_dims("ConvTransposeNd", dims), on=SPACE[dims])
    return [
        conv(4, 8, 3),
        conv(4, 6, 1, bias=False),
        conv(4, 6, 3, stride=2, padding=1),
        conv(4, 6, 3, padding=2, dilation=2),
        conv(4, 6, 3, groups=2),
        conv(4, 8, 3, padding=1, groups=4, bias=False, note="depthwise"),
        conv(4, 6, 3, padding="same"),
        *(conv(4, 6, 3, padding=2, padding_mode=mode) for mode in ("reflect", "replicate", "circular")),
        transposed(4, 6, 3),
        transposed(4, 6, 3, stride=2, padding=1, output_padding=1, bias=False),
        transposed(4, 6, 2, groups=2, dilation=2),
        transposed(4, 4, 3, groups=4, note="depthwise"),
    ]


CONVOLUTIONS = [
    *(row for dims in DIMS for row in _convolutions(dims)),
    of(nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), on=PLANE),
    of(nn.Conv2d, 4, 6, 3, padding=(2, 1), padding_mode="circular", stride=2, groups=2, on=PLANE),
    of(nn.Conv1d, 4, 6, 3, on=floats(4, 9), note="of one sample without a batch dimension"),
    of(nn.ConvTranspose2d, 4, 6, 3, stride=2, on=PLANE, call=lambda m, x: m(x, output_size=(16, 14)), note="to a size"),
    named(
        "Conv2d in channels_last",
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        on=lambda generator: PLANE(generator).to(memory_format=torch.channels_last),
    ),
]


# Linear layers


def materialized(kind: type[nn.Module], *arguments: Any, on: Maker, **options: Any) -> Row:
    """A lazy module, which must have seen a batch before an optimizer can be built."""
    row = of(kind, *arguments, on=on, **options)

    def build() -> nn.Module:
        module = row.build()
        module(torch.ones_like(row.batch(0)[0]))
        return module

    return replace(row, build=build)


LINEAR = [
    of(nn.Linear, 6, 4, on=VECTORS),
    of(nn.Linear, 6, 4, bias=False, on=VECTORS),
    of(nn.Linear, 6, 4, on=SEQUENCES, note="over a sequence"),
    of(nn.Linear, 6, 4, on=floats(6), note="of one sample without a batch dimension"),
    of(nn.Linear, 6, 4, dtype=torch.float64, on=floats(5, 6, dtype=torch.float64)),
    of(nn.Bilinear, 6, 3, 4, on=(VECTORS, floats(5, 3))),
    of(nn.Bilinear, 6, 3, 4, bias=False, on=(VECTORS, floats(5, 3))),
    of(nn.Identity, on=VECTORS),
    materialized(nn.LazyLinear, 4, on=VECTORS),
    *(materialized(in_dims("LazyConvNd", dims), 4, 3, on=SPACE[dims]) for dims in DIMS),
    *(materialized(in_dims("LazyConvTransposeNd", dims), 4, 3, on=SPACE[dims]) for dims in DIMS),
    *(materialized(in_dims("LazyBatchNormNd", dims), on=SPACE[dims]) for dims in DIMS),
    *(materialized(in_dims("LazyInstanceNormNd", dims), affine=True, on=SPACE[dims]) for dims in DIMS),
]


# Normalization

NORMS = [
    *(of(in_dims("BatchNormNd", dims), 4, on=SPACE[dims]) for dims in DIMS),
    *(of(in_dims("BatchNormNd", dims), 4, eps=0.1, momentum=0.3, on=SPACE[dims]) for dims in DIMS),
    *(of(in_dims("BatchNormNd", dims), 4, affine=False, on=SPACE[dims]) for dims in DIMS),
    *(of(in_dims("BatchNormNd", dims), 4, track_running_stats=False, on=SPACE[dims]) for dims in DIMS),
    *lane_by_lane(
        "vmap stopped at module 'first' (BatchNorm",  # the momentum is 1 / num_batches_tracked, a Python number
        *(of(in_dims("BatchNormNd", dims), 4, momentum=None, on=SPACE[dims]) for dims in DIMS),
    ),
    of(nn.BatchNorm1d, 6, on=VECTORS, note="of vectors"),
    of(nn.BatchNorm1d, 6, affine=False, track_running_stats=False, on=VECTORS),
    of(nn.BatchNorm2d, 4, dtype=torch.float64, on=floats(5, 4, 3, 3, dtype=torch.float64)),
    of(nn.GroupNorm, 2, 4, on=PLANE),
    of(nn.GroupNorm, 4, 4, affine=False, on=SPACE[1]),
    of(nn.GroupNorm, 1, 6, on=VECTORS),
    *(of(in_dims("InstanceNormNd", dims), 4, on=SPACE[dims]) for dims in DIMS),
    *(of(in_dims("InstanceNormNd", dims), 4, affine=True, on=SPACE[dims]) for dims in DIMS),
    *(of(in_dims("InstanceNormNd", dims), 4, track_running_stats=True, on=SPACE[dims]) for dims in DIMS),
    of(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True, momentum=0.3, on=PLANE),
    of(nn.LayerNorm, 6, on=SEQUENCES),
    of(nn.LayerNorm, [4, 6], bias=False, on=SEQUENCES),
    of(nn.LayerNorm, 6, elementwise_affine=False, on=VECTORS),
    of(nn.RMSNorm, 6, on=SEQUENCES),
    of(nn.RMSNorm, [4, 6], eps=0.1, on=SEQUENCES),
    of(nn.RMSNorm, 6, elementwise_affine=False, on=VECTORS),
    of(nn.LocalResponseNorm, 2, on=PLANE),
    of(nn.LocalResponseNorm, 3, alpha=0.1, beta=0.5, k=2.0, on=SPACE[1]),
    *lane_by_lane("(CrossMapLRN2d)", of(nn.CrossMapLRN2d, 3, alpha=0.1, on=PLANE)),
]


# Embeddings

TOKENS = integers(11, 5, 7)
BAGS = (integers(11, 12), lambda generator: torch.tensor([0, 4, 4, 9]))  # the second bag is empty
ENDED_BAGS = (integers(11, 12), lambda generator: torch.tensor([0, 4, 4, 9, 12]))

EMBEDDINGS = [
    of(nn.Embedding, 11, 6, on=TOKENS),
    of(nn.Embedding, 11, 6, padding_idx=0, on=TOKENS),
    of(nn.Embedding, 11, 6, padding_idx=-1, on=TOKENS),
    of(nn.Embedding, 11, 6, max_norm=1.0, on=TOKENS),
    of(nn.Embedding, 11, 6, max_norm=2.0, norm_type=1.0, padding_idx=3, on=TOKENS),
    of(nn.Embedding, 11, 6, scale_grad_by_freq=True, on=TOKENS),
    *(of(nn.EmbeddingBag, 11, 6, mode=mode, on=TOKENS) for mode in ("sum", "mean", "max")),
    *(of(nn.EmbeddingBag, 11, 6, mode=mode, on=BAGS, note="with offsets") for mode in ("sum", "mean", "max")),
    of(nn.EmbeddingBag, 11, 6, mode="sum", include_last_offset=True, on=ENDED_BAGS),
    of(nn.EmbeddingBag, 11, 6, padding_idx=2, on=TOKENS),
    of(nn.EmbeddingBag, 11, 6, max_norm=1.0, on=TOKENS),
    of(nn.EmbeddingBag, 11, 6, scale_grad_by_freq=True, on=TOKENS),
    of(
        nn.EmbeddingBag,
        11,
        6,
        mode="sum",
        on=(TOKENS, floats(5, 7)),
        call=lambda m, x, weights: m(x, per_sample_weights=weights),
        note="with per_sample_weights",
    ),
]


# Recurrent layers

STEPS = floats(4, 5, 6)  # [time, samples, features]


def packed(module: nn.Module, x: Tensor) -> Any:
    """Sequences of different lengths."""
    out, state = module(rnn.pack_padded_sequence(x, torch.tensor([4, 2, 3, 1, 4]), True, enforce_sorted=False))
    return rnn.pad_packed_sequence(out, batch_first=True)[0], state


def step_by_step(cell: nn.Module, x: Tensor) -> Any:
    state = None
    for now in x:
        state = cell(now, state)
    return state


def from_a_state(module: nn.Module, x: Tensor) -> Any:
    hidden = x[:1, :, :3].tanh().contiguous()
    return module(x, (hidden, hidden / 2) if isinstance(module, nn.LSTM) else hidden)


def _recurrent(kind: type[nn.RNNBase]) -> list[Row]:
    recurrent = functools.partial(of, kind, 6)
    return [
        recurrent(3, on=STEPS),
        recurrent(3, batch_first=True, on=SEQUENCES),
        recurrent(3, bias=False, on=STEPS),
        recurrent(3, num_layers=2, on=STEPS),
        recurrent(3, bidirectional=True, on=STEPS),
        recurrent(3, num_layers=2, bidirectional=True, batch_first=True, on=SEQUENCES),
        recurrent(3, on=STEPS, call=from_a_state, note="from a state"),
        *lane_by_lane(
            f"vmap stopped at module 'first' ({kind.__name__})",
            recurrent(3, batch_first=True, on=SEQUENCES, call=packed, note="of packed sequences"),
        ),
        recurrent(3, on=floats(4, 6), note="of one sequence without a batch dimension"),
    ]


RECURRENT = [
    *(row for kind in (nn.RNN, nn.LSTM, nn.GRU) for row in _recurrent(kind)),
    of(nn.RNN, 6, 3, nonlinearity="relu", num_layers=2, on=STEPS),
    of(nn.LSTM, 6, 3, proj_size=2, on=STEPS),
    of(nn.LSTM, 6, 3, proj_size=2, num_layers=2, bidirectional=True, on=STEPS),
    of(nn.RNNCell, 6, 3, on=STEPS, call=step_by_step),
    of(nn.RNNCell, 6, 3, bias=False, nonlinearity="relu", on=STEPS, call=step_by_step),
    of(nn.LSTMCell, 6, 3, on=STEPS, call=step_by_step),
    of(nn.LSTMCell, 6, 3, bias=False, on=STEPS, call=step_by_step),
    of(nn.GRUCell, 6, 3, on=STEPS, call=step_by_step),
    of(nn.GRUCell, 6, 3, bias=False, on=STEPS, call=step_by_step),
]


# Attention

WIDE = floats(5, 4, 8)  # [samples, time, features]
TIME_FIRST = floats(4, 5, 8)
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)
BIAS = torch.linspace(-1, 1, 16).view(4, 4)


def padding(samples: int, time: int) -> Maker:
    """True from the end of each sequence on; the first has none, so that the longest is as long as its tensor."""

    def make(generator: torch.Generator) -> Tensor:
        lengths = torch.randint(1, time + 1, (samples, 1), generator=generator)
        lengths[0] = time
        return torch.arange(time) >= lengths

    return make


def attending(**options: Any) -> Callable[..., Any]:
    """Calls attention on one sequence for query, key and value; a second input is the key padding mask."""

    def call(module: nn.Module, x: Tensor, padded: Tensor | None = None) -> Any:
        return module(x, x, x, key_padding_mask=padded, **options)

    return call


def attention(note: str, on: Maker | tuple[Maker, ...] = WIDE, *, batch_first: bool = True, **options: Any) -> Row:
    """The row of attention that is called so."""
    call = attending(**options)
    return of(nn.MultiheadAttention, 8, 2, batch_first=batch_first, on=on, call=call, note=note)


PADDED = (WIDE, padding(5, 4))
THREE = (WIDE, floats(5, 3, 6), floats(5, 3, 3))

ATTENTION = [
    attention(""),
    attention("", TIME_FIRST, batch_first=False),
    attention("without weights", need_weights=False),
    attention("with weights of each head", average_attn_weights=False),
    attention("with attn_mask", attn_mask=CAUSAL),
    attention("with attn_mask, without weights", attn_mask=CAUSAL, need_weights=False),
    attention("with a float attn_mask", attn_mask=BIAS),
    attention("with a float attn_mask, without weights", attn_mask=BIAS, need_weights=False),
    attention("with is_causal", attn_mask=CAUSAL, is_causal=True, need_weights=False),
    attention("with key_padding_mask", PADDED),
    attention("with both masks, without weights", PADDED, attn_mask=CAUSAL, need_weights=False),
    of(nn.MultiheadAttention, 8, 2, kdim=6, vdim=3, batch_first=True, on=THREE, note="of three sequences"),
    of(nn.MultiheadAttention, 8, 2, bias=False, add_bias_kv=True, on=TIME_FIRST, call=attending()),
    of(nn.MultiheadAttention, 8, 2, add_zero_attn=True, on=TIME_FIRST, call=attending(need_weights=False)),
]


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


def encoder_layer(note: str = "", on: Maker | tuple[Maker, ...] = WIDE, call: Any = None, **options: Any) -> Row:
    options = {"batch_first": True, **options}
    return of(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, on=on, call=call, note=note, **options)


def decoder_layer(**options: Any) -> Row:
    def call(module: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
        return module(x, memory, tgt_mask=CAUSAL)

    on = (WIDE, floats(5, 3, 8))
    return of(nn.TransformerDecoderLayer, 8, 2, 16, dropout=0.0, batch_first=True, on=on, call=call, **options)


def decoder() -> nn.Module:
    part = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(part, 2, nn.LayerNorm(8))


def causal(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, src_mask=CAUSAL, is_causal=True)


def with_padding(module: nn.Module, x: Tensor, padded: Tensor) -> Tensor:
    return module(x, src_key_padding_mask=padded)


def with_memory_padding(module: nn.Module, x: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
    return module(x, memory, memory_key_padding_mask=padded)


def translating(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return module(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(4))


TRANSFORMERS = [
    encoder_layer(),
    encoder_layer(norm_first=True),
    encoder_layer(activation="gelu"),
    encoder_layer(activation=F.silu),
    encoder_layer(bias=False),
    encoder_layer(on=TIME_FIRST, batch_first=False),
    encoder_layer("causal", call=causal),
    encoder_layer("with src_key_padding_mask", PADDED, with_padding),
    named("TransformerEncoder(2 layers)", lambda: nn.TransformerEncoder(layer(), 2), on=WIDE),
    named(
        "TransformerEncoder(2 layers, norm) norm_first",
        lambda: nn.TransformerEncoder(layer(norm_first=True), 2, nn.LayerNorm(8), enable_nested_tensor=False),
        on=WIDE,
    ),
    # In evaluation torch itself gives zeros at the padded places, in training it does not: training is fused,
    # and evaluation lane by lane.
    replace(
        named(
            "TransformerEncoder(2 layers) with src_key_padding_mask",
            lambda: nn.TransformerEncoder(layer(), 2),
            on=PADDED,
            call=with_padding,
        ),
        strategy=None,
    ),
    decoder_layer(),
    decoder_layer(norm_first=True, activation="gelu"),
    named(
        "TransformerDecoder(2 layers) with memory_key_padding_mask",
        decoder,
        on=(WIDE, floats(5, 3, 8), padding(5, 3)),
        call=with_memory_padding,
    ),
    of(nn.Transformer, 8, 2, 1, 1, 16, dropout=0.0, batch_first=True, on=(floats(5, 3, 8), WIDE), call=translating),
]


# Activations

ACTIVATIONS = [
    of(nn.PReLU, on=VECTORS),
    of(nn.PReLU, 4, init=0.1, on=PLANE),
    *(
        of(kind, on=VECTORS)
        for kind in (
            nn.CELU,
            nn.ELU,
            nn.GELU,
            nn.GLU,
            nn.Hardshrink,
            nn.Hardsigmoid,
            nn.Hardswish,
            nn.Hardtanh,
            nn.LeakyReLU,
            nn.LogSigmoid,
            nn.Mish,
            nn.ReLU,
            nn.ReLU6,
            nn.SELU,
            nn.SiLU,
            nn.Sigmoid,
            nn.Softplus,
            nn.Softshrink,
            nn.Softsign,
            nn.Tanh,
            nn.Tanhshrink,
        )
    ),
    of(nn.CELU, alpha=0.5, on=VECTORS),
    of(nn.GELU, approximate="tanh", on=VECTORS),
    of(nn.LeakyReLU, 0.2, inplace=True, on=VECTORS),
    of(nn.ReLU, inplace=True, on=VECTORS),
    of(nn.SiLU, inplace=True, on=VECTORS),
    of(nn.Softplus, beta=2.0, threshold=1.0, on=VECTORS),
    of(nn.Threshold, 0.1, -1.0, on=VECTORS),
    *(of(kind, dim=1, on=VECTORS) for kind in (nn.Softmax, nn.Softmin, nn.LogSoftmax)),
    of(nn.Softmax2d, on=PLANE),
]


# Pooling


class ThereAndBack(nn.Module):
    """Max pooling and its inverse."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool, self.unpool = in_dims("MaxPoolNd", dims)(2, return_indices=True), in_dims("MaxUnpoolNd", dims)(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x), output_size=x.shape)


def unpooling(dims: int) -> Row:
    row = named(f"MaxUnpool{dims}d(2)", functools.partial(ThereAndBack, dims), on=SPACE[dims])
    return replace(row, kind=in_dims("MaxUnpoolNd", dims))


def _pools(dims: int) -> list[Row]:
    def pool(name: str, *arguments: Any, **options: Any) -> Row:
        return of(in_dims(name, dims), *arguments, on=SPACE[dims], **options)

    return [
        pool("MaxPoolNd", 2),
        pool("MaxPoolNd", 3, stride=2, padding=1, ceil_mode=True),
        pool("MaxPoolNd", 2, stride=1, dilation=2),
        pool("MaxPoolNd", 2, return_indices=True),
        pool("AvgPoolNd", 2),
        pool("AvgPoolNd", 3, stride=2, padding=1, count_include_pad=False, ceil_mode=True),
        pool("LPPoolNd", 2, 2),
        pool("AdaptiveMaxPoolNd", 2),
        pool("AdaptiveMaxPoolNd", 3, return_indices=True),
        pool("AdaptiveAvgPoolNd", 1),
        pool("AdaptiveAvgPoolNd", 3),
        unpooling(dims),
    ]


POOLING = [
    *(row for dims in DIMS for row in _pools(dims)),
    of(nn.AvgPool2d, 2, divisor_override=3, on=PLANE),
    of(nn.AdaptiveAvgPool2d, (None, 2), on=PLANE),
    of(nn.LPPool2d, 1.5, (2, 3), stride=1, on=lambda generator: PLANE(generator).abs() + 1),
    *(of(in_dims("MaxPoolNd", dims), 2, on=floats(5, *[6] * dims), note="without a batch dimension") for dims in DIMS),
    replace(
        named(
            "FractionalMaxPool2d(2, output_size=3) of given samples",
            lambda: nn.FractionalMaxPool2d(2, output_size=3, _random_samples=torch.linspace(0, 0.9, 40).view(5, 4, 2)),
            on=PLANE,
        ),
        kind=nn.FractionalMaxPool2d,
    ),
    replace(
        named(
            "FractionalMaxPool3d(2, output_ratio=0.5) of given samples",
            lambda: nn.FractionalMaxPool3d(
                2, output_ratio=0.5, _random_samples=torch.linspace(0, 0.9, 36).view(3, 4, 3)
            ),
            on=SPACE[3],
        ),
        kind=nn.FractionalMaxPool3d,
    ),
]


# Shapes: padding, resampling, shuffling, folding

SHAPES = [
    *(
        of(in_dims(name, dims), 2, on=SPACE[dims])
        for name in ("ReflectionPadNd", "ReplicationPadNd", "CircularPadNd", "ZeroPadNd")
        for dims in DIMS
    ),
    *(of(in_dims("ConstantPadNd", dims), 1, 0.5, on=SPACE[dims]) for dims in DIMS),
    of(nn.ZeroPad2d, (1, -1, 0, 2), on=PLANE),
    *(of(nn.Upsample, scale_factor=2, mode="nearest", on=SPACE[dims]) for dims in (1,)),
    of(nn.Upsample, size=(9, 5), mode="nearest", on=PLANE),
    of(nn.Upsample, scale_factor=1.5, mode="nearest-exact", on=PLANE),
    of(nn.Upsample, scale_factor=2, mode="linear", on=SPACE[1]),
    of(nn.Upsample, scale_factor=2, mode="bilinear", align_corners=True, on=PLANE),
    of(nn.Upsample, scale_factor=(1.5, 2), mode="bicubic", on=PLANE),
    of(nn.Upsample, scale_factor=2, mode="trilinear", on=SPACE[3]),
    of(nn.UpsamplingNearest2d, scale_factor=2, on=PLANE),
    of(nn.UpsamplingBilinear2d, size=(9, 5), on=PLANE),
    of(nn.PixelShuffle, 2, on=PLANE),
    of(nn.PixelUnshuffle, 2, on=floats(5, 3, 4, 6)),
    of(nn.ChannelShuffle, 2, on=PLANE),
    of(nn.Unfold, 3, padding=1, stride=2, on=PLANE),
    of(nn.Fold, (5, 4), 2, on=floats(5, 8, 12)),
    of(nn.Flatten, on=PLANE),
    of(nn.Flatten, 1, 2, on=PLANE),
    of(nn.Unflatten, 1, (2, 3), on=VECTORS),
    of(nn.CosineSimilarity, on=(VECTORS, floats(5, 6))),
    of(nn.PairwiseDistance, p=1.0, keepdim=True, on=(VECTORS, floats(5, 6))),
]


# Containers and models of a user's own


class Listed(nn.Module):
    """Holds its parts in lists and dicts, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.named = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        self.gates = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.shifts = nn.ParameterDict({"up": torch.randn(8), "down": torch.randn(4)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = sum(gate * branch(x) for gate, branch in zip(self.gates, self.branches, strict=True))
        for name, layer in self.named.items():
            hidden = torch.tanh(layer(hidden) + self.shifts[name])
        return hidden


class LanguageModel(nn.Module):
    """The embedding's weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = layer(norm_first=True, activation="gelu")
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layer(self.embedding(tokens), src_mask=mask, is_causal=True))


class TiedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Averaging(nn.Module):
    """Assigns its buffers anew, changes one in place, and has one that no checkpoint holds."""

    mean: Tensor
    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count = self.count + 1
            self.total += x.detach().sum(0)
        return x - self.mean + 0.1 * self.count + 0.01 * self.total


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, self.up(F.relu(self.down(x)))], 1))


class Counting(nn.Module):
    """Keeps a count where no state_dict shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return self.linear(x) / (1 + self.count)


class ByValue(nn.Module):
    """Branches on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden.tanh() if hidden.mean() > 0 else hidden.sigmoid()


class Halving(torch.autograd.Function):
    """An operation of a user's own, whose gradient is not its derivative. It has no batching rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1) / 2


class GeneratedRule(torch.autograd.Function):
    """The same, written so that torch can make the batching rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Halving.backward


def scaled_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def hooked() -> nn.Module:
    module = nn.Linear(6, 4)
    module.register_forward_hook(scaled_output)
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    return module


def pretrained() -> nn.Module:
    """Weights from a checkpoint, and a head of its own."""
    torch_state = torch.get_rng_state()
    torch.manual_seed(99)
    saved = nn.Linear(6, 8).state_dict()
    torch.set_rng_state(torch_state)
    body = nn.Linear(6, 8)
    body.load_state_dict(saved)
    return nn.Sequential(body, nn.ReLU(), nn.Linear(8, 4))


def frozen() -> nn.Module:
    model = pretrained()
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    return model


def with_an_unused_part() -> nn.Module:
    module = nn.Linear(6, 4)
    module.unused = nn.Linear(2, 2)
    return module


def same_module_twice() -> nn.Module:
    module = nn.Linear(6, 6)
    return nn.Sequential(module, nn.Tanh(), module)


def cloned_layers() -> nn.Module:
    module = nn.Linear(6, 6)
    return nn.Sequential(module, nn.Tanh(), copy.deepcopy(module))


MODELS = [
    named("ModuleList, ModuleDict, ParameterList, ParameterDict", Listed, on=VECTORS),
    named("Sequential of Sequentials", lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.ReLU())), on=VECTORS),
    named("a language model with tied weights", LanguageModel, on=TOKENS),
    named("weights tied in forward", TiedInForward, on=VECTORS),
    named("one module in two places", same_module_twice, on=VECTORS),
    named("layers made by copy.deepcopy", cloned_layers, on=VECTORS),
    named("pretrained weights", pretrained, on=VECTORS),
    named("frozen pretrained weights", frozen, on=VECTORS),
    named("Embedding.from_pretrained", lambda: nn.Embedding.from_pretrained(torch.eye(11), freeze=False), on=TOKENS),
    named("a part without use", with_an_unused_part, on=VECTORS),
    named("buffers assigned anew", Averaging, on=VECTORS),
    named("a residual block", Block, on=floats(5, 4, 3, 3)),
    named("a U-net", Unet, on=floats(5, 4, 4, 4)),
    named("forward hooks", hooked, on=VECTORS),
    named(
        "a float64 model",
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(),
        on=floats(5, 6, dtype=torch.float64),
    ),
    named(
        "an integer-input model",
        lambda: nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(42, 3)),
        on=TOKENS,
    ),
    named(
        "operations of a user's own with a generated rule",
        lambda: Applied(lambda x: GeneratedRule.apply(x)),
        on=VECTORS,
    ),
    *lane_by_lane(
        "setup_context", named("operations of a user's own", lambda: Applied(lambda x: Halving.apply(x)), on=VECTORS)
    ),
    *lane_by_lane("data-dependent control flow", named("a branch on a value", ByValue, on=VECTORS)),
]


# Parametrizations


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.abs().expm1().clamp(min=1e-3).log()


class Adapted(nn.Module):
    """Adds a product of two thin matrices to a weight, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(1, 6))
        self.up = nn.Parameter(torch.randn(6, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def parametrized(*parts: Callable[[], nn.Module]) -> nn.Module:
    module = nn.Linear(6, 6)
    for part in parts:
        parametrize.register_parametrization(module, "weight", part())
    return module


PARAMETRIZED = [
    named("weight_norm(Linear)", lambda: parametrizations.weight_norm(nn.Linear(6, 4)), on=VECTORS),
    named(
        "weight_norm(Conv1d, dim=None)", lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=None), on=SPACE[1]
    ),
    *(
        named(
            f"orthogonal(Linear, {mode!r})",
            functools.partial(lambda mode: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map=mode), mode),
            on=VECTORS,
        )
        for mode in ("matrix_exp", "cayley", "householder")
    ),
    named("a parametrization of a user's own", lambda: parametrized(Symmetric), on=VECTORS),
    named("two parametrizations, one with an inverse", lambda: parametrized(Positive, Symmetric), on=VECTORS),
    named("a parametrization with parameters", lambda: parametrized(Adapted), on=VECTORS),
]
# The power iteration writes through out=, and the older ones keep a computed weight as an attribute.
PARAMETRIZED += lane_by_lane(
    "",
    named("spectral_norm(Linear)", lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), on=VECTORS),
    named(
        "spectral_norm(Conv2d, n_power_iterations=2)",
        lambda: parametrizations.spectral_norm(nn.Conv2d(4, 6, 3), n_power_iterations=2),
        on=PLANE,
    ),
    named("the older weight_norm(Linear)", lambda: nn.utils.weight_norm(nn.Linear(6, 4)), on=VECTORS),
    named("prune.l1_unstructured(Linear)", lambda: prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5), on=VECTORS),
)

PARAMETRIZED += [
    # Its computed weight is a plain tensor of other numbers in each trial: each is an array for itself.
    replace(
        named("the older spectral_norm(Linear)", lambda: nn.utils.spectral_norm(nn.Linear(6, 4)), on=VECTORS),
        strategy=None,
    )
]


# Functions in a user's forward


def function(name: str, call: Callable[..., Any], on: Maker | tuple[Maker, ...], **shapes: tuple[int, ...]) -> Row:
    """The row of a function of the batch, and of parameters of the shapes given."""
    return named(name, functools.partial(Applied, call, **shapes), on=on)


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    y[:, 0] = y[:, 1].clone()
    y.clamp_(-1, 1)
    return y


def filled(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape)
    y[:, 0] = x[:, 1]
    return y


def row_by_row(x: Tensor) -> Tensor:
    return torch.stack([row.sum() * row for row in x])


def penalty(x: Tensor, weight: Tensor) -> Tensor:
    """The size of a gradient with respect to the input, as in WGAN-GP."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad((x @ weight).tanh().sum(), x, create_graph=True)
    return gradient.square().sum()


ONE_OF_FOUR = torch.tensor([2, 0, 1, 2])

FUNCTIONS = [
    function("view, transpose, permute, reshape", lambda x: x.view(20, 6).t().reshape(4, 30).permute(1, 0), SEQUENCES),
    function(
        "flatten, unsqueeze, expand, repeat",
        lambda x: x.flatten(1).unsqueeze(1).expand(5, 2, 24).repeat(1, 2, 1),
        SEQUENCES,
    ),
    function(
        "cat, stack, split, chunk, unbind",
        lambda x: torch.cat([*x.split(2, 1), torch.stack(x.unbind(1), 1), *x.chunk(2, 1)], 1),
        SEQUENCES,
    ),
    function(
        "roll, flip, tril, diagonal", lambda x: (x.roll(1, 1) + x.flip(2)).tril().diagonal(dim1=1, dim2=2), SEQUENCES
    ),
    function("x[:, ::2], x[..., None], x[:, [0, 2]]", lambda x: x[:, ::2, :, None] * x[:, [0, 2], None], SEQUENCES),
    function("iterating over a tensor", row_by_row, VECTORS),
    function("einsum", lambda x, weight: torch.einsum("btf,fg,bsg->bts", x, weight, x), SEQUENCES, weight=(6, 6)),
    function(
        "matmul, bmm, baddbmm",
        lambda x, weight: torch.baddbmm(x @ weight, x, weight.expand(5, 6, 6)).bmm(x.mT),
        SEQUENCES,
        weight=(6, 6),
    ),
    function("softmax, log_softmax, logsumexp", lambda x: (x.softmax(1), x.log_softmax(-1), x.logsumexp(0)), SEQUENCES),
    function("max and min with indices", lambda x: (*x.max(1), *x.min(-1), x.argmax(1), x.amax((1, 2))), SEQUENCES),
    function(
        "topk, sort, argsort, kthvalue", lambda x: (*x.topk(2), *x.sort(1), x.argsort(-1), *x.kthvalue(2, 1)), SEQUENCES
    ),
    function("median, quantile", lambda x: (*x.median(-1), x.quantile(0.3, dim=1)), SEQUENCES),
    function("gather", lambda x, at: x.gather(1, at), (VECTORS, integers(6, 5, 3))),
    function(
        "scatter, scatter_add",
        lambda x, at: (x.scatter(1, at, 1.0), x.scatter_add(1, at, x)),
        (VECTORS, integers(6, 5, 6)),
    ),
    function(
        "index_select, index_add, take_along_dim",
        lambda x, at: (x.index_select(1, ONE_OF_FOUR), x.index_add(1, ONE_OF_FOUR, x[:, :4]), x.take_along_dim(at, 1)),
        (VECTORS, integers(6, 5, 3)),
    ),
    function("x[index]", lambda x, at: x[torch.arange(5), at], (VECTORS, integers(6, 5))),
    function(
        "where, masked_fill, clamp",
        lambda x: (torch.where(x > 0, x, 2 * x), x.masked_fill(x < 0, -1.0), x.clamp(-0.5, 0.5)),
        SEQUENCES,
    ),
    function("cumsum, cumprod, cummax", lambda x: (x.cumsum(1), x.cumprod(-1), *x.cummax(1)), SEQUENCES),
    function(
        "mean, var, std, norm, normalize",
        lambda x: (x.mean((0, 1)), x.var(0), x.std(1, correction=0), x.norm(dim=-1), F.normalize(x)),
        SEQUENCES,
    ),
    function(
        "cdist, cosine_similarity, outer",
        lambda x: (torch.cdist(x, x + 1), F.cosine_similarity(x[:, 0], x[:, 1]), torch.outer(x[0, 0], x[1, 1])),
        SEQUENCES,
    ),
    function("arithmetic in place", in_place, VECTORS),
    function("one_hot", lambda x, at: F.one_hot(at, 6) * x, (VECTORS, integers(6, 5))),
    function("one_hot of what is computed", lambda x: F.one_hot(x.argmax(1), 6) * x, VECTORS),
    function("embedding", lambda at, weight: F.embedding(at, weight), TOKENS, weight=(11, 6)),
    function("linear", lambda x, weight, bias: F.linear(x, weight, bias), SEQUENCES, weight=(4, 6), bias=(4,)),
    function("bilinear", lambda x, weight: F.bilinear(x, x, weight), VECTORS, weight=(4, 6, 6)),
    function(
        "conv2d with groups",
        lambda x, weight: F.conv2d(x, weight, padding=1, groups=2),
        PLANE,
        weight=(6, 2, 3, 3),
    ),
    function("conv_transpose2d", lambda x, weight: F.conv_transpose2d(x, weight, stride=2), PLANE, weight=(4, 3, 3, 3)),
    function(
        "conv2d with a filter for each sample",
        lambda x, weight: F.conv2d(x.flatten(0, 1)[None], weight.repeat(5, 1, 1, 1), groups=20),
        PLANE,
        weight=(4, 1, 3, 3),
    ),
    function(
        "layer_norm, rms_norm",
        lambda x, weight, bias: (F.layer_norm(x, (6,), weight, bias), F.rms_norm(x, (6,), weight)),
        SEQUENCES,
        weight=(6,),
        bias=(6,),
    ),
    function(
        "group_norm, instance_norm",
        lambda x, weight: (F.group_norm(x, 2, weight), F.instance_norm(x, weight=weight)),
        PLANE,
        weight=(4,),
    ),
    function(
        "batch_norm of the batch",
        lambda x, weight: F.batch_norm(x, None, None, weight, training=True),
        PLANE,
        weight=(4,),
    ),
    function("prelu, glu, gelu", lambda x, weight: (F.prelu(x, weight), F.glu(x, 1), F.gelu(x)), PLANE, weight=(1,)),
    function(
        "max_pool2d, avg_pool1d, adaptive_avg_pool2d",
        lambda x: (
            F.max_pool2d(x, kernel_size=2),
            F.adaptive_avg_pool2d(x, output_size=1),
            F.avg_pool1d(x.flatten(2), 2),
        ),
        PLANE,
    ),
    function(
        "pad, pixel_shuffle, Tensor.unfold",
        lambda x: (F.pad(x, (1, 1, 2, 0), "reflect"), F.pixel_shuffle(x, 2), x.unfold(2, 3, 2)),
        PLANE,
    ),
    function(
        "interpolate", lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, (4, 4), mode="bilinear")), PLANE
    ),
    function(
        "grid_sample, affine_grid",
        lambda x, theta: F.grid_sample(
            x, F.affine_grid(theta.expand(5, 2, 3), [5, 4, 3, 3], align_corners=False), align_corners=False
        ),
        PLANE,
        theta=(2, 3),
    ),
    function("scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x, x, x), floats(5, 2, 4, 6)),
    function(
        "scaled_dot_product_attention(is_causal=True)",
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        floats(5, 2, 4, 6),
    ),
    function(
        "scaled_dot_product_attention(attn_mask=...)",
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=~CAUSAL),
        floats(5, 2, 4, 6),
    ),
    function(
        "scaled_dot_product_attention(enable_gqa=True)",
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True),
        floats(5, 2, 4, 6),
    ),
    function("dropout(training=False)", lambda x: F.dropout(x, 0.5, training=False), VECTORS),
    function("detach, no_grad", lambda x: x * x.detach().tanh(), VECTORS),
    function(
        "linalg.inv, det, solve",
        lambda x: (
            torch.linalg.inv(x @ x.mT + torch.eye(4)),
            torch.linalg.slogdet(x @ x.mT + torch.eye(4))[1],
            torch.linalg.solve(x @ x.mT + torch.eye(4), x),
        ),
        SEQUENCES,
    ),
    function(
        "linalg.cholesky, eigvalsh, svdvals",
        lambda x: (
            torch.linalg.cholesky(x @ x.mT + torch.eye(4)),
            torch.linalg.eigvalsh(x @ x.mT),
            torch.linalg.svdvals(x),
        ),
        SEQUENCES,
    ),
    function("fft", lambda x: torch.view_as_real(torch.fft.rfft(x)), SEQUENCES),
    function(
        "vmap in forward", lambda x, weight: torch.vmap(lambda row: (row * weight).cumsum(0))(x), VECTORS, weight=(6,)
    ),
    *lane_by_lane(
        "inplace arithmetic",
        function("a tensor filled with what is computed", filled, VECTORS),
    ),
    *lane_by_lane(
        "updated in place, were not batched",
        function(
            "batch_norm with statistics that nobody keeps",
            lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
            PLANE,
        ),
    ),
    *lane_by_lane(
        "dynamic shape",
        function("x[mask]", lambda x: x[x > 0].sum(), VECTORS),
        function("nonzero", lambda x: (x > 0).nonzero().float().mean() * x, VECTORS),
    ),
    *lane_by_lane("calling .item()", function("item", lambda x: x * x.mean().item(), VECTORS)),
    *lane_by_lane(
        "data pointer", function("numpy", lambda x: x * torch.from_numpy(x.detach().numpy().copy()), VECTORS)
    ),
    *lane_by_lane("requires_grad_", function("a penalty on gradients", penalty, VECTORS, weight=(6, 4))),
    *lane_by_lane(
        "checkpoint.checkpoint(",  # it computes the weights again in the backward pass, where vmap is over
        function(
            "checkpoint",
            lambda x, weight: checkpoint.checkpoint(lambda y: (y @ weight).tanh(), x, use_reentrant=False),
            VECTORS,
            weight=(6, 4),
        ),
    ),
]

ROWS = [
    *CONVOLUTIONS,
    *LINEAR,
    *NORMS,
    *EMBEDDINGS,
    *RECURRENT,
    *ATTENTION,
    *TRANSFORMERS,
    *ACTIVATIONS,
    *POOLING,
    *SHAPES,
    *MODELS,
    *PARAMETRIZED,
    *FUNCTIONS,
]


# Losses


class Head(nn.Module):
    """Outputs of a shape, brought to where a loss is defined."""

    def __init__(self, shape: tuple[int, ...], link: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, int(torch.tensor(shape).prod()))
        self.shape, self.link = shape, link

    def forward(self, x: Tensor) -> Any:
        return self.link(self.linear(x).unflatten(-1, self.shape))


def as_it_is(x: Tensor) -> Tensor:
    return x


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2, -1)


def thirds(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(3, -1)


def loss(
    kind: type[nn.Module],
    outputs: tuple[int, ...],
    *targets: Maker,
    link: Callable[[Tensor], Any] = as_it_is,
    note: str = "",
    **options: Any,
) -> Row:
    """The row of a loss of torch.nn on outputs of that shape (for each of 8 samples)."""
    row = of(kind, on=(floats(8, 6), *targets), note=note, **options)
    return replace(row, build=functools.partial(Head, outputs, link), criterion=row.build)


def loss_function(name: str, criterion: Callable[..., Tensor], outputs: tuple[int, ...], *targets: Maker) -> Row:
    """The row of a loss as a function."""
    row = named(name, functools.partial(Head, outputs, as_it_is), on=(floats(8, 6), *targets))
    return replace(row, criterion=lambda: criterion)


def probabilities(*shape: int) -> Maker:
    return lambda generator: torch.randn(shape, generator=generator).softmax(1)


def signs(*shape: int) -> Maker:
    return lambda generator: torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).float()


def zeros_and_ones(*shape: int) -> Maker:
    return lambda generator: torch.randint(0, 2, shape, generator=generator).float()


def labels_in_front(generator: torch.Generator) -> Tensor:
    """Some labels, then -1, as multi-label margin loss wants them."""
    return torch.tensor([[2, 0, -1, 1], [1, -1, 0, 2], [3, 2, 1, 0], [-1, 0, 1, 2]]).repeat(2, 1)


CLASS = integers(4, 8)
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1])
SOFT = functools.partial(F.log_softmax, dim=1)

LOSSES = [
    loss(nn.CrossEntropyLoss, (4,), CLASS),
    loss(nn.CrossEntropyLoss, (4,), CLASS, weight=WEIGHT),
    loss(nn.CrossEntropyLoss, (4,), CLASS, label_smoothing=0.1, weight=WEIGHT),
    loss(nn.CrossEntropyLoss, (4,), CLASS, label_smoothing=0.1),
    loss(nn.CrossEntropyLoss, (4,), CLASS, ignore_index=1),
    loss(nn.CrossEntropyLoss, (4,), CLASS, ignore_index=1, weight=WEIGHT, label_smoothing=0.2),
    loss(nn.CrossEntropyLoss, (4,), CLASS, reduction="sum"),
    loss(nn.CrossEntropyLoss, (4,), CLASS, reduction="none"),
    loss(nn.CrossEntropyLoss, (4, 3, 2), integers(4, 8, 3, 2), note="of images"),
    loss(nn.CrossEntropyLoss, (4, 3), integers(4, 8, 3), ignore_index=0, weight=WEIGHT, note="of sequences"),
    loss(nn.CrossEntropyLoss, (4,), probabilities(8, 4), note="of class probabilities"),
    loss(nn.CrossEntropyLoss, (4,), probabilities(8, 4), label_smoothing=0.1, weight=WEIGHT, note="of probabilities"),
    loss(nn.NLLLoss, (4,), CLASS, link=SOFT),
    loss(nn.NLLLoss, (4,), CLASS, link=SOFT, weight=WEIGHT, ignore_index=2, reduction="sum"),
    loss(nn.NLLLoss, (4, 3, 2), integers(4, 8, 3, 2), link=SOFT, note="of images"),
    *(loss(nn.MSELoss, (4,), floats(8, 4), reduction=reduction) for reduction in ("mean", "sum", "none")),
    *(loss(nn.L1Loss, (4,), floats(8, 4), reduction=reduction) for reduction in ("mean", "sum", "none")),
    loss(nn.SmoothL1Loss, (4,), floats(8, 4)),
    loss(nn.SmoothL1Loss, (4,), floats(8, 4), beta=0.5, reduction="sum"),
    loss(nn.HuberLoss, (4,), floats(8, 4)),
    loss(nn.HuberLoss, (4,), floats(8, 4), delta=0.5, reduction="none"),
    loss(nn.BCELoss, (4,), zeros_and_ones(8, 4), link=torch.sigmoid),
    loss(nn.BCELoss, (4,), probabilities(8, 4), link=torch.sigmoid, weight=WEIGHT, reduction="sum"),
    loss(nn.BCEWithLogitsLoss, (4,), zeros_and_ones(8, 4)),
    loss(nn.BCEWithLogitsLoss, (4,), zeros_and_ones(8, 4), pos_weight=WEIGHT),
    loss(nn.BCEWithLogitsLoss, (4,), zeros_and_ones(8, 4), weight=WEIGHT, reduction="none"),
    loss(nn.KLDivLoss, (4,), probabilities(8, 4), link=SOFT, reduction="batchmean"),
    loss(nn.KLDivLoss, (4,), lambda g: probabilities(8, 4)(g).log(), link=SOFT, reduction="sum", log_target=True),
    loss(nn.PoissonNLLLoss, (4,), integers(5, 8, 4)),
    loss(nn.PoissonNLLLoss, (4,), integers(5, 8, 4), log_input=False, full=True, link=F.softplus),
    loss(nn.GaussianNLLLoss, (4,), floats(8, 4), lambda g: torch.rand(8, 4, generator=g) + 0.1),
    loss(nn.GaussianNLLLoss, (4,), floats(8, 4), lambda g: torch.rand(8, 1, generator=g) + 0.1, full=True),
    loss(nn.HingeEmbeddingLoss, (4,), signs(8, 4)),
    loss(nn.HingeEmbeddingLoss, (4,), signs(8, 4), margin=0.5, reduction="sum"),
    loss(nn.SoftMarginLoss, (4,), signs(8, 4)),
    loss(nn.MarginRankingLoss, (8,), signs(8, 4), margin=0.1, link=halves),
    loss(nn.CosineEmbeddingLoss, (8,), signs(8), margin=0.1, link=halves),
    loss(nn.TripletMarginLoss, (12,), link=thirds),
    loss(nn.TripletMarginLoss, (12,), link=thirds, margin=0.5, p=1.0, swap=True),
    loss(nn.TripletMarginWithDistanceLoss, (12,), link=thirds),
    loss(nn.MultiMarginLoss, (4,), CLASS),
    loss(nn.MultiMarginLoss, (4,), CLASS, p=2, margin=0.5, weight=WEIGHT),
    loss(nn.MultiLabelMarginLoss, (4,), labels_in_front),
    loss(nn.MultiLabelSoftMarginLoss, (4,), zeros_and_ones(8, 4)),
    loss(nn.MultiLabelSoftMarginLoss, (4,), zeros_and_ones(8, 4), weight=WEIGHT, reduction="sum"),
    loss_function("F.cross_entropy", F.cross_entropy, (4,), CLASS),
    loss_function("F.mse_loss", F.mse_loss, (4,), floats(8, 4)),
    loss_function(
        "F.binary_cross_entropy_with_logits(pos_weight)",
        lambda out, y: F.binary_cross_entropy_with_logits(out, y, pos_weight=WEIGHT),
        (4,),
        zeros_and_ones(8, 4),
    ),
    loss_function(
        "a focal loss",
        lambda out, y: ((1 - (-(e := F.cross_entropy(out, y, reduction="none"))).exp()) ** 2 * e).mean(),
        (4,),
        CLASS,
    ),
    loss_function("a loss of what the model itself says", lambda out: F.cross_entropy(out, out.argmax(1)), (4,)),
    loss_function(
        "a loss of soft labels that the model makes",
        lambda out: F.kl_div(SOFT(out), out.detach().roll(1, 0).softmax(1), reduction="batchmean"),
        (4,),
    ),
    loss_function("an entropy", lambda out: -(out.softmax(1) * out.log_softmax(1)).sum(1).mean(), (4,)),
    loss_function(
        "a contrastive loss",
        lambda out: F.cross_entropy(F.normalize(out) @ F.normalize(out).t(), torch.arange(8).roll(1)),
        (4,),
    ),
]


# Losses that have parameters, or that need more than an output and a target


def time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).log_softmax(-1)


SENTENCES = (integers(4, 8, 2, least=1), lambda g: torch.full((8,), 5), integers(3, 8, least=1))

LOSSES += [
    loss(nn.CTCLoss, (5, 4), *SENTENCES, link=time_first),
    loss(nn.CTCLoss, (5, 4), *SENTENCES, link=time_first, blank=0, reduction="sum", zero_infinity=True),
]
ROWS += [
    *lane_by_lane(
        "(AdaptiveLogSoftmaxWithLoss)",
        of(nn.AdaptiveLogSoftmaxWithLoss, 6, 10, cutoffs=[3, 6], on=(VECTORS, integers(10, 5))),
    ),
]
if hasattr(nn, "LinearCrossEntropyLoss"):
    ROWS += [
        of(nn.LinearCrossEntropyLoss, 6, 4, on=(VECTORS, integers(4, 5))),
        of(nn.LinearCrossEntropyLoss, 6, 4, bias=True, label_smoothing=0.1, on=(VECTORS, integers(4, 5))),
    ]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_modules_and_functions(row: Row) -> None:
    assert_row(row)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in LOSSES])
def test_losses(row: Row) -> None:
    assert_row(row)


def assert_row(row: Row) -> None:
    assert_equal_to_alone(task_of(row), LANES, ROUNDS, strategy=row.strategy, reason=row.reason)


def test_what_a_module_counts_in_python_is_its_own() -> None:
    """Also when a lane joins later: its count starts then. Fused or not, as the engine likes."""
    row = named("a count in Python", Counting, on=VECTORS)
    assert_equal_to_alone(task_of(row), LANES, ROUNDS, joins_later=True)


def test_no_two_rows_have_one_name() -> None:
    names = [row.name for row in (*ROWS, *LOSSES, *RANDOM)]
    assert len(names) == len(set(names))


# What is random in training


@dataclass(frozen=True)
class Random:
    """One line of the table of what is random in training, and deterministic in evaluation.

    Attributes:
        name: How a user would write it.
        build: Builds the module from a rate.
        shape: Of its input.
        rates: The lanes' rates; two are equal, so that their draws can be told apart.
        fill: What the input is filled with; None for random numbers.
        kind: The class of torch.nn that the row is about, if it is one.
        call: Calls the module.
        random_evaluation: It is random in evaluation too.
        strategy: How an array of it trains.
        reason: Why not fused: a part of what the user is told.
    """

    name: str
    build: Callable[[float], nn.Module]
    shape: tuple[int, ...]
    rates: tuple[float, float, float] = (0.3, 0.3, 0.3)
    fill: float | None = 1.0
    kind: type | None = None
    call: Callable[..., Any] | None = None
    random_evaluation: bool = False
    strategy: str = FUSED
    reason: str = ""


class Weighted(nn.Module):
    """Weighs every entry of the input: the gradients of the weights show what became of each entry."""

    def __init__(self, row: Random, rate: float) -> None:
        super().__init__()
        self.module = row.build(rate)
        self.call = row.call
        self.weight = nn.Parameter(torch.ones(row.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        output = self.module(x) if self.call is None else self.call(self.module, x)
        return output[0] if isinstance(output, tuple) else output


class InTraining(nn.Module):
    """A function that is random, in training only."""

    def __init__(self, function: Callable[[Tensor, float, bool], Tensor], rate: float) -> None:
        super().__init__()
        self.function, self.rate = function, rate

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.rate, self.training)


def random_function(name: str, function: Callable[[Tensor, float, bool], Tensor], *shape: int) -> Random:
    return Random(name, functools.partial(InTraining, function), shape)


def stacked_layers(kind: type[nn.RNNBase], **options: Any) -> Random:
    """Layers with dropout between them; those of an RNN pass on what they get, so that its masks show."""

    def build(rate: float) -> nn.Module:
        module = kind(20, 20, num_layers=3, dropout=rate, **options)
        for name, parameter in module.named_parameters() if kind is nn.RNN else ():
            with torch.no_grad():
                parameter.copy_(torch.eye(20) if "weight_ih" in name else torch.zeros_like(parameter))
        return module

    return Random(f"{kind.__name__}(num_layers=3, dropout=p)", build, (4, 120, 20), fill=None)


def noise(x: Tensor, rate: float, training: bool) -> Tensor:
    return x * (1 + rate * torch.randn_like(x)) if training else x


def stochastic_depth(x: Tensor, rate: float, training: bool) -> Tensor:
    return x * torch.bernoulli(torch.full((x.shape[0], 1), 1 - rate)) if training else x


def sampled(x: Tensor, rate: float, training: bool) -> Tensor:
    distribution = torch.distributions.Normal(x, rate * x.abs() + 0.1)
    return distribution.rsample() if training else distribution.mean


SAMPLES = (8, 600, 3)  # [samples, channels, space]
PER_LANE = (0.3, 0.3, 0.7)

RANDOM = [
    Random("Dropout(p)", nn.Dropout, SAMPLES, PER_LANE, kind=nn.Dropout),
    Random("Dropout(p, inplace=True)", lambda p: nn.Dropout(p, inplace=True), SAMPLES, PER_LANE),
    Random("Dropout1d(p)", nn.Dropout1d, SAMPLES, PER_LANE, kind=nn.Dropout1d),
    Random("Dropout2d(p)", nn.Dropout2d, (*SAMPLES, 2), PER_LANE, kind=nn.Dropout2d),
    Random("Dropout3d(p)", nn.Dropout3d, (*SAMPLES, 2, 1), PER_LANE, kind=nn.Dropout3d),
    Random("AlphaDropout(p)", nn.AlphaDropout, SAMPLES, kind=nn.AlphaDropout),
    Random("FeatureAlphaDropout(p)", nn.FeatureAlphaDropout, SAMPLES, kind=nn.FeatureAlphaDropout),
    *lane_by_lane(
        "vmap stopped at module 'module' (RReLU)",
        Random("RReLU()", lambda p: nn.RReLU(), SAMPLES, fill=-1.0, kind=nn.RReLU),
        Random("RReLU(0.1, 0.9, inplace=True)", lambda p: nn.RReLU(0.1, 0.9, inplace=True), SAMPLES, fill=-1.0),
    ),
    Random(
        "FractionalMaxPool2d(2, output_ratio=0.6)",
        lambda p: nn.FractionalMaxPool2d(2, output_ratio=0.6),
        (8, 10, 9, 7),
        fill=None,
        kind=nn.FractionalMaxPool2d,
        random_evaluation=True,
    ),
    Random(
        "FractionalMaxPool3d(2, output_size=3)",
        lambda p: nn.FractionalMaxPool3d(2, output_size=3),
        (8, 10, 5, 6, 7),
        fill=None,
        kind=nn.FractionalMaxPool3d,
        random_evaluation=True,
    ),
    stacked_layers(nn.LSTM),
    stacked_layers(nn.GRU),
    replace(stacked_layers(nn.RNN, nonlinearity="relu"), fill=1.0),
    *(
        Random(
            f"MultiheadAttention(dropout=p){note}",
            lambda p: nn.MultiheadAttention(16, 2, dropout=p, batch_first=True),
            (60, 5, 16),
            fill=None,
            call=attending(need_weights=not note),
        )
        for note in ("", " without weights")
    ),
    Random(
        "TransformerEncoderLayer(dropout=p)",
        lambda p: nn.TransformerEncoderLayer(16, 2, 16, dropout=p, batch_first=True, norm_first=True),
        (60, 5, 16),
        fill=None,
    ),
    Random(
        "TransformerDecoderLayer(dropout=p)",
        lambda p: nn.TransformerDecoderLayer(16, 2, 16, dropout=p, batch_first=True, norm_first=True),
        (60, 5, 16),
        fill=None,
        call=lambda m, x: m(x, x),
    ),
    random_function("F.dropout", lambda x, p, training: F.dropout(x, p, training), *SAMPLES),
    random_function("F.dropout1d", lambda x, p, training: F.dropout1d(x, p, training), *SAMPLES),
    random_function("F.dropout2d", lambda x, p, training: F.dropout2d(x, p, training), *SAMPLES, 2),
    random_function("F.dropout3d", lambda x, p, training: F.dropout3d(x, p, training), *SAMPLES, 2, 1),
    random_function("F.alpha_dropout", lambda x, p, training: F.alpha_dropout(x, p, training), *SAMPLES),
    random_function(
        "F.feature_alpha_dropout", lambda x, p, training: F.feature_alpha_dropout(x, p, training), *SAMPLES
    ),
    random_function(
        "scaled_dot_product_attention(dropout_p=p)",
        lambda x, p, training: F.scaled_dot_product_attention(x, x, x, dropout_p=p if training else 0.0),
        *(60, 2, 5, 8),
    ),
    random_function(
        "gumbel_softmax",
        lambda x, p, training: F.gumbel_softmax(x, 1 + p)[..., :2] if training else x.softmax(-1)[..., :2],
        *SAMPLES,
    ),
    random_function("randn_like", noise, *SAMPLES),
    random_function("bernoulli", stochastic_depth, 4800, 3),
    *lane_by_lane(
        "inplace randomness",
        random_function("distributions.Normal.rsample", sampled, *SAMPLES),
    ),
]


@functools.cache
def random_task(row: Random) -> type:
    class Task:
        def build_model(self, config: Config) -> nn.Module:
            return Weighted(row, config["rate"])

        def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
            return torch.optim.SGD([model.weight], lr=RANDOM_LR * model.weight.numel())

        def train_dataloader(self, config: Config) -> list[Tensor]:
            return [self.batch()]

        def val_dataloader(self, config: Config) -> list[Tensor]:
            return [self.batch()]

        def training_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            return model(batch).mean()

        def validation_step(self, model: nn.Module, batch: Any, config: Config) -> Any:
            return {"val_loss": score(model(batch))}

        def batch(self) -> Tensor:
            if row.fill is None:
                return torch.randn(row.shape, generator=torch.Generator().manual_seed(0))
            return torch.full(row.shape, row.fill)

    return Task


RANDOM_LR = 1e-2  # small: what the weights have learnt in a round shall not show in the next
RANDOM_ROUNDS = 3


def statistics(gradients: Tensor) -> dict[str, float]:
    """What of a random mask is the same in every draw, up to chance. [rounds, ...]."""
    scale = float(gradients.abs().mean())
    return {
        "mean": float(gradients.mean()) / scale,
        "deviation": float(gradients.std()) / scale,
        "zeros": float((gradients.abs() < 1e-3 * scale).float().mean()),
        # Entries that are dropped together are so for all neighbours along a dimension.
        **{
            f"equal along {dim}": float((gradients.diff(dim=dim).abs() < 1e-3 * scale).float().mean())
            for dim in range(1, gradients.dim())
            if gradients.shape[dim] > 1
        },
        "scale": scale,
    }


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in RANDOM])
def test_random_modules_and_functions(row: Random) -> None:
    configs = [{"seed": 1, "rate": rate} for rate in row.rates]
    kind = random_task(row)
    lanes = range(len(configs))
    options = dict(strategy=row.strategy, reason=row.reason)
    with training(kind, configs, **options) as worker:
        weights = [torch.ones(len(configs), *row.shape)]
        losses: list[list[float]] = []
        for _ in range(RANDOM_ROUNDS):
            results = list(worker.run_round().values())
            states = [worker.state_dict(trial)["model"] for trial in worker.trial_ids]
            weights.append(torch.stack([state["weight"] for state in states]))
            losses.append([result["train_loss"] for result in results])
            for lane in lanes:
                if not row.random_evaluation:
                    expected = plain_evaluation(kind(), configs[lane], states[lane])
                    assert_same(results[lane]["val_loss"], expected, f"val_loss of lane {lane}")
        gradients = -torch.stack(weights, 1).diff(dim=1) / RANDOM_LR  # [lanes, rounds, ...]
        for lane in lanes:
            alone = alone_draws(kind(), configs[lane])
            actual, expected = statistics(gradients[lane]), statistics(alone.gradients)
            for name, value in expected.items():
                assert actual[name] == pytest.approx(value, rel=0.08, abs=0.08), name
            assert sum(loss[lane] for loss in losses) / len(losses) == pytest.approx(alone.loss, abs=0.08)
    assert not gradients[0].equal(gradients[1]), "two lanes drew the same"
    assert not gradients[0, 0].equal(gradients[0, 1]), "a lane drew the same twice"


def plain_evaluation(task: Any, config: Config, state: dict[str, Tensor]) -> float:
    model = task.build_model(config)
    model.load_state_dict(state)
    with torch.no_grad():
        return float(task.validation_step(model.eval(), task.batch(), config)["val_loss"])


@dataclass(frozen=True)
class Draws:
    gradients: Tensor
    loss: float


def alone_draws(task: Any, config: Config) -> Draws:
    run = reference.Run(task, config)
    draws, losses = [], []
    for _ in range(RANDOM_ROUNDS):
        before = run.model.weight.detach().clone()
        losses.append(run.run_round()["train_loss"])
        draws.append((before - run.model.weight.detach()) / RANDOM_LR)
    return Draws(torch.stack(draws), sum(losses) / len(losses))


# Is the table whole?

LEFT_OUT = {
    "Container": "a base class of old",
    "LinearCrossEntropyOptions": "no module",
    "Module": "the base class",
    "NLLLoss2d": "the old name of NLLLoss",
    "RNNBase": "a base class",
    "RNNCellBase": "a base class",
    "SyncBatchNorm": "trains on CUDA in a process group only",
}


def test_every_class_of_torch_nn_has_a_row() -> None:
    kinds = {row.kind for row in (*ROWS, *LOSSES, *RANDOM)}
    kinds |= {type(module) for row in MODELS + TRANSFORMERS for module in row.build().modules()}
    missing = set(nn.modules.__all__) - {kind.__name__ for kind in kinds if kind} - set(LEFT_OUT)
    assert not missing
