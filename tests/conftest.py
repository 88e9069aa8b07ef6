"""Tests compare fused training with plain PyTorch, so an array must not choose plain PyTorch for its speed.

Those that tune share one local Ray cluster a process.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hfta_tune.fusion import COMPILED, LANE_BY_LANE, RECORDED, VMAP, FusedArray, FusionWarning, compile_notes
from hfta_tune.fusion.choice import StrategyChoice
from hfta_tune.fusion.compiled import BoundStep

if TYPE_CHECKING:
    from selenium import webdriver


@pytest.fixture(autouse=True)
def fused_where_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFTA_TUNE_STRATEGY", "vmap")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on two threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def always_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile once everything is measured, and prefer the compiled step; vmap comes next.

    Whatever earlier runs on this machine noted of compiling.
    """
    monkeypatch.setattr(compile_notes, "_default_folder", lambda: tmp_path / "compile_notes")
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.setenv("HFTA_TUNE_STRATEGY", "auto")
    real = StrategyChoice.strategy

    def strategy(self: StrategyChoice, lanes: int) -> str:
        chosen = real(self, lanes)
        return COMPILED if COMPILED in self.candidates and lanes > 1 else chosen

    def record(self: StrategyChoice, strategy: str, seconds: float) -> None:
        note(self, strategy, 1e3 if strategy == LANE_BY_LANE else seconds)

    note = StrategyChoice.record
    monkeypatch.setattr(StrategyChoice, "strategy", strategy)
    monkeypatch.setattr(StrategyChoice, "record", record)


@pytest.fixture
def always_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record after the first round, and prefer the recorded step; vmap comes next. Nothing is compiled."""
    monkeypatch.setenv("HFTA_TUNE_STRATEGY", "auto")

    def strategy(self: StrategyChoice, lanes: int) -> str:
        own = [strategy for strategy in (RECORDED, VMAP) if strategy in self.candidates]
        return own[0] if own and lanes > 1 else LANE_BY_LANE

    def record(self: FusedArray, steps_left: float) -> None:
        if self._compiled.can_be_made and self._choice.may_record and self.strategy == VMAP:
            self._choice.recorded(there=self._compiled.record())

    monkeypatch.setattr(StrategyChoice, "strategy", strategy)
    monkeypatch.setattr(FusedArray, "compile_if_it_pays", record)


@pytest.fixture
def steps_of_tensors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of lanes of each step that a recorded or compiled function has trained."""
    taken: list[int] = []
    real = BoundStep.__call__

    def call(self: BoundStep, batch: Any) -> Any:
        result = real(self, batch)
        taken.append(len(next(iter(result[0].values()))))
        return result

    monkeypatch.setattr(BoundStep, "__call__", call)
    return taken


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    """What the user has been warned of so far."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(warning.message) for warning in caught if issubclass(warning.category, FusionWarning)]


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    """Headless Chromium, which reaches this machine only."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver: Debian's package chromium-driver brings both")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless",
        "--no-sandbox",  # root has none
        "--disable-dev-shm-usage",  # containers have little
        "--disable-component-update",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--window-size=1400,2300",
    ):
        options.add_argument(argument)
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as browser:
        yield browser


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A private Ray session of the tests: no dashboard, no usage reports, quiet."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import trainables
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(trainables)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def storage(tmp_path: Path, cluster: None) -> str:
    return str(tmp_path / "results")
