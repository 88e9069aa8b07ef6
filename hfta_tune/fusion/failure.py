"""Why a step did not run for all lanes at once."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

__all__ = ["LanesDiffer", "TornByOutOfMemory", "VmapFailed", "first_line", "line_of", "place_of"]

_ENGINE = str(Path(__file__).parent)


class LanesDiffer(Exception):
    """Raised by a step that finds that its lanes cannot share one call. Nothing has been trained."""


class VmapFailed(Exception):
    """The step does not run under vmap. Nothing has been trained; `place` says where it stopped."""

    def __init__(self, cause: Exception, place: str) -> None:
        super().__init__(f"{place}: {first_line(cause)}")
        self.cause = cause
        self.place = place


class TornByOutOfMemory(Exception):
    """Memory ran out while parameters were being updated: the lanes are between two states."""

    def __init__(self, cause: torch.OutOfMemoryError) -> None:
        super().__init__(first_line(cause))
        self.cause = cause


def place_of(error: BaseException, template: nn.Module | None) -> str:
    """Say where a step stopped: the path of the innermost module and the line of code."""
    paths = {id(m): name.removeprefix("model.") for name, m in template.named_modules()} if template else {}
    place = "the step"
    for trace in _traces(error):
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths and module is not template:
            place = f"module {paths[id(module)]!r} ({type(module).__name__})"
    line = line_of(error)
    return f"{place}, at `{line}`" if line else place


def line_of(error: BaseException) -> str:
    """The innermost line of code that is not the engine's; empty if there is no source."""
    line = ""
    for trace in _traces(error):
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_ENGINE):
            line = linecache.getline(name, trace.tb_lineno).strip() or line
    return line


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
