"""Every Tune scheduler in the packer against the same scheduler in stock Tune, on the same learning curves.

Stock Tune runs its trials one at a time, so that its results come in one order only. In the packer they
train side by side in one worker, whose results come round by round in the order in which trials started. What a
scheduler is to decide is the same in both wherever it depends only on each trial's own results, on those of a
whole rung, or on those of trials that started earlier.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import curves
import numpy as np
import pytest
from curves import Packed, Stock
from ray import cloudpickle, tune
from ray.tune import CheckpointConfig
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    ResourceChangingScheduler,
    TrialScheduler,
)
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search.bohb import TuneBOHB

from hfta_tune import HFTAPacker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),  # A trial that a scheduler forgets keeps a run going for ever.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

WATCHED: dict[str, Any] = dict(metric="score", mode="max")


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No result files, and classes that a worker can unpickle without the test modules."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    cloudpickle.register_pickle_by_value(curves)
    yield
    cloudpickle.unregister_pickle_by_value(curves)


@dataclass(frozen=True)
class Course:
    """What became of a trial.

    Attributes:
        status: Its status in the end.
        results: Of each result the iteration, how much the trial had trained by then, and the score.
        config: Its config in the end.
    """

    status: str
    results: tuple[tuple[int, int, float], ...]
    config: dict[str, Any]

    @property
    def iterations(self) -> int:
        return self.results[-1][0]


class Results(tune.Callback):
    """All results in the order in which the run had them, and which trials had ended by then."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, dict[str, Any], set[str]]] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self.all.append((trial, dict(result), {other.trial_id for other in trials if other.is_finished()}))


@dataclass(frozen=True)
class Run:
    """A run's trials by number, and its results in order."""

    courses: list[Course]
    order: list[tuple[Any, dict[str, Any], set[str]]]


def as_it_is(scheduler: TrialScheduler) -> TrialScheduler:
    return scheduler


def packer(scheduler: TrialScheduler) -> TrialScheduler:
    return HFTAPacker(scheduler, B=4)


def run(kind: type, scheduler: TrialScheduler, storage: str, *, config: Any, stop: Any = None, **arguments: Any) -> Run:
    """Run trials with the whole machine for each, in stock Tune, or for the one worker."""
    random.seed(0)
    np.random.seed(0)
    results = Results()
    analysis = tune.run(
        kind,
        config=config,
        scheduler=scheduler,
        storage_path=f"{storage}/{kind.__name__}",
        stop=stop or {"training_iteration": 12},
        resources_per_trial={"cpu": 2},
        callbacks=[results],
        reuse_actors=kind is Stock,  # which is faster, and a trial's process is none of a scheduler's business
        verbose=0,
        **arguments,
    )
    courses = [
        Course(
            trial.status,
            tuple(
                (result["training_iteration"], result["trained"], result["score"])
                for own, result, _ in results.all
                if own is trial
            ),
            trial.config,
        )
        for trial in analysis.trials
    ]
    return Run(courses, results.all)


def curves_of(trials: int) -> Any:
    generator = np.random.default_rng(7)
    ceilings, speeds = generator.permutation(trials) + 1.0, generator.uniform(0.2, 1.0, trials)
    return tune.grid_search([dict(ceiling=float(c), speed=float(s)) for c, s in zip(ceilings, speeds, strict=True)])


# Schedulers that stop trials


def asha(brackets: int) -> TrialScheduler:
    return ASHAScheduler(**WATCHED, max_t=9, grace_period=1, reduction_factor=3, brackets=brackets)


def median() -> TrialScheduler:
    return MedianStoppingRule(**WATCHED, time_attr="training_iteration", grace_period=2, min_samples_required=2)


@pytest.mark.parametrize(
    ("build", "stops"),
    [
        (FIFOScheduler, {12}),
        (lambda: asha(brackets=1), {1, 3, 9}),
        (lambda: asha(brackets=3), {1, 3, 9}),
        (median, set(range(2, 13))),
    ],
    ids=["FIFO", "ASHA", "ASHA with three brackets", "median stopping rule"],
)
def test_trials_stop_where_they_stop_in_stock_tune(
    build: Callable[[], TrialScheduler], stops: set[int], storage: str
) -> None:
    """A trial is compared with those before it, which come to each iteration before it does in both runs.

    As many trials as there are lanes exist at a time: MedianStoppingRule pauses trials while others wait.
    """
    stock = run(Stock, build(), storage, config=curves_of(9), max_concurrent_trials=1)
    packed = run(Packed, HFTAPacker(build(), B=3), storage, config=curves_of(9), max_concurrent_trials=3)
    assert packed.courses == stock.courses
    found = {course.iterations for course in stock.courses}
    assert found <= stops and (len(found) > 1 or stops == {12})


@pytest.mark.parametrize("checkpoint_freq", [0, 2])
def test_hyperband_judges_each_rung_as_in_stock_tune(checkpoint_freq: int, storage: str) -> None:
    """A rung is judged once all its trials have come to it, in whatever order. One trial ends before its rung.

    While a trial is saved to be paused, HyperBand takes it for a running one. If the last of the last rung reports
    then, HyperBand forgets the others, and the run does not end.
    """

    def stop(trial_id: str, result: dict[str, Any]) -> bool:
        return trial_id.endswith("_00004") and result["training_iteration"] == 2

    def go(kind: type, wrap: Callable[[TrialScheduler], TrialScheduler]) -> Run:
        scheduler = wrap(HyperBandScheduler(**WATCHED, max_t=9, reduction_factor=3))
        return run(kind, scheduler, storage, config=curves_of(9), stop=stop, checkpoint_freq=checkpoint_freq)

    stock, packed = go(Stock, as_it_is), go(Packed, packer)
    assert packed.courses == stock.courses
    assert {course.iterations for course in stock.courses} == {2, 3, 9}


@pytest.mark.skipif(
    "q=quantize" in inspect.getsource(TuneBOHB), reason="this Ray's TuneBOHB needs a ConfigSpace without wheels"
)
def test_bohb_gives_its_searcher_what_it_does_in_stock_tune(storage: str) -> None:
    """BOHB's model depends on what it knew when it was asked, so all configs are drawn from the prior here.

    What the model is made of, the losses of each budget, is the same; and so is what HyperBand does.
    """

    def go(kind: type, wrap: Callable[[TrialScheduler], TrialScheduler]) -> tuple[Run, dict[int, list[float]]]:
        searcher = TuneBOHB(**WATCHED, seed=3, max_concurrent=4, bohb_config={"min_points_in_model": 100})
        scheduler = HyperBandForBOHB(**WATCHED, max_t=9, reduction_factor=3)
        config = {"ceiling": tune.uniform(1, 10), "speed": tune.uniform(0.2, 1)}
        done = run(kind, wrap(scheduler), storage, config=config, search_alg=searcher, num_samples=9)
        return done, {budget: sorted(losses) for budget, losses in searcher.bohber.losses.items()}

    (stock, known), (packed, told) = go(Stock, as_it_is), go(Packed, packer)
    assert packed.courses == stock.courses
    assert told == known
    assert {course.iterations for course in stock.courses} == {1, 3, 9}


# Schedulers that change configs


@dataclass(frozen=True)
class Exploit:
    """A trial takes the state of another, and a new config.

    Attributes:
        trial: Its number.
        at: The iteration that it has come to.
        donor: The number of the other.
        trained: How much the other's state had trained.
        config: The new config.
    """

    trial: int
    at: int
    donor: int
    trained: int
    config: dict[str, Any]


def seeded(kind: type[PopulationBasedTraining], **arguments: Any) -> PopulationBasedTraining:
    """A population based scheduler that notes its exploits, and whose random choices depend on the trial alone.

    Other code of the process uses the same global generators.
    """

    def number(trial: Any) -> int:
        return int(trial.trial_id.split("_")[1])

    class Seeded(kind):  # type: ignore[valid-type, misc]
        def _checkpoint_or_exploit(self, trial: Any, *others: Any) -> None:
            seed = 100 * number(trial) + self._trial_state[trial].last_train_time
            random.seed(seed)
            np.random.seed(seed)
            super()._checkpoint_or_exploit(trial, *others)

        def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
            at = self._trial_state[trial].last_train_time
            super()._exploit(tune_controller, trial, trial_to_clone)
            trained = self._trial_state[trial_to_clone].last_result["trained"]
            self.exploits.append(Exploit(number(trial), at, number(trial_to_clone), trained, trial.config))

    scheduler = Seeded(
        **WATCHED, time_attr="training_iteration", perturbation_interval=3, log_config=False, **arguments
    )
    scheduler.exploits = []
    return scheduler


def pbt(**arguments: Any) -> Any:
    return seeded(PopulationBasedTraining, hyperparam_mutations={"speed": tune.uniform(0.2, 1)}, **arguments)


def pb2() -> Any:
    return seeded(PB2, hyperparam_bounds={"speed": [0.2, 1]}, synch=True)


POPULATION = [dict(ceiling=4.0 - number, speed=0.3 + 0.1 * number) for number in range(4)]


PB2_NEEDS_GPY = pytest.mark.skipif(
    "GPy" in inspect.getsource(inspect.getmodule(PB2)) and importlib.util.find_spec("GPy") is None,  # type: ignore[arg-type]
    reason="this Ray's PB2 needs GPy, which later ones do without",
)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: pbt(synch=True, quantile_fraction=0.5), id="PBT"),
        pytest.param(pb2, id="PB2", marks=PB2_NEEDS_GPY),
    ],
)
def test_synchronous_exploits_are_those_of_stock_tune(build: Callable[[], Any], storage: str) -> None:
    """All trials wait for each other, so it does not matter in which order they come."""

    def go(kind: type, wrap: Callable[[TrialScheduler], TrialScheduler]) -> tuple[Run, list[Exploit]]:
        scheduler = build()
        return run(
            kind, wrap(scheduler), storage, config=tune.grid_search(POPULATION), stop={"training_iteration": 8}
        ), scheduler.exploits

    (stock, expected), (packed, exploits) = go(Stock, as_it_is), go(Packed, packer)
    assert exploits == expected
    assert packed.courses == stock.courses
    assert {exploit.at for exploit in expected} == {3, 6}


class Asked:
    """What PBT asks of a trial and of the controller, when a run's results are given to it again."""

    def __init__(self, trial: Any, everyone: dict[Any, Asked]) -> None:
        self.trial_id = trial.trial_id
        self.experiment_tag = ""
        self.config = POPULATION[int(trial.trial_id.split("_")[1])]
        self.trained = 0
        self.status = "RUNNING"
        self.finished = False
        self.run_metadata = SimpleNamespace(checkpoint_manager=SimpleNamespace(checkpoint_config=CheckpointConfig()))
        self._everyone = everyone

    def is_finished(self) -> bool:
        return self.finished

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag

    search_alg = None

    def get_trials(self) -> list[Asked]:
        return list(self._everyone.values())

    def pause_trial(self, trial: Asked, should_checkpoint: bool) -> None:
        assert not should_checkpoint

    def _schedule_trial_save(self, trial: Asked, result: Any) -> str:
        return "saved"


@pytest.mark.parametrize(
    ("arguments", "earliest"), [({}, 3), ({"burn_in_period": 5}, 5)], ids=["PBT", "PBT with burn-in"]
)
def test_asynchronous_exploits_are_stock_pbt_s(arguments: dict[str, Any], earliest: int, storage: str) -> None:
    """What PBT decides depends on the order of results, so a fresh PBT of Tune's is told them in the same order.

    It must come to the same exploits, and every result must be that of the trial's config and state after them.
    A run of stock Tune goes through the same test.
    """
    iterations = 16

    def check(kind: type, wrap: Callable[[TrialScheduler], TrialScheduler]) -> None:
        scheduler, fresh = pbt(**arguments), pbt(**arguments)
        done = run(
            kind, wrap(scheduler), storage, config=tune.grid_search(POPULATION), stop={"training_iteration": iterations}
        )
        trials: dict[Any, Asked] = {}
        for trial in sorted({trial for trial, _, _ in done.order}, key=lambda trial: trial.trial_id):
            trials[trial.trial_id] = Asked(trial, trials)
            fresh.on_trial_add(trials[trial.trial_id], trials[trial.trial_id])
        by_number = list(trials.values())
        for trial, result, finished in done.order:
            own = trials[trial.trial_id]
            assert result["trained"] == own.trained + 1
            assert result["score"] == curves.score(own.config, result["trained"])
            own.trained = result["trained"]
            for other in trials.values():
                other.finished = other.trial_id in finished
            if result["training_iteration"] < iterations:
                before = len(fresh.exploits)
                fresh.on_trial_result(own, own, result)
                for exploit in fresh.exploits[before:]:
                    by_number[exploit.trial].trained = exploit.trained
        assert scheduler.exploits == fresh.exploits
        assert {course.status for course in done.courses} == {"TERMINATED"}
        assert fresh.exploits and all(exploit.at >= earliest for exploit in fresh.exploits)

    check(Stock, as_it_is)
    check(Packed, packer)


def test_a_recorded_schedule_is_replayed_as_in_stock_tune(tmp_path: Path, storage: str) -> None:
    configs = [dict(ceiling=3.0, speed=speed) for speed in (0.2, 0.4, 0.6)]
    policy = tmp_path / "pbt_policy.txt"
    steps = [["1", "0", 2, 2, configs[0], configs[1]], ["2", "1", 5, 5, configs[1], configs[2]]]
    policy.write_text("".join(json.dumps(step) + "\n" for step in steps))

    def go(kind: type, wrap: Callable[[TrialScheduler], TrialScheduler]) -> Run:
        return run(
            kind, wrap(PopulationBasedTrainingReplay(str(policy))), storage, config={}, stop={"training_iteration": 9}
        )

    stock, packed = go(Stock, as_it_is), go(Packed, packer)
    assert packed.courses == stock.courses
    (course,) = stock.courses
    expected = [configs[0]] * 2 + [configs[1]] * 3 + [configs[2]] * 4
    assert [value for _, _, value in course.results] == [
        curves.score(config, trained) for trained, config in enumerate(expected, start=1)
    ]


def test_resources_that_change_are_refused(storage: str) -> None:
    """HFTAPacker refuses to wrap such a scheduler (test_packer.py), and to be wrapped in one."""
    with pytest.raises(TypeError, match="ResourceChangingScheduler cannot wrap HFTAPacker: the trials of a worker"):
        run(Packed, ResourceChangingScheduler(HFTAPacker(B=2)), storage, config=curves_of(2))
