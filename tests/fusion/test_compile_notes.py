"""What compiling cost and gained is known to later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainables import Points

from hfta_tune.fusion.compile_notes import UNKNOWN, CompileNotes, Expected
from hfta_tune.worker import Worker


def test_a_form_that_was_never_compiled(tmp_path: Path) -> None:
    assert CompileNotes(tmp_path / "none").expected("form", lanes=8) == UNKNOWN


def test_the_first_time_is_not_what_the_next_will_take(tmp_path: Path) -> None:
    CompileNotes(tmp_path).compiled("form", 40.0)
    assert CompileNotes(tmp_path).expected("form", 8).seconds < 10
    CompileNotes(tmp_path).compiled("form", 3.5)
    assert CompileNotes(tmp_path).expected("form", 8) == Expected(3.5, UNKNOWN.gain)
    assert CompileNotes(tmp_path).expected("another form", 8) == UNKNOWN


def test_the_gain_is_that_of_the_nearest_number_of_lanes(tmp_path: Path) -> None:
    notes = CompileNotes(tmp_path)
    notes.measured("form", 8, 0.9)  # of what was never compiled: nothing to add it to
    assert notes.expected("form", 8) == UNKNOWN
    notes.compiled("form", 3.0)
    notes.measured("form", 4, -0.2)
    notes.measured("form", 32, 0.7)
    gains = [notes.expected("form", lanes).gain for lanes in (2, 4, 30, 128)]
    assert gains[0] == gains[1] < UNKNOWN.gain < gains[2] == gains[3]


def test_one_bad_measurement_does_not_rule_out_compiling(tmp_path: Path) -> None:
    notes = CompileNotes(tmp_path)
    notes.compiled("form", 3.0)
    gains = []
    for gain in (0.0, 0.8, 0.8, 0.0, 0.0, 0.0, 0.0):
        notes.measured("form", 8, gain)
        gains.append(notes.expected("form", 8).gain)
    assert gains[0] > 0.2 and gains[2] > 0.6 and gains[-1] < 0.05


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seconds": "many", "gains": {}}', '{"seconds": 3, "gains": [1]}'])
def test_a_file_that_is_not_a_note(tmp_path: Path, text: str) -> None:
    notes = CompileNotes(tmp_path)
    notes.compiled("form", 3.0)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert notes.expected("form", 8) == UNKNOWN
    notes.compiled("form", 4.0)
    assert notes.expected("form", 8).seconds == 4.0


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes = CompileNotes(tmp_path / "file")
    notes.compiled("form", 3.0)
    assert notes.expected("form", 8) == UNKNOWN


@pytest.mark.slow
def test_a_later_worker_knows_what_an_earlier_one_paid(
    always_compiles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected: list[Expected] = []
    real = CompileNotes.expected

    def ask(self: CompileNotes, form: Any, lanes: int) -> Expected:
        expected.append(real(self, form, lanes))
        return expected[-1]

    monkeypatch.setattr(CompileNotes, "expected", ask)
    for _ in range(2):
        worker = Worker(4)
        for number in range(4):
            config = {"lr": 0.01 * (number + 1)}
            worker.add(str(number), Points._outside_tune(config), config)
        for _ in range(6):
            worker.run_round(rounds_left=1e9)
        (array,) = worker.describe()["arrays"]
        assert array["strategy"] == "compiled"
    assert expected[0] == UNKNOWN
    assert expected[1].seconds < UNKNOWN.seconds and expected[1].gain != UNKNOWN.gain
