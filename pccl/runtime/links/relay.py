"""``Relay``: joins the connections of two peers that cannot dial each other.

At the request of their master, both dial this process, and each names the other. What they send
each other is encrypted; see :mod:`pccl.transports.relay`. ``RelayPairs`` decides which connections
to join, and this module joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.topology.relay_pairs import (
    EndConnection,
    FindStuck,
    JoinConnections,
    RelayPairs,
    RelayStep,
)
from pccl.transports.base import Connection
from pccl.transports.relay import Introducer, SplicedEnd


class Relay:
    """The connections that this process forwards, or is about to forward.

    Args:
        clock: gives the time.
        patience_ns: how long a connection may wait for the other peer.
        stall_ns: how long a peer may take nothing of what waits for it, at least.
        has_left: whether a peer was removed from the run.
    """

    def __init__(
        self,
        clock: Clock,
        patience_ns: int,
        stall_ns: int,
        has_left: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._clock = clock
        self._pairs = RelayPairs(patience_ns, stall_ns, has_left)
        self.refusal = self._pairs.refusal
        self._ends: dict[int, SplicedEnd] = {}
        self._last_number = 0
        self._timer: Timer | None = None
        self._timer_ns: int | None = None
        self._ended_bytes = 0

    @property
    def pairs(self) -> int:
        """Number of pairs of peers for which this process forwards."""
        return self._pairs.pairs

    @property
    def carried_bytes(self) -> int:
        """Bytes that this process has forwarded, in both directions."""
        return self._ended_bytes + sum(end.carried_bytes for end in self._ends.values())

    def accept(self, connection: Connection, source: PeerId, target: PeerId) -> None:
        """Take a connection of ``source``, and join it with that of ``target`` once both are here.

        Two peers have one connection through a relay: a newer one replaces it. Without a target,
        the source asks for the address from which it has dialled.
        """
        if target == NOBODY:
            Introducer(connection)
            return
        self._last_number += 1
        number = self._last_number
        steps = self._pairs.came(number, source, target, self._clock.now_ns())
        if steps is None:
            connection.abort()
            return
        self._ends[number] = SplicedEnd(connection, partial(self._ended, number))
        self._carry_out(steps)

    def forget(self, peer: PeerId) -> None:
        """Close the connections of a peer that has left the run."""
        self._carry_out(self._pairs.left(peer))

    def close(self) -> None:
        """Close all connections."""
        self._carry_out(self._pairs.close())

    def _carry_out(self, steps: Iterable[RelayStep]) -> None:
        for step in steps:
            match step:
                case JoinConnections(one, other):
                    self._ends[one].join(self._ends[other])
                case EndConnection(number, at_once):
                    end = self._ends[number]
                    (end.abort if at_once else end.close)()
                case FindStuck():
                    stuck = [number for number, end in self._ends.items() if end.is_stuck()]
                    self._carry_out(self._pairs.stuck(stuck))
        self._set_timer()

    def _set_timer(self) -> None:
        due_ns = self._pairs.due_ns
        if due_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = due_ns
        self._timer = None if due_ns is None else self._clock.call_at_ns(due_ns, self._due)

    def _due(self) -> None:
        self._timer = self._timer_ns = None
        self._carry_out(self._pairs.due(self._clock.now_ns()))

    def _ended(self, number: int, _: SplicedEnd) -> None:
        for one in self._pairs.ended(number):
            self._ended_bytes += self._ends.pop(one).carried_bytes
        self._set_timer()
