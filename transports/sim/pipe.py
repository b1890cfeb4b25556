"""A pipe is one direction of a simulated connection, from ``send`` to the receiving process.

Bytes travel at the bandwidth of the route between two hosts and arrive after its latency. The
acknowledgement takes one more latency. Gates can hold back both. On a route that loses large
segments, no byte after the first lost one is ever delivered, however often it is sent again. This
module knows nothing of listeners, processes or the rules of transports.

Invariant: the delivered bytes are always a prefix of the accepted bytes, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pccl.protocol.types import NS_PER_S
from pccl.transports.sim.events import Event, Events
from pccl.transports.sim.ports import SMALL_BYTES
from pccl.transports.sim.receive_buffer import ReceiveBuffer
from pccl.transports.sim.routes import Gate, HostRoute

PIECE_MAX_BYTES = 64 << 10
"""Most bytes that arrive at one instant; more than a real packet, to need fewer events."""

RETRANSMIT_NS = NS_PER_S // 5
"""Time after which a kernel sends unacknowledged data again; it doubles each time."""

_PARTIAL_WRITE = 0.25  # probability that `send` accepts less than would fit,
_CUT_PIECE = 0.5  # that bytes arrive in a smaller piece than possible,
_MERGED_PIECE = 0.25  # and that a piece arrives together with the piece before it

UNSENT_MAX_BYTES = 512 << 10
"""Bytes that a kernel takes beyond those on the way, as TCP's low-water mark has it."""


@dataclass(eq=False, slots=True)
class _Parcel:
    """Bytes that wait at their sender or in the queue of a port; or the end of the stream."""

    data: memoryview
    entered_ns: int = -1
    """When they entered the queue; -1: they wait at their sender."""
    is_lost: bool = False


class Pipe:
    """One direction of a connection, from ``send`` to ``get_buffer`` at the other end.

    Of the window, ``_flying`` bytes are not delivered yet, and ``_returning`` bytes are delivered
    but not acknowledged yet. The rest is free.

    Args:
        events: events of the network.
        route: route from the source to the sink.
        back: route from the sink to the source.
        window_bytes: most unacknowledged bytes.
        sink: receives the bytes.
        on_room: called once after ``want_room``, when a third of the window is free.
        on_ignored: called when bytes arrive at a sink that has vanished.
        on_stuck: called once when the route has lost a segment for good, because it is too large.
        segment_bytes: the largest segment that the source sends.

    Attributes:
        gate: can hold back the bytes of this pipe.
        route, segment_bytes: see above.
        acked_bytes: bytes that the sink has acknowledged, as the source knows.
        arrived_bytes: bytes that have arrived at the sink.
        heard_ns: when the last acknowledgement came.
    """

    def __init__(
        self,
        events: Events,
        route: HostRoute,
        back: HostRoute,
        window_bytes: int,
        sink: ReceiveBuffer,
        on_room: Callable[[], None],
        on_ignored: Callable[[], None],
        on_stuck: Callable[[], None],
        segment_bytes: int,
    ) -> None:
        self.gate = Gate(events)
        self.route = route
        self.segment_bytes = segment_bytes
        self.acked_bytes = self.arrived_bytes = 0
        self.heard_ns = self._since_ns = events.now_ns()
        self._events = events
        self._back = back
        self._sink = sink
        self._on_room = on_room
        self._on_ignored = on_ignored
        self._on_stuck = on_stuck
        self._is_stuck = False
        self._burst = (0, 0)  # (when the last bytes were accepted, how many at that instant)
        self._window_bytes = window_bytes
        self._pieces: deque[tuple[int, memoryview]] = deque()  # (when it arrives, bytes)
        self._end: tuple[int, str] | None = None  # (when it arrives, why the stream ends)
        self._last_arrival_ns = 0
        self._delivery: Event | None = None
        self._held_up = False
        self._parcels: deque[_Parcel] = deque()
        """Data on the way through a port, in order."""
        self._unsent = 0
        """Bytes of it that have not entered the queue."""
        self._flying = 0
        self._returning = 0
        self._acks: deque[tuple[int, int]] = deque()  # (when it is back, how many bytes)
        self._busy_from_ns = -1
        """Since when there have been bytes to acknowledge; -1: there are none."""
        self._busy_before_ns = 0
        self._last_ack_ns = 0
        self._wanted = False
        self._wake_planned = False

    # -- at the source ---------------------------------------------------------------------------

    def take(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Accept bytes that fit into the window, perhaps not all; return their number."""
        views = [memoryview(buffer) for buffer in buffers]
        whole = sum([view.nbytes for view in views])
        size = min(self._room(), UNSENT_MAX_BYTES - self._unsent, whole)
        if size and self._events.chance(_PARTIAL_WRITE):
            size = self._events.some(size)
        if size < whole:
            left = size
            fitting: list[memoryview] = []
            for view in views:
                if view.nbytes and left:
                    fitting.append(view.cast("B")[:left])
                    left -= fitting[-1].nbytes
            views = fitting
        if size and self._busy_from_ns < 0:
            self._busy_from_ns = self._events.now_ns()
        if self._swallow(size):
            return size
        rest = memoryview(b"".join(views))
        while rest:
            length = min(len(rest), self._piece_bytes)
            if self._events.chance(_CUT_PIECE):
                length = self._events.some(length)
            self._post(rest[:length])
            rest = rest[length:]
        self._flying += size
        return size

    def _swallow(self, size: int) -> bool:
        """Lose the next bytes if a segment is too large, or was; return whether they are lost.

        A kernel puts writes of one instant together.
        """
        largest_bytes, now_ns = self.route.largest_bytes, self._events.now_ns()
        if not self._flying and not self._returning:
            self._since_ns = now_ns
        if largest_bytes is None or not size:
            return self._is_stuck and bool(size)
        when_ns, burst = self._burst
        burst = size if when_ns != now_ns else burst + size
        self._burst = now_ns, burst
        is_large = min(burst, self.segment_bytes) > largest_bytes
        if self._is_stuck and not is_large and not self._is_shut:  # asks for the lost one again
            back_ns = self.route.transmit(size) + self._back.delay_ns
            self._last_ack_ns = when_ns = max(self._last_ack_ns, back_ns)
            self._acks.append((when_ns, 0))
        elif is_large and not self._is_stuck:
            self._is_stuck = True
            self._on_stuck()
        self._flying += size if self._is_stuck else 0
        return self._is_stuck

    @property
    def _is_shut(self) -> bool:
        gates = (self.route.gate, self.gate, self._back.gate)
        return any(gate.shut_until_ns > self._events.now_ns() for gate in gates)

    # -- what the kernel of the source knows -----------------------------------------------------

    @property
    def unacknowledged(self) -> int:
        """Segments on the way, or lost."""
        return -(-(self._window_bytes - self._room()) // self.segment_bytes)

    @property
    def busy_ns(self) -> int:
        """Time in which there were bytes to acknowledge."""
        self._room()
        since_ns = self._events.now_ns() - self._busy_from_ns if self._busy_from_ns >= 0 else 0
        return self._busy_before_ns + since_ns

    @property
    def retransmits(self) -> int:
        """How often the oldest segment on the way was sent again."""
        now_ns, oldest = self._events.now_ns(), self._pieces[0] if self._pieces else None
        if not self.unacknowledged or (oldest is not None and oldest[0] > now_ns):
            return 0
        if self._parcels and oldest is None:
            return 0  # the kernel has measured how long the queues are
        if oldest is not None and not self._sink.has_room(len(oldest[1])):
            return 0  # the sink acknowledges that it has no room
        first_ns = RETRANSMIT_NS + self.route.delay_ns + self._back.delay_ns
        return (1 + max(0, now_ns - self._since_ns) // first_ns).bit_length() - 1

    @property
    def _piece_bytes(self) -> int:
        """Most bytes that arrive at one instant: a slow route delivers something each second."""
        rate = self.route.rate or PIECE_MAX_BYTES
        for line in (self.route.up, self.route.down):
            rate = rate if line is None else min(rate, line.piece_bytes)
        return min(PIECE_MAX_BYTES, max(rate, self.segment_bytes))

    def _post(self, piece: memoryview) -> None:
        if self.route.has_port:
            self._post_to_port(piece)
            return
        self._last_arrival_ns = arrival = max(
            self.route.transmit(len(piece)), self._last_arrival_ns
        )
        if self._pieces and self._pieces[-1][0] > self._events.now_ns():
            _, last = self._pieces[-1]
            together = len(last) + len(piece)
            if together <= self._piece_bytes and self._events.chance(_MERGED_PIECE):
                piece = memoryview(bytes(last) + bytes(piece))
                self._pieces.pop()
        self._pieces.append((arrival, piece))
        self.arm()

    def _post_to_port(self, piece: memoryview) -> None:
        parcel = _Parcel(piece)
        self._parcels.append(parcel)
        self._unsent += len(piece)
        arrive, enter = partial(self._come, parcel), partial(self._enter, parcel)
        self.route.pass_ports(self, len(piece), arrive, enter)

    def _enter(self, parcel: _Parcel) -> None:
        if not parcel.is_lost:
            parcel.entered_ns = self._events.now_ns()
            self._unsent -= len(parcel.data)
            self._plan_wake()

    def _come(self, parcel: _Parcel) -> None:
        if not parcel.is_lost:
            first = self._parcels.popleft()
            assert first is parcel, "bytes stay in order"
            self._pieces.append((self._events.now_ns(), parcel.data))
            self.arm()

    def _finished(self, reason: str) -> None:
        self._end = (self._events.now_ns(), reason)
        self.arm()

    def finish(self, reason: str) -> None:
        """End the stream after all accepted bytes."""
        if self._is_stuck:
            return
        if self.route.has_port:
            self.route.pass_ports(self, SMALL_BYTES, partial(self._finished, reason), lambda: None)
            return
        self._end = (max(self.route.transmit(0), self._last_arrival_ns), reason)
        self.arm()

    def reset(self, reason: str) -> None:
        """End the stream after one latency; bytes that would arrive later are lost."""
        self.route.carry(partial(self._cut, reason))

    def drop_unsent(self) -> None:
        """Discard bytes that have not left the source yet."""
        self._lose_parcels(lambda parcel: parcel.entered_ns < 0)
        self._drop_after(self._events.now_ns() + self.route.delay_ns)

    def _lose_parcels(self, is_lost: Callable[[_Parcel], bool]) -> None:
        while self._parcels and is_lost(self._parcels[-1]):
            self._parcels.pop().is_lost = True

    def _drop_after(self, when_ns: int) -> None:
        while self._pieces and self._pieces[-1][0] > when_ns:
            self._pieces.pop()

    def want_room(self) -> None:
        """Call ``on_room`` once, as soon as a third of the window is free."""
        self._wanted = True
        self._plan_wake()

    def _room(self) -> int:
        while self._acks and self._acks[0][0] <= self._events.now_ns():
            self.heard_ns, nbytes = self._acks.popleft()
            self._returning -= nbytes
            self.acked_bytes += nbytes
            self._since_ns = self.heard_ns if nbytes else self._since_ns
            if self._busy_from_ns >= 0 and not self._flying and not self._returning:
                self._busy_before_ns += self.heard_ns - self._busy_from_ns
                self._busy_from_ns = -1
        return self._window_bytes - self._flying - self._returning

    def _plan_wake(self) -> None:
        """Schedule ``on_room`` for when a third of the window is free, as in a kernel."""
        if not self._wanted or self._wake_planned:
            return
        enough = max(1, self._window_bytes // 3)
        if self._unsent > UNSENT_MAX_BYTES // 2:
            return  # the queue of a port calls this method again
        if self._room() >= enough:
            when = 0
        elif self._window_bytes - self._flying >= enough:
            when = self._last_ack_ns
        else:
            return  # a delivery calls this method again
        self._wake_planned = True
        self._events.at(when, partial(self._wake, enough))

    def _wake(self, enough: int) -> None:
        self._wake_planned = False
        if self._room() < enough:
            self._plan_wake()
        elif self._wanted:
            self._wanted = False
            self._on_room()

    # -- at the sink -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Schedule the next delivery, unless it is scheduled or held back already."""
        if self._delivery is not None or self._held_up:
            return
        if self._pieces:
            self._delivery = self._events.at(self._pieces[0][0], self._deliver)
        elif self._end is not None:
            self._delivery = self._events.at(self._end[0], self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        now = self._events.now_ns()
        for gate in (self.route.gate, self.gate):
            if now < gate.shut_until_ns:
                gate.admits(self._deliver)
                self._held_up = True
                return
        self._held_up = False
        if self._sink.awaits_start:
            return
        if self._pieces and self._pieces[0][0] <= now:
            if not self._sink.has_room(len(self._pieces[0][1])):
                return  # the buffer there is full; `arm` is called when its process has read
            _, piece = self._pieces.popleft()
            if self._sink.vanished:
                self._on_ignored()
            else:
                self.arrived_bytes += len(piece)
                self._acknowledge(len(piece))
                self._sink.put(piece)
        elif not self._pieces and self._end is not None and self._end[0] <= now:
            reason, self._end = self._end[1], None
            self._sink.put(reason)
        self.arm()

    def _acknowledge(self, nbytes: int) -> None:
        now = self._events.now_ns()
        if now < self._back.gate.shut_until_ns:
            self._back.gate.admits(partial(self._acknowledge, nbytes))
            return
        self._flying -= nbytes
        self._returning += nbytes
        self._last_ack_ns = when = max(self._last_ack_ns, now + self._back.answer_ns)
        self._acks.append((when, nbytes))
        self._plan_wake()

    def _cut(self, reason: str) -> None:
        if not self.gate.admits(partial(self._cut, reason)):
            return
        self._lose_parcels(lambda parcel: True)
        self._drop_after(self._events.now_ns())
        self._end = (self._events.now_ns(), reason)
        if self._delivery is not None:
            self._events.cancel(self._delivery)
        if not self._held_up:
            self._deliver()
