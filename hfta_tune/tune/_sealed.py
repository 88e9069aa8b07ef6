"""What a user's objects need to get through between driver and worker without taking other trials along."""

from __future__ import annotations

from typing import Any

from ray import cloudpickle

from hfta_tune.fusion import FusionError, first_line

__all__ = ["Sealed", "portable"]


class Sealed:
    """An object of the user's, unpickled only where it is used: a failure is one of that use, not of the transport.

    That of pickling it, too.

    Ray drops a call whose arguments it cannot unpickle. The calls of a worker are numbered, so the next ones would
    wait for it for ever.

    Args:
        value: The object.
        what: What it is, for the message.
    """

    def __init__(self, value: Any, what: str) -> None:
        self._what = what
        self._pickled = b""
        self._obstacle = ""
        try:
            self._pickled = cloudpickle.dumps(value)
        except Exception as error:
            self._obstacle = first_line(error)

    def open(self) -> Any:
        """Return the object.

        Raises:
            FusionError: if it could not be pickled, or cannot be unpickled in this process.
        """
        if self._obstacle:
            raise FusionError(f"{self._what} cannot be pickled for the worker's process ({self._obstacle}).")
        try:
            return cloudpickle.loads(self._pickled)
        except Exception as error:
            raise FusionError(
                f"{self._what} cannot be loaded in the worker's process ({first_line(error)}). Its module must be "
                "importable there too: install it, or name it in ray.init(runtime_env={'py_modules': [...]})."
            ) from error


def portable(error: BaseException) -> Exception:
    """Return an error as it is if it survives pickling and a Future takes it, else one that has its text."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
            return error
        except Exception:
            pass
    return RuntimeError(f"{type(error).__name__}: {error}")
