"""The command line of the check: hfta-tune check module:Class."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from hfta_tune.fusion import FusionError
from hfta_tune.monitor.check._check import check
from hfta_tune.monitor.check._space import Space

__all__ = ["add_arguments", "run"]

_EPILOG = """\
--config is a config as Tune takes it, in JSON: values are fixed, and {"grid_search": [...]} is a grid. A list is a
value. --space names a search space in Python: a dict with Tune's domains (tune.loguniform and so on), or a function of
an Optuna trial that returns the config. Given both, an entry of --config replaces the whole entry of that name, a
nested one too, and may be new. With a function, which is called all the same, it must be a value and no grid.

  hfta-tune check digits:Digits --config '{"lr": 0.01, "hidden": {"grid_search": [32, 64]}}'
  hfta-tune check digits:Digits --space digits:space --lanes 32

The exit code is 0, 1 if the audit fails (fused training differs from plain PyTorch by more than rounding), and 2
where the check could not be made, whatever the reason.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("trainable", metavar="MODULE:CLASS", help="the FusedTrainable, such as digits:Digits")
    parser.add_argument("--config", metavar="JSON", default="{}", help="a config, in JSON")
    parser.add_argument("--space", metavar="MODULE:NAME", help="a search space, in Python")
    parser.add_argument("--lanes", type=int, default=8, help="B, how many trials would share a worker (default: 8)")
    parser.add_argument("--trials", type=int, default=64, help="how many trials to sample (default: 64)")
    parser.add_argument("--device", help='where to measure, such as "cuda:0" (default: CUDA if there, else the CPU)')
    parser.add_argument("--compile", action="store_true", help="measure the compiled step too; may take a minute")
    parser.add_argument("--seed", type=int, default=0, help="governs what is sampled (default: 0)")
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Check, print the report, and return the exit code: 1 if the audit fails."""
    try:
        report = check(
            _named(args.trainable),
            _space(args),
            lanes=args.lanes,
            trials=args.trials,
            device=args.device,
            compile=args.compile,
            seed=args.seed,
        )
    except (FusionError, TypeError, ValueError) as error:
        args.error(str(error))
        raise  # argparse has ended the process
    except Exception:
        traceback.print_exc()
        return 2
    print(report)
    return 0 if report.passed else 1


def _space(args: argparse.Namespace) -> Space:
    try:
        config = json.loads(args.config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--config is no JSON ({error}): {args.config}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config must be a JSON object of keys and values but got {args.config}.")
    space = {} if args.space is None else _named(args.space)
    if isinstance(space, Mapping):
        return {**space, **config}
    if not callable(space) or not config:
        return space  # type: ignore[no-any-return]
    for key, value in config.items():
        if isinstance(value, dict) and "grid_search" in value:
            raise ValueError(f"--config has a grid in {key!r}, but --space is a function; give {key!r} one value.")
    return lambda trial: {**space(trial), **config}


def _named(text: str) -> Any:
    """What MODULE:NAME names; modules of the working directory are found too."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ValueError(f"{text!r} names nothing; write MODULE:NAME, such as digits:Digits.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"importing {module_name} failed: {error}.") from error
        raise ValueError(
            f"there is no module {module_name!r} in the working directory or on the Python path; run it where that is."
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"module {module_name!r} has no {name!r}.")
    return getattr(module, name)
