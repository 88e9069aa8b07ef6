"""The one exception and the one warning class of hfta_tune."""

from __future__ import annotations

__all__ = ["FusionError", "FusionWarning"]


class FusionError(Exception):
    """A trial cannot be trained as written; the message names the trial, the value and the remedy."""


class FusionWarning(UserWarning):
    """Something trains right but slower than it could; the message says what stood in the way."""
