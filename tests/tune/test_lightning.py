"""A LightningModule as trials of a Tune run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray import cloudpickle, tune
from ray.tune.search import BasicVariantGenerator

pytest.importorskip("lightning")

from with_lightning import modules

import hfta_tune

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


def test_results_and_checkpoints(storage: str) -> None:
    cloudpickle.register_pickle_by_value(modules)
    try:
        analysis = tune.run(
            hfta_tune.lightning.trainable(modules.Classifier, modules.Data(), gradient_clip_val=0.5),
            config={"lr": tune.grid_search([0.002, 0.01, 0.05]), "smoothing": 0.1},
            search_alg=BasicVariantGenerator(random_state=0),
            scheduler=hfta_tune.HFTAPacker(B=3),
            stop={"training_iteration": 3},
            checkpoint_at_end=True,
            storage_path=storage,
            verbose=0,
        )
    finally:
        cloudpickle.unregister_pickle_by_value(modules)
    assert len({trial.last_result["pid"] for trial in analysis.trials}) == 1
    for trial in analysis.trials:
        arguments = {name: trial.config[name] for name in ("lr", "smoothing")}
        expected, weights = modules.by_lightning(
            modules.Classifier, arguments, modules.Data(), 3, gradient_clip_val=0.5
        )
        for name, value in expected[-1].items():
            assert trial.last_result[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        saved = torch.load(Path(trial.checkpoint.path, "checkpoint.pt"), weights_only=True)["model"]
        module = modules.Classifier(**arguments)
        module.load_state_dict(saved)
        torch.testing.assert_close(dict(module.state_dict()), dict(weights), rtol=1e-4, atol=1e-5)
