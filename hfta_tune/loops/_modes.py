"""torch's modes of the running thread, which all lanes of a hub share: each lane takes its own with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

__all__ = ["Modes"]

_AUTOCAST_DEVICES = ("cpu", "cuda")
# Each lane asks this several times a step.
_any_autocast = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
)
_grad, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_functions, _dispatchers = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


@dataclass(slots=True)
class Modes:
    """The modes that a lane's own code has set where it calls for something that is done for all lanes.

    Attributes:
        grad: Whether gradients are on.
        autocast: {device: dtype} of those devices on which autocast is on.
        nesting: How many autocast contexts it is in.
        caches: Whether autocast keeps what it has cast.
    """

    grad: bool
    autocast: dict[str, torch.dtype]
    nesting: int = 0
    caches: bool = True
    _normal: Any = None
    _functions: list[Any] | None = None
    _dispatchers: list[Any] | None = None

    @classmethod
    def set_aside(cls, function_modes: int, dispatch_modes: int) -> Modes | None:
        """Leave the modes that a lane has entered; None if there are none.

        Args:
            function_modes: How many torch function modes there are without the lane's.
            dispatch_modes: How many torch dispatch modes there are without the lane's.
        """
        functions, dispatchers = _functions() - function_modes, _dispatchers() - dispatch_modes
        grad, inference = _grad(), _inference()
        if grad and not (inference or functions or dispatchers or _any_autocast()):
            return None
        autocast = {
            device: torch.get_autocast_dtype(device)
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        }
        modes = cls(grad and not inference, autocast)
        # The innermost first, and back in the opposite order.
        modes._dispatchers = [dispatch._pop_mode() for _ in range(dispatchers)]
        modes._functions = [torch.overrides._pop_mode() for _ in range(functions)]
        if inference:
            modes._normal = torch.inference_mode(False)
            modes._normal.__enter__()
        if autocast:
            # Kept until the last context is left: other lanes step meanwhile, and their casts would be old.
            modes.nesting, modes.caches = torch.autocast_increment_nesting() - 1, torch.is_autocast_cache_enabled()
            for _ in range(modes.nesting + 1):
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(True)
        for device in autocast:
            torch.set_autocast_enabled(device, False)
        torch.set_grad_enabled(True)
        return modes

    def take_up(self) -> None:
        """Enter the modes again."""
        if self._normal is not None:
            self._normal.__exit__(None, None, None)
            torch.set_grad_enabled(False)
        elif not self.grad:
            torch.set_grad_enabled(False)
        if self.autocast:
            for _ in range(self.nesting):
                torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(self.caches)
        for device, dtype in self.autocast.items():
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, dtype)
        for mode in reversed(self._functions or ()):
            torch.overrides._push_mode(mode)
        for mode in reversed(self._dispatchers or ()):
            dispatch._push_mode(mode)
