"""The calls that a worker has yet to carry out, in the order in which the driver made them."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "CallQueue"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        method: What to do.
        arguments: With what.
        answer: To be called with the result, or with None and the error.
    """

    method: str
    arguments: tuple[Any, ...]
    answer: Callable[[Any, BaseException | None], None]


class CallQueue:
    """Calls by number: each is handed out after all calls with lower numbers, whatever order they arrive in."""

    def __init__(self) -> None:
        self._early: list[tuple[int, Call]] = []
        self._due: deque[Call] = deque()
        self._next = 0
        self._changed = threading.Condition()

    def put(self, number: int, call: Call) -> None:
        """Add the call of a number; numbers are unique and begin at 0."""
        with self._changed:
            heapq.heappush(self._early, (number, call))
            while self._early and self._early[0][0] == self._next:
                self._due.append(heapq.heappop(self._early)[1])
                self._next += 1
            self._changed.notify()

    def take(self) -> Call:
        """Return the next call, once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._due)
            return self._due.popleft()

    def peek(self) -> Call | None:
        """The next call, which stays, or None if there is none yet."""
        return self._due[0] if self._due else None
