"""What a user's hook raises, as one error that is enough to fix it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfta_tune.fusion import FusionError, first_line

__all__ = ["error_of_hook", "explained"]

_HOOKS = (
    "setup",
    "build_model",
    "build_optimizer",
    "build_lr_scheduler",
    "train_dataloader",
    "val_dataloader",
    "training_step",
    "validation_step",
    "evaluate",
)


@contextlib.contextmanager
def explained(trainable: type, trial: str, config: dict[str, Any]) -> Iterator[None]:
    """Make a FusionError of what a hook raises inside."""
    try:
        yield
    except FusionError:
        raise
    except Exception as error:
        raise error_of_hook(error, trainable, trial, config) from error


def error_of_hook(error: Exception, trainable: type, trial: str, config: dict[str, Any]) -> FusionError:
    """Name the hook, the place, the trial and its config, and say what to do."""
    hook = place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name in _HOOKS and isinstance(trace.tb_frame.f_locals.get("self"), trainable):
            hook, place = code.co_name, f" ({Path(code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, KeyError) and error.args and error.args[0] not in config:
        remedy = f"Give the config a value of {error.args[0]!r}"
    else:
        remedy = f"See that {hook or 'it'} works for this config"
    what = hook or "building or training it"
    return FusionError(f"trial {trial}: {what}{place} raised {first_line(error)}. {remedy}: {config!r:.300}.")
