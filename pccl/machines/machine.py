"""The base class of the peer's and the master's machine, which turn events into effects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import repeat
from typing import Generic, TypeVar

from pccl.machines.history import History

_Event = TypeVar("_Event")
_Effect = TypeVar("_Effect")


class Machine(ABC, Generic[_Event, _Effect]):
    """A pure state machine that keeps a history.

    Args:
        owner: name of the machine in its history.
        now_ns: current time.
    """

    def __init__(self, owner: str, now_ns: int) -> None:
        self.history = History(owner)
        self._now_ns = now_ns
        self._effects: list[_Effect] = []
        """Effects of the current event, in order; the parts of the machine append to this list."""

    def handle(self, event: _Event, now_ns: int) -> list[_Effect]:
        """Process one event; return the effects to carry out, in order."""
        self._now_ns = now_ns
        self.history.entries.append((now_ns, event))
        self._take(event)
        effects = self._effects.copy()
        if effects:
            self._effects.clear()
            self.history.entries.extend(zip(repeat(now_ns), effects))
        return effects

    @abstractmethod
    def _take(self, event: _Event) -> None:
        """Change the state for ``event``, and append to ``_effects``."""
