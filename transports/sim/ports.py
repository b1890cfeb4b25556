"""The port of a host: what its router lets through, each way, for all its connections together.

The queue of a home router is long, and one for all: a heartbeat waits behind data to any host. What
exceeds the queue would be lost, and sent again: it waits at its sender instead, as if its
congestion control had foreseen it. The senders that wait take turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from pccl.protocol.types import NS_PER_S
from pccl.transports.sim.events import Action, Events

SMALL_BYTES = 60
"""The size of a packet without data."""

PIECE_NS = NS_PER_S // 32
"""What passes in this time arrives at one instant. A real router passes packets."""


def _nothing() -> None:
    """Do nothing."""


class Line:
    """One direction of a port: a queue of limited length, which is served in order of arrival.

    Args:
        events: events of the network.
        bytes_per_s: the rate.
        buffer_bytes: the length of the queue.

    Attributes:
        bytes_per_s: see above; may be set at any time.
    """

    def __init__(self, events: Events, bytes_per_s: int, buffer_bytes: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._events = events
        self._buffer_bytes = buffer_bytes
        self._queued_bytes = 0
        self._busy_until_ns = 0
        self._waiting: dict[object, deque[tuple[int, Action, Action]]] = {}
        """What waits at each sender; the sender whose turn is next comes first."""

    @property
    def wait_ns(self) -> int:
        """How long a byte that enters now stays in the queue."""
        return max(0, self._busy_until_ns - self._events.now_ns())

    @property
    def piece_bytes(self) -> int:
        """Most bytes that arrive at one instant."""
        return self.bytes_per_s * PIECE_NS // NS_PER_S

    def carry(self, sender: object, nbytes: int, leave: Action, enter: Action = _nothing) -> None:
        """Let bytes of a sender pass, after its earlier ones.

        Args:
            sender: takes turns with other senders, if the queue is full.
            nbytes: number of bytes.
            leave: called when they have passed.
            enter: called when they enter the queue.
        """
        if sender in self._waiting:
            self._waiting[sender].append((nbytes, leave, enter))
        elif self._has_room(nbytes):
            self._enter(nbytes, leave, enter)
        else:
            self._waiting[sender] = deque([(nbytes, leave, enter)])

    def _has_room(self, nbytes: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + nbytes <= self._buffer_bytes

    def _enter(self, nbytes: int, leave: Action, enter: Action) -> None:
        self._queued_bytes += nbytes
        begins_ns = max(self._events.now_ns(), self._busy_until_ns)
        self._busy_until_ns = begins_ns + -(-nbytes * NS_PER_S // self.bytes_per_s)
        self._events.at(self._busy_until_ns, partial(self._leave, nbytes, leave))
        enter()

    def _leave(self, nbytes: int, leave: Action) -> None:
        self._queued_bytes -= nbytes
        while self._waiting:
            sender, waiting = next(iter(self._waiting.items()))
            if not self._has_room(waiting[0][0]):
                break
            first = waiting.popleft()
            del self._waiting[sender]
            if waiting:
                self._waiting[sender] = waiting  # behind all others
            self._enter(*first)
        leave()


@dataclass(frozen=True, slots=True)
class Port:
    """Both directions of a port; None: no limit.

    Attributes:
        up: what the host sends.
        down: what it receives.
    """

    up: Line | None = None
    down: Line | None = None


NO_PORT = Port()
