"""Configs that note what is read."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from hfta_tune._recording import MISSING, ConfigPath, RecordingConfig, lookup, numbers_of, plain

CONFIG = {"lr": 0.1, "name": "a", "optimizer": {"momentum": 0.9, "nesterov": True}, "empty": {}}
ALL = {("lr",), ("name",), ("optimizer", "momentum"), ("optimizer", "nesterov"), ("empty",)}


class Reads:
    def __init__(self) -> None:
        self.paths: set[ConfigPath] = set()
        self.whole = 0
        self.config = RecordingConfig(CONFIG, self.note, self.note_whole)

    def note(self, path: ConfigPath, value: Any) -> Any:
        self.paths.add(path)
        return value

    def note_whole(self) -> None:
        self.whole += 1


SINGLE: list[tuple[Any, set[ConfigPath], Any]] = [
    (lambda c: c["lr"], {("lr",)}, 0.1),
    (lambda c: c.get("lr"), {("lr",)}, 0.1),
    (lambda c: c.get("nothing", 7), {("nothing", MISSING)}, 7),
    (lambda c: "lr" in c, {("lr", MISSING)}, True),
    (lambda c: "nothing" in c, {("nothing", MISSING)}, False),
    (lambda c: c["optimizer"]["momentum"], {("optimizer", "momentum")}, 0.9),
    (lambda c: c["optimizer"].get("nesterov"), {("optimizer", "nesterov")}, True),
    (lambda c: c["empty"], {("empty",)}, {}),
    (lambda c: isinstance(c, dict), set(), True),
    (lambda c: c["optimizer"] and None, {("optimizer", "momentum"), ("optimizer", "nesterov")}, None),
]


@pytest.mark.parametrize(("read", "paths", "value"), SINGLE, ids=range(len(SINGLE)))
def test_a_read_of_one_key_is_a_read_of_one_key(read: Any, paths: set[ConfigPath], value: Any) -> None:
    reads = Reads()
    assert read(reads.config) == value
    assert reads.paths == paths


def test_a_missing_key_raises_and_is_noted() -> None:
    reads = Reads()
    with pytest.raises(KeyError, match="nothing"):
        reads.config["nothing"]
    assert reads.paths == {("nothing", MISSING)}


WHOLE = [
    dict,
    list,
    len,
    repr,
    copy.copy,
    copy.deepcopy,
    json.dumps,
    pickle.dumps,
    lambda c: {**c},
    lambda c: c.copy(),
    lambda c: c | {"x": 1},
    lambda c: {"x": 1} | c,
    lambda c: list(c.items()),
    lambda c: list(c.values()),
    lambda c: list(c.keys()),
    lambda c: c == {},
    lambda c: (lambda **k: k)(**c),
]


@pytest.mark.parametrize("read", WHOLE, ids=range(len(WHOLE)))
def test_iterating_or_copying_reads_everything(read: Any) -> None:
    reads = Reads()
    read(reads.config)
    assert reads.whole >= 1
    assert {path[0] for path in reads.paths} | {"optimizer"} == {"lr", "name", "optimizer", "empty"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: plain(c)])
def test_copies_are_the_plain_config(copied: Any) -> None:
    reads = Reads()
    result = copied(reads.config)
    assert result == CONFIG and type(result["optimizer"]) is dict
    assert reads.paths == ALL


def test_lookup() -> None:
    assert lookup(CONFIG, ("optimizer", "momentum")) == 0.9
    assert lookup(CONFIG, ("optimizer", "lr")) is MISSING
    assert lookup(CONFIG, ("lr", "deeper")) is MISSING
    assert lookup(CONFIG, ("lr", MISSING)) is True
    assert lookup(CONFIG, ("nothing", MISSING)) is MISSING


def test_numbers() -> None:
    assert numbers_of({"a": 1, "b": {"c": 2.5}, "d": True, "e": "x"}) == {("a",): 1.0, ("b", "c"): 2.5}
