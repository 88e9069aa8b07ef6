"""The Dockerfiles, with no Docker engine: linted, read, and the CPU image's steps carried out in a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dockerfile_parse import DockerfileParser
from installed import link, needed_by
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
CPU, CUDA = DOCKERFILES

# Not carried out: what changes the machine.
SYSTEM_COMMANDS = ("apt-get", "useradd")
IMAGE_FOLDERS = re.compile(r"(?<!\w)/(opt|src|dashboards|home)\b")


def steps(dockerfile: Path) -> list[tuple[str, str]]:
    """The instructions and their values, in order."""
    structure = DockerfileParser(str(dockerfile), cache_content=True).structure
    return [(step["instruction"], step["value"]) for step in structure if step["instruction"] != "COMMENT"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert hadolint is not None
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_each_base_has_a_digest_and_the_user_is_not_root(dockerfile: Path) -> None:
    stages: set[str] = set()
    users: list[str] = []
    for instruction, value in steps(dockerfile):
        if instruction == "FROM":
            base, *name = value.split(" AS ")
            assert base in stages or "@sha256:" in base, value
            stages.update(name)
            users = []
        elif instruction == "USER":
            users.append(value)
    assert users
    assert users[-1].split(":")[0] not in ("0", "root")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_in_the_context(dockerfile: Path) -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for instruction, value in steps(dockerfile)
        if instruction == "COPY" and not value.startswith("--from")
        for source in value.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_the_cuda_image_differs_in_torch_and_the_driver_only() -> None:
    differing = set(steps(CPU)) ^ set(steps(CUDA))
    assert differing
    for instruction, value in differing:
        assert "torch" in value.lower() or (instruction == "ENV" and "RAY_USAGE_STATS_ENABLED" in value)


class Folder:
    """Stands for the file system of an image: carries out a Dockerfile's steps in a folder.

    All stages share it, so that what is copied from another stage is in its place already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.working_directory = folder
        python = Path(sys.executable).parent
        # pip's cache and no bytecode: for speed.
        self.environment = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}
        self.environment.pop("PYTHONPATH", None)
        self.installed = False

    def inside(self, text: str) -> str:
        """The text with the image's folders replaced by those in this one."""
        return IMAGE_FOLDERS.sub(rf"{self.folder}\g<0>", text)

    def carry_out(self, instruction: str, value: str) -> None:
        if instruction == "RUN":
            if not value.startswith(SYSTEM_COMMANDS):
                if "pip install" in value and not self.installed:
                    self.link_what_is_installed_here()
                self.run(["sh", "-ec", self.inside(value)])
        elif instruction == "COPY":
            self.copy(value)
        elif instruction == "ENV":
            for assignment in shlex.split(value):
                name, setting = assignment.split("=", 1)
                if name != "PIP_NO_CACHE_DIR":
                    self.environment[name] = string.Template(self.inside(setting)).substitute(self.environment)
        elif instruction == "WORKDIR":
            self.working_directory = Path(self.inside(value))
            self.working_directory.mkdir(parents=True, exist_ok=True)
        elif instruction == "CMD":
            self.run(json.loads(value))
        else:
            assert instruction in ("ARG", "FROM", "USER"), f"{instruction} is not carried out here."

    def link_what_is_installed_here(self) -> None:
        """Spare pip the unpacking of what this environment has in the pinned versions; pip finds out what is missing.

        Linked is only what the image's own requirement brings: what it forgets is missing here too.
        """
        self.installed = True
        (extras,) = {match[1] for _, value in steps(CPU) if (match := re.search(r'"\.\[([\w,]+)\]"', value))}
        pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
        pinned = {canonicalize_name(name): version for name, version in pinned.items()}
        for name, distribution in needed_by(f"hfta-tune[{extras}]").items():
            version = distribution.version
            if name == "torch":  # a given index is tried
                version = version.removesuffix("+cpu" if "TORCH_CPU_INDEX" not in os.environ else "")
            if pinned.get(name) == version and name != "setuptools":  # venv has put another one there
                link(distribution, Path(self.inside("/opt/venv")))

    def copy(self, value: str) -> None:
        *sources, target = value.split()
        if sources[0].startswith("--from="):
            assert Path(self.inside(sources[1])).exists(), value
            assert sources[1] == target, value
            return
        destination = self.working_directory / self.inside(target)
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, destination, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, destination)

    def run(self, command: list[str]) -> str:
        # Found in the image's PATH, not in this process's.
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None, command
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.working_directory,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Folder]:
    yield Folder(tmp_path)
    shutil.rmtree(tmp_path)  # more than 1 GB, which pytest would keep


@pytest.mark.slow
@pytest.mark.skipif(
    "TORCH_CPU_INDEX" not in os.environ and not torch.__version__.endswith("+cpu"),
    reason="the index of PyTorch's CPU builds is not known: set TORCH_CPU_INDEX",
)
def test_the_steps_of_the_cpu_image_install_what_the_containers_run(image: Folder) -> None:
    for instruction, value in steps(CPU):
        image.carry_out(instruction, value)

    places = image.run(
        ["python", "-c", "import hfta_tune.searchers, torch; print(hfta_tune.__file__, torch.__version__)"]
    )
    assert places.startswith(f"{image.folder}/opt/venv/")
    assert places.rstrip().endswith("+cpu")
    assert "--address" in image.run(["ray", "job", "submit", "--help"])
    image.run(["python", "-c", "import ray.dashboard.optional_deps, prometheus_client"])
    assert "--trials" in image.run(["python", image.inside("/opt/examples/digits_tune.py"), "--help"])
    image.run(["hfta-tune", "grafana", "--out", image.inside("/dashboards/hfta_tune")])
    dashboards = list((image.folder / "dashboards/hfta_tune").glob("*.json"))
    assert dashboards
    assert all(json.loads(dashboard.read_text())["panels"] for dashboard in dashboards)
