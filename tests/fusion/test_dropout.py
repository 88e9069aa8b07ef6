"""Dropout with a probability a lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from hfta_tune.fusion.dropout import LANE_DROPOUTS, LaneDropout, dropout_probabilities, replace_dropouts

SHAPES = {
    nn.Dropout: (50, 40),
    nn.Dropout1d: (50, 40, 3),
    nn.Dropout2d: (50, 40, 3, 2),
    nn.Dropout3d: (50, 40, 3, 2, 2),
}


def test_every_kind_is_covered() -> None:
    assert frozenset(SHAPES) == LANE_DROPOUTS


@pytest.mark.parametrize("kind", list(SHAPES), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("batched", [True, False])
def test_rates_scale_and_form_of_the_mask(kind: type[nn.Dropout], batched: bool) -> None:
    torch.manual_seed(0)
    rates = torch.tensor([0.0, 0.25, 0.8, 1.0])
    template = LaneDropout(kind(0.5))
    x = torch.ones(SHAPES[kind] if batched or kind is nn.Dropout2d else SHAPES[kind][1:])
    out = vmap(lambda p: functional_call(template, {"p": p}, (x,)), randomness="different")(rates)
    reference = kind(0.5)(x)
    for rate, lane in zip(rates.tolist(), out, strict=True):
        kept = lane != 0
        torch.testing.assert_close(lane[kept], torch.full_like(lane[kept], 1 / (1 - rate) if rate < 1 else 0.0))
        # Entries that torch drops together are dropped together here.
        together = [i for i in range(x.dim()) if (reference != 0).any(i).equal((reference != 0).all(i))]
        for dim in together:
            assert kept.any(dim).equal(kept.all(dim))
        if batched:
            units = kept.flatten(2)[..., 0] if kind is not nn.Dropout else kept
            assert units.float().mean().item() == pytest.approx(1 - rate, abs=0.05)
    assert not out[1].equal(out[2])


def test_evaluation_keeps_everything() -> None:
    x = torch.randn(5)
    assert LaneDropout(nn.Dropout(0.9)).eval()(x) is x


def test_in_place_dropout_changes_its_input() -> None:
    x = torch.ones(100)
    out = LaneDropout(nn.Dropout(0.5, inplace=True))(x)
    assert out.equal(x) and (x == 0).any()


def test_a_shared_module_stays_shared_and_subclasses_are_left_alone() -> None:
    class Own(nn.Dropout):
        pass

    shared = nn.Dropout(0.3)
    model = nn.Sequential(shared, nn.Sequential(shared, Own(0.2)))
    assert dropout_probabilities(model) == {"0.p": 0.3}
    replace_dropouts(model)
    assert isinstance(model[0], LaneDropout) and model[0] is model[1][0]
    assert type(model[1][1]) is Own
    assert not model.state_dict()
