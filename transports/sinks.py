"""Sinks are the destinations of incoming payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Sink(Protocol):
    """The destination of the payload of one frame."""

    def memory(self, received: int) -> memoryview:
        """Return memory for the next bytes. The lane calls this before every read.

        ``received`` bytes of the payload have arrived. The memory must not be empty, nor longer
        than the rest of the payload; it may be shorter.
        """
        ...

    def counts(self) -> bool:
        """Whether a wrong hash of the complete payload is an error of the lane.

        False for payload that is discarded or verified otherwise: its sender may have changed the
        memory while sending.
        """
        ...

    def complete(self) -> None:
        """Process the complete payload. If this raises RemoteProtocolError, the lane closes."""
        ...

    def lost(self) -> None:
        """Handle the loss of the lane before the payload was complete."""
        ...


_UNREAD = memoryview(bytearray(256 << 10))
"""Memory for discarded payload, which all sinks share and none reads."""


def discard(length: int) -> memoryview:
    """Return memory for some of the next ``length`` bytes (at least one), to discard them."""
    return _UNREAD[:length]


@dataclass(slots=True)
class Drain:
    """The sink of a frame whose payload is discarded.

    Args:
        length: length of the payload, in bytes.
    """

    length: int

    def memory(self, received: int) -> memoryview:
        """Return memory that is never read."""
        return _UNREAD[: self.length - received]

    def counts(self) -> bool:
        """Return False: damage to a discarded payload does not matter."""
        return False

    def complete(self) -> None:
        """Do nothing: the payload is discarded."""

    def lost(self) -> None:
        """Do nothing: the payload would have been discarded."""


@dataclass(slots=True)
class Collect:
    """The sink of a frame whose payload is processed as a whole.

    Args:
        payload: memory for the whole payload, which nothing else uses.
        take: called with ``payload`` once it is complete.
        lose: called if the lane is lost before that; None: no call.
    """

    payload: bytearray
    take: Callable[[bytearray], None]
    lose: Callable[[], None] | None = None

    def memory(self, received: int) -> memoryview:
        """Return the rest of ``payload``."""
        return memoryview(self.payload)[received:]

    def counts(self) -> bool:
        """Return True: ``take`` uses the whole payload."""
        return True

    def complete(self) -> None:
        """Call ``take`` with the payload."""
        self.take(self.payload)

    def lost(self) -> None:
        """Call ``lose``, unless it is None."""
        if self.lose is not None:
            self.lose()
