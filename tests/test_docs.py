"""The documentation: its code runs, its tables are those of the tests, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from warm import WarmPython

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])

# A block that is not run has this comment before it, with the reason.
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\s*")

# README's class takes its data loaders from elsewhere, and its runs are too long for a test.
README_NEEDS = """
import torch as _torch
_x = _torch.randn(256, 64, generator=_torch.Generator().manual_seed(0))
train_loader = val_loader = list(zip(_x.split(64), _x[:, :10].argmax(1).split(64)))
import os as _os; _os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
import ray as _ray; _ray.init(num_cpus=2, include_dashboard=False)
"""
README_SMALLER = {
    "num_samples=128": "num_samples=32",
    "n_trials=128": "n_trials=32",
    '"training_iteration": 20': '"training_iteration": 2',
    "epochs=20": "epochs=2",
}


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """Of each fenced block that is run the language, the number of lines before its code, and the code."""
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        comments = text[: match.start()].rpartition("\n\n")[2]
        if not NOT_RUN.fullmatch(comments):
            yield match[1], text.count("\n", 0, match.start(2)), match[2]


def script(text: str) -> str:
    """The Python of a page, each line where it is in the page, so that errors name the page's lines."""
    lines: list[str] = []
    for language, before, code in blocks(text):
        if language == "python":
            lines += [""] * (before - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n"


def commands(text: str) -> list[str]:
    """The calls of hfta-tune in a page."""
    shell = "\n".join(code for language, _, code in blocks(text) if language == "bash")
    return [line for line in shell.replace("\\\n", " ").splitlines() if line.startswith("hfta-tune ")]


WITH_CODE = [page for page in PAGES if script(page.read_text()).strip() or commands(page.read_text())]


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("HFTA_TUNE_STRATEGY", None)
    with WarmPython(environment) as python:
        yield python


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in WITH_CODE])
def test_a_page_s_code_runs(page: Path, tmp_path: Path, python: WarmPython) -> None:
    """Its blocks in order, as one script of a user's; then its calls of hfta-tune, in the same folder."""
    code = script(page.read_text())
    if page.name == "README.md" and page.parent == ROOT:
        for long, short in README_SMALLER.items():
            assert long in code
            code = code.replace(long, short)
        code = f"exec({README_NEEDS!r}); {code.lstrip()}"
    calls = [
        f"from hfta_tune.cli import main; raise SystemExit(main({shlex.split(command)[1:]}))"
        for command in commands(page.read_text())
    ]
    for number, text in enumerate([code, *calls]):
        file, log = tmp_path / f"{page.stem}{number or ''}.py", tmp_path / "log"
        file.write_text(text)
        returned = python.run(file, log, HOME=str(tmp_path))
        assert returned == 0, f"{text if number else page.name}\n{log.read_text()[-6000:]}"


@pytest.mark.slow
def test_the_report_of_a_check_is_the_one_that_is_printed(tmp_path: Path, python: WarmPython) -> None:
    """But for times and rounding, and the advice that goes with times."""
    text = (ROOT / "docs" / "monitoring.md").read_text()
    before, shown = re.split(r"<!-- printed by the code above -->\n```\n", text)
    (tmp_path / "check.py").write_text(script(before))
    assert python.run(tmp_path / "check.py", tmp_path / "log") == 0
    printed = (tmp_path / "log").read_text()
    kept = [[line for line in own.splitlines() if line] for own in (shown.partition("```")[0], printed)]
    of_labels = [{line[:14].strip(): line[14:] for line in own if line[0] != " "} for own in kept]
    assert list(of_labels[0]) == list(of_labels[1])
    for label in of_labels[0].keys() - {"strategy", "audit"}:
        assert of_labels[0][label] == of_labels[1][label]
    assert all("(a step of 16 lanes: " in own["strategy"] and "vmap: passed" in own["audit"] for own in of_labels)


def test_a_block_says_why_it_is_not_run() -> None:
    reasons = [line for page in PAGES for line in page.read_text().splitlines() if "<!-- not run" in line]
    assert all(NOT_RUN.fullmatch(line) for line in reasons), reasons


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose):
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
            assert heading in anchors, target


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert not [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index]


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "_generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_tests(generate: ModuleType) -> None:
    """Made anew with `python docs/_generate.py`."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    if pinned is None or not torch.__version__.startswith(pinned[1]):
        pytest.skip("another torch has other classes, so other rows")
    for page in generate.TABLES:
        text = (ROOT / "docs" / page).read_text()
        assert generate.with_tables(page) == text, f"docs/{page} is out of date: run python docs/_generate.py"
