"""The calls of one peer that wait for the outcome of something that its caller has left.

State only: ``PeerMachine`` decides what has to wait, and for how long.

What they wait for changes nothing for the others, who have made the same calls at once. So each is
made for the membership that its caller saw then, though he has looked at another outcome since.
"""

from __future__ import annotations

from collections.abc import Iterator

from pccl.machines.peer.events import ReduceCall
from pccl.machines.peer.refusals import JointCall
from pccl.protocol.types import Roster


class DeferredCalls:
    """In the order in which they were made."""

    def __init__(self) -> None:
        self._calls: dict[int, JointCall] = {}
        self._left: dict[int, str] = {}
        """Collectives that the caller has left as well -> why; others may wait for them."""
        self._seen: dict[int, Roster] = {}
        """What their callers saw when they made them, of those to which that matters."""

    def __iter__(self) -> Iterator[JointCall]:
        """Those that have a caller."""
        return (event for call, event in self._calls.items() if call not in self._left)

    def add(self, event: JointCall, seen: Roster | None = None) -> None:
        """It has to wait, perhaps once more; ``seen``: it is made for that, if it is new."""
        self._calls[event.call] = event
        if seen is not None:
            self._seen.setdefault(event.call, seen)

    def seen_at(self, call: int) -> Roster | None:
        """What the caller saw when he made one of these; None: what he sees now."""
        return self._seen.get(call)

    def see_anew(self) -> None:
        """A round that was left has ended, before them all: they are made for what it brought."""
        self._seen.clear()

    def leave(self, call: int, reason: str) -> bool:
        """A caller leaves; return whether it is one of these."""
        known = self._calls.get(call)
        if isinstance(known, ReduceCall):
            self._left[call] = reason
        elif known is not None:
            del self._calls[call]
            self._seen.pop(call, None)
        return known is not None

    def why_left(self, event: ReduceCall) -> str | None:
        """Why the caller of one of these has left; None if it waits."""
        return self._left.get(event.call)

    def take(self) -> Iterator[JointCall]:
        """Take all out, to try them again; who left one is known until the next is tried."""
        taken, self._calls = self._calls, {}
        for call, event in taken.items():
            yield event
            if call not in self._calls:
                self._left.pop(call, None)
                self._seen.pop(call, None)

    def clear(self) -> None:
        """This peer is no longer a part of the run."""
        self._calls.clear()
        self._left.clear()
        self._seen.clear()
