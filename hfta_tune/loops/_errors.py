"""Errors that several lanes get."""

from __future__ import annotations

import copy
from typing import TypeVar

__all__ = ["copy_of_error", "note"]

_Error = TypeVar("_Error", bound=BaseException)


def copy_of_error(error: _Error) -> _Error:
    """An error for one of the lanes that get it, so that what is noted in it is that lane's; itself without a copy."""
    try:
        own = copy.copy(error)
    except Exception:
        return error
    if type(own) is not type(error) or str(own) != str(error):
        return error
    own.__traceback__, own.__cause__ = error.__traceback__, error.__cause__
    if (notes := getattr(error, "__notes__", None)) is not None:
        vars(own)["__notes__"] = list(notes)
    return own


def note(error: BaseException, text: str) -> None:
    """Add a note to an error, from Python 3.11 on."""
    getattr(error, "add_note", lambda note: None)(text)
