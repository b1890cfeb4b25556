"""How a bug is planted: functions that take the place of the library's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Changes = list[tuple[Any, str, Any]]
"""Owner, name and replacement of each changed attribute."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

PLANTED: defaultdict[str, Changes] = defaultdict(list)


def change(bug: str, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Plant a function, or a property of it, in place of ``owner.name``."""
    found = getattr(owner, name)
    PLANTED[bug].append((owner, name, property(function) if type(found) is property else function))


def private(owner: Any, name: str) -> Any:
    """Return a private attribute, which a bug may read."""
    return getattr(owner, name)


def says(bug: str, owner: Any, name: str, answer: Any = None) -> None:
    """Plant a bug: a function or property does nothing, and always returns ``answer``."""
    change(bug, owner, name, lambda *args, **options: answer)  # pyright: ignore[reportUnknownLambdaType]


def does(owner: Any, name: str) -> Callable[[_Function], _Function]:
    """Plant a function in place of ``owner.name``; it gets the original, and its arguments."""

    def plant(function: _Function) -> _Function:
        real = getattr(owner, name)
        change(function.__name__, owner, name, lambda *args, **kw: function(real, *args, **kw))
        return function

    return plant
