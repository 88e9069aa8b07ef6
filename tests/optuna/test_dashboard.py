"""optuna-dashboard in headless Chromium, while `optimize` trains and when it has returned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

import optuna
import optuna_dashboard
import pytest
import torch
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.support.wait import WebDriverWait
from torch import Tensor, nn

import hfta_tune

SLOPES = [1.0, 2.0, 3.0, 4.0]
EPOCHS = 3

# What a page shows, read in one go: React may replace the elements between two calls.
CURVES = """
    const plot = document.getElementById("graph-intermediate-values");
    const curves = plot?.data ?? [];
    const lines = plot?.querySelectorAll(".scatterlayer .trace .lines path") ?? [];
    return lines.length === curves.length ? curves.map(({name, x, y}) => [name.trim(), x, y]) : [];
"""
STATES = r"""
    return [...document.querySelectorAll("li")].map(item => item.innerText.split(/\s*\n\s*/).slice(0, 2))
        .filter(([name]) => /^Trial \d+$/.test(name));
"""


class DashboardServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Gate:
    """Holds the trials in their last epoch until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        self.opened.wait()


def climb(gate: Gate) -> type[hfta_tune.FusedTrainable]:
    class Climb(hfta_tune.FusedTrainable):
        """Its height grows by its slope each epoch."""

        epochs = 0

        def build_model(self, config: dict[str, Any]) -> nn.Module:
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            return model

        def build_optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=config["slope"])

        def train_dataloader(self, config: dict[str, Any]) -> list[Tensor]:
            return [torch.ones(1, 1)]

        def training_step(self, model: nn.Module, batch: Tensor, config: dict[str, Any]) -> Tensor:
            return -model(batch).mean()

        def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
            self.epochs += 1
            if self.epochs == EPOCHS:
                gate.pass_through()
            return {"height": model.weight.item()}

    return Climb


def curves(epochs: int, name: str) -> list[list[Any]]:
    """Name, steps and heights of each trial after so many epochs."""
    return [
        [name.format(number), list(range(epochs)), [slope * (epoch + 1) for epoch in range(epochs)]]
        for number, slope in enumerate(SLOPES)
    ]


def states(state: str) -> list[list[str]]:
    return [[f"Trial {number}", state] for number in range(len(SLOPES))]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def study(address: str) -> optuna.Study:
    study = optuna.create_study(storage=address, direction="maximize", sampler=optuna.samplers.RandomSampler())
    for slope in SLOPES:
        study.enqueue_trial({"slope": slope})
    return study


@pytest.fixture
def pages(address: str, study: optuna.Study) -> Iterator[str]:
    """Where the dashboard shows the study. It has the storage's address only, as if it ran elsewhere."""
    with make_server("127.0.0.1", 0, optuna_dashboard.wsgi(address), server_class=DashboardServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/dashboard/studies/{study._study_id}"
        server.shutdown()
        thread.join()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def training(study: optuna.Study, gate: Gate) -> Iterator[Future[None]]:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"slope": trial.suggest_float("slope", 0.0, 5.0)}

    with ThreadPoolExecutor() as pool:
        yield pool.submit(
            hfta_tune.optimize, study, climb(gate), space, n_trials=4, epochs=EPOCHS, metric="height", B=4
        )
        gate.opened.set()


@pytest.fixture
def shows(browser: webdriver.Chrome) -> Callable[[str, list[Any]], None]:
    """Waits until a script reads from the page what is expected. The page asks for news every few seconds."""

    def wait(script: str, expected: list[Any]) -> None:
        with contextlib.suppress(TimeoutException):
            WebDriverWait(browser, 60).until(lambda browser: browser.execute_script(script) == expected)
        assert browser.execute_script(script) == expected

    return wait


@pytest.mark.slow
def test_intermediate_values_of_running_trials(
    browser: webdriver.Chrome,
    shows: Callable[[str, list[Any]], None],
    pages: str,
    training: Future[None],
    gate: Gate,
    tmp_path: Path,
) -> None:
    assert gate.reached.wait(timeout=60)
    browser.get(f"{pages}/trials")
    shows(STATES, states("Running"))
    browser.get(pages)
    shows(CURVES, curves(EPOCHS - 1, "trial #{} (running)"))
    assert browser.save_screenshot(str(tmp_path / "running.png"))

    gate.opened.set()
    training.result(timeout=60)
    shows(CURVES, curves(EPOCHS, "trial #{}"))
    browser.get(f"{pages}/trials")
    shows(STATES, states("Complete"))
    assert browser.save_screenshot(str(tmp_path / "complete.png"))
