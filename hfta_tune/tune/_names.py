"""Names of actors, which are unique in a namespace."""

from __future__ import annotations

import uuid
from typing import Any

from ray.actor import ActorClass

__all__ = ["named"]


class _Named:
    """Starts an actor by its name, or by that and some digits where another actor has it.

    Runs in one namespace may have equal names, and a name is in use until its actor's process has ended.
    """

    def __init__(self, actor_class: ActorClass, name: str, options: dict[str, Any]) -> None:
        self._actor_class = actor_class
        self._name = name
        self._options = options

    def remote(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return self._start(self._name, arguments, keywords)
        except ValueError:  # what Ray raises of a name that is taken
            return self._start(f"{self._name}:{uuid.uuid4().hex[:8]}", arguments, keywords)

    def _start(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return ActorClass.options(self._actor_class, **self._options, name=name).remote(*arguments, **keywords)


def named(actor_class: ActorClass, name: str) -> ActorClass:
    """Have the actors of a class named, where the resource managers of Ray Air start them: by options, then remote."""

    def options(**options: Any) -> _Named:
        return _Named(actor_class, name, options)

    actor_class.options = options
    return actor_class
