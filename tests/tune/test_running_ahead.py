"""A worker that has answered trains on before it is asked: what the driver sees is as if it had waited."""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import reference
import torch
from ray.exceptions import RayTaskError
from ray.tune.result import TRIAL_INFO
from torch import Tensor, nn
from trainables import Points

import hfta_tune.tune._actor
import hfta_tune.tune._executor
from hfta_tune.tune._actor import WorkerActor, _Ahead
from hfta_tune.tune._sealed import Sealed

CONFIGS = [{"lr": lr, "seed": seed} for seed, lr in enumerate((0.003, 0.01, 0.03, 0.1))]
FAR_OFF = 60.0


class Gated(Points):
    """Its training step waits at a gate, and says that it has come there."""

    gate: ClassVar[threading.Event]
    waits: ClassVar[threading.Event]

    def training_step(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        if not Gated.gate.is_set():
            Gated.waits.set()
            assert Gated.gate.wait(FAR_OFF)
        return super().training_step(model, batch, config)

    def log_result(self, result: dict[str, Any]) -> None:
        """Nowhere. In older Ray, a Trainable that Tune has given no logger writes files, and `reset` closes them."""


class Fails(Gated):
    """The trial with seed 1 fails at the end of its second round."""

    def evaluate(self, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
        self.rounds = getattr(self, "rounds", 0) + 1
        if config["seed"] == 1 and self.rounds == 2:
            raise RuntimeError("had enough")
        return {}


class SavesItself(Gated):
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        super().save_checkpoint(checkpoint_dir)


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The gate shuts when a round begins that nobody has asked for."""
    threads = torch.get_num_threads()
    for lane in range(3):  # now: torch has one random generator, and the worker's thread uses it too
        for rounds in (1, 2, 3):
            alone(lane, rounds)
    monkeypatch.setattr(hfta_tune.tune._executor, "prepare_worker_process", lambda: None)
    Gated.gate, Gated.waits = threading.Event(), threading.Event()
    Gated.gate.set()
    begin = _Ahead.begin

    def begin_and_shut(self: _Ahead) -> set[int]:
        Gated.waits.clear()
        Gated.gate.clear()
        return begin(self)

    monkeypatch.setattr(_Ahead, "begin", begin_and_shut)
    yield
    monkeypatch.undo()
    Gated.gate.set()
    torch.set_num_threads(threads)


class Driver:
    """Calls a worker as the executor does."""

    def __init__(self, kind: type[Points] = Gated) -> None:
        self.actor = WorkerActor(lanes=4, cpus=1, gpus=0)
        self._number = 0
        self.send("define", 0, Sealed(kind, "the class"))

    def send(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        call: Coroutine[Any, Any, Any] = self.actor.submit(self._number, method, *arguments)
        self._number += 1
        return asyncio.ensure_future(call)

    def create(self, *lanes: int) -> None:
        for lane in lanes:
            info = types.SimpleNamespace(trial_id=f"trial{lane}", trial_name=f"trial{lane}")
            self.send("create", lane, 0, Sealed(({**CONFIGS[lane], TRIAL_INFO: info}, None), "the config"))

    def call(self, lane: int, method: str, *arguments: Any) -> asyncio.Task[Any]:
        return self.send("call", lane, method, Sealed((arguments, {}), "an argument"))

    async def round(self, *lanes: int, ending: tuple[int, ...] = ()) -> list[Any]:
        results, _ = await asyncio.wait_for(self.send("round", lanes, None, ending), FAR_OFF)
        return results

    async def saved(self, lane: int, directory: Path) -> dict[str, Any]:
        await asyncio.wait_for(self.call(lane, "save", str(directory)), FAR_OFF)
        return torch.load(directory / "checkpoint.pt", weights_only=True)

    async def in_the_middle(self) -> None:
        """The worker has begun a round that nobody has asked for, and stands in its first step."""
        assert await asyncio.to_thread(Gated.waits.wait, FAR_OFF)


@functools.cache
def alone(lane: int, rounds: int) -> reference.Snapshot:
    return reference.train(Points._outside_tune(CONFIGS[lane]), CONFIGS[lane], rounds)[-1]


def assert_result(result: Any, lane: int, rounds: int) -> None:
    expected = alone(lane, rounds).metrics
    assert result["training_iteration"] == rounds
    reference.assert_same({name: result[name] for name in expected}, expected, f"lane {lane}, round {rounds}")


async def in_the_second_round(kind: type[Points] = Gated, lanes: int = 2) -> Driver:
    """A worker that has given the results of one round and stands in the first step of the next."""
    driver = Driver(kind)
    driver.create(*range(lanes))
    for lane, result in enumerate(await driver.round(*range(lanes))):
        assert_result(result, lane, 1)
    await driver.in_the_middle()
    return driver


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@scenario
async def test_what_is_saved_is_the_round_that_was_reported(tmp_path: Path) -> None:
    driver = await in_the_second_round()
    Gated.gate.set()
    # The next call after the round's end: the lanes have trained two rounds, and one has been reported.
    while driver.actor._ahead is None or not driver.actor._ahead._ready:
        await asyncio.sleep(0.001)
    for lane in (0, 1):
        saved = await driver.saved(lane, tmp_path / str(lane))
        reference.assert_like(saved, alone(lane, 1), f"lane {lane}")
        assert saved["epoch"] == 1
    for lane, result in enumerate(await driver.round(0, 1, ending=(0, 1))):
        assert_result(result, lane, 2)
        reference.assert_like(await driver.saved(lane, tmp_path / f"later{lane}"), alone(lane, 2), f"lane {lane}")


@scenario
async def test_a_save_does_not_wait_for_the_end_of_the_round(tmp_path: Path) -> None:
    driver = await in_the_second_round()
    answer = asyncio.ensure_future(driver.saved(0, tmp_path))
    Gated.gate.set()
    assert (await answer)["epoch"] == 1
    reference.assert_like(await answer, alone(0, 1), "lane 0")
    assert_result((await driver.round(0, 1, ending=(0, 1)))[0], 0, 2)


@scenario
async def test_a_lane_that_was_stopped_is_dropped() -> None:
    driver = await in_the_second_round()
    stopped = driver.call(0, "stop")
    asked = asyncio.ensure_future(driver.round(1, ending=(1,)))
    Gated.gate.set()
    await stopped
    assert driver.actor._worker.trial_ids == [driver.actor._trainables[1].trial_id]
    (result,) = await asked
    assert_result(result, 1, 2)


@scenario
async def test_a_round_of_lanes_that_all_stop_is_given_up() -> None:
    driver = await in_the_second_round()
    stopped = [driver.call(lane, "stop") for lane in (0, 1)]
    driver.create(2)
    asked = asyncio.ensure_future(driver.round(2, ending=(2,)))
    Gated.gate.set()
    await asyncio.gather(*stopped)
    (result,) = await asked
    assert_result(result, 2, 1)


@pytest.mark.parametrize("anew", [True, False])
@scenario
async def test_lanes_that_join_in_the_middle(anew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Ahead, "is_better_begun_anew", lambda self, asked: anew)
    driver = await in_the_second_round()
    driver.create(2)
    asked = asyncio.ensure_future(driver.round(0, 1, 2, ending=(0, 1) if anew else ()))
    Gated.gate.set()
    results = await asked
    assert_result(results[0], 0, 2)
    assert_result(results[1], 1, 2)
    if anew:
        assert_result(results[2], 2, 1)
    else:
        assert results[2] is None
        await driver.in_the_middle()
        asked = asyncio.ensure_future(driver.round(2, 0, 1, ending=(0, 1, 2)))
        Gated.gate.set()
        results = await asked
        assert_result(results[0], 2, 1)
        assert_result(results[1], 0, 3)


@scenario
async def test_an_exploited_lane_goes_on_from_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Ahead, "is_better_begun_anew", lambda self, asked: False)
    driver = await in_the_second_round()
    saved = driver.call(1, "save", str(tmp_path))
    Gated.gate.set()
    await driver.call(0, "restore", await saved)
    results = await driver.round(0, 1, ending=(0, 1))
    assert results[0] is None  # its round of before is void
    assert_result(results[1], 1, 2)
    (result,) = await driver.round(0, ending=(0,))
    assert result["training_iteration"] == 2
    # Lane 0 has another learning rate, so it is not lane 1's second round; its first batch's loss would be.
    state = await driver.saved(0, tmp_path / "after")
    assert state["epoch"] == 2
    assert state["optimizer"]["param_groups"][0]["lr"] == CONFIGS[0]["lr"]


@scenario
async def test_a_lane_that_is_used_again_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Ahead, "is_better_begun_anew", lambda self, asked: False)
    driver = await in_the_second_round()
    reset = driver.call(0, "reset", dict(CONFIGS[2]), None)
    Gated.gate.set()
    assert await reset
    results = await driver.round(0, 1, ending=(0, 1))
    assert results[0] is None
    (result,) = await driver.round(0, ending=(0,))
    assert_result(result, 2, 1)


@scenario
async def test_what_goes_wrong_is_told_with_the_result_and_not_before(tmp_path: Path) -> None:
    driver = await in_the_second_round(Fails)
    Gated.gate.set()
    while driver.actor._ahead is None or not driver.actor._ahead._ready:
        await asyncio.sleep(0.001)
    reference.assert_like(await driver.saved(1, tmp_path), alone(1, 1), "the lane that is going to fail")
    results = await driver.round(0, 1, ending=(0, 1))
    assert_result(results[0], 0, 2)
    assert isinstance(results[1], RayTaskError) and "had enough" in str(results[1])


@scenario
async def test_nothing_runs_ahead_of_lanes_that_end_or_that_save_more_than_their_lane() -> None:
    driver = Driver()
    driver.create(0, 1)
    await driver.round(0, 1, ending=(0, 1))
    own = Driver(SavesItself)
    own.create(0, 1)
    await own.round(0, 1)
    for actor in (driver.actor, own.actor):
        assert actor._ahead is not None and not actor._ahead.next and not actor._ahead.running
        assert not actor._worker._held


@pytest.mark.parametrize(
    ("running", "asked", "gone", "anew"),
    [
        (8, 8, 0.5, False),  # nobody joins
        (4, 8, 0.4, True),
        (4, 8, 0.6, False),
        (1, 8, 0.8, True),
        (7, 8, 0.05, True),
        (7, 8, 0.5, False),
    ],
)
def test_when_a_round_is_begun_anew(
    running: int, asked: int, gone: float, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = _Ahead()
    now = [100.0]
    monkeypatch.setattr(hfta_tune.tune._actor.time, "perf_counter", lambda: now[0])
    ahead.plan(range(running), (), (), None)
    ahead.begin()
    ahead.seconds = 10.0
    now[0] += 10.0 * gone
    assert ahead.is_better_begun_anew(range(asked)) is anew
