"""The same fixed configurations under hfta_tune.optimize and under study.optimize with plain PyTorch."""

import copy
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

import hfta_tune
from hfta_tune.optuna import _optimize
from hfta_tune.worker import Worker

N_TRIALS = 64


class OwnNumberPruner(optuna.pruners.BasePruner):
    """Prunes two trials of three, each after a number of epochs that follows from its own number."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return trial.number % 3 > 0 and trial.last_step == trial.number % 5


def make_study(digits: Any, pruner: optuna.pruners.BasePruner) -> optuna.Study:
    # A name of its own: HyperbandPruner chooses a trial's bracket by it.
    # A copy: some pruners learn from their first trials.
    study = optuna.create_study(
        study_name="fixed", sampler=optuna.samplers.RandomSampler(seed=0), pruner=copy.deepcopy(pruner)
    )
    for config in digits.configs(N_TRIALS):
        study.enqueue_trial(config)
    return study


def check_same(actual: optuna.Study, expected: optuna.Study) -> None:
    assert [t.params for t in actual.trials] == [t.params for t in expected.trials]
    assert [t.state for t in actual.trials] == [t.state for t in expected.trials]
    for a, e in zip(actual.trials, expected.trials, strict=True):
        assert list(a.intermediate_values) == list(e.intermediate_values)
        np.testing.assert_allclose(
            list(a.intermediate_values.values()), list(e.intermediate_values.values()), rtol=1e-4
        )
        np.testing.assert_allclose(a.values, e.values, rtol=1e-4)


@pytest.mark.parametrize(
    "pruner",
    [
        optuna.pruners.NopPruner(),
        optuna.pruners.ThresholdPruner(upper=1.5, n_warmup_steps=2),
        OwnNumberPruner(),
    ],
    ids=lambda pruner: type(pruner).__name__,
)
def test_pruner_that_looks_at_one_trial_only(digits: Any, pruner: optuna.pruners.BasePruner) -> None:
    expected = make_study(digits, pruner)
    expected.optimize(digits.objective, n_trials=N_TRIALS)
    actual = make_study(digits, pruner)
    hfta_tune.optimize(
        actual,
        digits.trainable,
        digits.suggest,
        n_trials=N_TRIALS,
        epochs=digits.epochs,
        metric="val_loss",
        B=16,
    )
    check_same(actual, expected)
    if isinstance(pruner, optuna.pruners.ThresholdPruner):
        # So near to the threshold, rounding alone could decide.
        values = [v for t in expected.trials for v in t.intermediate_values.values()]
        assert min(abs(value - 1.5) for value in values) > 1e-3
    pruned = [t for t in expected.trials if t.state == TrialState.PRUNED]
    assert bool(pruned) == (not isinstance(pruner, optuna.pruners.NopPruner))


def test_median_pruner_one_lane(digits: Any) -> None:
    """With B=1 the events have one order only, so MedianPruner and TPE must do the very same."""

    def study() -> optuna.Study:
        return optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=8),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
        )

    expected, actual = study(), study()
    expected.optimize(digits.objective, n_trials=24)
    hfta_tune.optimize(
        actual,
        digits.trainable,
        digits.suggest,
        n_trials=24,
        epochs=digits.epochs,
        metric="val_loss",
        B=1,
    )
    check_same(actual, expected)
    assert {t.state for t in actual.trials} == {TrialState.COMPLETE, TrialState.PRUNED}


class RecordingWorker(Worker):
    """Keeps which trials trained in each round."""

    rounds: list[list[int]]

    def run_round(self, *args: Any, **kwargs: Any) -> dict[str, dict[str, float] | Exception]:
        results = super().run_round(*args, **kwargs)
        type(self).rounds.append(sorted(int(trial_id) for trial_id in results))
        return results


@pytest.mark.parametrize(
    "pruner",
    [
        optuna.pruners.MedianPruner(),
        optuna.pruners.PercentilePruner(40.0, n_startup_trials=8),
        optuna.pruners.SuccessiveHalvingPruner(reduction_factor=2),
        optuna.pruners.HyperbandPruner(min_resource=1, max_resource=6, reduction_factor=2),
        optuna.pruners.WilcoxonPruner(p_threshold=0.2),
    ],
    ids=lambda pruner: type(pruner).__name__,
)
def test_pruner_that_looks_at_other_trials(
    digits: Any, pruner: optuna.pruners.BasePruner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 trials, B=16.

    What such a pruner decides depends on how far the other trials are by then, so B lanes cannot prune what a
    one-at-a-time study prunes. Replayed instead: the observed order of events in a fresh study whose values
    are the plain PyTorch ones. The pruner must decide there as it did here, in every epoch of every trial.
    """
    B = 16
    monkeypatch.setattr(RecordingWorker, "rounds", [], raising=False)
    monkeypatch.setattr(_optimize, "Worker", RecordingWorker)
    ended: list[int] = []
    asked: list[tuple[int, int]] = []  # (trial, rounds run before it was asked for)

    def space(trial: optuna.Trial) -> dict[str, Any]:
        asked.append((trial.number, len(RecordingWorker.rounds)))
        return digits.suggest(trial)

    actual = make_study(digits, pruner)
    hfta_tune.optimize(
        actual,
        digits.trainable,
        space,
        n_trials=N_TRIALS,
        epochs=digits.epochs,
        metric="val_loss",
        B=B,
        callbacks=[lambda study, trial: ended.append(trial.number)],
    )
    rounds = RecordingWorker.rounds

    # Refill: until the last trial was asked for, every round had B lanes in use.
    assert [number for number, _ in asked] == list(range(N_TRIALS))
    last_ask = asked[-1][1]
    assert all(len(lanes) == B for lanes in rounds[:last_ask])
    for number, round_index in asked:
        assert number in rounds[round_index]
        assert not any(number in lanes for lanes in rounds[:round_index])
    batches_without_refill = N_TRIALS // B * digits.epochs
    assert len(rounds) < batches_without_refill

    # Every trial trained in consecutive rounds, one epoch in each.
    for trial in actual.trials:
        mine = [i for i, lanes in enumerate(rounds) if trial.number in lanes]
        assert mine == list(range(mine[0], mine[0] + len(trial.intermediate_values)))
        assert list(trial.intermediate_values) == list(range(len(mine)))

    # Replay. Within a round, trials are reported and ended in the order of their numbers.
    replay = make_study(digits, pruner)
    running: dict[int, tuple[optuna.Trial, list[float]]] = {}
    replay_ended: list[int] = []
    for lanes in rounds:
        for number in lanes:
            if number not in running:
                trial = replay.ask()
                assert trial.number == number
                config = digits.suggest(trial)
                running[number] = trial, [loss for loss, _ in digits.plain_epochs(config)]
        for number in lanes:
            trial, values = running[number]
            epoch = len(replay.trials[number].intermediate_values)
            trial.report(values[epoch], epoch)
            if trial.should_prune():
                replay.tell(trial, state=TrialState.PRUNED)
                replay_ended.append(number)
            elif epoch == digits.epochs - 1:
                replay.tell(trial, values[epoch])
                replay_ended.append(number)
    check_same(actual, replay)
    assert ended == replay_ended
    n_pruned = sum(t.state == TrialState.PRUNED for t in actual.trials)
    assert n_pruned >= 10
    assert sum(t.state == TrialState.COMPLETE for t in actual.trials) == N_TRIALS - n_pruned


def test_patient_pruner(digits: Any) -> None:
    """Trials that diverge are pruned, some epochs later than the pruner that is wrapped would have it."""

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {**digits.suggest(trial), "lr": 0.05 if trial.number % 3 else 5.0}

    def objective(trial: optuna.Trial) -> float:
        loss = float("nan")
        for epoch, (loss, _) in enumerate(digits.plain_epochs(space(trial))):
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned()
        return loss

    def study() -> optuna.Study:
        return make_study(digits, optuna.pruners.PatientPruner(optuna.pruners.ThresholdPruner(upper=2.0), patience=1))

    expected, actual = study(), study()
    expected.optimize(objective, n_trials=9)
    hfta_tune.optimize(actual, digits.trainable, space, n_trials=9, epochs=digits.epochs, metric="val_loss", B=4)
    assert [t.state for t in actual.trials] == [t.state for t in expected.trials]
    assert [list(t.intermediate_values) for t in actual.trials] == [
        list(t.intermediate_values) for t in expected.trials
    ]
    assert 0 < sum(t.state == TrialState.PRUNED for t in actual.trials) < 9


def test_several_directions(digits: Any) -> None:
    def objective(trial: optuna.Trial) -> tuple[float, float]:
        *_, last = digits.plain_epochs(digits.suggest(trial))
        return last

    def study() -> optuna.Study:
        study = optuna.create_study(directions=["minimize", "maximize"], sampler=optuna.samplers.RandomSampler(seed=0))
        for config in digits.configs(6):
            study.enqueue_trial(config)
        return study

    expected, actual = study(), study()
    expected.optimize(objective, n_trials=6)
    hfta_tune.optimize(
        actual,
        digits.trainable,
        digits.suggest,
        n_trials=6,
        epochs=digits.epochs,
        metric=["val_loss", "accuracy"],
        B=4,
    )
    check_same(actual, expected)
    assert [t.number for t in actual.best_trials] == [t.number for t in expected.best_trials]
