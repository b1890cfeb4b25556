"""One relayed connection: two sockets, and between them a flow in each direction.

Bytes read from one socket are offered to the link's shaper and wait here until it says that they
have arrived; then they are written to the other. Nothing decides here when.

Invariants:

* Bytes are read only as the window has room for them: what is here is in flight.
* What is delivered is, in order, what was read, and then the end; or the connection dies by reset.
  No byte is skipped and the next one delivered.
* A reset does not pass a direction that is held; it does once that is released.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from pccl.stress.emulator.shaper import Direction, ShapedFlow, Shaper
from pccl.stress.emulator.tuning import failure_of, reset

READ_BYTES_MAX = 256 << 10
_VIEWS_MAX = 16

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # some programs restore SIGPIPE's default


class Side(enum.Enum):
    """Of the two parties of a connection, one."""

    DIALLER = "dialler"
    """Who has dialled the relay."""
    TARGET = "target"
    """Whom the relay has dialled."""


class RelayEnd:
    """One of the two sockets, and what the loop is asked to watch it for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self.is_open = True
        self.is_connected = False
        self.is_read = False
        self._awaits_writable = False
        self._loop = loop

    def watch_readable(self, callback: Callable[[], object]) -> None:
        """Call back whenever there is something to read."""
        if self.is_open and not self.is_read:
            self.is_read = True
            self._loop.add_reader(self.sock, callback)

    def unwatch_readable(self) -> None:
        """The reverse."""
        if self.is_read:
            self.is_read = False
            self._loop.remove_reader(self.sock)

    def await_writable(self, callback: Callable[[], object]) -> None:
        """Call back once, when it takes bytes again or a dial has ended."""

        def once() -> None:
            if self._awaits_writable:
                self._awaits_writable = False
                self._loop.remove_writer(self.sock)
                callback()

        if self.is_open and not self._awaits_writable:
            self._awaits_writable = True
            self._loop.add_writer(self.sock, once)

    def close(self, *, with_reset: bool = False) -> None:
        """Close the socket, in an orderly way or not."""
        if not self.is_open:
            return
        self.unwatch_readable()
        if self._awaits_writable:
            self._awaits_writable = False
            self._loop.remove_writer(self.sock)
        self.is_open = False
        if with_reset:
            reset(self.sock)
        else:
            self.sock.close()


class RelayPipe:
    """One direction of a connection: what is in flight in it, and why it is held, if it is."""

    def __init__(self, source: RelayEnd, sink: RelayEnd, shaper: Shaper, flow: ShapedFlow) -> None:
        self.source = source
        self.sink = sink
        self.shaper = shaper
        self.flow = flow
        self.holds: set[str] = set()
        """Which of the relay, the link and the flow itself is stalled in this direction."""
        self.swallows = False
        self.passed_bytes = 0
        self.flipped_bits = 0
        self.has_read_end = False
        self.has_passed_end = False
        self._payload: deque[memoryview] = deque()

    def put(self, data: bytes, now_ns: int) -> None:
        """Bytes were read from the source; there is room for them."""
        self.shaper.offer(self.flow, len(data), now_ns)
        flips = self.shaper.flips(len(data))
        if flips:
            changed = bytearray(data)
            for bit in flips:
                changed[bit // 8] ^= 1 << bit % 8
            self.flipped_bits += len(flips)
            data = bytes(changed)
        if not self.swallows:
            self._payload.append(memoryview(data))

    def swallow(self) -> None:
        """From now on whatever arrives vanishes, as does what is under way."""
        self.swallows = True
        self._payload.clear()

    def write(self, now_ns: int) -> bool:
        """Give what has arrived to the sink, as far as it takes it; return whether it took all.

        Raises:
            OSError: the sink is gone.
        """
        flow = self.flow
        while flow.arrived_bytes:
            if self.swallows:
                count = flow.arrived_bytes
            else:
                try:
                    count = self.sink.sock.sendmsg(self._arrived(), (), _NO_SIGNAL)
                except (BlockingIOError, InterruptedError):
                    return False
                self._forget(count)
            self.passed_bytes += count
            self.shaper.deliver(flow, count, now_ns)
        if flow.has_ended and not self.has_passed_end:
            self.has_passed_end = True
            if not self.swallows:
                self.sink.sock.shutdown(socket.SHUT_WR)
        return True

    def _arrived(self) -> list[memoryview]:
        left = self.flow.arrived_bytes
        views: list[memoryview] = []
        for view in self._payload:
            views.append(view[:left])
            left -= len(views[-1])
            if not left or len(views) == _VIEWS_MAX:
                break
        return views

    def _forget(self, count: int) -> None:
        payload = self._payload
        while count:
            first = payload[0]
            if len(first) > count:
                payload[0] = first[count:]
                return
            count -= len(first)
            payload.popleft()


@dataclass(frozen=True, slots=True)
class FlowStatus:
    """One connection through the relay.

    Attributes:
        flow: its number, by which faults name it; the first is 1.
        link: key of its link.
        forward_bytes: given to the relay's target so far.
        backward_bytes: given to who has dialled so far.
        forward_flight_bytes: on the way to the target, or not acknowledged.
        backward_flight_bytes: the same on the way back.
    """

    flow: int
    link: Hashable
    forward_bytes: int
    backward_bytes: int
    forward_flight_bytes: int
    backward_flight_bytes: int


class RelayedConnection:
    """One accepted connection and the one dialled for it.

    Args:
        number: its name among those of the relay.
        link: key of the link that it belongs to.
        near: the end of who has dialled the relay.
        far: the end that the relay has dialled.
        pipes: of both directions.
        tell: called after something was read, written or ended outside of :meth:`move`.
        ended: called once, when both ends are closed.
    """

    def __init__(
        self,
        number: int,
        link: Hashable,
        near: RelayEnd,
        far: RelayEnd,
        pipes: dict[Direction, RelayPipe],
        tell: Callable[[RelayPipe], object],
        ended: Callable[[RelayedConnection], object],
    ) -> None:
        self.number = number
        self.link = link
        self.pipes = pipes
        self._near = near
        self._far = far
        self._ended = ended
        self._wakers = {pipe: partial(tell, pipe) for pipe in pipes.values()}
        self._unsaid: set[Direction] = set()  # resets that wait for the way to be open again
        self._is_over = False

    def begin(self, first: bytes, ended: bool, now_ns: int) -> None:
        """Take what the dialler has sent already; the far end is being dialled."""
        pipe = self.pipes[Direction.FORWARD]
        if first:
            pipe.put(first, now_ns)
        if ended:
            pipe.has_read_end = True
            pipe.shaper.finish(pipe.flow, now_ns)

    def status(self) -> FlowStatus:
        """How it stands."""
        there, back = self.pipes[Direction.FORWARD], self.pipes[Direction.BACKWARD]
        return FlowStatus(
            self.number,
            self.link,
            forward_bytes=there.passed_bytes,
            backward_bytes=back.passed_bytes,
            forward_flight_bytes=there.flow.flight_bytes,
            backward_flight_bytes=back.flow.flight_bytes,
        )

    # -- bytes -----------------------------------------------------------------------------------

    def move(self, pipe: RelayPipe, now_ns: int) -> None:
        """Write what has arrived and read what there is room for; the shaper is at ``now_ns``."""
        self._write(pipe, now_ns)
        self._read(pipe, now_ns)

    def _read(self, pipe: RelayPipe, now_ns: int) -> None:
        source = pipe.source
        if not source.is_open or pipe.has_read_end or not source.is_connected:
            return
        room_bytes = pipe.shaper.room_bytes(pipe.flow)
        if not room_bytes:
            source.unwatch_readable()  # it comes back with the next acknowledgement
            return
        try:
            data = source.sock.recv(min(room_bytes, READ_BYTES_MAX))
        except (BlockingIOError, InterruptedError):
            data = None
        except OSError:
            self._lose(source)
            return
        if data is None or data:
            source.watch_readable(self._wakers[pipe])
            if data:
                pipe.put(data, now_ns)
            return
        pipe.has_read_end = True
        source.unwatch_readable()
        pipe.shaper.finish(pipe.flow, now_ns)

    def _write(self, pipe: RelayPipe, now_ns: int) -> None:
        if not pipe.swallows and not (pipe.sink.is_open and pipe.sink.is_connected):
            return
        try:
            if not pipe.write(now_ns):
                pipe.sink.await_writable(self._wakers[pipe])
        except OSError:
            self._lose(pipe.sink)
        else:
            if all(one.has_passed_end and not one.swallows for one in self.pipes.values()):
                self._finish(with_reset=False)

    # -- ends ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find out about an end that has been reset while nobody reads or writes there."""
        for end in (self._near, self._far):
            if end.is_open and end.is_connected and not end.is_read and failure_of(end.sock):
                self._lose(end)

    def dialled(self) -> None:
        """The dial of the far end is over."""
        if failure_of(self._far.sock):
            self._lose(self._far)
            return
        self._far.is_connected = True
        for wake in self._wakers.values():
            wake()

    def _lose(self, end: RelayEnd) -> None:
        """An end was reset: the other one hears of it, if the way there is open."""
        end.close()
        direction = Direction.FORWARD if end is self._near else Direction.BACKWARD
        pipe = self.pipes[direction]
        somebody_listens = pipe.sink.is_open and not pipe.swallows
        if somebody_listens and pipe.holds:
            self._unsaid.add(direction)
        else:
            self._finish(with_reset=True)

    def _finish(self, with_reset: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._near.close(with_reset=with_reset)
        self._far.close(with_reset=with_reset)
        self._ended(self)

    # -- faults ----------------------------------------------------------------------------------

    def hold(self, direction: Direction, reason: str, now_ns: int) -> None:
        """Nothing more passes in a direction."""
        pipe, back = self.pipes[direction], self.pipes[direction.reverse]
        pipe.holds.add(reason)
        pipe.shaper.hold(pipe.flow, now_ns)
        back.shaper.hold_acks(back.flow, now_ns)

    def release(self, direction: Direction, reason: str, now_ns: int) -> None:
        """Everything passes again, unless there is another reason why not."""
        pipe, back = self.pipes[direction], self.pipes[direction.reverse]
        pipe.holds.discard(reason)
        if pipe.holds:
            return
        pipe.shaper.release(pipe.flow, now_ns)
        back.shaper.release_acks(back.flow, now_ns)
        if direction in self._unsaid:
            self._finish(with_reset=True)

    def reset(self) -> None:
        """Both ends see a reset at once."""
        self._finish(with_reset=True)

    def half_open(self, gone: Side) -> None:
        """One side is gone; the other is not told, and talks to nobody."""
        for pipe in self.pipes.values():
            pipe.swallow()
        end, other = (self._near, self._far) if gone is Side.DIALLER else (self._far, self._near)
        end.close(with_reset=True)
        if not other.is_open:
            self._finish(with_reset=True)
