"""What training_step and validation_step may read, and what it does to the arrays."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainables import Points, points

from hfta_tune import FusedTrainable, FusionWarning, Worker


def arrays(worker: Worker) -> list[set[str]]:
    return sorted((set(array["trials"]) for array in worker.describe()["arrays"]), key=sorted)


def train(kind: type[FusedTrainable], configs: list[dict[str, Any]], rounds: int = 2) -> tuple[Worker, Any]:
    """Train configs together and each alone; assert equal results; return the worker and the warnings."""
    worker = Worker(len(configs), device="cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number, config in enumerate(configs):
            worker.add(str(number), kind._outside_tune(config), config)
        together = [worker.run_round() for _ in range(rounds)]
    for number, config in enumerate(configs):
        alone = Worker(1, device="cpu")
        alone.add("own", kind._outside_tune(config), config)
        for results in together:
            own, shared = alone.run_round()["own"], results[str(number)]
            assert isinstance(own, dict) and isinstance(shared, dict), (own, shared)
            assert own.keys() == shared.keys()
            for name, value in own.items():
                assert shared[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (number, name)
    return worker, [w for w in said if issubclass(w.category, FusionWarning)]


class Smoothed(Points):
    """Reads a float in tensor arithmetic."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y = batch
        logits = model(x)
        mix = config["loss"]["smoothing"]
        return (1 - mix) * F.cross_entropy(logits, y) - mix * logits.log_softmax(1).mean()


class Forced(Points):
    """Turns the same float into a Python number."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=float(config["smoothing"])) * config["weight"]


class Recomputed(Points):
    """Computes activations again in the backward pass, where vmap is over, and reads a float in tensor arithmetic."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y = batch
        logits = checkpoint(lambda inputs: model(inputs).tanh(), x, use_reentrant=False)
        return F.cross_entropy(logits, y) * config["weight"]


class Named(Points):
    """Reads a string."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y = batch
        logits = model(x)
        return F.cross_entropy(logits, y) if config["loss"] == "ce" else (logits - F.one_hot(y)).square().mean()


class Counts(Points):
    """Reads an int, an optional key, and asks for one that only some have."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        loss = super().training_step(model, batch, config)
        for _ in range(config.get("penalties", 0)):
            loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
        return loss + 0.1 if "offset" in config else loss


class WholeConfig(Points):
    """Copies its config in a step."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        settings = {**config}
        return super().training_step(model, batch, config) * settings["weight"]


class OwnAttribute(Points):
    """Keeps something of its config in self and uses it in a step."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        self.weight = config["weight"]
        return super().build_model(config)

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        return super().training_step(model, batch, config) * self.weight


class ItemInValidation(Points):
    """Makes Python numbers in validation_step, which vmap cannot."""

    def validation_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, float]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item()}


class LateKey(Points):
    """Reads a key only at the second batch, when all lanes have trained already."""

    def train_dataloader(self, config: dict[str, Any]) -> Any:
        x, y = points()
        return [(x[:32], y[:32], "a"), (x[32:64], y[32:64], "b"), (x[64:], y[64:], "a")]

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        x, y, kind = batch
        loss = F.cross_entropy(model(x), y)
        return loss * 2 if kind == "b" and config["doubles"] else loss


def configs(key: str, values: list[Any], **others: Any) -> list[dict[str, Any]]:
    return [{"lr": 0.01 * (i + 1), **others, key: value} for i, value in enumerate(values)]


def test_a_float_in_tensor_arithmetic_is_each_lanes_own() -> None:
    worker, said = train(Smoothed, configs("loss", [{"smoothing": s} for s in (0.0, 0.1, 0.3)]))
    assert arrays(worker) == [{"0", "1", "2"}] and not said


def test_a_float_made_a_python_number_joins_the_signature() -> None:
    worker, said = train(
        Forced, [{**c, "weight": 1.0 + i} for i, c in enumerate(configs("smoothing", [0.1, 0.2, 0.1]))]
    )
    assert arrays(worker) == [{"0", "2"}, {"1"}]
    assert [array["strategy"] for array in worker.describe()["arrays"] if len(array["trials"]) > 1] == ["vmap"]
    assert [str(w.message) for w in said] == [
        "training_step of Forced turns config['smoothing'] into a Python number, so only trials with equal values "
        "of it share an array. Use it in tensor arithmetic to let it differ."
    ]


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.5, 2.0]], ids=["equal", "different"])
def test_a_float_is_not_to_blame_for_what_stops_the_backward_pass(weights: list[float]) -> None:
    worker, said = train(Recomputed, configs("weight", weights))
    assert arrays(worker) == [{"0", "1"}]
    assert [array["strategy"] for array in worker.describe()["arrays"]] == ["lane by lane"]
    (message,) = (str(w.message) for w in said)
    assert message.startswith("Recomputed trains lane by lane: vmap stopped at the step")
    assert "torch.utils.checkpoint" in message


def test_a_key_of_another_type_joins_the_signature() -> None:
    worker, said = train(Named, configs("loss", ["ce", "mse", "ce", "ce"]))
    assert arrays(worker) == [{"0", "2", "3"}, {"1"}] and not said


def test_ints_defaults_and_presence() -> None:
    several = [
        {"lr": 0.01},
        {"lr": 0.02, "penalties": 2},
        {"lr": 0.03, "offset": 1.5},
        {"lr": 0.04, "offset": 2.5},
    ]
    worker, said = train(Counts, several)
    assert arrays(worker) == [{"0"}, {"1"}, {"2", "3"}] and not said


def test_copying_the_config_is_said_once_and_floats_still_differ() -> None:
    worker, said = train(WholeConfig, configs("weight", [1.0, 2.0, 3.0]))
    assert arrays(worker) == [{"0", "1", "2"}]
    assert len(said) == 1 and "training_step of WholeConfig reads its whole config" in str(said[0].message)


def test_an_attribute_of_self_that_differs_trains_lane_by_lane_and_is_named() -> None:
    worker, said = train(OwnAttribute, configs("weight", [1.0, 2.0, 3.0]))
    assert [array["strategy"] for array in worker.describe()["arrays"]] == ["lane by lane"]
    assert len(said) == 1 and "reads self.weight, which differs between" in str(said[0].message)


def test_an_attribute_of_self_that_agrees_fuses() -> None:
    worker, said = train(OwnAttribute, [{"lr": lr, "weight": 2.0} for lr in (0.01, 0.02)])
    assert [array["strategy"] for array in worker.describe()["arrays"]] == ["vmap"] and not said


def test_a_validation_step_that_vmap_cannot_do_leaves_training_fused() -> None:
    worker, said = train(ItemInValidation, configs("x", [1, 2, 3]))
    (array,) = worker.describe()["arrays"]
    assert (array["strategy"], array["evaluation_strategy"]) == ("vmap", "lane by lane")
    assert len(said) == 1 and ".item()" in str(said[0].message)


def test_lanes_part_in_mid_round_without_losing_a_step() -> None:
    worker, said = train(LateKey, configs("doubles", [True, False, True]))
    assert arrays(worker) == [{"0", "2"}, {"1"}] and not said


def test_hooks_get_a_config_of_their_own() -> None:
    class Changes(Points):
        def build_model(self, config: dict[str, Any]) -> nn.Module:
            config["hidden"] = 4
            return super().build_model(config)

    config = {"lr": 0.1}
    before = copy.deepcopy(config)
    worker = Worker(1, device="cpu")
    worker.add("a", Changes._outside_tune(config), config)
    assert isinstance(worker.run_round()["a"], dict)
    assert config == before


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(Points, configs("x", [1, 2]))
    assert torch.rand(3).equal(expected)


def test_trials_share_a_data_set_that_stands_in_the_config() -> None:
    class FromConfig(Points):
        def train_dataloader(self, config: dict[str, Any]) -> Any:
            return config["data"]

    data = iter_again([points()])
    worker, said = train(FromConfig, [{"lr": lr, "data": data} for lr in (0.01, 0.02)])
    assert arrays(worker) == [{"0", "1"}] and not said


class iter_again:
    """A data set that can be compared as an object only."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Accurate(Points):
    """Returns metrics besides the loss; one is called like ours."""

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Any:
        x, y = batch
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        return loss + config["weight"], {"accuracy": (logits.argmax(1) == y).float().mean(), "train_loss": loss}


def test_metrics_of_a_training_step() -> None:
    configs = [{"seed": number, "lr": 0.01, "weight": 0.5 * number} for number in range(3)]
    worker, _ = train(Accurate, configs)
    plain, _ = train(Smoothed, [{"seed": n, "lr": 0.01, "loss": {"smoothing": 0.0}} for n in range(3)])
    results, expected = worker.run_round(), plain.run_round()
    for name in results:
        ours, theirs = results[name], expected[name]
        assert isinstance(ours, dict) and isinstance(theirs, dict)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert 0 < ours["accuracy"] <= 1


@pytest.mark.slow
def test_metrics_of_a_compiled_training_step(always_compiles: None, steps_of_tensors: list[int]) -> None:
    worker, alone = Worker(3, device="cpu"), [Worker(1, device="cpu") for _ in range(3)]
    for number, own in enumerate(alone):
        config = {"seed": number, "lr": 0.01, "weight": 0.5 * number}
        for each in (worker, own):
            each.add(str(number), Accurate._outside_tune(config), config)
    for _ in range(6):
        results = worker.run_round(rounds_left=1e9)
        for number, own in enumerate(alone):
            assert results[str(number)] == pytest.approx(own.run_round()[str(number)], rel=1e-4, abs=1e-5)
    assert steps_of_tensors


def test_a_metric_named_like_an_optimizer() -> None:
    class Two(Points):
        def build_optimizer(self, model: Any, config: dict[str, Any]) -> Any:
            return {"all": torch.optim.SGD(model.parameters(), lr=0.1)}

        def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Any:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return {"all": loss}, {"all": loss}

    worker = Worker(1, device="cpu")
    worker.add("a", Two._outside_tune({"seed": 0}), {"seed": 0})
    assert "'all', which is the name of an optimizer" in str(worker.run_round()["a"])
