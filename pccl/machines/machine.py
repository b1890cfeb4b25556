"""What all machines share: events and the time go in, effects come out, a story is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
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

    def handle(self, event: _Event, now_ns: int) -> list[_Effect]:
        """Take one event; return what must be done, in order."""
        self._now_ns = now_ns
        self.history.record(now_ns, event)
        self._take(event)
        effects, self._effects = self._effects, []
        for effect in effects:
            self.history.record(now_ns, self._told_as(effect))
        return effects

    def _told_as(self, effect: _Effect) -> object:
        """What the story keeps of an effect: less, if it is large."""
        return effect

    @abstractmethod
    def _take(self, event: _Event) -> None:
        """Change the state, and append to ``_effects``."""
