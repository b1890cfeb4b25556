"""Computes when each byte of a link leaves and arrives. Pure, in virtual nanoseconds.

    sender ─> queue ─> serialised at the link's rate ─> half a round trip ─> arrived ─> receiver
                 ^                                                                        |
                 └──────── room in the window <─── half a round trip back <───────────────┘

Each direction of a link is one ``Shaper``, in which each connection has a ``ShapedFlow``. Both
count bytes, but do not hold them. Each call passes the time, which never goes back.

Invariants:

* The link serialises one chunk at a time; n bytes take n * 8 / rate, rounded up to a nanosecond.
* Of the flows that can send next, the flow with the least sent bytes goes first. So flows get equal
  shares, and a share that a flow cannot use (its cap, no data) goes to the other flows.
* Bytes of a flow arrive in the order in which they were offered, and its end after all of them.
* ``flight_bytes`` of a flow never exceeds the window at the time when its bytes were offered.
"""

from __future__ import annotations

import enum
from collections import deque
from math import log
from random import Random

from pccl.stress.emulator.spec import PACKET_BYTES, QUEUE_S, LinkSpec

NS_PER_S = 1_000_000_000

CHUNK_S = 0.001
"""Time in which the link sends a chunk, within the bounds below. Chunks are small, so that flows
share finely and without bursts, but not smaller than a packet."""

CHUNK_BYTES_MIN = 1460
CHUNK_BYTES_MAX = 64 << 10


class Direction(enum.Enum):
    """One of the two directions of a connection."""

    FORWARD = "forward"
    """From the dialler to the proxy's target."""
    BACKWARD = "backward"

    @property
    def reverse(self) -> Direction:
        """The other direction."""
        return Direction.BACKWARD if self is Direction.FORWARD else Direction.FORWARD


class ShapedFlow:
    """One direction of one connection. :meth:`Shaper.add` makes it, and only the shaper changes it.

    Attributes:
        queued_bytes: bytes offered, but not yet serialised.
        flight_bytes: bytes offered, but not yet acknowledged.
        arrived_bytes: bytes arrived, but not yet read by the receiver.
        has_ended: whether the sender's end has arrived, after all bytes.
        ending: whether the sender's end is queued, behind the bytes.
        transit: arrival time and number of bytes (0: the end) of each chunk in transit, in order. A
            chunk with an earlier time than its predecessor waits for it.
        acks: arrival times and numbers of bytes of acknowledgements in transit.
        free_ns: time before which the link serialises no byte of the flow.
        served_bytes: bytes serialised so far, as counted for fair sharing.
        held_since_ns, acks_held_since_ns: time since which bytes or acks are held; None: not held.
    """

    __slots__ = (
        "acks", "acks_held_since_ns", "arrived_bytes", "ending", "flight_bytes", "free_ns",
        "has_ended", "held_since_ns", "number", "queued_bytes", "served_bytes", "transit",
    )  # fmt: skip

    def __init__(self, number: int, ready_ns: int) -> None:
        self.queued_bytes = 0
        self.flight_bytes = 0
        self.arrived_bytes = 0
        self.has_ended = False
        self.number = number
        self.ending = False
        self.free_ns = ready_ns
        self.served_bytes = 0
        self.transit: deque[tuple[int, int]] = deque()
        self.acks: deque[tuple[int, int]] = deque()
        self.held_since_ns: int | None = None
        self.acks_held_since_ns: int | None = None

    @property
    def is_backlogged(self) -> bool:
        """Whether the flow has bytes or its end to send, and is not held."""
        return (self.queued_bytes > 0 or self.ending) and self.held_since_ns is None

    def event_ns(self, flight_max_bytes: int) -> int | None:
        """Return when a byte arrives next, or an ack if over half of the window is in use."""
        at_ns: int | None = None
        if self.transit and self.held_since_ns is None:
            at_ns = self.transit[0][0]
        if (
            self.acks
            and self.acks_held_since_ns is None
            and 2 * self.flight_bytes > flight_max_bytes
        ):
            ack_ns = self.acks[0][0]
            at_ns = ack_ns if at_ns is None else min(at_ns, ack_ns)
        return at_ns

    def pass_due(self, now_ns: int) -> bool:
        """Process the arrivals and acknowledgements up to now; return whether there were any."""
        stirred = False
        if self.held_since_ns is None:
            while self.transit and self.transit[0][0] <= now_ns:
                count = self.transit.popleft()[1]
                self.arrived_bytes += count
                self.has_ended |= not count
                stirred = True
        if self.acks_held_since_ns is None:
            while self.acks and self.acks[0][0] <= now_ns:
                self.flight_bytes -= self.acks.popleft()[1]
                stirred = True
        return stirred


class Shaper:
    """One direction of one link, with its flows.

    Args:
        spec: the link.
        chance: random numbers for jitter and flipped bits.
        overhead_ns: delay that the proxy itself adds to each way; subtracted from the link's delay.
    """

    def __init__(self, spec: LinkSpec, chance: Random, overhead_ns: int = 0) -> None:
        self._chance = chance
        self._overhead_ns = overhead_ns
        self._flows: list[ShapedFlow] = []
        self._flow_count = 0
        self._free_ns = 0  # the link is busy until this time
        self._served_bytes = 0  # ``served_bytes`` of the last served flow, before its turn
        self._set(spec)

    def _set(self, spec: LinkSpec) -> None:
        self._rate_bps = spec.rate_bps
        self._flow_bps = spec.flow_bps
        self._delay_ns = max(0, spec.half_rtt_ns - self._overhead_ns)
        self._jitter_ns = round(spec.jitter_s * NS_PER_S)
        self._flight_max_bytes = spec.flight_max_bytes
        self._corrupt = spec.corrupt
        self._intact_bytes = 0.0
        self._draw_intact()
        bps = spec.slowest_bps
        self._chunk_bytes = CHUNK_BYTES_MAX
        self._queue_bytes: int | None = None
        if bps is not None:
            chunk_bytes = int(bps * CHUNK_S / 8)
            self._chunk_bytes = min(max(chunk_bytes, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
        if spec.rate_bps is not None:
            self._queue_bytes = int(spec.rate_bps * QUEUE_S / 8)

    def _draw_intact(self) -> None:
        """Draw the number of bytes until the next flipped bit."""
        if self._corrupt:
            # -log(u) is exponential; Random's own methods may differ between versions of Python.
            spread = -log(1.0 - self._chance.random())
            self._intact_bytes += spread * PACKET_BYTES / self._corrupt

    def flips(self, nbytes: int) -> list[int]:
        """Return the numbers of the bits to flip in the next ``nbytes`` bytes."""
        found: list[int] = []
        if not self._corrupt:
            return found
        self._intact_bytes -= nbytes
        while self._intact_bytes < 0:
            found.append(min(8 * nbytes - 1, int(8 * (nbytes + self._intact_bytes))))
            self._draw_intact()
        return found

    # -- events ----------------------------------------------------------------------------------

    def add(self, now_ns: int, ready_ns: int = 0) -> ShapedFlow:
        """Add the flow of a new connection. Its bytes are serialised from ``ready_ns`` on."""
        self._flow_count += 1
        flow = ShapedFlow(self._flow_count, max(now_ns, ready_ns))
        flow.served_bytes = self._served_bytes
        self._flows.append(flow)
        return flow

    def remove(self, flow: ShapedFlow) -> None:
        """Remove the flow of a connection that has ended, with its bytes in transit."""
        self._flows.remove(flow)

    def room_bytes(self, flow: ShapedFlow) -> int:
        """Return the number of bytes of a flow that may be offered now."""
        room = self._flight_max_bytes - flow.flight_bytes
        if self._queue_bytes is not None:
            backlogged = sum(other.is_backlogged for other in self._flows) or 1
            limit = max(self._queue_bytes // backlogged, 2 * self._chunk_bytes)
            room = min(room, limit - flow.queued_bytes)
        return max(0, room)

    def offer(self, flow: ShapedFlow, count: int, now_ns: int) -> None:
        """Queue ``count`` bytes from the sender; at most ``room_bytes``."""
        assert count > 0
        assert not flow.ending
        assert count <= self.room_bytes(flow)
        self._join(flow, now_ns)
        flow.queued_bytes += count
        flow.flight_bytes += count

    def finish(self, flow: ShapedFlow, now_ns: int) -> None:
        """Queue the sender's end, after which no bytes follow."""
        self._join(flow, now_ns)
        flow.ending = True

    def deliver(self, flow: ShapedFlow, count: int, now_ns: int) -> None:
        """Record that the receiver took ``count`` arrived bytes, and acknowledge them."""
        assert 0 < count <= flow.arrived_bytes
        flow.arrived_bytes -= count
        flow.acks.append((now_ns + self._delay_ns, count))

    def advance(self, now_ns: int) -> list[ShapedFlow]:
        """Advance the time; return the flows with arrived bytes or ends, or with new room."""
        self._serialise(now_ns)
        return [flow for flow in self._flows if flow.pass_due(now_ns)]

    def next_event_ns(self) -> int | None:
        """Return when to call :meth:`advance` next; None: only after another call.

        Acknowledgements of flows that use at most half of their window do not count.
        """
        flight_max_bytes = self._flight_max_bytes
        events = [
            at_ns for flow in self._flows if (at_ns := flow.event_ns(flight_max_bytes)) is not None
        ]
        chosen = self._choose()
        if chosen is not None:
            events.append(chosen[0])
        return min(events, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether a flow waits for the link."""
        return any(flow.is_backlogged for flow in self._flows)

    # -- changes and faults ----------------------------------------------------------------------

    def change(self, spec: LinkSpec, now_ns: int) -> None:
        """Change the link for bytes serialised from now on. Bytes in transit arrive as planned.

        No byte overtakes another: with a shorter delay, later bytes wait for earlier ones.
        """
        self._serialise(now_ns)
        self._set(spec)
        for flow in self._flows:  # a flow does not get back shares that its old cap excluded
            flow.served_bytes = self._served_bytes

    def hold(self, flow: ShapedFlow, now_ns: int) -> None:
        """Hold the bytes of a flow until :meth:`release`, but not its acknowledgements."""
        if flow.held_since_ns is None:
            self._serialise(now_ns)
            flow.pass_due(now_ns)
            flow.held_since_ns = now_ns

    def release(self, flow: ShapedFlow, now_ns: int) -> None:
        """Let the bytes of a held flow continue, delayed by the duration of the hold."""
        if flow.held_since_ns is not None:
            late_ns = now_ns - flow.held_since_ns
            flow.held_since_ns = None
            flow.transit = deque((at_ns + late_ns, count) for at_ns, count in flow.transit)
            flow.free_ns = max(flow.free_ns, now_ns)
            flow.served_bytes = max(flow.served_bytes, self._served_bytes)

    def lose(self, flow: ShapedFlow) -> None:
        """Lose the bytes of ``flow`` in transit, and queue them to be sent again in order."""
        lost_bytes = sum(count for _, count in flow.transit)
        flow.ending |= any(not count for _, count in flow.transit)
        flow.transit.clear()
        flow.queued_bytes += lost_bytes

    def hold_acks(self, flow: ShapedFlow, now_ns: int) -> None:
        """Hold the acknowledgements of a flow until :meth:`release_acks`: it gets no new room."""
        if flow.acks_held_since_ns is None:
            flow.pass_due(now_ns)
            flow.acks_held_since_ns = now_ns

    def release_acks(self, flow: ShapedFlow, now_ns: int) -> None:
        """Let held acknowledgements continue, delayed by the duration of the hold."""
        if flow.acks_held_since_ns is not None:
            late_ns = now_ns - flow.acks_held_since_ns
            flow.acks_held_since_ns = None
            flow.acks = deque((at_ns + late_ns, count) for at_ns, count in flow.acks)

    # -- inside ----------------------------------------------------------------------------------

    def _join(self, flow: ShapedFlow, now_ns: int) -> None:
        """Make a flow compete for the link from now on. Time must have been advanced to now."""
        if not flow.queued_bytes:
            flow.free_ns = max(flow.free_ns, now_ns)
            flow.served_bytes = max(flow.served_bytes, self._served_bytes)

    def _choose(self) -> tuple[int, ShapedFlow] | None:
        """Return when to serve which flow next: the earliest, then the least served one."""
        best: ShapedFlow | None = None
        best_key = (0, 0, 0)
        for flow in self._flows:
            if flow.is_backlogged:
                start_ns = max(self._free_ns, flow.free_ns)
                key = (start_ns, flow.served_bytes, flow.number)
                if best is None or key < best_key:
                    best, best_key = flow, key
        return None if best is None else (best_key[0], best)

    def _serialise(self, now_ns: int) -> None:
        """Serialise every chunk whose start is not after now."""
        while (chosen := self._choose()) is not None and chosen[0] <= now_ns:
            start_ns, flow = chosen
            if not flow.queued_bytes:  # the end alone takes no time and no share
                flow.ending = False
                self._send_off(flow, start_ns, 0)
                continue
            count = min(flow.queued_bytes, self._chunk_bytes)
            self._served_bytes = flow.served_bytes
            flow.queued_bytes -= count
            flow.served_bytes += count
            self._free_ns = start_ns + _duration_ns(count, self._rate_bps)
            flow.free_ns = start_ns + _duration_ns(count, self._flow_bps)
            self._send_off(flow, max(self._free_ns, flow.free_ns), count)

    def _send_off(self, flow: ShapedFlow, departure_ns: int, count: int) -> None:
        at_ns = departure_ns + self._delay_ns
        if self._jitter_ns:
            at_ns += self._chance.randint(0, self._jitter_ns)
        flow.transit.append((at_ns, count))


def _duration_ns(count: int, rate_bps: int | None) -> int:
    return 0 if rate_bps is None else -(-count * 8 * NS_PER_S // rate_bps)
