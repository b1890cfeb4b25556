"""``SegmentLimit``: finds links on which large packets vanish, and gives them smaller segments.

A tunnel or VPN drops packets that are too large for it. If a firewall also drops the ICMP message
that says so, the sender never learns it (RFC 2923, "black hole"): connections open, heartbeats
pass, and each lane stops at its first full segment. A new lane stops there, too. So after two such
lanes in a row, the next ones are opened with smaller segments, which the link keeps. A process
cannot switch on the kernel's own search for the right size (RFC 4821).

An outage stops lanes, too, but small packets as well. Nothing can show that small packets pass on
an old lane with a full send window. So the first of the two lanes needs no such proof. But then the
second one is replaced as late as in an outage, unless small packets pass on it right now.

Either side of a lane may notice it: the sender, because nothing of a large write is acknowledged;
the receiver, because nothing arrives although small packets are acknowledged. The side that dials
sets the size, for both directions.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

SEGMENTS_BYTES = (1200, 536)
"""Segment sizes to try, the first one first. Every network passes the packets that they need: IPv6
asks for 1280 bytes (RFC 8200), IPv4 for 576 (RFC 791)."""

CAREFUL_SEGMENT_BYTES = SEGMENTS_BYTES[0]
"""The largest segment of connections to the master and to relays, from the beginning: they carry
little, or are slow, and a peer has no other way."""

STUCK_LANES_MAX = 2
"""Lanes in a row that are stuck before segments get smaller for the first time. One may be stuck by
an outage that began just after it was opened."""

SMALL_BYTES = 16 << 10
"""Bytes that pass before the first full segment, at most: those of the handshake and of the first
encrypted records, which are short."""

STILL_BYTES = 4096
"""Bytes that pass on a stuck lane since it was asked for a sign of life, at most."""

RETRANSMITS_MIN = 3
"""How often the oldest packet of a stuck lane was sent again, at least: in 2 s on most paths, so
before the other side is asked. A healthy path loses a packet once, and it may be a small one."""

LARGE_BYTES = 64 << 10
"""Bytes that pass only if full segments do."""


class Way(enum.Enum):
    """The direction in which large packets vanish, from this side."""

    OUT = enum.auto()
    IN = enum.auto()


class Proof(enum.IntEnum):
    """When small packets have passed on a stuck lane; the more recent, the better."""

    NONE = 0
    """Not for a long time: it may be an outage."""
    OPENED = 1
    """When it was opened, and it has carried little since: an outage is unlikely."""
    STUCK = 2
    """Since it is stuck: it is no outage."""


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """What the kernel knows of the connection of a lane.

    Attributes:
        segment_bytes: the largest segment that it sends.
        acked_bytes: bytes that the other system has acknowledged, since the connection began.
        arrived_bytes: bytes that have arrived, since the connection began.
        unacknowledged: packets that the other system has not acknowledged.
        retransmits: how often the oldest of them was sent again.
        ack_ago_ns: time since the other system acknowledged anything.
    """

    segment_bytes: int
    acked_bytes: int
    arrived_bytes: int
    unacknowledged: int
    retransmits: int
    ack_ago_ns: int

    def passed(self, before: LaneFacts | None) -> dict[Way, int]:
        """Return the bytes that have passed since; None, or a predecessor: since the beginning."""
        if before is None or before.acked_bytes > self.acked_bytes:
            return {Way.OUT: self.acked_bytes, Way.IN: self.arrived_bytes}
        return {
            Way.OUT: self.acked_bytes - before.acked_bytes,
            Way.IN: self.arrived_bytes - before.arrived_bytes,
        }


@dataclass(frozen=True, slots=True)
class StuckLane:
    """A lane on which large packets do not pass.

    Attributes:
        way: the direction in which they vanish.
        segment_bytes: the largest segment of the lane.
        asked_ns: when the lane was asked for a sign of life, which has not come.
        proof: when small packets have passed.
    """

    way: Way
    segment_bytes: int
    asked_ns: int
    proof: Proof = Proof.STUCK


def stuck_among(
    number: int,
    before: Mapping[int, LaneFacts],
    now: Mapping[int, LaneFacts],
    asked_ns: int,
    *,
    is_heard: bool,
    is_young: bool,
) -> StuckLane | None:
    """Return one of the lanes of a link if large packets vanish on it.

    If large packets pass on another lane, the path is not to blame. If anything does, the other
    side is alive.

    Args:
        number: number of the lane.
        before: what was known of each lane when this one was asked for a sign of life.
        now: what is known now.
        asked_ns: when it was asked.
        is_heard: whether an acknowledgement has arrived since the lane moved something.
        is_young: whether it was asked soon after it was opened. An idle lane carries little, too.
    """
    way, own = stuck_way(before[number], now[number]), now[number]
    others = [one.passed(before.get(n)) for n, one in now.items() if n != number]
    if way is None or any(passed[way] >= LARGE_BYTES for passed in others):
        return None
    nbytes = own.acked_bytes if way is Way.OUT else own.arrived_bytes
    is_new = is_young and nbytes <= SMALL_BYTES
    proof = Proof.OPENED if is_new else Proof.NONE
    # The system of a stopped process acknowledges what arrives, but no such process opens a lane.
    if any(any(passed.values()) for passed in others) or (is_heard and (way is Way.OUT or is_new)):
        proof = Proof.STUCK
    return StuckLane(way, own.segment_bytes, asked_ns, proof)


def stuck_way(before: LaneFacts, now: LaneFacts) -> Way | None:
    """Return in which direction nothing large passes on a lane; None: in neither.

    Args:
        before: what was known when the lane was asked for a sign of life, which has not come.
        now: what is known now.
    """
    if now.unacknowledged:
        is_still = now.acked_bytes - before.acked_bytes <= STILL_BYTES
        return Way.OUT if is_still and now.retransmits >= RETRANSMITS_MIN else None
    return Way.IN if now.arrived_bytes - before.arrived_bytes <= STILL_BYTES else None


class SegmentLimit:
    """The segment size of one link.

    Args:
        memory_ns: time after which a stuck lane no longer counts.

    Attributes:
        segment_bytes: the largest segment of the next lanes; 0: as large as the system likes.
    """

    def __init__(self, memory_ns: int) -> None:
        self.segment_bytes = 0
        self._memory_ns = memory_ns
        self._sizes = list(SEGMENTS_BYTES)
        self._way = Way.OUT
        self._in_a_row = 0
        self._needs = Proof.OPENED
        """What a lane must have, to be replaced before the usual time."""
        self._struck_ns: int | None = None
        self._is_told = True

    def suspects(self, now_ns: int) -> Proof | None:
        """Return with what proof a lane that is stuck is replaced before the usual time.

        None: no lane was stuck lately, or a large packet has passed since.
        """
        if self._struck_ns is None or now_ns - self._struck_ns > self._memory_ns:
            return None
        return self._needs if self._in_a_row > 0 or not self._is_told else None

    def stuck(self, lane: StuckLane, now_ns: int) -> bool:
        """Record a stuck lane that has ended; return whether the segments get smaller.

        If the smallest segments do not help, it is something else, and the limit ends.
        """
        if self.segment_bytes and lane.segment_bytes > self.segment_bytes:
            return False  # it was opened before the last decision, or by the other side
        if self._struck_ns is not None:
            if lane.asked_ns < self._struck_ns:
                return False  # the same event: all lanes with data are stuck at the same time
            if now_ns - self._struck_ns > self._memory_ns:
                self._in_a_row = 0
        is_first = not self._in_a_row and self._is_told
        if not (lane.proof or is_first):
            return False
        self._needs = Proof.OPENED if lane.proof else Proof.STUCK
        self._struck_ns, self._way = now_ns, lane.way
        self._in_a_row += 1
        is_next = not self._is_told and bool(self._sizes)  # the size that is tried does not fit
        if self._in_a_row < STUCK_LANES_MAX and not is_next:
            return False
        if not self._sizes:
            self._forget()
            return False
        self.segment_bytes, self._in_a_row, self._is_told = self._sizes.pop(0), 0, False
        return True

    def carried(self, facts: LaneFacts, opened_ns: int) -> bool:
        """Record what a lane has carried; return whether it proves the smaller segments right.

        Larger segments that pass on a new lane prove them wrong: it was something else.

        Args:
            facts: what is known of the lane.
            opened_ns: when it came up. One from before the last stuck lane proves nothing.
        """
        is_new = self._struck_ns is not None and opened_ns >= self._struck_ns
        nbytes = facts.acked_bytes if self._way is Way.OUT else facts.arrived_bytes
        is_open = self._in_a_row > 0 or not self._is_told
        if not (is_open and is_new) or nbytes < LARGE_BYTES:
            return False
        self._in_a_row = 0
        if self.segment_bytes and facts.segment_bytes > self.segment_bytes:
            self._forget()
            return False
        is_news, self._is_told = not self._is_told, True
        return is_news

    def _forget(self) -> None:
        self.segment_bytes, self._sizes = 0, list(SEGMENTS_BYTES)
        self._in_a_row, self._is_told = 0, True
