"""When each byte of a link's direction leaves and arrives: pure, in virtual nanoseconds.

    sender ─> queue ─> serialised at the link's rate ─> half a round trip ─> arrived ─> receiver
                 ^                                                                        |
                 └──────── room in the window <─── half a round trip back <───────────────┘

A link's direction is one ``Shaper``; each connection has a ``ShapedFlow`` in it. Both count bytes
and never see them. Time goes in with each call and never goes back.

Invariants:

* The link serialises one chunk at a time; n bytes take n * 8 / rate, rounded up to a nanosecond.
* Of the flows that could send next, the one that has had least goes first: equal shares, and what
  one cannot use (its own cap, nothing to send) goes to the others.
* Bytes of a flow arrive in the order in which they were offered, and its end after all of them.
* ``flight_bytes`` of a flow never exceeds what the window was when its bytes were let in.
"""

from __future__ import annotations

import enum
from collections import deque
from math import log
from random import Random

from pccl.stress.emulator.spec import PACKET_BYTES, QUEUE_S, LinkSpec

NS_PER_S = 1_000_000_000

CHUNK_S = 0.001
"""A chunk is what the link sends in this time, within the bounds below: small, so that flows share
finely and bytes do not come in bursts, but no smaller than a packet."""

CHUNK_BYTES_MIN = 1460
CHUNK_BYTES_MAX = 64 << 10


class Direction(enum.Enum):
    """Of a connection's two directions, one."""

    FORWARD = "forward"
    """From who has dialled to the relay's target."""
    BACKWARD = "backward"

    @property
    def reverse(self) -> Direction:
        """The other one."""
        return Direction.BACKWARD if self is Direction.FORWARD else Direction.FORWARD


class ShapedFlow:
    """One direction of one connection. Made by :meth:`Shaper.add`; only the shaper changes it.

    Attributes:
        queued_bytes: let in, and not begun to be serialised.
        flight_bytes: let in, and their acknowledgement is not back.
        arrived_bytes: arrived, and not yet taken by the receiver.
        has_ended: the sender's end has arrived, after all bytes.
        ending: the sender's end is queued, behind the bytes.
        transit: arrival and number of bytes (0: the end) of all that is on its way, in the order of
            the bytes: what would arrive before an earlier one waits for it.
        acks: the same of acknowledgements.
        free_ns: no byte of it is serialised before.
        served_bytes: what it has had, in the measure of fair sharing.
        held_since_ns, acks_held_since_ns: since when nothing moves there or back; None: it does.
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
        """Whether it waits for the link."""
        return (self.queued_bytes > 0 or self.ending) and self.held_since_ns is None

    def event_ns(self, flight_max_bytes: int) -> int | None:
        """When its next byte arrives, or room comes back that is scarce."""
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
        """Let arrive and be acknowledged what is due; return whether anything was."""
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
        spec: what the link is like.
        chance: where jitter is drawn from; one seed, one run.
        overhead_ns: what whoever passes the bytes on adds to each way; taken off the delay.
    """

    def __init__(self, spec: LinkSpec, chance: Random, overhead_ns: int = 0) -> None:
        self._chance = chance
        self._overhead_ns = overhead_ns
        self._flows: list[ShapedFlow] = []
        self._flow_count = 0
        self._free_ns = 0  # the link's work up to here is done or promised
        self._served_bytes = 0  # of the flow served last, when it was
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
        """How many bytes pass until the next bit flips."""
        if self._corrupt:
            # -log(u) is exponential; Random's own methods may differ between versions of Python.
            spread = -log(1.0 - self._chance.random())
            self._intact_bytes += spread * PACKET_BYTES / self._corrupt

    def flips(self, nbytes: int) -> list[int]:
        """Of so many bytes that pass the link now, the numbers of the bits that flip."""
        found: list[int] = []
        if not self._corrupt:
            return found
        self._intact_bytes -= nbytes
        while self._intact_bytes < 0:
            found.append(min(8 * nbytes - 1, int(8 * (nbytes + self._intact_bytes))))
            self._draw_intact()
        return found

    # -- what happens ----------------------------------------------------------------------------

    def add(self, now_ns: int, ready_ns: int = 0) -> ShapedFlow:
        """A connection begins; none of its bytes is serialised before ``ready_ns``."""
        self._flow_count += 1
        flow = ShapedFlow(self._flow_count, max(now_ns, ready_ns))
        flow.served_bytes = self._served_bytes
        self._flows.append(flow)
        return flow

    def remove(self, flow: ShapedFlow) -> None:
        """A connection is over, wherever its bytes are."""
        self._flows.remove(flow)

    def room_bytes(self, flow: ShapedFlow) -> int:
        """How many bytes of a flow may be offered now."""
        room = self._flight_max_bytes - flow.flight_bytes
        if self._queue_bytes is not None:
            backlogged = sum(other.is_backlogged for other in self._flows) or 1
            limit = max(self._queue_bytes // backlogged, 2 * self._chunk_bytes)
            room = min(room, limit - flow.queued_bytes)
        return max(0, room)

    def offer(self, flow: ShapedFlow, count: int, now_ns: int) -> None:
        """The sender has sent ``count`` bytes; at most ``room_bytes``."""
        assert count > 0
        assert not flow.ending
        assert count <= self.room_bytes(flow)
        self._join(flow, now_ns)
        flow.queued_bytes += count
        flow.flight_bytes += count

    def finish(self, flow: ShapedFlow, now_ns: int) -> None:
        """The sender will send no more."""
        self._join(flow, now_ns)
        flow.ending = True

    def deliver(self, flow: ShapedFlow, count: int, now_ns: int) -> None:
        """The receiver has taken ``count`` of the bytes that have arrived."""
        assert 0 < count <= flow.arrived_bytes
        flow.arrived_bytes -= count
        flow.acks.append((now_ns + self._delay_ns, count))

    def advance(self, now_ns: int) -> list[ShapedFlow]:
        """Let time pass; return the flows of which bytes or the end arrived, or that got room."""
        self._serialise(now_ns)
        return [flow for flow in self._flows if flow.pass_due(now_ns)]

    def next_event_ns(self) -> int | None:
        """When :meth:`advance` is next needed; None: not before something else happens.

        Acknowledgements that nobody waits for are no reason.
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
        """Whether bytes wait for the link."""
        return any(flow.is_backlogged for flow in self._flows)

    # -- changes and faults ----------------------------------------------------------------------

    def change(self, spec: LinkSpec, now_ns: int) -> None:
        """The link is different from now on; what is on its way arrives as it would have.

        No byte overtakes another: after a shorter delay, later bytes wait for earlier ones.
        """
        self._serialise(now_ns)
        self._set(spec)
        for flow in self._flows:  # what one could not use under its cap is not owed to it
            flow.served_bytes = self._served_bytes

    def hold(self, flow: ShapedFlow, now_ns: int) -> None:
        """Nothing of a flow moves until :meth:`release`; its acknowledgements do."""
        if flow.held_since_ns is None:
            self._serialise(now_ns)
            flow.pass_due(now_ns)
            flow.held_since_ns = now_ns

    def release(self, flow: ShapedFlow, now_ns: int) -> None:
        """A held flow goes on where it was."""
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
        """The way back is interrupted: no room is won until :meth:`release_acks`."""
        if flow.acks_held_since_ns is None:
            flow.pass_due(now_ns)
            flow.acks_held_since_ns = now_ns

    def release_acks(self, flow: ShapedFlow, now_ns: int) -> None:
        """Acknowledgements go on where they were."""
        if flow.acks_held_since_ns is not None:
            late_ns = now_ns - flow.acks_held_since_ns
            flow.acks_held_since_ns = None
            flow.acks = deque((at_ns + late_ns, count) for at_ns, count in flow.acks)

    # -- inside ----------------------------------------------------------------------------------

    def _join(self, flow: ShapedFlow, now_ns: int) -> None:
        """A flow has something to send; time has been advanced to now."""
        if not flow.queued_bytes:
            flow.free_ns = max(flow.free_ns, now_ns)
            flow.served_bytes = max(flow.served_bytes, self._served_bytes)

    def _choose(self) -> tuple[int, ShapedFlow] | None:
        """Who is served next, and when: the first that can be, then who has had least."""
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
        """Begin every chunk that begins up to now."""
        while (chosen := self._choose()) is not None and chosen[0] <= now_ns:
            start_ns, flow = chosen
            if not flow.queued_bytes:  # the end alone: no time, no share
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
