"""Lightning modules in lanes against lightning's own Trainer."""

from __future__ import annotations

import logging
from typing import Any

import optuna
import pytest
import torch

pytest.importorskip("lightning")

from with_lightning.modules import Classifier, Convolved, Data, Recurrent, by_lightning

import hfta_tune
from hfta_tune import Worker

EPOCHS = 4
CONFIGS = [{"lr": 0.002 * 2**n, "smoothing": 0.1 * n} for n in range(3)]


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def in_lanes(kind: Any, configs: list[dict[str, Any]], epochs: int = EPOCHS, strategy: str = "vmap") -> Any:
    worker = Worker(len(configs), device="cpu", strategy=strategy)
    for number, config in enumerate(configs):
        worker.add(str(number), kind._outside_tune(config), config)
    rounds = [worker.run_round() for _ in range(epochs)]
    for results in rounds:
        for result in results.values():
            if isinstance(result, Exception):
                raise result
    arrays = {len(array["trials"]) for array in worker.describe()["arrays"]}
    states = [worker.state_dict(str(number))["model"] for number in range(len(configs))]
    return [[results[str(n)] for results in rounds] for n in range(len(configs))], states, arrays


@pytest.mark.parametrize("strategy", ["vmap", "lane by lane"])
@pytest.mark.parametrize(
    ("kind", "shape", "trainer"),
    [
        (Classifier, (8,), {}),
        (Classifier, (8,), {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
        (Convolved, (1, 4, 4), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Recurrent, (5, 4), {}),
    ],
    ids=["mlp", "mlp that clips and accumulates", "cnn", "lstm"],
)
def test_metrics_and_weights(kind: Any, shape: Any, trainer: dict[str, Any], strategy: str) -> None:
    made = hfta_tune.lightning.trainable(kind, Data(shape), **trainer)
    results, states, arrays = in_lanes(made, CONFIGS, strategy=strategy)
    assert arrays == {3}  # numbers tell no trials apart
    for config, own, state in zip(CONFIGS, results, states, strict=True):
        expected, weights = by_lightning(kind, config, Data(shape), EPOCHS, **trainer)
        for epoch, metrics in enumerate(expected):
            assert {name: own[epoch][name] for name in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6), epoch
        assert state.keys() == weights.keys()
        torch.testing.assert_close(dict(state), dict(weights), rtol=1e-4, atol=1e-5)
    assert {"train_loss", "train_loss_step", "train_loss_epoch", "train_acc", "last", "val_loss"} <= results[0][
        0
    ].keys()


def test_bfloat16() -> None:
    made = hfta_tune.lightning.trainable(Classifier, Data(), precision="bf16-mixed")
    results, _, _ = in_lanes(made, CONFIGS, epochs=2)
    for config, own in zip(CONFIGS, results, strict=True):
        expected, _ = by_lightning(Classifier, config, Data(), 2, precision="bf16-mixed")
        assert own[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=2e-2)


def test_what_splits_arrays_and_the_checkpoint_is_the_modules() -> None:
    made = hfta_tune.lightning.trainable(Classifier, Data)
    configs = [{"lr": 0.01, "width": 8, "batch_size": 24}, {"lr": 0.02, "width": 12, "batch_size": 24}]
    _, states, arrays = in_lanes(made, configs, epochs=1)
    assert arrays == {1}
    for config, state in zip(configs, states, strict=True):
        Classifier(width=config["width"]).load_state_dict(state)


def test_an_optuna_study() -> None:
    made = hfta_tune.lightning.trainable(Classifier, Data())
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), direction="maximize")

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}

    hfta_tune.optimize(study, made, space, n_trials=4, epochs=2, metric="val_acc", B=4)
    expected, _ = by_lightning(Classifier, study.trials[0].params, Data(), 2)
    assert study.trials[0].value == pytest.approx(expected[-1]["val_acc"])


@pytest.mark.slow
def test_compiled(always_compiles: None, steps_of_tensors: list[int]) -> None:
    made = hfta_tune.lightning.trainable(Classifier, Data(), gradient_clip_val=0.3)
    worker = Worker(3, device="cpu")
    for number, config in enumerate(CONFIGS):
        worker.add(str(number), made._outside_tune(config), config)
    rounds = [worker.run_round(rounds_left=1e9) for _ in range(6)]
    assert steps_of_tensors
    for number, config in enumerate(CONFIGS):
        expected, _ = by_lightning(Classifier, config, Data(), 6, gradient_clip_val=0.3)
        for results, metrics in zip(rounds, expected, strict=True):
            own = results[str(number)]
            assert isinstance(own, dict)
            assert {name: own[name] for name in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6)
