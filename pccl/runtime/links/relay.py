"""``Relay``: joins the connections of two peers that cannot dial each other.

Their master has told both to dial this process, and each names the other. The first one waits. What
they send each other is encrypted; see :mod:`pccl.transports.relay`.
"""

from __future__ import annotations

from functools import partial

from pccl.protocol.limits import RELAYED_PAIRS_MAX, RELAYED_WAIT_MAX
from pccl.protocol.types import PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.transports.base import Connection
from pccl.transports.relay import SplicedEnd

_Way = tuple[PeerId, PeerId]
"""The peer that has dialled the relay, and the one that it wants to reach."""


class Relay:
    """The connections that this process forwards, or is about to forward.

    Args:
        clock: gives the time.
        patience_ns: how long a connection may wait for the other peer.
        stall_ns: how long a peer may take nothing of what waits for it, at least.
    """

    def __init__(self, clock: Clock, patience_ns: int, stall_ns: int) -> None:
        self._clock = clock
        self._patience_ns = patience_ns
        self._stall_ns = stall_ns
        self._looks: Timer | None = None
        self._waiting: dict[_Way, tuple[SplicedEnd, Timer]] = {}
        self._joined: dict[_Way, SplicedEnd] = {}
        self._ended_bytes = 0

    @property
    def pairs(self) -> int:
        """Number of pairs of peers for which this process forwards."""
        return len(self._joined) // 2

    @property
    def carried_bytes(self) -> int:
        """Bytes that this process has forwarded, in both directions."""
        return self._ended_bytes + sum(end.carried_bytes for end in self._joined.values())

    def refusal(self, source: PeerId, target: PeerId) -> str:
        """Return why this process does not forward for two peers now; empty: it does."""
        if source == target:
            return "a relay connects two different peers"
        if self.pairs >= RELAYED_PAIRS_MAX and (source, target) not in self._joined:
            return "this relay is full: it forwards for too many others"
        if (target, source) in self._waiting:
            return ""
        others = [way for way in self._waiting if way != (source, target)]
        of_source = sum(way[0] == source for way in others)
        if of_source >= RELAYED_WAIT_MAX or len(others) >= 16 * RELAYED_WAIT_MAX:
            return "too many connections wait at this relay"
        return ""

    def accept(self, connection: Connection, source: PeerId, target: PeerId) -> None:
        """Take a connection of ``source``, and join it with that of ``target`` once both are here.

        Two peers have one connection through a relay: a newer one replaces it.
        """
        if self.refusal(source, target):  # others came during its handshake
            connection.abort()
            return
        way, back = (source, target), (target, source)
        if way in self._waiting:
            earlier, timer = self._waiting.pop(way)
            timer.cancel()
            earlier.close()
        end = SplicedEnd(connection, partial(self._ended, way))
        if back not in self._waiting:
            due_ns = self._clock.now_ns() + self._patience_ns
            self._waiting[way] = end, self._clock.call_at_ns(due_ns, end.close)
            return
        other, timer = self._waiting.pop(back)
        timer.cancel()
        if way in self._joined:
            self._joined[way].abort()
        self._joined[way], self._joined[back] = end, other
        end.join(other)
        if self._looks is None:
            self._look_later()

    def forget(self, peer: PeerId) -> None:
        """Close the connections of a peer that has left the run."""
        for way in [way for way in self._joined if way[0] == peer]:
            self._joined[way].abort()
        for way in [way for way in self._waiting if peer in way]:
            self._waiting[way][0].close()

    def _look_later(self) -> None:
        self._looks = self._clock.call_at_ns(self._clock.now_ns() + self._stall_ns, self._look)

    def _look(self) -> None:
        """Close the pairs that are stuck."""
        for end in [end for end in self._joined.values() if end.is_stuck()]:
            end.abort()
        self._looks = None
        if self._joined:
            self._look_later()

    def close(self) -> None:
        """Close all connections."""
        if self._looks is not None:
            self._looks.cancel()
            self._looks = None
        for end in [*(end for end, _ in self._waiting.values()), *self._joined.values()]:
            end.close()

    def _ended(self, way: _Way, end: SplicedEnd) -> None:
        self._ended_bytes += end.carried_bytes
        if self._joined.get(way) is end:
            del self._joined[way]
        elif way in self._waiting and self._waiting[way][0] is end:
            self._waiting.pop(way)[1].cancel()
