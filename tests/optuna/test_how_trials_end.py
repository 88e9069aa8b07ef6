"""COMPLETE, PRUNED or FAIL; catch; callbacks; stop, timeout and interrupts. Nothing may stay RUNNING."""

import logging
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

import hfta_tune
from hfta_tune.optuna import _session

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


class HookError(Exception):
    """What a hook raises in these tests."""


class OtherError(Exception):
    """What another hook raises."""


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1), "number": trial.number}


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def epochs_of(study: optuna.Study) -> list[int]:
    return [len(trial.intermediate_values) for trial in study.trials]


@pytest.fixture
def study() -> Iterator[optuna.Study]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())
    yield study
    assert TrialState.RUNNING not in states(study)
    # And the study is free again.
    study.optimize(lambda trial: 0.0, n_trials=1)


class TestNaN:
    def test_final_nan_fails_its_own_trial_only(
        self, study: optuna.Study, line: Any, optuna_log: pytest.LogCaptureFixture
    ) -> None:
        def diverging(trial: optuna.Trial) -> dict[str, Any]:
            return {"lr": float("nan") if trial.number == 1 else 0.1}

        seen: list[tuple[int, TrialState]] = []
        hfta_tune.optimize(
            study,
            line,
            diverging,
            n_trials=5,
            epochs=2,
            B=3,
            callbacks=[lambda study, trial: seen.append((trial.number, trial.state))],
        )
        assert states(study) == [COMPLETE, FAIL, COMPLETE, COMPLETE, COMPLETE]
        assert (1, FAIL) in seen and len(seen) == 5
        failed = study.trials[1]
        assert failed.values is None
        assert set(failed.intermediate_values) == {0, 1}
        assert np.isnan(failed.intermediate_values[1])
        assert all(np.isfinite(trial.value) for trial in study.trials if trial.number != 1)
        assert any("Trial 1 failed" in message and "nan" in message for message in optuna_log.messages)

    def test_no_warning_of_optuna(self, study: optuna.Study, line: Any, recwarn: pytest.WarningsRecorder) -> None:
        hfta_tune.optimize(study, line, lambda trial: {"lr": float("nan")}, n_trials=2, epochs=1)
        assert states(study) == [FAIL, FAIL]
        assert not [warning for warning in recwarn if "optuna" in warning.filename]

    def test_infinity_is_a_value(self, study: optuna.Study, line: Any) -> None:
        hfta_tune.optimize(study, line, lambda trial: {"lr": 1e30}, n_trials=1, epochs=1)
        assert states(study) == [COMPLETE]
        assert study.trials[0].value == float("inf")


@pytest.fixture
def raising_line(line: Any) -> Any:
    """Line whose hooks raise where the config says so."""

    class RaisingLine(line):  # type: ignore[misc]
        def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
            if config["raises"] == "build_model":
                raise HookError("of build_model")
            return super().build_model(config)

        def train_dataloader(self, config: dict[str, Any]) -> Any:
            if config["raises"] == "train_dataloader":
                raise HookError("of train_dataloader")
            return super().train_dataloader(config)

        def training_step(self, model: Any, batch: Any, config: dict[str, Any]) -> Any:
            if config["raises"] == "training_step":
                raise HookError("of training_step")
            return super().training_step(model, batch, config)

    return RaisingLine


def raising_space(*numbers: int, where: str) -> Any:
    """A space whose trials of these numbers raise, in the space itself or in a hook."""

    def space(trial: optuna.Trial) -> dict[str, Any]:
        raises = where if trial.number in numbers else ""
        if raises == "space":
            raise HookError("of space")
        return {"lr": trial.suggest_float("lr", 0.01, 0.1), "raises": raises}

    return space


PLACES = ["space", "build_model", "train_dataloader", "training_step"]


class TestExceptionOfOneTrial:
    @pytest.mark.parametrize("where", PLACES)
    def test_caught(
        self, study: optuna.Study, raising_line: Any, where: str, optuna_log: pytest.LogCaptureFixture
    ) -> None:
        seen: list[tuple[int, TrialState]] = []
        hfta_tune.optimize(
            study,
            raising_line,
            raising_space(1, 4, where=where),
            n_trials=6,
            epochs=2,
            B=3,
            catch=HookError,
            callbacks=[lambda study, trial: seen.append((trial.number, trial.state))],
        )
        assert states(study) == [COMPLETE, FAIL, COMPLETE, COMPLETE, FAIL, COMPLETE]
        assert epochs_of(study) == [2, 0, 2, 2, 0, 2]
        assert sorted(seen) == list(enumerate(states(study)))
        failures = [r for r in optuna_log.records if r.levelno == logging.WARNING and "failed" in r.message]
        assert ["Trial 1 " in failures[0].message, "Trial 4 " in failures[1].message] == [True, True]
        assert all(f"of {where}" in record.message and record.exc_info for record in failures)

    @pytest.mark.parametrize("where", PLACES)
    def test_not_caught(self, study: optuna.Study, raising_line: Any, where: str) -> None:
        """The lanes that run finish, nothing new starts, then it is raised."""
        seen: list[int] = []
        with pytest.raises(HookError, match=f"of {where}"):
            hfta_tune.optimize(
                study,
                raising_line,
                raising_space(2, where=where),
                n_trials=50,
                epochs=3,
                B=3,
                catch=(OtherError, ZeroDivisionError),
                callbacks=[lambda study, trial: seen.append(trial.number)],
            )
        assert states(study) == [COMPLETE, COMPLETE, FAIL]
        assert epochs_of(study) == [3, 3, 0]
        assert study.trials[2].values is None
        # As under study.optimize, the trial whose exception ends the study has no callback.
        assert sorted(seen) == [0, 1]

    def test_the_first_is_raised(self, study: optuna.Study, line: Any, optuna_log: pytest.LogCaptureFixture) -> None:
        def raise_after_trial(study: optuna.Study, trial: FrozenTrial) -> None:
            raise (HookError if trial.number == 1 else OtherError)(f"after trial {trial.number}")

        class Shorter(optuna.pruners.BasePruner):
            def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
                return trial.number == 1

        study.pruner = Shorter()
        with pytest.raises(HookError, match="after trial 1"):
            hfta_tune.optimize(study, line, space, n_trials=9, epochs=2, B=3, callbacks=[raise_after_trial])
        assert states(study) == [COMPLETE, PRUNED, COMPLETE]
        assert "after trial 0" in optuna_log.text and "after trial 2" in optuna_log.text

    @pytest.mark.parametrize("where", ["space", "build_model", "training_step"])
    def test_trial_pruned(self, study: optuna.Study, line: Any, where: str) -> None:
        class PrunedLine(line):  # type: ignore[misc]
            def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
                if config["number"] == 1 and where == "build_model":
                    raise optuna.TrialPruned("not worth it")
                return super().build_model(config)

            def training_step(self, model: Any, batch: Any, config: dict[str, Any]) -> Any:
                if config["number"] == 1 and where == "training_step":
                    raise optuna.TrialPruned("not worth it")
                return super().training_step(model, batch, config)

        def pruned_space(trial: optuna.Trial) -> dict[str, Any]:
            if trial.number == 1 and where == "space":
                raise optuna.TrialPruned("not worth it")
            return space(trial)

        seen: list[int] = []
        hfta_tune.optimize(
            study,
            PrunedLine,
            pruned_space,
            n_trials=4,
            epochs=2,
            B=2,
            callbacks=[lambda study, trial: seen.append(trial.number)],
        )
        assert states(study) == [COMPLETE, PRUNED, COMPLETE, COMPLETE]
        assert study.trials[1].values is None
        assert sorted(seen) == [0, 1, 2, 3]

    def test_pruner_that_raises_fails_the_trial(self, study: optuna.Study, line: Any) -> None:
        class RaisingPruner(optuna.pruners.BasePruner):
            def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
                if trial.number == 0:
                    raise HookError("of the pruner")
                return False

        study.pruner = RaisingPruner()
        hfta_tune.optimize(study, line, space, n_trials=4, epochs=2, B=2, catch=HookError)
        assert states(study) == [FAIL, COMPLETE, COMPLETE, COMPLETE]
        assert epochs_of(study) == [1, 2, 2, 2]

    def test_sampler_that_raises_in_ask(self, study: optuna.Study, line: Any) -> None:
        class RaisingSampler(optuna.samplers.RandomSampler):
            def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
                if trial.number == 2:
                    raise HookError("of the sampler")

        study.sampler = RaisingSampler(seed=0)
        with pytest.raises(HookError, match="of the sampler"):
            hfta_tune.optimize(study, line, space, n_trials=5, epochs=2, B=3)
        assert states(study)[:2] == [COMPLETE, COMPLETE]
        # Optuna itself leaves the trial behind that its sampler refused; it never was ours.
        study.tell(2, state=FAIL)
        study.sampler = optuna.samplers.RandomSampler(seed=0)

    def test_sampler_that_raises_in_tell(self, study: optuna.Study, line: Any) -> None:
        class RaisingSampler(optuna.samplers.RandomSampler):
            def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: Any, values: Any) -> None:
                if trial.number == 0:
                    raise HookError("of the sampler")

        study.sampler = RaisingSampler(seed=0)
        with pytest.raises(HookError, match="of the sampler"):
            hfta_tune.optimize(study, line, space, n_trials=5, epochs=2, B=2)
        assert states(study) == [COMPLETE, COMPLETE]


class TestCallbacks:
    def test_called_after_each_trial_with_a_copy(self, study: optuna.Study, line: Any) -> None:
        calls: list[tuple[str, int, TrialState]] = []

        def first(study: optuna.Study, trial: FrozenTrial) -> None:
            calls.append(("first", trial.number, trial.state))
            trial.number = -1

        def second(study: optuna.Study, trial: FrozenTrial) -> None:
            calls.append(("second", trial.number, study.trials[trial.number].state))

        hfta_tune.optimize(study, line, space, n_trials=3, epochs=1, B=2, callbacks=[first, second])
        assert calls == [(name, n, COMPLETE) for n in range(3) for name in ("first", "second")]

    def test_stop(self, study: optuna.Study, line: Any) -> None:
        """Without n_trials and timeout the study goes on until stop; then the running lanes finish."""

        class Staggered(optuna.pruners.BasePruner):
            def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
                return trial.number % 2 == 0

        def stop(study: optuna.Study, trial: FrozenTrial) -> None:
            if trial.number == 6:
                study.stop()

        study.pruner = Staggered()
        hfta_tune.optimize(study, line, space, epochs=4, B=3, callbacks=[stop])
        assert states(study)[6] == PRUNED
        assert epochs_of(study) == [1 if number % 2 == 0 else 4 for number in range(len(study.trials))]
        # At most the two other lanes were in use.
        assert 7 <= len(study.trials) <= 9

    def test_stop_in_space(self, study: optuna.Study, line: Any) -> None:
        def stopping(trial: optuna.Trial) -> dict[str, Any]:
            if trial.number == 2:
                trial.study.stop()
            return space(trial)

        hfta_tune.optimize(study, line, stopping, n_trials=20, epochs=2, B=8)
        assert states(study) == [COMPLETE] * 3

    def test_max_trials_callback(self, study: optuna.Study, line: Any) -> None:
        callback = optuna.study.MaxTrialsCallback(5, states=(COMPLETE,))
        hfta_tune.optimize(study, line, space, epochs=1, B=1, callbacks=[callback])
        assert states(study) == [COMPLETE] * 5

    def test_grid_sampler_stops_the_study(self, study: optuna.Study, line: Any) -> None:
        study.sampler = optuna.samplers.GridSampler({"lr": [0.01, 0.05, 0.1]})
        hfta_tune.optimize(study, line, space, epochs=1, B=1)
        assert sorted(trial.params["lr"] for trial in study.trials) == [0.01, 0.05, 0.1]
        study.sampler = optuna.samplers.RandomSampler(seed=0)

    @pytest.mark.parametrize("inner", ["study.optimize", "hfta_tune.optimize"])
    def test_nesting_is_refused(self, study: optuna.Study, line: Any, inner: str) -> None:
        def nest(study: optuna.Study, trial: FrozenTrial) -> None:
            if inner == "study.optimize":
                study.optimize(lambda trial: 0.0, n_trials=1)
            else:
                hfta_tune.optimize(study, line, space, n_trials=1, epochs=1)

        with pytest.raises(RuntimeError, match=r"Nested|inside an optimization of the same study"):
            hfta_tune.optimize(study, line, space, n_trials=2, epochs=1, B=2, callbacks=[nest])
        assert states(study) == [COMPLETE, COMPLETE]

    def test_nesting_in_study_optimize_is_refused(self, study: optuna.Study, line: Any) -> None:
        def objective(trial: optuna.Trial) -> float:
            with pytest.raises(RuntimeError, match="inside an optimization of the same study"):
                hfta_tune.optimize(study, line, space, n_trials=1, epochs=1)
            trial.study.stop()  # still inside the outer loop
            return 0.0

        study.optimize(objective, n_trials=5)
        assert states(study) == [COMPLETE]


class TestKeyboardInterrupt:
    def test_in_a_callback(self, study: optuna.Study, line: Any, optuna_log: pytest.LogCaptureFixture) -> None:
        def interrupt(study: optuna.Study, trial: FrozenTrial) -> None:
            if trial.number == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hfta_tune.optimize(study, line, space, n_trials=50, epochs=2, B=4, callbacks=[interrupt])
        # Trials 4 and 5 are told; 6 and 7 trained as long, but the interrupt came first.
        assert states(study) == [COMPLETE] * 6 + [FAIL] * 2
        assert "6, 7" in optuna_log.text and "KeyboardInterrupt" in optuna_log.text

    @pytest.mark.parametrize("where", ["space", "build_model"])
    def test_while_a_trial_starts(self, study: optuna.Study, line: Any, where: str) -> None:
        class InterruptedLine(line):  # type: ignore[misc]
            def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
                if config["number"] == 2 and where == "build_model":
                    raise KeyboardInterrupt
                return super().build_model(config)

        def interrupted(trial: optuna.Trial) -> dict[str, Any]:
            if trial.number == 2 and where == "space":
                raise KeyboardInterrupt
            return space(trial)

        with pytest.raises(KeyboardInterrupt):
            hfta_tune.optimize(study, InterruptedLine, interrupted, n_trials=9, epochs=2, B=4)
        assert states(study) == [FAIL] * 3

    def test_in_tell(self, study: optuna.Study, line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        tell = study.tell

        def interrupted_once(trial: optuna.Trial, *args: Any, **kwargs: Any) -> FrozenTrial:
            if trial.number == 1:
                monkeypatch.setattr(study, "tell", tell)
                raise KeyboardInterrupt
            return tell(trial, *args, **kwargs)

        monkeypatch.setattr(study, "tell", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            hfta_tune.optimize(study, line, space, n_trials=9, epochs=2, B=3)
        assert states(study) == [COMPLETE, FAIL, FAIL]


class TestLimits:
    @pytest.mark.parametrize("limit", [{"n_trials": 0}, {"timeout": 0}], ids=str)
    def test_nothing_to_do(
        self, study: optuna.Study, line: Any, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_session, "time", types.SimpleNamespace(monotonic=lambda: 100.0))
        hfta_tune.optimize(study, line, space, epochs=1, **limit)
        assert study.trials == []

    def test_timeout(self, study: optuna.Study, line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """No trial starts after it; those that run finish; the progress bar never runs backwards."""
        clock = {"now": 100.0}
        monkeypatch.setattr(_session, "time", types.SimpleNamespace(monotonic=lambda: clock["now"]))
        shown: list[float] = []

        class RecordingBar(_session._ProgressBar):
            def update(self, elapsed_seconds: float, study: optuna.Study) -> None:
                shown.append(elapsed_seconds)
                super().update(elapsed_seconds, study)

        monkeypatch.setattr(_session, "_ProgressBar", RecordingBar)

        def a_minute_later(study: optuna.Study, trial: FrozenTrial) -> None:
            clock["now"] += 60

        hfta_tune.optimize(
            study,
            line,
            space,
            timeout=300,
            epochs=2,
            B=4,
            callbacks=[a_minute_later],
            show_progress_bar=True,
        )
        # 4 trials end by 240 s, 4 more start, and they are the last.
        assert states(study) == [COMPLETE] * 8
        assert epochs_of(study) == [2] * 8
        assert shown == [60, 120, 180, 240, 300, 300, 300, 300]

    def test_fewer_trials_than_lanes(self, study: optuna.Study, line: Any) -> None:
        hfta_tune.optimize(study, line, space, n_trials=2, epochs=1, B=16)
        assert states(study) == [COMPLETE] * 2

    def test_second_call_adds_trials_even_after_stop(self, study: optuna.Study, line: Any) -> None:
        def stop(study: optuna.Study, trial: FrozenTrial) -> None:
            study.stop()

        hfta_tune.optimize(study, line, space, n_trials=3, epochs=1, B=2, callbacks=[stop])
        assert states(study) == [COMPLETE] * 2
        hfta_tune.optimize(study, line, space, n_trials=3, epochs=1, B=2)
        assert states(study) == [COMPLETE] * 5

    def test_enqueued_trials_first(self, study: optuna.Study, line: Any) -> None:
        study.enqueue_trial({"lr": 0.02})
        study.enqueue_trial({"lr": 0.03}, user_attrs={"why": "a guess"})
        hfta_tune.optimize(study, line, space, n_trials=3, epochs=1, B=2)
        assert [trial.params["lr"] for trial in study.trials[:2]] == [0.02, 0.03]
        assert study.trials[1].user_attrs == {"why": "a guess"}


class TestWhatTheUserSees:
    def test_log(self, line: Any, optuna_log: pytest.LogCaptureFixture) -> None:
        study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e6))
        study.enqueue_trial({"lr": 0.1})
        study.enqueue_trial({"lr": 1e6})
        hfta_tune.optimize(
            study, line, lambda trial: {"lr": trial.suggest_float("lr", 0, 1e6)}, n_trials=2, epochs=3, B=2
        )
        assert states(study) == [COMPLETE, PRUNED]
        value = study.trials[0].value
        assert any(
            f"Trial 0 finished with value {value} and parameters {{'lr': 0.1}}." in message
            and f"Best is trial 0 with value {value}." in message
            for message in optuna_log.messages
        )
        assert any("Trial 1 was pruned: epoch 1 of 3" in message for message in optuna_log.messages)

    @pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
    def test_log_of_several_directions(self, digits: Any, optuna_log: pytest.LogCaptureFixture) -> None:
        study = optuna.create_study(directions=["minimize", "maximize"])
        study.set_metric_names(["loss", "share"])
        study.enqueue_trial(digits.configs(1)[0])
        hfta_tune.optimize(
            study, digits.trainable, digits.suggest, n_trials=1, epochs=1, metric=("val_loss", "accuracy")
        )
        loss, share = study.trials[0].values
        assert f"Trial 0 finished with values {{'loss': {loss}, 'share': {share}}} and" in optuna_log.text

    def test_verbosity_of_optuna_governs(
        self, study: optuna.Study, line: Any, optuna_log: pytest.LogCaptureFixture
    ) -> None:
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            hfta_tune.optimize(study, line, lambda trial: {"lr": float("nan")}, n_trials=1, epochs=1)
        finally:
            optuna.logging.set_verbosity(verbosity)
        assert not [r for r in optuna_log.records if r.name.startswith("optuna.") and "Trial" in r.message]

    def test_progress_bar(self, study: optuna.Study, line: Any, capsys: pytest.CaptureFixture[str]) -> None:
        hfta_tune.optimize(study, line, space, n_trials=5, epochs=1, B=2, show_progress_bar=True)
        shown = capsys.readouterr().err
        assert "5/5" in shown
        assert f"Best trial: {study.best_trial.number}" in shown


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_heartbeat(line: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a storage with heartbeat, other processes see our trials alive, and we fail their dead ones."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db", heartbeat_interval=60)
    study = optuna.create_study(storage=storage, pruner=optuna.pruners.NopPruner())
    dead = study._storage.create_new_trial(study._study_id)
    monkeypatch.setattr(storage, "_get_stale_trial_ids", lambda study_id: [dead])
    beating: set[int] = set()
    record = storage.record_heartbeat

    def recording(trial_id: int) -> None:
        beating.add(trial_id)
        record(trial_id)

    monkeypatch.setattr(storage, "record_heartbeat", recording)
    hfta_tune.optimize(study, line, space, n_trials=4, epochs=2, B=3)
    assert states(study) == [FAIL] + [COMPLETE] * 4
    assert beating == {trial._trial_id for trial in study.trials[1:]}


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_trial_that_another_process_ends_takes_no_other_with_it(study: optuna.Study, line: Any, epoch: int) -> None:
    """As the dashboard's button does. Like study.optimize, it asks for no more trials and raises."""

    class Ended(line):  # type: ignore[misc]
        def evaluate(self, model: Any, config: dict[str, Any]) -> dict[str, float]:
            trial = study.trials[0]
            if config["number"] == 1 and epoch == len(study.trials[1].intermediate_values):
                study._storage.set_trial_state_values(trial._trial_id, FAIL)
            return {"score": 1.0}

    with pytest.raises(ValueError, match="Cannot tell a FAIL trial"):
        hfta_tune.optimize(study, Ended, space, n_trials=6, epochs=4, metric="score", B=4)
    assert states(study) == [FAIL, COMPLETE, COMPLETE, COMPLETE]
