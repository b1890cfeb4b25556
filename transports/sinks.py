"""Sinks: where the payload of a frame goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Sink(Protocol):
    """Where the payload of one frame goes."""

    def memory(self, received: int) -> memoryview:
        """Memory for the next bytes; asked before every read.

        ``received`` bytes of the payload have been read so far. The memory may be shorter than
        what is missing, never longer, and must not be empty.
        """
        ...

    def counts(self) -> bool:
        """Whether all the payload, which is here, has to be what was sent.

        Not what nobody wants any more, or what is verified otherwise: its sender may have used the
        memory for something else meanwhile.
        """
        ...

    def complete(self) -> None:
        """The payload is here. May raise RemoteProtocolError: the lane is closed."""
        ...

    def lost(self) -> None:
        """The lane is gone before the payload was complete."""
        ...


_UNREAD = memoryview(bytearray(256 << 10))
"""Written by all, read by none."""


def discard(length: int) -> memoryview:
    """Memory for the next of ``length`` bytes (at least one) that nobody wants."""
    return _UNREAD[:length]


@dataclass(slots=True)
class Drain:
    """The sink of a frame that nobody wants.

    Args:
        length: of its payload, in bytes.
    """

    length: int

    def memory(self, received: int) -> memoryview:
        """Memory that nobody reads."""
        return _UNREAD[: self.length - received]

    def counts(self) -> bool:
        """Never: nobody wants the payload."""
        return False

    def complete(self) -> None:
        """Nothing to do: nobody wants the payload."""

    def lost(self) -> None:
        """Nothing to do: nobody waits for the payload."""


@dataclass(slots=True)
class Collect:
    """The sink of a frame that is taken when all of it is here.

    Args:
        payload: memory of its own for the whole payload.
        take: called with that when it is full.
        lose: called if the lane is gone before; None: nobody cares.
    """

    payload: bytearray
    take: Callable[[bytearray], None]
    lose: Callable[[], None] | None = None

    def memory(self, received: int) -> memoryview:
        """The rest of ``payload``."""
        return memoryview(self.payload)[received:]

    def counts(self) -> bool:
        """Always: the whole payload is used."""
        return True

    def complete(self) -> None:
        """Hand the payload to ``take``."""
        self.take(self.payload)

    def lost(self) -> None:
        """Call ``lose``, if there is one."""
        if self.lose is not None:
            self.lose()
