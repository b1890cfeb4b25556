"""What all machines share: events and the time go in, effects come out, a story is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat
from typing import Generic, TypeVar

from pccl.machines.history import History

_Event = TypeVar("_Event")
_Effect = TypeVar("_Effect")


class Machine(ABC, Generic[_Event, _Effect]):
    """A pure state machine.

    Args:
        owner: whose it is, for the story.
        now_ns: the present.
    """

    def __init__(self, owner: str, now_ns: int) -> None:
        self.history = History(owner)
        self._now_ns = now_ns
        self._effects: list[_Effect] = []
        """Of the event that is being handled, in order; the parts of the machine append to it."""

    def handle(self, event: _Event, now_ns: int) -> list[_Effect]:
        """Take one event; return what must be done, in order."""
        self._now_ns = now_ns
        self.history.entries.append((now_ns, event))
        self._take(event)
        effects = self._effects.copy()
        self._effects.clear()
        self.history.entries.extend(zip(repeat(now_ns), self._story(effects)))
        return effects

    def _story(self, effects: list[_Effect]) -> Sequence[object]:
        """What is remembered of these: less of what is large."""
        return effects

    @abstractmethod
    def _take(self, event: _Event) -> None:
        """Change the state, and append to ``_effects``."""
