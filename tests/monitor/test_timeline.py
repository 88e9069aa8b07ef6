"""The timeline of a run: what is logged, what is read back, and the picture and the trace made of it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from lanes import Recorder
from optuna.storages.journal import JournalFileBackend
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from trainables import Climb, Points

import hfta_tune
from hfta_tune.cli import main
from hfta_tune.monitor import _timeline_log
from hfta_tune.monitor._timeline_figure import figure_of
from hfta_tune.monitor._timeline_log import LOG_FILES, ROUNDS, StudyRounds, TimelineLog
from hfta_tune.monitor._timeline_trace import chrome_trace
from hfta_tune.monitor.timeline import Compilation, Idle, LaneStay, Timeline, TimelineError, WorkerSpan
from hfta_tune.rounds import ArrayRound, Round
from hfta_tune.tune import _executor

of_tune = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning"),
]

START = 1_700_000_000.0
_DAY = timedelta(days=1)


class Clock:
    """Stands for the module time in _timeline_log; seconds since START."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(_timeline_log, "time", self)

    def time(self) -> float:
        return START + self.now

    def monotonic(self) -> float:
        return self.now


def own_round(begin: float, end: float, *trials: str, compile_seconds: float = 0.0) -> Round:
    array = ArrayRound(0, trials, "vmap", steps=3, samples=96, compile_seconds=compile_seconds)
    return Round(START + begin, START + end, (array,))


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is killed at second 10, and is restored ten hours later."""
    clock = Clock(monkeypatch)
    log = TimelineLog(tmp_path, "digits")
    log.trials_wait(4)
    clock.now = 1
    log.worker_opened(0, 2)
    log.trial_joined("a", 0, 0)
    log.trial_joined("b", 0, 1)
    log.trials_wait(2)
    clock.now = 3
    log.round_ended(0, own_round(1.5, 3, "a", "b", compile_seconds=0.5))
    log.trial_ended("a", "pruned")
    log.trial_left("a")
    log.trial_left("b")  # it is paused
    clock.now = 5
    log.trial_joined("c", 0, 0)
    clock.now = 7
    log.round_ended(0, own_round(5, 7, "c", "a"))  # a has left: the worker ran ahead
    log.trial_left("c")
    log.trial_ended("c", "done")
    log.trial_joined("b", 0, 0)
    clock.now = 10
    log.round_ended(0, own_round(7, 9.5, "b"))

    clock.now = 36_000
    log = TimelineLog(tmp_path, "digits")
    log.worker_opened(0, 2)
    log.trial_joined("b", 0, 1)
    clock.now = 36_004
    log.round_ended(0, own_round(36_001, 36_004, "b"))
    log.trial_ended("b", "error")
    log.trial_left("b")
    log.trial_joined("d", 0, 1)
    clock.now = 36_005
    log.trial_ended("d", "stopped")
    log.run_ended()
    return tmp_path


def test_what_a_run_logs_is_read_back(logged: Path) -> None:
    timeline = Timeline.read(logged)
    assert timeline.name == "digits" and timeline.resumed == (10,) and timeline.seconds == 15
    assert timeline.workers == (WorkerSpan("worker 0", 2, 1, 10), WorkerSpan("worker 0", 2, 10, 15))
    assert sorted(timeline.stays, key=lambda stay: (stay.trial, stay.begin)) == [
        LaneStay("a", "worker 0", 0, 1, 3, "pruned", 1),
        LaneStay("b", "worker 0", 1, 1, 3, "paused", 1),
        LaneStay("b", "worker 0", 0, 7, 10, "stopped", 1),
        LaneStay("b", "worker 0", 1, 10, 14, "error", 1),
        LaneStay("c", "worker 0", 0, 5, 7, "done", 1),
        LaneStay("d", "worker 0", 1, 14, 15, "stopped", 0),
    ]
    assert [(own.begin, own.end) for own in timeline.rounds] == [(1.5, 3), (5, 7), (7, 9.5), (11, 14)]
    assert [array.trials for own in timeline.rounds for array in own.arrays] == [("a", "b"), ("c",), ("b",), ("b",)]
    assert timeline.compilations == (Compilation("worker 0", 2.5, 3),)
    assert timeline.waiting == ((0, 4), (1, 2))
    assert timeline.idle == [
        Idle("worker 0", 0, 3, 5),
        Idle("worker 0", 1, 3, 10),
        Idle("worker 0", 0, 10, 15),
    ]
    assert timeline.lanes_in_use == pytest.approx(1 - 14 / 28) and timeline.in_rounds == pytest.approx(1 - 5 / 14)


def test_a_line_that_was_cut_off_and_events_of_a_later_version(logged: Path) -> None:
    expected = Timeline.read(logged)
    _, second = sorted(logged.glob(LOG_FILES))
    second.write_text(second.read_text() + '{"event":"weather","time":1700036005,"sky":"grey"}\n{"event":"trial_le')
    assert Timeline.read(logged) == expected


def test_a_run_that_goes_on_has_trials_that_run(logged: Path) -> None:
    _, second = sorted(logged.glob(LOG_FILES))
    second.write_text("".join(second.read_text().splitlines(keepends=True)[:-2]))
    assert {stay.trial: stay.ending for stay in Timeline.read(logged).stays}["d"] == "running"


class Storage:
    """A study, and its storage, that keep what is written."""

    def __init__(self) -> None:
        self._storage = self
        self._study_id = 7
        self.written: list[dict[str, Any]] = []

    def set_study_system_attr(self, study_id: int, key: str, value: dict[str, Any]) -> None:
        assert study_id == 7 and key.startswith(ROUNDS) and len(key) < 512
        self.written.append(value)


def test_rounds_of_a_long_study_stay_small_and_are_rarely_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    study = Storage()
    rounds = StudyRounds(study)
    monkeypatch.setattr(rounds, "_began", START)
    rounds.worker_opened(0, 4)
    for number in range(3600):
        clock.now = number + 1
        rounds.round_ended(0, own_round(number, number + 1))
    rounds.trial_ended("3", "stopped")
    rounds.trial_ended("4", "nan")
    rounds.run_ended()
    assert len(study.written) == 9
    kept = study.written[-1]
    spans = list(_timeline_log.spans_of_text(kept["rounds"]))
    assert kept["every"] == 4 and spans == [(1000 * n, 1000 * (n + 1)) for n in range(3, 3600, 4)]
    assert kept["stopped"] == [3] and kept["lanes"] == 4
    assert len(json.dumps(kept)) < 65_535 / 2


def test_nothing_is_written_of_an_optimize_call_without_a_round() -> None:
    study = Storage()
    StudyRounds(study).run_ended()
    assert study.written == []


def bars_of(figure: Any) -> dict[str, list[tuple[float, float, float]]]:
    """Begin, length and row of each bar, by what it shows."""
    return {
        re.sub(r" \(.*", "", bar.name): list(zip(bar.base, bar.x, bar.y, strict=True))
        for bar in figure.data
        if bar.type == "bar"
    }


def test_bars_lie_in_the_rows_of_their_lanes(logged: Path) -> None:
    figure = hfta_tune.plot_timeline(logged)
    bars = bars_of(figure)
    assert bars["pruned"] == [(1, 2, 1)] and bars["done"] == [(5, 2, 1)]
    assert bars["paused, or to be retried"] == [(1, 2, 2)] and bars["error"] == [(10, 4, 2)]
    assert bars["stopped with the run"] == [(7, 3, 1), (14, 1, 2)]
    assert bars["idle"] == [(3, 2, 1), (3, 7, 2), (10, 5, 1)]
    assert bars["compiling"] == [(2.5, 0.5, 1)]
    assert figure.data[-1].name == "numbers"  # nothing covers them
    assert sorted(figure.data[-1].text) == ["a", "b", "b", "b", "c", "d"]
    assert bars["between rounds, pale"] == [(1, 0.5, 1), (3, 2, 1), (9.5, 0.5, 1), (10, 1, 1), (14, 1, 1)]
    ticks = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    assert ticks == {0: "<b>worker 0</b> rounds", 1: "lane 0", 2: "lane 1"}
    assert figure.layout.xaxis.title.text == "seconds since the start"


def test_a_study_with_rounds_of_many_workers_has_rows_for_all(logged: Path) -> None:
    spans = tuple(WorkerSpan(f"host:{number}", 32, 0, 10) for number in range(4))
    stays = (LaneStay("1", "host:2", 31, 0, 1, "done", 1), LaneStay("2", "no lane", None, 0, 1, "error", 0))
    figure = figure_of(Timeline("wide", spans, stays, ()))
    bars = bars_of(figure)
    assert bars["done"] == [(0, 1, 2 * 34 + 32)] and bars["error"] == [(0, 1, 4 * 34)]
    assert len(figure.layout.yaxis.tickvals) == 5  # lanes are too many to be named


def test_the_page_needs_no_network(logged: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["timeline", str(logged), "--output", str(page)]) == 0
    text = page.read_text()
    without_code = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
    tags = re.findall(r"<(?:script|link|img|iframe|a)\b[^>]*>", without_code)
    assert tags and not [tag for tag in tags if "src=" in tag or "href=" in tag]
    assert len(text) > 1e6 and "worker 0" in text


def test_the_trace(logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["timeline", str(logged), "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"Wrote {path}: 4 trials in 15.0 s.\n"
    trace = json.loads(path.read_text())
    assert trace == chrome_trace(Timeline.read(logged))
    events = trace["traceEvents"]
    needed = {
        "X": {"ts", "dur", "pid", "tid"},
        "i": {"ts", "pid", "tid", "s"},
        "C": {"ts", "pid", "args"},
        "M": {"pid", "args"},
    }
    assert all(needed[event["ph"]] | {"name"} <= event.keys() for event in events)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert sorted(threads.values()) == ["compilations", "lane 0", "lane 1", "rounds"]

    def spans(kind: str) -> list[tuple[str, str, float, float]]:
        chosen = [event for event in events if event.get("cat") == kind]
        return [
            (event["name"], threads[event["pid"], event["tid"]], event["ts"], event.get("dur", 0)) for event in chosen
        ]

    assert ("trial c", "lane 0", 5e6, 2e6) in spans("trial") and len(spans("trial")) == 6
    assert ("pruned", "lane 0", 3e6, 0) in spans("end") and len(spans("end")) == 6
    assert spans("round")[0] == ("round", "rounds", 1.5e6, 1.5e6) and len(spans("round")) == 4
    assert spans("compilation") == [("compile", "compilations", 2.5e6, 0.5e6)]
    # Viewers nest spans of a thread that overlap; of a lane, none do.
    lanes = sorted((thread, begin, begin + length) for _, thread, begin, length in spans("trial"))
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(lanes) if a[0] == b[0])


def foreign_study(folder: Path) -> str:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    for name in ("one", "two"):
        optuna.create_study(storage=storage, study_name=name).optimize(lambda trial: 1.0, n_trials=1)
    return str(folder / "journal.log")


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (lambda folder: str(folder), [], "hfta_tune_timeline"),
        (lambda folder: str(folder / "nowhere"), [], "~/ray_results/NAME"),
        (foreign_study, [], "It holds 'one', 'two'. Give study_name"),
        (foreign_study, ["--study-name", "three"], "There is no study 'three' in it"),
        (foreign_study, ["--study-name", "one"], "hfta_tune.optimize(study"),
        (lambda folder: str(folder), ["--output", "picture.png"], "must end in .html or .json but is picture.png"),
    ],
)
def test_without_data_the_command_says_what_to_do(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: Callable[[Path], str],
    arguments: list[str],
    message: str,
) -> None:
    given = [source(tmp_path), "--output", str(tmp_path / "timeline.html"), *arguments]
    assert main(["timeline", *given]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("hfta-tune timeline: ") and message in said.err and not said.out
    assert not (tmp_path / "timeline.html").exists()


def test_without_plotly_the_error_names_the_extra(
    logged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'hfta-tune[plot]'")):
        hfta_tune.plot_timeline(logged)
    assert main(["timeline", str(logged), "--output", str(logged / "trace.json")]) == 0  # it needs no plotly


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["tiemline"])
    assert exit.value.code == 2 and "timeline" in capsys.readouterr().err


# Whole runs


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """What a run of Tune tells, apart from its log."""
    recorder = Recorder()
    real = _executor.observers_of_experiment
    monkeypatch.setattr(
        _executor, "observers_of_experiment", lambda name, directory: [*real(name, directory), recorder]
    )
    yield recorder


def no_two_in_a_lane(timeline: Timeline) -> None:
    stays = sorted(timeline.stays, key=lambda stay: (stay.worker, stay.lane, stay.begin))
    for earlier, later in itertools.pairwise(stays):
        assert (earlier.worker, earlier.lane) != (later.worker, later.lane) or earlier.end <= later.begin


@pytest.mark.usefixtures("cluster")
class TestTune:
    pytestmark = of_tune

    def test_bars_are_what_the_trials_did(self, storage: str, recorded: Recorder) -> None:
        asha = ASHAScheduler(metric="score", mode="max", max_t=8, grace_period=2, reduction_factor=2)
        analysis = tune.run(
            Climb,
            name="asha",
            config={"peak": tune.grid_search([1, 8, 2, 7, 3, 6, 5, 4]), "number": tune.grid_search([0, 1])},
            scheduler=hfta_tune.HFTAPacker(asha, B=4),
            stop={"height": 8},
            resources_per_trial={"cpu": 2},
            storage_path=storage,
            verbose=0,
        )
        (log,) = Path(storage, "asha").glob(LOG_FILES)
        assert '"run_ended"' in log.read_text().splitlines()[-1]
        timeline = Timeline.read(analysis)
        assert timeline == Timeline.read(Path(storage, "asha")) and timeline.name == "asha"
        results = {trial.trial_id: trial.last_result for trial in analysis.trials}
        stays = {stay.trial: stay for stay in timeline.stays}
        assert len(timeline.stays) == len(stays) and stays.keys() == results.keys()
        for name, result in results.items():
            stay, iterations = stays[name], result["training_iteration"]
            assert stay.ending == ("done" if iterations == 8 else "pruned") == recorded.reasons[name]
            assert stay.rounds == iterations
            assert [(stay.worker, stay.lane)] == [(f"worker {w}", lane) for w, lane in recorded.places[name]]
            assert stay.end - stay.begin >= result["time_total_s"]
        no_two_in_a_lane(timeline)
        told = sorted((own.begin, own.end) for _, own in recorded.rounds)
        start = json.loads(log.read_text().splitlines()[0])["time"]
        for own, (begin, end) in zip(timeline.rounds, told, strict=True):
            assert own.begin == pytest.approx(begin - start, abs=1e-4)
            assert own.end == pytest.approx(end - start, abs=1e-4)
        # Sixteen trials had four lanes: each trial but the first of a lane follows one that ended.
        assert len({(stay.worker, stay.lane) for stay in stays.values()}) == 4
        assert sum(bar.type == "bar" and len(bar.x) for bar in figure_of(timeline).data if "(" in bar.name) == 16

    def test_a_run_that_is_interrupted_and_restored(self, storage: str) -> None:
        interrupted = Path(storage).with_name("interrupted")  # the restored run has the callback as it was

        class Interrupts(tune.Callback):
            def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
                if result["training_iteration"] == 3 and not interrupted.exists():
                    interrupted.touch()
                    os.kill(os.getpid(), signal.SIGINT)

        trainable = tune.with_resources(Climb, {"cpu": 2})
        tuner = tune.Tuner(
            trainable,
            param_space={"peak": tune.grid_search([1, 2, 3])},
            tune_config=tune.TuneConfig(scheduler=hfta_tune.HFTAPacker(B=2)),
            run_config=tune.RunConfig(
                name="interrupted",
                storage_path=storage,
                stop={"training_iteration": 6},
                callbacks=[Interrupts()],
                verbose=0,
            ),
        )
        tuner.fit()
        directory = Path(storage, "interrupted")
        timeline = Timeline.read(directory)
        assert timeline.stays and {stay.ending for stay in timeline.stays} == {"stopped"}

        results = tune.Tuner.restore(str(directory), trainable).fit()
        assert not results.errors and len(list(directory.glob(LOG_FILES))) == 2
        timeline = Timeline.read(results)
        assert len(timeline.resumed) == 1 and {stay.ending for stay in timeline.stays} == {"stopped", "done"}
        assert sum(stay.ending == "done" for stay in timeline.stays) == 3
        no_two_in_a_lane(timeline)


def fails_in_its_space(trial: optuna.Trial) -> dict[str, Any]:
    if trial.number == 3:
        raise KeyError("no such key")
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "hidden": trial.suggest_categorical("hidden", [4, 8])}


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.slow), "journal"])
def test_bars_of_a_study_from_its_storage_alone(tmp_path: Path, kind: str) -> None:
    where = f"sqlite:///{tmp_path}/study.db" if kind == "sqlite" else str(tmp_path / "journal.log")
    storage: Any = where if kind == "sqlite" else optuna.storages.JournalStorage(JournalFileBackend(where))
    study = optuna.create_study(
        storage=storage,
        study_name="points",
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    )
    for _ in range(2):
        hfta_tune.optimize(
            study, Points, fails_in_its_space, n_trials=8, epochs=3, metric="accuracy", B=4, catch=KeyError
        )
    trials = study.trials
    del study, storage
    timeline = Timeline.read(where)
    assert timeline.name == "points" and len(timeline.workers) == 2
    assert {span.lanes for span in timeline.workers} == {4}
    begin = min(trial.datetime_start for trial in trials)
    expected = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "error"}
    stays = {int(stay.trial): stay for stay in timeline.stays}
    assert stays.keys() == {trial.number for trial in trials} and len(timeline.stays) == 16
    for trial in trials:
        stay = stays[trial.number]
        assert stay.begin == pytest.approx((trial.datetime_start - begin).total_seconds(), abs=1e-5)
        assert stay.end == pytest.approx((trial.datetime_complete - begin).total_seconds(), abs=1e-5)
        assert stay.ending == expected[trial.state.name] and stay.rounds == len(trial.intermediate_values)
        assert stay.lane == trial.system_attrs.get("hfta_tune", {"lane": None})["lane"]
        # A trial's rounds are those of its worker that lie in its time.
        inside = [own for own in timeline.rounds if stay.begin <= own.end <= stay.end + 1e-3]
        assert trial.number == 3 or len(inside) == stay.rounds
    no_two_in_a_lane(timeline)
    assert {stay.ending for stay in stays.values()} == {"done", "pruned", "error"}
    assert main(["timeline", where, "--study-name", "points", "--output", str(tmp_path / "page.html")]) == 0


def test_rounds_of_a_study_with_several_directions() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    metrics = ["train_loss", "accuracy"]
    hfta_tune.optimize(study, Points, lambda trial: {"lr": 0.1}, n_trials=5, epochs=3, metric=metrics, B=2)
    assert [stay.rounds for stay in Timeline.read(study).stays] == [3] * 5


def test_how_trials_of_a_study_ended_that_optuna_only_calls_failed() -> None:
    class Breaks(Points):
        def evaluate(self, model: Any, config: dict[str, Any]) -> dict[str, float]:
            if config["number"] == 5:
                raise KeyboardInterrupt
            return {"score": float("nan") if config["number"] in (1, 4) else 1.0}

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    with pytest.raises(KeyboardInterrupt):
        hfta_tune.optimize(
            study, Breaks, lambda trial: {"lr": 0.1, "number": trial.number}, n_trials=8, epochs=1, metric="score", B=2
        )
    endings = {stay.trial: stay.ending for stay in Timeline.read(study).stays}
    assert endings == {"0": "done", "1": "nan", "2": "done", "3": "done", "4": "stopped", "5": "stopped"}


def test_calls_far_apart_leave_no_gap() -> None:
    study = optuna.create_study()
    hfta_tune.optimize(study, Points, lambda trial: {"lr": 0.1}, n_trials=2, epochs=1, metric="accuracy", B=2)
    trials = study.trials
    for trial in trials:  # the same, a day before
        assert trial.datetime_start is not None and trial.datetime_complete is not None
        trial.datetime_start -= _DAY
        trial.datetime_complete -= _DAY
        study.add_trial(trial)
    timeline = Timeline.read(study)
    assert len(timeline.resumed) == 1 and timeline.seconds < 60


def test_an_empty_directory_of_tune_is_no_timeline(tmp_path: Path) -> None:
    Path(tmp_path, LOG_FILES.replace("*", "x")).touch()
    with pytest.raises(TimelineError, match="HFTAPacker"):
        Timeline.read(tmp_path)
