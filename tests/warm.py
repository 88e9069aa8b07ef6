"""A process that has imported what takes long, and forks one for each script: none waits for torch and Ray again."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["WarmPython"]


class WarmPython:
    """Runs scripts, each in a process of its own, as `python SCRIPT` does.

    Args:
        environment: The processes' environment; what the imports read of it is read once.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()
        with contextlib.suppress(ProcessLookupError):  # scripts that a time limit has cut off
            os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, script: Path, log: Path, **environment: str) -> int:
        """Run a script in its folder with its outputs in a file; return its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), str(log), environment]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _become(script: str, log: str, environment: Mapping[str, str]) -> None:
    """Be the process of a script."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    os.chdir(Path(script).parent)
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As Python ends, but for the freeing of each module, which takes a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _serve() -> None:
    import optuna  # noqa: F401
    import ray.tune  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401

    import hfta_tune.optuna
    import hfta_tune.tune  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(*json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
