"""The trace of a run: a hash of all events, and the last events as text.

The hash covers values, but not the names of classes, modules and fields. So a change that only
moves or renames code leaves the hash unchanged.
"""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from pccl.machines.master.events import MasterTick
from pccl.machines.peer.events import Tick
from pccl.protocol.types import NS_PER_S

STORY_LINES_MAX = 400
_LINES_PER_UPDATE = 1000

_ROUTINE_LINES = ("deliver ", "writable ")
_ROUTINE_EVENTS = frozenset((MasterTick, Tick))
"""What happens all the time: the hash includes it, but the story does not."""

_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))


class Trace:
    """Collects the events of a run, in order."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._unhashed: list[str] = []
        self._story: deque[tuple[int, str, object]] = deque(maxlen=STORY_LINES_MAX)

    def note(self, now_ns: int, who: str, what: object) -> None:
        """Record that ``what``, an event or a line of text, happened to ``who``."""
        self.count += 1
        content: object = what
        if isinstance(what, str):
            is_routine = what.startswith(_ROUTINE_LINES)
        else:
            content, is_routine = values_of(what), what.__class__ in _ROUTINE_EVENTS
        self._unhashed.append(f"{now_ns} {who} {content!r}\n")
        if len(self._unhashed) >= _LINES_PER_UPDATE:
            self._hash_lines()
        if not is_routine:
            self._story.append((now_ns, who, what))

    def _hash_lines(self) -> None:
        self._hash.update("".join(self._unhashed).encode())
        self._unhashed.clear()

    @property
    def digest(self) -> str:
        """Hash of all events so far: equal if and only if the same events happened."""
        self._hash_lines()
        return self._hash.hexdigest()

    def story(self, lines: int = STORY_LINES_MAX) -> str:
        """Return the last ``lines`` events as text, without routine events."""
        entries = list(self._story)[-lines:]
        return "\n".join(
            f"{now_ns / NS_PER_S:14.9f} {who:<8} {what}" for now_ns, who, what in entries
        )


def values_of(what: object) -> object:
    """Return the content of a value, without the names of its classes.

    Raises:
        TypeError: a part has a type whose ``repr`` may depend on its address.
    """
    kind: Any = type(what)
    return _reader(kind)(what)


@cache
def _reader(kind: Any) -> Callable[[Any], object]:
    """Return the function that reads the content of values of type ``kind``."""
    if kind in _PLAIN:
        return lambda what: what
    if issubclass(kind, enum.Enum):
        return lambda what: what.value
    if issubclass(kind, tuple | list):
        return lambda what: [
            each if each.__class__ in _PLAIN else _reader(each.__class__)(each) for each in what
        ]
    if issubclass(kind, BaseException):
        return str
    if issubclass(kind, Mapping):
        return lambda what: [[values_of(key), values_of(each)] for key, each in what.items()]
    if issubclass(kind, set | frozenset):
        return lambda what: sorted(repr(values_of(each)) for each in what)
    if not is_dataclass(kind):
        raise TypeError(f"a trace cannot hold a value of type {kind.__name__}")
    names = [field.name for field in fields(kind)]
    return lambda what: [
        each if each.__class__ in _PLAIN else _reader(each.__class__)(each)
        for each in map(what.__getattribute__, names)
    ]
