"""HFTAPacker has its workers audit, and places no more trials in one than fit into memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from faulty import alone
from ray import tune
from torch import nn
from torch.nn import functional as F
from trainables import Points

from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]


class Rounds(tune.Callback):
    """Which trials trained in each round; the results of one round have its duration in common."""

    def __init__(self) -> None:
        self.members: dict[tuple[int, float], set[str]] = defaultdict(set)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.members[result["pid"], result["time_this_iter_s"]].add(trial.trial_id)


def run(trainable: Any, storage: str, **arguments: Any) -> tune.ExperimentAnalysis:
    return tune.run(
        trainable,
        verbose=0,
        raise_on_failed_trial=False,
        storage_path=storage,
        stop={"training_iteration": 3},
        **arguments,
    )


def assert_all_as_alone(analysis: tune.ExperimentAnalysis) -> None:
    for trial in analysis.trials:
        assert trial.status == "TERMINATED"
        expected = alone(trial.config, rounds=3)[-1]
        assert trial.last_result["train_loss"] == pytest.approx(expected, rel=1e-4)


def test_the_packer_s_workers_audit(storage: str) -> None:
    class Broken(Points):
        """In the worker's process, linear layers are wrong by 5% in fused steps."""

        def build_model(self, config: dict[str, Any]) -> nn.Module:
            from hfta_tune.fusion.kernels import _mode

            def linear(input: Any, weight: Any, bias: Any = None) -> Any:
                return F.linear(input, 1.05 * weight, bias)

            _mode._KERNELS[torch._C._nn.linear] = linear
            return super().build_model(config)

        def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
            assert self._worker is not None
            return {"warned": float(any(said.startswith("audit of Broken: trial ") for said in self._worker._said))}

    config = {"lr": tune.grid_search([0.003, 0.01, 0.03]), "seed": 1}
    analysis = run(Broken, storage, config=config, scheduler=HFTAPacker(B=3, audit=True))
    assert [trial.last_result["warned"] for trial in analysis.trials] == [1.0] * 3
    assert_all_as_alone(analysis)


def test_no_more_trials_than_fit_are_placed_once_memory_has_run_out(storage: str) -> None:
    class Large(Points):
        """In the worker's process, two lanes fit into a fused step."""

        def build_model(self, config: dict[str, Any]) -> nn.Module:
            from hfta_tune.fusion import vmapped_steps

            real = vmapped_steps.call_for_all

            def call_for_all(step: Any, lanes: Any, *arguments: Any) -> Any:
                if len(lanes) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return real(step, lanes, *arguments)

            if real.__module__.startswith("hfta_tune"):
                vmapped_steps.call_for_all = call_for_all
            return super().build_model(config)

    rounds = Rounds()
    analysis = run(
        Large,
        storage,
        config={"lr": tune.grid_search([0.003, 0.01, 0.03]), "seed": tune.grid_search([1, 2, 3, 4])},
        scheduler=HFTAPacker(B=6),
        resources_per_trial={"cpu": 2},  # so there is one worker
        callbacks=[rounds],
    )
    assert len(analysis.trials) == 12
    assert_all_as_alone(analysis)
    crowded = set().union(*(trials for trials in rounds.members.values() if len(trials) > 2))
    assert 2 < len(crowded) <= 6, "those that were placed before memory ran out"
    later = [trials for trials in rounds.members.values() if not trials <= crowded]
    assert later and all(len(trials) <= 2 for trials in later)
