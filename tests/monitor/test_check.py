"""The check of a trainable before it is tuned, compared with counts and sizes worked out by hand."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import tune
from torch import Tensor, nn
from torch.nn import functional as F
from trainables import Points, points

import hfta_tune
from hfta_tune import FusionError, cli
from hfta_tune.fusion import LANE_BY_LANE, VMAP, Difference
from hfta_tune.fusion.kernels import _mode
from hfta_tune.monitor.check import _check
from hfta_tune.monitor.check._signatures import arrays_expected

Config = dict[str, Any]

LR = {"lr": tune.loguniform(1e-3, 1e-1)}
SMALL = {"lanes": 3, "trials": 12, "device": "cpu"}

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_plain_mlp(said: Callable[[], list[str]]) -> None:
    widths = tune.choice([8, 16])
    report = hfta_tune.check(Points, {**LR, "seed": tune.randint(0, 99), "hidden": widths}, **SMALL)
    assert report.structural["hidden"] in (
        "changes the shape of 0.weight from [16, 8] to [8, 8]",
        "changes the shape of 0.weight from [8, 8] to [16, 8]",
    )
    assert list(report.structural) == ["hidden"] and report.free == ("lr", "seed")
    assert report.signatures == 2 and report.built == 12
    assert report.modules == {"0": None, "1": None, "2": None} and not report.fallbacks
    assert report.seconds_a_step.keys() == {VMAP, LANE_BY_LANE}
    assert report.speed_up == report.seconds_a_step[LANE_BY_LANE] / min(report.seconds_a_step.values())
    assert report.passed
    (found,) = report.audits.values()
    assert isinstance(found, Difference) and 0 <= found.largest <= found.allowed
    assert "hidden is structural: 2 signatures for 12 trials" in report.advice[0]
    assert "StructureFirst" in report.advice[0]
    assert not said()


def test_the_memory_of_a_lane() -> None:
    memory = hfta_tune.check(Points, {"lr": 0.1, "hidden": 16}, **SMALL).memory
    parameters = (8 * 16 + 16) + (16 * 3 + 3)
    assert memory.parameters == memory.gradients == 4 * parameters
    assert memory.buffers == 0
    # Adam's two averages of each parameter, and a step count in float32 for each of the four tensors.
    assert memory.optimizer == 4 * (2 * parameters + 4)
    assert memory.total == 4 * (4 * parameters + 4)
    assert memory.peak is None


class Normed(Points):
    """It has buffers, and a layer that nothing trains."""

    def build_model(self, config: Config) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model[0].requires_grad_(False)
        return model

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=config["lr"], momentum=0.9)


def test_the_memory_of_buffers_and_frozen_layers() -> None:
    memory = hfta_tune.check(Normed, LR, **SMALL).memory
    trained = 2 * 5 + (5 * 3 + 3)
    assert memory.parameters == 4 * (8 * 5 + 5 + trained)
    assert memory.gradients == memory.optimizer == 4 * trained
    assert memory.buffers == 4 * 2 * 5 + 8  # running mean and variance, and a count in int64


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 9])
def test_expected_arrays(lanes: int) -> None:
    signatures = ["a", "a", "a", "b", "c"]
    samples = list(itertools.combinations(signatures, min(lanes, len(signatures))))
    mean = sum(len(set(sample)) for sample in samples) / len(samples)
    assert arrays_expected(signatures, lanes) == pytest.approx(mean)


def test_the_speed_up_of_arrays_as_the_search_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two signatures of six trials each: four lanes make 1.94 arrays on average, of 2.06 lanes."""
    tried: list[list[Config]] = []

    def always_vmap(*args: Any, **options: Any) -> Any:
        return replace(measure(*args, **options), strategy=VMAP, seconds={VMAP: 0.002, LANE_BY_LANE: 0.006})

    def note(trainable: Any, configs: list[Config], *args: Any, **options: Any) -> float:
        tried.append(configs)
        assert speed_up_of(trainable, configs, *args, **options) > 0
        return 1.25

    measure, speed_up_of = _check.measure, _check.speed_up_of
    monkeypatch.setattr(_check, "measure", always_vmap)
    monkeypatch.setattr(_check, "speed_up_of", note)
    grid = {**LR, "hidden": tune.grid_search([4, 8])}
    report = hfta_tune.check(Points, grid, lanes=4, trials=12, device="cpu")
    assert report.expected_speed_up == 1.25 and report.speed_up == pytest.approx(3)
    assert report.arrays == pytest.approx(2 - 2 * 15 / 495)
    assert [len(configs) for configs in tried] == [2] and len({config["hidden"] for config in tried[0]}) == 1
    printed = " ".join(str(report).split())
    assert "3.0 times as fast as lane by lane, 1.2 times in arrays of 2.1 lanes" in printed
    full = hfta_tune.check(Points, LR, lanes=4, trials=12, device="cpu")
    assert full.expected_speed_up is None and len(tried) == 1


def test_nothing_differs() -> None:
    report = hfta_tune.check(Points, {"lr": 0.1}, **SMALL)
    assert not report.structural and not report.free and report.signatures == 1
    assert "structural    no key differs between the trials" in str(report)


def test_only_floats() -> None:
    report = hfta_tune.check(Points, LR, **SMALL)
    assert not report.structural and report.free == ("lr",)
    assert (report.signatures, report.sharing) == (1, 12)
    assert (report.arrays, report.lanes_an_array) == (1, 3)
    assert not any("structural" in text for text in report.advice)
    assert "structural    none of the keys" in str(report)


def test_a_grid_has_each_of_its_points() -> None:
    grid = {"lr": 0.1, "hidden": tune.grid_search([4, 5, 6])}
    assert hfta_tune.check(Points, grid, lanes=1, trials=3, device="cpu").signatures == 3
    assert hfta_tune.check(Points, grid, lanes=1, trials=2, device="cpu").signatures == 2


class Gate(nn.Module):
    """It decides by the value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Gated(Points):
    def build_model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), Gate()), nn.Linear(4, 3))


def test_a_module_that_falls_back() -> None:
    report = hfta_tune.check(Gated, LR, **SMALL)
    why = report.modules["1.1"]
    assert why is not None and why.startswith("Gate, at `return x if x.sum() > 0 else -x`: RuntimeError")
    assert [path for path, why in report.modules.items() if why is None] == ["0", "1", "1.0", "2"]
    assert "module '1.1' (Gate)" in report.fallbacks[0]
    assert report.strategy == LANE_BY_LANE and report.passed and not report.audits
    assert report.speed_up == 1
    assert "nothing to audit" in str(report) and "4 of 5 fuse" in str(report)
    assert any("until what is listed under fallbacks is changed" in text for text in report.advice)


class Branching(Points):
    """Its step decides by the value of a tensor; all of its modules fuse."""

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        loss = super().training_step(model, batch, config)
        return 2 * loss if loss > 1 else loss


def test_a_step_that_falls_back() -> None:
    report = hfta_tune.check(Branching, LR, **SMALL)
    assert "`return 2 * loss if loss > 1 else loss`" in report.fallbacks[0]
    assert not any(report.modules.values())


class Sequences(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x.unflatten(1, (4, 2)))[0][:, -1])  # type: ignore[no-any-return]


class Recurrent(Points):
    def build_model(self, config: Config) -> nn.Module:
        return Sequences(config["hidden"])


def test_an_lstm() -> None:
    report = hfta_tune.check(Recurrent, {**LR, "hidden": tune.grid_search([3, 4])}, **SMALL)
    change = report.structural["hidden"]
    assert change == "changes the shape of recurrent.weight_ih_l0 from [12, 2] to [16, 2]"
    assert report.modules == {"recurrent": None, "head": None} and report.passed
    assert VMAP in report.seconds_a_step and (report.signatures, report.sharing) == (2, 6)


# Keys that are structural for what hooks do with them


class Batched(Points):
    """Its data loader reads a key; its steps read a name and force a float into Python."""

    def train_dataloader(self, config: Config) -> Any:
        x, y = points()
        return list(zip(x.split(config["data"]["batch"]), y.split(config["data"]["batch"]), strict=True))

    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y, label_smoothing=float(config["smoothing"]))
        return loss.abs() if config["name"] == "abs" else loss


def test_keys_that_hooks_read() -> None:
    space = {
        **LR,
        "data": {"batch": tune.choice([16, 32])},
        "smoothing": tune.uniform(0, 0.5),
        "name": tune.choice(["abs", "none"]),
    }
    report = hfta_tune.check(Batched, space, **SMALL)
    assert report.structural["data/batch"] == "is read by the data loader hooks"
    assert report.structural["name"].startswith("is read in a step")
    assert report.structural["smoothing"].startswith("is read in a step")
    assert report.free == ("lr",)
    assert report.signatures == 12  # each has a smoothing of its own
    advice = "\n".join(report.advice)
    assert "The data loader hooks read data/batch" in advice
    assert "turns config['smoothing'] into a Python number" in advice
    assert "smoothing is structural and has many values" in advice
    assert "data/batch, name, smoothing as the steps read it" not in report.signature
    assert "name, smoothing as the steps read it" in report.signature
    assert report.passed and VMAP in report.audits


class Copying(Points):
    def train_dataloader(self, config: Config) -> Any:
        return super().train_dataloader(dict(config))


def test_a_loader_that_copies_its_config() -> None:
    report = hfta_tune.check(Copying, LR, **SMALL)
    assert report.structural == {"lr": "is read by the data loader hooks"} and report.signatures == 12
    assert any("train_dataloader of Copying reads its whole config" in text for text in report.advice)


class Optimized(Points):
    """Conditional: momentum goes with SGD."""

    def build_optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        if config["optimizer"] == "sgd":
            return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
        return torch.optim.Adam(model.parameters(), lr=config["lr"], amsgrad=config["amsgrad"])


def suggest(trial: Any) -> Config:
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        return {"lr": lr, "optimizer": "sgd", "momentum": trial.suggest_float("momentum", 0.1, 0.9)}
    return {"lr": lr, "optimizer": "adam", "amsgrad": trial.suggest_categorical("amsgrad", [True, False])}


def test_a_conditional_space_of_optuna() -> None:
    report = hfta_tune.check(Optimized, suggest, lanes=2, trials=16, device="cpu")
    assert "changes the optimizer from " in report.structural["optimizer"]
    assert "along with the keys that go with it" in report.structural["optimizer"]
    assert "lr" in report.free
    assert report.signatures == 3  # SGD, Adam, and Adam with amsgrad


class Locked(Points):
    """Its models cannot be compared."""

    def build_model(self, config: Config) -> nn.Module:
        model = super().build_model(config)
        model.policy = object()  # type: ignore[assignment]
        return model


def test_models_that_cannot_be_compared() -> None:
    report = hfta_tune.check(Locked, LR, **SMALL)
    assert not report.structural and not report.free
    assert "structural    not known, see fallbacks" in str(report)
    assert report.signatures == 12 and report.lanes_an_array == 1
    (fallback,) = report.fallbacks
    assert "its models cannot be compared" in fallback and "'policy'" in fallback
    assert report.seconds_a_step.keys() == {LANE_BY_LANE} and report.passed


def test_one_lane() -> None:
    report = hfta_tune.check(Points, LR, lanes=1, trials=4, device="cpu")
    assert report.strategy == LANE_BY_LANE and report.seconds_a_step[LANE_BY_LANE] > 0
    assert report.passed and not report.audits
    assert any("One lane has nothing to share" in text for text in report.advice)


def test_the_callers_random_numbers_stay() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    hfta_tune.check(Points, LR, **SMALL)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.slow
@pytest.mark.usefixtures("always_compiles")
def test_a_compiled_step() -> None:
    report = hfta_tune.check(Points, LR, compile=True, **SMALL)
    assert report.seconds_a_step.keys() == {VMAP, LANE_BY_LANE, "compiled"}
    assert report.audits.keys() == {VMAP, "compiled"} and report.passed


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear, LR), TypeError, "trainable must be a subclass of hfta_tune.FusedTrainable"),
        ((Points, [1]), TypeError, "space must be a dict as Tune's config, or a function"),
        ((Points, lambda trial: 1), TypeError, "space must return the config as a dict but returned 1"),
        ((Points, {"lr": tune.grid_search([])}), ValueError, "a grid in it is empty"),
        ((Points, {}), FusionError, r"build_optimizer \(trainables.py, line \d+\) raised KeyError: 'lr'. Give the"),
        (
            (Points, lambda trial: trial.suggest_dice("lr")),
            ValueError,
            "but <lambda> raised AttributeError: .*test_check",
        ),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hfta_tune.check(*arguments, **SMALL)


@pytest.mark.parametrize("option", [{"lanes": 0}, {"trials": 0}, {"device": "abacus"}, {"device": "cuda:99"}])
def test_bad_options(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
        hfta_tune.check(Points, LR, **{**SMALL, **option})


class Broken(Points):
    def training_step(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        raise OSError("no such shard")


def test_an_error_outside_the_hooks() -> None:
    with pytest.raises(FusionError, match="trial 0: building or training it raised ValueError: invalid literal"):
        hfta_tune.check(Points, {"lr": 0.1, "seed": "first"}, **SMALL)


def test_a_step_that_raises() -> None:
    with pytest.raises(
        FusionError, match=r"trial 0: training_step \(test_check.py, line \d+\) raised OSError: no such"
    ):
        hfta_tune.check(Broken, LR, **SMALL)


# The command line


def check_on_command_line(*arguments: str) -> int:
    return cli.main(["check", *arguments, "--lanes", "2", "--trials", "4", "--device", "cpu"])


def test_the_command_line_in_a_process_of_its_own() -> None:
    program = "import sys; from hfta_tune.cli import main; sys.exit(main())"
    config = '{"lr": 0.1, "hidden": {"grid_search": [8, 16]}}'
    options = ["--lanes", "2", "--trials", "4", "--device", "cpu", "--config", config]
    done = subprocess.run(
        [sys.executable, "-c", program, "check", "trainables:Points", *options],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "hidden changes the shape of 0.weight from [8, 8] to [16, 8]" in done.stdout
    assert "2 signatures for 4 trials" in done.stdout and "passed" in done.stdout


def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_for_this_test.py").write_text("open('no such file')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert check_on_command_line("broken_for_this_test:Any") == 2  # 1 is for an audit that fails
    assert "FileNotFoundError" in capsys.readouterr().err


def test_the_command_fails_if_the_audit_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(input, 1.01 * weight, bias)

    monkeypatch.setitem(_mode._KERNELS, torch._C._nn.linear, linear)
    assert check_on_command_line("trainables:Points", "--config", '{"lr": 0.1}') == 1
    printed = capsys.readouterr().out
    assert "FAILED. trial 0: the loss differs by up to" in printed
    assert "The audit failed" in printed


def test_a_space_in_python_and_what_is_fixed_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
    from ray import tune
    from trainables import Points
    space = {"lr": tune.loguniform(1e-3, 1e-1), "hidden": tune.grid_search([4, 8])}
    def suggest(trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1), "hidden": trial.suggest_int("hidden", 2, 99)}
    """
    (tmp_path / "search_of_this_test.py").write_text("\n".join(line[4:] for line in text.splitlines()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = "search_of_this_test"
    assert check_on_command_line(f"{module}:Points", "--space", f"{module}:space") == 0
    assert "2 signatures for 4 trials" in capsys.readouterr().out
    for name in ("space", "suggest"):
        assert (
            check_on_command_line(f"{module}:Points", "--space", f"{module}:{name}", "--config", '{"hidden": 4}') == 0
        )
        assert "1 signature for 4 trials" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Points"], "'Points' names nothing; write MODULE:NAME"),
        (["no_such_module:Points"], "there is no module 'no_such_module'"),
        (["trainables:Pints"], "module 'trainables' has no 'Pints'"),
        (["trainables:points"], "trainable must be a subclass of hfta_tune.FusedTrainable"),
        (["trainables:Points", "--config", "{lr: 1}"], "--config is no JSON (Expecting property name"),
        (["trainables:Points", "--config", "[1]"], "--config must be a JSON object"),
        (["trainables:Points", "--config", "{}"], "raised KeyError: 'lr'. Give the config a value of 'lr'"),
        (["trainables:Points", "--space", "trainables:spice"], "module 'trainables' has no 'spice'"),
        (
            ["trainables:Points", "--space", "trainables:points", "--config", '{"lr": {"grid_search": [1, 2]}}'],
            "--config has a grid in 'lr', but --space is a function",
        ),
    ],
)
def test_what_cannot_be_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_on_command_line(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
