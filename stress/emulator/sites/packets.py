"""Computes when each packet between sites arrives. Pure, in virtual nanoseconds.

    site ─> port up ─> link of the pair ─> limit of the connection ─> half a round trip
         ─> port down ─> site

Each limit is a queue that sends one packet at a time, in the order of arrival, and drops what
arrives while too much waits. All packets of a site pass its port, whatever they belong to, as in
the router of a home. So packets of one connection stay in order.

One more site, the outside, has the number -1: no link limits or delays packets to and from it, but
the port of the other site does.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar

from pccl.stress.emulator.shaper import NS_PER_S
from pccl.stress.emulator.sites.matrix import SiteMatrix
from pccl.stress.emulator.spec import LinkSpec

OUTSIDE = -1

QUEUE_NS = 100_000_000
"""Work that may wait in a queue, in nanoseconds of its rate; for a link at least a round trip, as
much as one connection needs to fill it (its bandwidth-delay product)."""

_QUEUES_MIN = 64
"""As many queues of connections are kept in any case, for each direction of a link."""

T = TypeVar("T")


class _PathStep(Protocol):
    def leave_ns(self, now_ns: int, flow: Hashable, nbytes: int) -> int | None:
        """Return when a packet leaves that arrives now; None: it is dropped."""
        ...


class PacketQueue:
    """A queue in front of a limit.

    Args:
        rate_bps: the limit.
        queue_ns: time that the packets in it may take to leave; a later one is dropped.
    """

    def __init__(self, rate_bps: int, queue_ns: int) -> None:
        self._rate_bps = rate_bps
        self._queue_ns = queue_ns
        self._free_ns = 0

    def is_empty(self, now_ns: int) -> bool:
        """Whether no packet waits or leaves: it is as good as new."""
        return self._free_ns <= now_ns

    def leave_ns(self, now_ns: int, flow: Hashable, nbytes: int) -> int | None:
        """Return when a packet leaves that arrives now; None: it is dropped."""
        if self._free_ns - now_ns > self._queue_ns:
            return None
        duration_ns = -(-nbytes * 8 * NS_PER_S // self._rate_bps)
        self._free_ns = max(self._free_ns, now_ns) + duration_ns
        return self._free_ns


class ConnectionQueues:
    """A queue for each connection; arguments are those of :class:`PacketQueue`.

    Nobody tells when a connection has ended. So empty queues are removed when their number has
    doubled.
    """

    def __init__(self, rate_bps: int, queue_ns: int) -> None:
        self._limits = rate_bps, queue_ns
        self._queues: dict[Hashable, PacketQueue] = {}
        self._queues_max = _QUEUES_MIN

    def leave_ns(self, now_ns: int, flow: Hashable, nbytes: int) -> int | None:
        """Return when a packet leaves that arrives now; None: it is dropped."""
        if flow not in self._queues:
            if len(self._queues) == self._queues_max:
                self._remove_empty(now_ns)
            self._queues[flow] = PacketQueue(*self._limits)
        return self._queues[flow].leave_ns(now_ns, flow, nbytes)

    def __len__(self) -> int:
        return len(self._queues)

    def _remove_empty(self, now_ns: int) -> None:
        queues = self._queues.items()
        self._queues = {flow: queue for flow, queue in queues if not queue.is_empty(now_ns)}
        self._queues_max = max(_QUEUES_MIN, 2 * len(self._queues))


class PacketDelay:
    """The delay of one way. Jitter delays packets at random, and none overtakes another."""

    def __init__(self, delay_ns: int, jitter_ns: int, chance: Random) -> None:
        self._delay_ns = delay_ns
        self._jitter_ns = jitter_ns
        self._chance = chance
        self._last_ns = 0

    def leave_ns(self, now_ns: int, flow: Hashable, nbytes: int) -> int:
        """Return when a packet leaves that arrives now."""
        at_ns = now_ns + self._delay_ns
        if self._jitter_ns:
            at_ns += self._chance.randint(0, self._jitter_ns)
        self._last_ns = max(self._last_ns, at_ns)
        return self._last_ns


@dataclass(slots=True)
class _Packet(Generic[T]):
    steps: tuple[_PathStep, ...]
    target: int
    flow: Hashable
    nbytes: int
    content: T
    step: int = 0
    """Number of the step that is next."""


class PacketNetwork(Generic[T]):
    """The packets on their ways between the sites of a matrix.

    Args:
        matrix: the sites.
        chance: random numbers for jitter.

    Attributes:
        dropped: number of packets that a queue has dropped.
        carried_bytes: bytes of the packets that have arrived.
    """

    def __init__(self, matrix: SiteMatrix, chance: Random) -> None:
        places = matrix.places or range(len(matrix.sites))
        shared = {
            place: (_port(port.up_bps), _port(port.down_bps))
            for place, port in zip(places, matrix.ports, strict=True)
        }
        ports = [shared[place] for place in places]
        ports.append(((), ()))  # of the outside, whose index is -1
        self._ways: dict[tuple[int, int], tuple[_PathStep, ...]] = {
            (source, target): _steps(link, chance)
            if places[source] == places[target]
            else (*ports[source][0], *_steps(link, chance), *ports[target][1])
            for (source, target), link in matrix.links.items()
        }
        for site in range(len(matrix.sites)):
            self._ways[site, OUTSIDE] = ports[site][0]
            self._ways[OUTSIDE, site] = ports[site][1]
        self._events: list[tuple[int, int, _Packet[T]]] = []
        """When which packet is before its next step, or has arrived."""
        self._count = 0
        self.dropped = 0
        self.carried_bytes = 0

    def offer(
        self, now_ns: int, source: int, target: int, flow: Hashable, nbytes: int, packet: T
    ) -> None:
        """Take a packet from a site; its way begins now.

        Args:
            now_ns: the time, not before that of an earlier call.
            source: number of the site that sends it.
            target: number of the site that receives it; a number without a site drops it.
            flow: its connection and direction.
            nbytes: its length.
            packet: returned by :meth:`advance` when it has arrived.
        """
        steps = self._ways.get((source, target))
        if steps is not None:
            self._plan(now_ns, _Packet(steps, target, flow, nbytes, packet))

    def advance(self, now_ns: int) -> list[tuple[int, T]]:
        """Advance the time; return the packets that have arrived, with their sites, in order."""
        arrived: list[tuple[int, T]] = []
        events = self._events
        while events and events[0][0] <= now_ns:
            at_ns, _, packet = heapq.heappop(events)
            if packet.step == len(packet.steps):
                self.carried_bytes += packet.nbytes
                arrived.append((packet.target, packet.content))
                continue
            step = packet.steps[packet.step]
            leave_ns = step.leave_ns(at_ns, packet.flow, packet.nbytes)
            if leave_ns is None:
                self.dropped += 1
                continue
            packet.step += 1
            self._plan(leave_ns, packet)
        return arrived

    def next_event_ns(self) -> int | None:
        """Return when to call :meth:`advance` next; None: after the next packet."""
        return self._events[0][0] if self._events else None

    def _plan(self, at_ns: int, packet: _Packet[T]) -> None:
        self._count += 1  # of two events at one time, the older one is first
        heapq.heappush(self._events, (at_ns, self._count, packet))


def _port(rate_bps: int | None) -> tuple[_PathStep, ...]:
    return () if rate_bps is None else (PacketQueue(rate_bps, QUEUE_NS),)


def _steps(link: LinkSpec, chance: Random) -> tuple[_PathStep, ...]:
    """Return the steps of one direction of a link."""
    queue_ns = max(QUEUE_NS, 2 * link.half_rtt_ns)
    steps: list[_PathStep] = []
    if link.rate_bps is not None:
        steps.append(PacketQueue(link.rate_bps, queue_ns))
    if link.flow_bps is not None:
        steps.append(ConnectionQueues(link.flow_bps, queue_ns))
    steps.append(PacketDelay(link.half_rtt_ns, round(link.jitter_s * NS_PER_S), chance))
    return tuple(steps)
