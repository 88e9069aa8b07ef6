"""The command line, `hfta-tune COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["COMMANDS", "main"]

# A command's module has add_arguments(parser), and run(args), which returns the exit code. Only the one asked for is
# imported.
COMMANDS = {
    "timeline": ("hfta_tune.monitor.timeline", "draw which trial had which lane when"),
    "check": ("hfta_tune.monitor.check", "say which trials of a search would train together"),
    "grafana": ("hfta_tune.monitor.grafana", "write the Grafana dashboard of a run's metrics"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 where it went well.

    Args:
        argv: The arguments, without the program's name; None takes those of the process.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="hfta-tune", description="Looks at runs of hfta_tune, past and to come.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if arguments[:1] == [name]:
            module = import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
