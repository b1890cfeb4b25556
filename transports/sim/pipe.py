"""One direction of a connection: the bytes between ``send`` there and the process here.

They leave a pipe at the bandwidth of the route between two hosts, arrive after its latency, and are
acknowledged one latency later; a gate can hold them up. Nothing here knows of listeners, processes
or the rules of the transport seam.

Invariant: what a pipe delivers is a prefix of what it took, in order, whatever happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pccl.transports.sim.events import Event, Events
from pccl.transports.sim.receive_buffer import ReceiveBuffer
from pccl.transports.sim.routes import Gate, HostRoute

PIECE_MAX_BYTES = 64 << 10
"""Most bytes that arrive at one instant; more than a real packet, to need fewer events."""

_PARTIAL_WRITE = 0.25  # how often `send` takes less than would fit,
_CUT_PIECE = 0.5  # ... bytes arrive in smaller portions than they might,
_MERGED_PIECE = 0.25  # ... and they arrive together with others that were sent before


class Pipe:
    """One direction of a connection: the bytes between ``send`` there and ``get_buffer`` here.

    Of the window, ``_flying`` bytes are taken but not delivered, ``_returning`` bytes are
    delivered but their acknowledgement has not come back; the rest is room.

    Args:
        events: the order of everything.
        route: from the source to the sink.
        back: from the sink to the source.
        window_bytes: most bytes on the way.
        sink: what has arrived.
        on_room: called, once, when there is room again after ``want_room``.
        on_ignored: called when bytes have arrived at a sink that vanished.

    Attributes:
        gate: holds up what this connection sends.
        route: see above.
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
    ) -> None:
        self.gate = Gate(events)
        self.route = route
        self._events = events
        self._back = back
        self._sink = sink
        self._on_room = on_room
        self._on_ignored = on_ignored
        self._window_bytes = window_bytes
        self._pieces: deque[tuple[int, memoryview]] = deque()  # (when it arrives, bytes)
        self._end: tuple[int, str] | None = None  # (when it arrives, why the stream ends)
        self._last_arrival_ns = 0
        self._delivery: Event | None = None
        self._held_up = False
        self._flying = 0
        self._returning = 0
        self._acks: deque[tuple[int, int]] = deque()  # (when it is back, how many bytes)
        self._last_ack_ns = 0
        self._wanted = False
        self._wake_planned = False

    # -- at the source ---------------------------------------------------------------------------

    def take(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Take what fits into the window, or less; return how many bytes that was."""
        views = [memoryview(buffer) for buffer in buffers]
        size = min(self._room(), sum(view.nbytes for view in views))
        if size and self._events.chance(_PARTIAL_WRITE):
            size = self._events.some(size)
        data = bytearray()
        for view in views:
            if view.nbytes and len(data) < size:
                data += view.cast("B")[: size - len(data)]
        rest = memoryview(bytes(data))
        while rest:
            length = min(len(rest), PIECE_MAX_BYTES)
            if self._events.chance(_CUT_PIECE):
                length = self._events.some(length)
            self._post(rest[:length])
            rest = rest[length:]
        self._flying += size
        return size

    def _post(self, piece: memoryview) -> None:
        arrival = max(self.route.transmit(len(piece)), self._last_arrival_ns)
        self._last_arrival_ns = arrival
        if self._pieces and self._pieces[-1][0] > self._events.now_ns():
            _, last = self._pieces[-1]
            together = len(last) + len(piece)
            if together <= PIECE_MAX_BYTES and self._events.chance(_MERGED_PIECE):
                piece = memoryview(bytes(last) + bytes(piece))
                self._pieces.pop()
        self._pieces.append((arrival, piece))
        self.arm()

    def finish(self, reason: str) -> None:
        """The stream ends here, behind everything that was taken."""
        self._end = (max(self.route.transmit(0), self._last_arrival_ns), reason)
        self.arm()

    def reset(self, reason: str) -> None:
        """The stream ends as soon as the other side can know; what is later than that is lost."""
        self.route.carry(partial(self._cut, reason))

    def drop_unsent(self) -> None:
        """Lose what has not left the source yet."""
        self._drop_after(self._events.now_ns() + self.route.delay_ns)

    def _drop_after(self, when_ns: int) -> None:
        while self._pieces and self._pieces[-1][0] > when_ns:
            self._pieces.pop()

    def want_room(self) -> None:
        """Tell the source once when there is room."""
        self._wanted = True
        self._plan_wake()

    def _room(self) -> int:
        while self._acks and self._acks[0][0] <= self._events.now_ns():
            self._returning -= self._acks.popleft()[1]
        return self._window_bytes - self._flying - self._returning

    def _plan_wake(self) -> None:
        """As in a kernel, a third of the window must be free before the source is told."""
        enough = max(1, self._window_bytes // 3)
        if not self._wanted or self._wake_planned:
            return
        if self._room() >= enough:
            when = 0
        elif self._window_bytes - self._flying >= enough:
            when = self._last_ack_ns
        else:
            return  # a delivery will bring us back here
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
        """Make sure that what comes next will be delivered."""
        if self._delivery is not None or self._held_up:
            return
        if self._pieces:
            self._delivery = self._events.at(self._pieces[0][0], self._deliver)
        elif self._end is not None:
            self._delivery = self._events.at(self._end[0], self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        self._held_up = not (
            self.route.gate.admits(self._deliver) and self.gate.admits(self._deliver)
        )
        if self._held_up or self._sink.awaits_start:
            return
        now = self._events.now_ns()
        if self._pieces and self._pieces[0][0] <= now:
            if not self._sink.has_room(len(self._pieces[0][1])):
                return  # the kernel there is full; when its process reads, we come back
            _, piece = self._pieces.popleft()
            if self._sink.vanished:
                self._on_ignored()
            else:
                self._acknowledge(len(piece))
                self._sink.put(piece)
        elif not self._pieces and self._end is not None and self._end[0] <= now:
            reason, self._end = self._end[1], None
            self._sink.put(reason)
        self.arm()

    def _acknowledge(self, nbytes: int) -> None:
        if self._back.gate.admits(partial(self._acknowledge, nbytes)):
            self._flying -= nbytes
            self._returning += nbytes
            when = max(self._last_ack_ns, self._events.now_ns() + self._back.delay_ns)
            self._last_ack_ns = when
            self._acks.append((when, nbytes))
            self._plan_wake()

    def _cut(self, reason: str) -> None:
        if not self.gate.admits(partial(self._cut, reason)):
            return
        self._drop_after(self._events.now_ns())
        self._end = (self._events.now_ns(), reason)
        if self._delivery is not None:
            self._delivery.cancel()
        if not self._held_up:
            self._deliver()
