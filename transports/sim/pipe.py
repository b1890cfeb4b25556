"""What the in-memory network is made of: events in virtual time, gates, routes and pipes.

``network`` puts hosts and connections on top. Here is how bytes move: they leave a
pipe at the bandwidth of the route between two hosts (shared by all that goes this way), arrive
after its latency, and are acknowledged one latency later; a gate can hold them up. Nothing here
knows of listeners, processes or the rules of the transport seam.

Invariants:

* Time is integer nanoseconds; one event per instant (the next free one, if it is taken).
* What a pipe delivers is a prefix of what it took, in order, whatever happens.
* Of randomness there is one source, drawn from in the order of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Protocol

from pccl.protocol.types import NS_PER_S

PIECE_MAX_BYTES = 64 << 10
"""Most bytes that arrive at one instant; more than a real packet, to need fewer events."""

_PARTIAL_WRITE = 0.25  # how often `send` takes less than would fit,
_CUT_PIECE = 0.5  # ... bytes arrive in smaller portions than they might,
_MERGED_PIECE = 0.25  # ... and they arrive together with others that were sent before
_FOR_EVER_NS = 1 << 62

Trace = Callable[[int, str], None]
"""Called with the time in nanoseconds and what happens then."""

Action = Callable[[], None]


class VirtualTimer(Protocol):
    """A pending call."""

    def cancel(self) -> object:
        """Forget the call."""
        ...


class VirtualClock(Protocol):
    """Virtual time, as the simulation's loop offers it."""

    def now_ns(self) -> int:
        """Return the present."""
        ...

    def call_at_ns(self, when_ns: int, callback: Action) -> VirtualTimer:
        """Call back at ``when_ns``."""
        ...


class Event:
    """Something that will happen in the network, alone in its instant."""

    def __init__(self, events: Events, when_ns: int, action: Action) -> None:
        self.when_ns = when_ns
        self._events = events
        self._action = action
        self._timer = events.clock.call_at_ns(when_ns, self._happen)

    def _happen(self) -> None:
        self._events.free(self.when_ns, happened=True)
        self._action()

    def cancel(self) -> None:
        """Let it not happen."""
        self._timer.cancel()
        self._events.free(self.when_ns, happened=False)


class Events:
    """The one order in which everything in the network happens, and its one source of chance.

    Args:
        clock: the virtual time.
        rng: the source of chance.
        trace: told of what happens; None for nobody.
        ragged: whether bytes are taken and delivered in random portions.
    """

    def __init__(
        self, clock: VirtualClock, rng: Random, trace: Trace | None, *, ragged: bool
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.ragged = ragged
        self._trace = trace
        self._taken: set[int] = set()  # asked for members only, never iterated
        self._latest_ns = -1

    def now_ns(self) -> int:
        """Return the present."""
        return self.clock.now_ns()

    def at(self, when_ns: int, action: Action) -> Event:
        """Let ``action`` happen at the first free instant that is not before ``when_ns``."""
        when_ns = max(when_ns, self.now_ns(), self._latest_ns + 1)
        while when_ns in self._taken:
            when_ns += 1
        self._taken.add(when_ns)
        return Event(self, when_ns, action)

    def soon(self, action: Action) -> Event:
        """Let ``action`` happen at the first free instant."""
        return self.at(0, action)

    def free(self, when_ns: int, *, happened: bool) -> None:
        """Give an instant back. For events only."""
        self._taken.discard(when_ns)
        if happened:
            self._latest_ns = when_ns

    def chance(self, probability: float) -> bool:
        """Throw a loaded coin; always False unless bytes are ragged."""
        return self.ragged and self.rng.random() < probability

    def some(self, count: int) -> int:
        """Draw from 1 to ``count``."""
        return 1 + int(self.rng.random() * count)

    def note(self, *what: object) -> None:
        """Tell the trace."""
        if self._trace is not None:
            self._trace(self.now_ns(), " ".join(map(str, what)))


class Gate:
    """Where bytes can be held up. What comes while it is shut waits, in order."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._shut_until_ns = 0
        self._waiting: list[Action] = []

    def shut(self, duration_ns: int | None) -> None:
        """Hold up everything for ``duration_ns``, or until it is opened."""
        until = _FOR_EVER_NS if duration_ns is None else self._events.now_ns() + duration_ns
        self._shut_until_ns = max(self._shut_until_ns, until)

    def open(self) -> None:
        """Hold up nothing any more."""
        self._shut_until_ns = self._events.now_ns()
        self._release()

    def admits(self, action: Action) -> bool:
        """Say whether the gate is open; if not, keep ``action`` and let it happen when it is."""
        if self._events.now_ns() >= self._shut_until_ns:
            return True
        self._waiting.append(action)
        if len(self._waiting) == 1:
            self._release()
        return False

    def _release(self) -> None:
        if self._events.now_ns() >= self._shut_until_ns:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                self._events.soon(action)
        elif self._waiting and self._shut_until_ns < _FOR_EVER_NS:
            self._events.at(self._shut_until_ns, self._release)


class HostRoute:
    """One direction between two hosts.

    Attributes:
        latency_ns: from leaving to arriving.
        bytes_per_s: the bandwidth, None for any.
        extra_ns: more latency, while there is a spike.
        caps: lower bandwidths that hold at present.
        gate: holds up everything that goes this way.
    """

    def __init__(self, events: Events, latency_ns: int, bytes_per_s: int | None) -> None:
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self.extra_ns = 0
        self.caps: list[int] = []
        self.gate = Gate(events)
        self._events = events
        self._busy_until_ns = 0

    def transmit(self, nbytes: int) -> int:
        """Queue ``nbytes`` behind everything that goes this way; return when they arrive."""
        start = max(self._events.now_ns(), self._busy_until_ns)
        rate = self.rate
        self._busy_until_ns = start + (0 if rate is None else -(-nbytes * NS_PER_S // rate))
        return self._busy_until_ns + self.delay_ns

    @property
    def rate(self) -> int | None:
        """The bandwidth at present, in bytes per second; None: any."""
        rate = min(self.caps, default=None)
        if rate is None or (self.bytes_per_s is not None and self.bytes_per_s < rate):
            rate = self.bytes_per_s
        return rate

    @property
    def delay_ns(self) -> int:
        """From leaving to arriving, at present."""
        return self.latency_ns + self.extra_ns

    def carry(self, action: Action) -> None:
        """Let ``action`` happen at the other side, after the latency."""
        self._events.at(self._events.now_ns() + self.delay_ns, partial(self._arrive, action))

    def _arrive(self, action: Action) -> None:
        if self.gate.admits(partial(self._arrive, action)):
            action()


class PipeEnd(Protocol):
    """What a pipe needs of the connection ends that it joins. All calls come from events."""

    @property
    def awaits_start(self) -> bool:
        """Nobody reads yet: what arrives waits."""
        ...

    @property
    def vanished(self) -> bool:
        """The whole host went away without a word; it acknowledges nothing."""
        ...

    @property
    def disowned(self) -> bool:
        """It ``vanished``, but a host of its name is up and knows no such connection."""
        ...

    @property
    def is_late(self) -> bool:
        """Its process does not read now; its kernel does."""
        ...

    def run(self, action: Action) -> None:
        """Let its process do something, as soon as it runs."""
        ...

    def take_delivery(self, data: memoryview) -> None:
        """Bytes are read."""
        ...

    def tell_writable(self) -> None:
        """There is room again."""
        ...

    def lose(self, reason: str) -> None:
        """The stream has ended."""
        ...


class Pipe:
    """One direction of a connection: the bytes between ``send`` there and ``get_buffer`` here.

    Of the window, ``_flying`` bytes are taken but not delivered, ``_returning`` bytes are
    delivered but their acknowledgement has not come back; the rest is room. What arrives for a
    process that does not run is kept by its kernel and acknowledged, up to one window.
    """

    def __init__(
        self,
        events: Events,
        source: PipeEnd,
        sink: PipeEnd,
        route: HostRoute,
        back: HostRoute,
        window_bytes: int,
    ) -> None:
        self.gate = Gate(events)
        self._events = events
        self._source = source
        self._sink = sink
        self.route = route
        self._back = back
        self._window_bytes = window_bytes
        self._pieces: deque[tuple[int, memoryview]] = deque()  # (when it arrives, bytes)
        self._end: tuple[int, str] | None = None  # (when it arrives, why the stream ends)
        self._last_arrival_ns = 0
        self._delivery: Event | None = None
        self._held_up = False
        self._unread: deque[memoryview | str] = deque()  # bytes; at the end why the stream ended
        self._unread_bytes = 0
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
            self._source.tell_writable()

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
            if self._unread_bytes + len(self._pieces[0][1]) > self._window_bytes:
                return  # the kernel there is full; when its process reads, we come back
            _, piece = self._pieces.popleft()
            if not self._sink.vanished:
                self._acknowledge(len(piece))
                self._arrived(piece)
            elif self._sink.disowned:
                self._back.carry(partial(self._source.lose, "connection reset by peer"))
        elif not self._pieces and self._end is not None and self._end[0] <= now:
            reason, self._end = self._end[1], None
            self._arrived(reason)
        self.arm()

    def _arrived(self, what: memoryview | str) -> None:
        if not self._unread and not self._sink.is_late:
            self._hand_over(what)
            return
        self._unread.append(what)
        self._unread_bytes += len(what) if isinstance(what, memoryview) else 0
        if len(self._unread) == 1:
            self._sink.run(self._read)

    def _read(self) -> None:
        """The process at the sink runs again."""
        what = self._unread.popleft()
        self._unread_bytes -= len(what) if isinstance(what, memoryview) else 0
        self._hand_over(what)
        if self._unread:
            self._sink.run(self._read)
        self.arm()

    def _hand_over(self, what: memoryview | str) -> None:
        if isinstance(what, str):
            self._sink.lose(what)
        else:
            self._sink.take_delivery(what)

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


__all__ = [
    "Action",
    "Event",
    "Events",
    "Gate",
    "HostRoute",
    "Pipe",
    "PipeEnd",
    "Trace",
    "VirtualClock",
    "VirtualTimer",
]
