"""Distributions of this environment, put into another one by links: what pip has unpacked it need not unpack again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["link", "needed_by"]


def needed_by(requirement: str) -> dict[str, metadata.Distribution]:
    """What is installed here of what a requirement brings, by name: all that it needs, and nothing else.

    Args:
        requirement: An installed distribution with its extras, such as "hfta-tune[dashboard]", which is left out.
    """
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    pending = [Requirement(requirement)]
    root = canonicalize_name(pending[0].name)
    while pending:
        own = pending.pop()
        name = canonicalize_name(own.name)
        for extra in ("", *own.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                distribution = metadata.distribution(own.name)
            except metadata.PackageNotFoundError:
                break
            if name != root:
                found[name] = distribution
            needs = map(Requirement, distribution.requires or ())
            pending += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return found


def link(distribution: metadata.Distribution, environment: Path) -> None:
    """Put a distribution into a virtual environment of the same Python and the same folders within."""
    here = Path(os.path.abspath(distribution.locate_file("../../..")))
    for place in _files_of(distribution):
        source = Path(os.path.abspath(place))
        target = environment / source.relative_to(here)
        if target.exists():  # several distributions have a namespace's files
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.parent == here / "bin":
            _copy_program(source, target, environment)
        else:
            try:
                os.link(source, target)
            except OSError:  # on another file system
                shutil.copy2(source, target)


def _files_of(distribution: metadata.Distribution) -> Iterator[Path]:
    for file in distribution.files or ():
        place = Path(str(distribution.locate_file(file)))
        if place.is_file():  # its bytecode need not be there
            yield place


def _copy_program(source: Path, target: Path, environment: Path) -> None:
    """Copy a program; a script's first line names the Python that runs it."""
    content = source.read_bytes()
    if content.startswith(b"#!"):
        _, line, rest = content.partition(b"\n")
        content = f"#!{environment / 'bin' / 'python'}".encode() + line + rest
    target.write_bytes(content)
    target.chmod(source.stat().st_mode)
