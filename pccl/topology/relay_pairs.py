"""``RelayPairs``: which connections a relay joins, how many it holds, and when it ends them.

Two peers that cannot dial each other dial the relay, and each names the other. The first connection
waits for the second one; then both are joined. A newer connection of a peer for the same other peer
replaces an older one that waits, and with a newer one of the other peer also a joined pair. A pair
counts until both of its connections have ended. Both end if one of them takes nothing for a while.

Pure: events go in, and steps come out in the order of execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pccl.protocol.limits import RELAYED_PAIRS_MAX, RELAYED_WAIT_MAX
from pccl.protocol.types import NOBODY, PeerId

RelayedWay = tuple[PeerId, PeerId]
"""The peer that has dialled the relay, and the peer that it wants to reach."""


@dataclass(frozen=True, slots=True)
class JoinConnections:
    """Introduce two connections to each other, and copy the bytes of each to the other."""

    one: int
    other: int


@dataclass(frozen=True, slots=True)
class EndConnection:
    """End a connection, and the one that it is joined with.

    ``at_once``: bytes that wait are lost.
    """

    number: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class FindStuck:
    """Call :meth:`RelayPairs.stuck` with the connections whose bytes nobody has taken since."""


RelayStep = JoinConnections | EndConnection | FindStuck


class RelayPairs:
    """The connections of one relay, by their numbers.

    Args:
        patience_ns: how long a connection may wait for the other peer.
        stall_ns: how long a peer may take nothing of what waits for it, at least.
        has_left: whether a peer was removed from the run.
    """

    def __init__(self, patience_ns: int, stall_ns: int, has_left: Callable[[PeerId], bool]) -> None:
        self._patience_ns = patience_ns
        self._stall_ns = stall_ns
        self._has_left = has_left
        self._look_ns: int | None = None
        self._waiting: dict[RelayedWay, tuple[int, int]] = {}
        """The connection, and until when it waits; the first one has waited longest."""
        self._joined: dict[RelayedWay, int] = {}
        """The connection of either peer of each pair."""
        self._others: dict[int, int] = {}
        """Joined connection -> the one that it is joined with, until both have ended."""
        self._ended: set[int] = set()
        """Joined connections that have ended before the other one."""

    @property
    def pairs(self) -> int:
        """Number of pairs of peers for which this relay forwards."""
        return len(self._joined) // 2

    @property
    def due_ns(self) -> int | None:
        """When to call :meth:`due`; None: not now."""
        times = [due_ns for _, due_ns in self._waiting.values()][:1]
        return min(times if self._look_ns is None else [*times, self._look_ns], default=None)

    def refusal(self, source: PeerId, target: PeerId) -> str:
        """Return why this relay does not forward for two peers now; empty: it does.

        Without a target, it only tells the source its address.
        """
        if target == NOBODY:
            return f"peer {source} has left the run" if self._has_left(source) else ""
        if source == target:
            return "a relay connects two different peers"
        for gone in filter(self._has_left, (source, target)):
            return f"peer {gone} has left the run"
        if self.pairs >= RELAYED_PAIRS_MAX and (source, target) not in self._joined:
            return "this relay is full: it forwards for too many others"
        if (target, source) in self._waiting:
            return ""
        others = [way for way in self._waiting if way != (source, target)]
        of_source = sum(way[0] == source for way in others)
        if of_source >= RELAYED_WAIT_MAX or len(others) >= 16 * RELAYED_WAIT_MAX:
            return "too many connections wait at this relay"
        return ""

    def came(
        self, number: int, source: PeerId, target: PeerId, now_ns: int
    ) -> list[RelayStep] | None:
        """Take a new connection of ``source``, which wants to reach ``target``; None: reject it."""
        if self.refusal(source, target):  # others came during its handshake
            return None
        way, back = (source, target), (target, source)
        steps: list[RelayStep] = []
        if way in self._waiting:
            steps.append(EndConnection(self._waiting.pop(way)[0]))
        if back not in self._waiting:
            self._waiting[way] = number, now_ns + self._patience_ns
            return steps
        other, _ = self._waiting.pop(back)
        if way in self._joined:
            steps += self._part(way)
        self._joined[way], self._joined[back] = number, other
        self._others[number], self._others[other] = other, number
        if self._look_ns is None:
            self._look_ns = now_ns + self._stall_ns
        return [*steps, JoinConnections(number, other)]

    def ended(self, number: int) -> tuple[int, ...]:
        """Record the end of a connection; return the connections that may be forgotten now."""
        for way in [way for way, (waits, _) in self._waiting.items() if waits == number]:
            del self._waiting[way]
        other = self._others.get(number)
        if other is None:
            return (number,)
        if other not in self._ended:
            self._ended.add(number)
            return ()
        for one in (number, other):
            del self._others[one]
        self._ended.remove(other)
        for way in [way for way, one in self._joined.items() if one in (number, other)]:
            del self._joined[way]
        return (number, other)

    def left(self, peer: PeerId) -> list[RelayStep]:
        """End the connections of a peer that has left the run, and those that wait for it."""
        steps: list[RelayStep] = []
        for way in [way for way in self._joined if way[0] == peer]:
            steps += self._part(way)
        for way in [way for way in self._waiting if peer in way]:
            steps.append(EndConnection(self._waiting.pop(way)[0]))
        return steps

    def due(self, now_ns: int) -> list[RelayStep]:
        """End connections that have waited too long; once in a while, find pairs that are stuck."""
        late = [way for way, (_, due_ns) in self._waiting.items() if due_ns <= now_ns]
        steps: list[RelayStep] = [EndConnection(self._waiting.pop(way)[0]) for way in late]
        if self._look_ns is not None and self._look_ns <= now_ns:
            self._look_ns = now_ns + self._stall_ns if self._joined else None
            steps.append(FindStuck())
        return steps

    def stuck(self, numbers: Iterable[int]) -> list[RelayStep]:
        """End the pairs of these connections."""
        found = set(numbers)
        steps: list[RelayStep] = []
        for way in [way for way, number in self._joined.items() if number in found]:
            if way in self._joined:  # the other one may be stuck, too
                steps += self._part(way)
        return steps

    def close(self) -> list[RelayStep]:
        """End all connections."""
        numbers = [*(number for number, _ in self._waiting.values()), *self._joined.values()]
        self._waiting.clear()
        self._joined.clear()
        self._look_ns = None
        return [EndConnection(number) for number in numbers]

    def _part(self, way: RelayedWay) -> list[RelayStep]:
        """End both connections of a pair at once."""
        source, target = way
        del self._joined[target, source]
        return [EndConnection(self._joined.pop(way), at_once=True)]
