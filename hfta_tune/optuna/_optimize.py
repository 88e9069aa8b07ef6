"""`optimize`: the trials of an Optuna study, trained B at a time as the lanes of one worker."""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optuna
import torch

from hfta_tune.monitor import Figures, RunFigures, observers_of_study
from hfta_tune.optuna._arguments import check_arguments, exception_classes, plain_config
from hfta_tune.optuna._metric import choose_metrics, values_of
from hfta_tune.optuna._objective import Objective, run_objective
from hfta_tune.optuna._samplers import advice_for_batches
from hfta_tune.optuna._session import Callback, RunningTrial, StudySession
from hfta_tune.rounds import Observers
from hfta_tune.trainable import FusedTrainable
from hfta_tune.worker import Worker

Space = Callable[[optuna.Trial], dict[str, Any]]
OnRound = Callable[[RunFigures], None]

_SECONDS_BETWEEN_LOG_LINES = 10.0


def optimize(
    study: optuna.Study,
    trainable: type[FusedTrainable] | Objective,
    space: Space | None = None,
    *,
    n_trials: int | None = None,
    timeout: float | None = None,
    epochs: int | None = None,
    metric: str | Sequence[str] | None = None,
    B: int = 8,
    device: str | torch.device | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[Callback] | None = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
    audit: bool = False,
    on_round: OnRound | None = None,
) -> None:
    """Optimizes a study with B trials training at once, in this process.

    It does what `study.optimize` does with an objective that trains `epochs` epochs, reports the metric
    after each, raises TrialPruned when the pruner says so, and returns the last value. When a trial ends,
    the next one takes its lane before the next epoch begins; the other lanes go on.

    After an epoch the trials are reported, and their pruning decided, in the order in which they
    started. Samplers see B trials running at once, as with n_jobs=B; of one that is worse for it, a warning
    says so and names the remedy.

    It also takes an objective, a function of one trial with a training loop of its own, as `study.optimize` does: B of
    them run at once, in this thread, and what they make ready with `hfta_tune.prepare` is trained as one. Then `space`,
    `epochs`, `metric`, `device` and `on_round` are not used. A trial starts when another has ended.

    Where a trial trained is its system attribute "hfta_tune": {"worker": host and process, "lane": 0 to B - 1,
    "array": the number of its array in this run, "signature": equal for trials of the run that may share an array}.

    Args:
        study: The study. Enqueued trials are taken first.
        trainable: What to train: a FusedTrainable subclass, or an objective.
        space: Suggests the hyperparameters of one trial and returns its config.
        n_trials: Number of trials. With None there is no limit but `timeout` and `study.stop()`.
        timeout: Seconds after which no trial starts. Those that run finish.
        epochs: Epochs a trial. The step of each reported value is the epoch, counted from 0.
        metric: Name of the metric to optimize, as `validation_step` or `evaluate` returns it. None takes the
            only metric besides "train_loss", or "train_loss" if there is no other. For a study with several
            directions, one name for each; nothing is reported or pruned then, as Optuna has it.
        B: Number of trials that train at once.
        device: Where to train. None takes the GPU if there is one, else the CPU.
        catch: Exceptions that only fail the trial that raised them. After any other, the running trials
            finish and it is raised.
        callbacks: Called with the study and the finished trial after each trial. `study.stop()` works there.
        gc_after_trial: Whether to collect garbage after each trial.
        show_progress_bar: Whether to show Optuna's progress bar.
        audit: Whether to compare the first fused step of every array with the same step of each trial in plain
            PyTorch. Where they differ, a warning says where, and those trials train one by one.
        on_round: Called with a `hfta_tune.monitor.RunFigures` after each epoch of the trials that run, when free lanes
            have been refilled: lanes, arrays, rates, ends and memory so far. `study.stop()` works there. The most
            important of them are in the log, once in 10 seconds.

    Raises:
        TypeError, ValueError: An argument is wrong, or no result has the metric.
        RuntimeError: It was called inside an optimization of the same study.

    Example:
        >>> import optuna, torch
        >>> from torch.nn import functional as F
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import hfta_tune
        >>> class Line(hfta_tune.FusedTrainable):
        ...     def build_model(self, config):
        ...         return torch.nn.Linear(1, 1)
        ...     def build_optimizer(self, model, config):
        ...         return torch.optim.SGD(model.parameters(), lr=config["lr"])
        ...     def train_dataloader(self, config):
        ...         x = torch.linspace(-1, 1, 16).unsqueeze(1)
        ...         return DataLoader(TensorDataset(x, 3 * x), batch_size=8)
        ...     def training_step(self, model, batch, config):
        ...         x, y = batch
        ...         return F.mse_loss(model(x), y)
        >>> def space(trial):
        ...     return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}
        >>> study = optuna.create_study()
        >>> hfta_tune.optimize(study, Line, space, n_trials=6, epochs=3, B=4)
        >>> len(study.trials)
        6
    """
    check_arguments(
        study=study,
        trainable=trainable,
        space=space,
        n_trials=n_trials,
        timeout=timeout,
        epochs=epochs,
        metric=metric,
        B=B,
        device=device,
        on_round=on_round,
    )
    figures = Figures()
    session = StudySession(
        study,
        n_trials=n_trials,
        timeout=timeout,
        catch=exception_classes(catch),
        callbacks=() if callbacks is None else tuple(callbacks),
        gc_after_trial=gc_after_trial,
        show_progress_bar=show_progress_bar,
        observer=Observers([figures, *observers_of_study(study)]),
    )
    advice = advice_for_batches(study.sampler, int(B), n_trials)
    if advice is not None:
        warnings.warn(advice, UserWarning, stacklevel=2)
    with session:
        session.observer.worker_opened(0, int(B))
        if not isinstance(trainable, type):
            run_objective(session, trainable, int(B), len(study.directions), audit=audit)
        else:
            assert space is not None and epochs is not None
            worker = Worker(B, device=device, audit=audit)
            reports = len(study.directions) == 1
            _Loop(session, worker, trainable, space, epochs, metric, figures, on_round, reports=reports).run()
    if session.error is not None:
        raise session.error


class _Loop:
    """Fills the free lanes, runs a round, ends what is over; again until no trial is left.

    Args:
        session: The study's side.
        worker: The lanes.
        trainable: What to train.
        space: Makes the config of a trial.
        epochs: Epochs a trial.
        metric: What the user asked for. It becomes names with the first results.
        figures: What the run has done so far.
        on_round: Is given the figures after each round.
        reports: Whether values are reported and trials pruned.
    """

    def __init__(
        self,
        session: StudySession,
        worker: Worker,
        trainable: type[FusedTrainable],
        space: Space,
        epochs: int,
        metric: str | Sequence[str] | None,
        figures: Figures,
        on_round: OnRound | None,
        *,
        reports: bool,
    ) -> None:
        self._session = session
        self._worker = worker
        self._trainable = trainable
        self._space = space
        self._epochs = epochs
        self._metric = metric
        self._reports = reports
        self._names: tuple[str, ...] = ()
        self._instances: dict[str, FusedTrainable] = {}
        self._figures = figures
        self._on_round = on_round
        self._log_due = time.monotonic() + _SECONDS_BETWEEN_LOG_LINES
        self._given = 0
        self._driver_seconds = time.thread_time()
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def run(self) -> None:
        self._refill()
        while self._session.running:
            self._run_round()
            self._refill()
            self._tell_figures()

    def _refill(self) -> None:
        # A trial whose own hooks or space raise leaves its lane free, so the next one is tried at once.
        while self._worker.free_lanes > 0 and self._session.may_ask:
            try:
                running = self._session.ask()
            except Exception as error:
                self._session.keep(error)
                return
            try:
                config = plain_config(self._space(running.trial))
                instance = self._trainable._outside_tune(config)
                self._worker.add(str(running.trial.number), instance, config)
                self._instances[str(running.trial.number)] = instance
            except Exception as error:
                self._session.finish(running, error)

    def _run_round(self) -> None:
        self._tell_results()
        results = self._worker.run_round(rounds_left=self._rounds_left())
        self._driver_seconds, self._given = time.thread_time(), len(results)
        assert self._worker.last_round is not None
        self._session.observer.round_ended(0, self._worker.last_round)
        if not self._names:
            metrics = [result for result in results.values() if not isinstance(result, Exception)]
            if metrics:
                self._names = choose_metrics(self._metric, metrics)
        for trial_id, running in list(self._session.running.items()):
            result = results[trial_id]
            if isinstance(result, Exception):
                # The worker has freed the lane already.
                self._instances.pop(trial_id).cleanup()
                self._session.finish(running, result)
                continue
            outcome = self._outcome(running, result)
            if outcome is not None:
                # First the lane: a callback may raise.
                self._worker.remove(trial_id)
                self._instances.pop(trial_id).cleanup()
                self._session.finish(running, outcome)

    def _tell_results(self) -> None:
        """The study has all results of the last round, and the trials of the next one were asked for."""
        self._session.observer.results_given(self._given, time.thread_time() - self._driver_seconds)
        self._given, self._driver_seconds = 0, time.thread_time()

    def _tell_figures(self) -> None:
        log = time.monotonic() >= self._log_due
        if self._on_round is None and not log:
            return
        self._tell_results()
        if self._worker.device.type == "cuda":
            free, size = torch.cuda.mem_get_info(self._worker.device)
            self._session.observer.memory_measured(0, size - free, size)
        figures = self._figures.now()
        if log:
            self._log_due = time.monotonic() + _SECONDS_BETWEEN_LOG_LINES
            self._session.log(figures)
        if self._on_round is not None:
            try:
                self._on_round(figures)
            except Exception as error:
                self._session.keep(error)

    def _rounds_left(self) -> float | None:
        """About how many rounds are to come, if nothing is pruned and the number of trials is known."""
        trials = self._session.trials_left
        if trials is None or not isinstance(self._session.pruner, optuna.pruners.NopPruner):
            return None
        running = self._session.running.values()
        epochs = trials * self._epochs + sum(self._epochs - trial.epochs_done for trial in running)
        return epochs / max(1, len(running))

    def _outcome(self, running: RunningTrial, result: Mapping[str, float]) -> Sequence[float] | Exception | None:
        """Books one epoch of a trial. Returns how it ends, or None if it goes on."""
        try:
            place = self._worker.place_of(str(running.trial.number)) or {}
            self._session.note(running, {"worker": self._name, "lane": running.lane, **place})
            values = values_of(self._names, result)
            if self._reports:
                running.trial.report(values[0], running.epochs_done)
            running.epochs_done += 1
            if self._reports and running.trial.should_prune():
                return optuna.TrialPruned(f"epoch {running.epochs_done} of {self._epochs} was its last.")
        except Exception as error:
            return error
        return values if running.epochs_done == self._epochs else None
