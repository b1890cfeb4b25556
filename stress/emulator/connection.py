"""One proxied connection: two sockets, and a flow in each direction between them.

The connection offers bytes from one socket to the link's shaper. It stores the bytes until the
shaper says that they have arrived, then writes them to the other socket.

Invariants:

* The connection reads bytes only if the window has room, so all stored bytes are in flight.
* It delivers all bytes in order, and then the end; or it dies by reset. It never skips a byte.
* A reset waits while its direction is held.
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
    """One of the two parties of a connection."""

    DIALLER = "dialler"
    """The party that dialled the proxy."""
    TARGET = "target"
    """The party that the proxy dialled."""


class ProxyEnd:
    """One of the two sockets, and its registrations in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self.is_open = True
        self.is_connected = False
        self.is_read = False
        self._awaits_writable = False
        self._loop = loop

    def watch_readable(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever the socket is readable."""
        if self.is_open and not self.is_read:
            self.is_read = True
            self._loop.add_reader(self.sock, callback)

    def unwatch_readable(self) -> None:
        """Undo ``watch_readable``."""
        if self.is_read:
            self.is_read = False
            self._loop.remove_reader(self.sock)

    def await_writable(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, when the socket is writable or its dial has ended."""

        def once() -> None:
            if self._awaits_writable:
                self._awaits_writable = False
                self._loop.remove_writer(self.sock)
                callback()

        if self.is_open and not self._awaits_writable:
            self._awaits_writable = True
            self._loop.add_writer(self.sock, once)

    def close(self, *, with_reset: bool = False) -> None:
        """Close the socket, with a reset or normally."""
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


class ProxyPipe:
    """One direction of a connection: its bytes in flight, and the reasons why it is held."""

    def __init__(self, source: ProxyEnd, sink: ProxyEnd, shaper: Shaper, flow: ShapedFlow) -> None:
        self.source = source
        self.sink = sink
        self.shaper = shaper
        self.flow = flow
        self.holds: set[str] = set()
        """Stalled scopes of this direction: ``proxy``, ``link``, ``flow``."""
        self.swallows = False
        self.passed_bytes = 0
        self.flipped_bits = 0
        self.has_read_end = False
        self.has_passed_end = False
        self._payload: deque[memoryview] = deque()

    def put(self, data: bytes, now_ns: int) -> None:
        """Take bytes from the source, and flip bits of them. The window must have room."""
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
        """Discard all bytes in flight, and all later ones."""
        self.swallows = True
        self._payload.clear()

    def write(self, now_ns: int) -> bool:
        """Write arrived bytes to the sink; return whether the sink took all of them.

        Raises:
            OSError: the connection of the sink is broken.
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
    """The status of one connection through the proxy.

    Attributes:
        flow: number of the connection, from 1, by which faults name it.
        link: key of its link.
        forward_bytes: bytes written to the proxy's target so far.
        backward_bytes: bytes written to the dialler so far.
        forward_flight_bytes: bytes to the target that are in transit or not acknowledged.
        backward_flight_bytes: bytes to the dialler that are in transit or not acknowledged.
    """

    flow: int
    link: Hashable
    forward_bytes: int
    backward_bytes: int
    forward_flight_bytes: int
    backward_flight_bytes: int


class ProxiedConnection:
    """One accepted connection, and the connection that the proxy dialled for it.

    Args:
        number: number of the connection in the proxy.
        link: key of its link.
        near: socket to the dialler.
        far: socket to the target.
        pipes: the pipes of both directions.
        tell: called when a socket of a pipe is readable or writable.
        ended: called once, when both sockets are closed.
    """

    def __init__(
        self,
        number: int,
        link: Hashable,
        near: ProxyEnd,
        far: ProxyEnd,
        pipes: dict[Direction, ProxyPipe],
        tell: Callable[[ProxyPipe], object],
        ended: Callable[[ProxiedConnection], object],
    ) -> None:
        self.number = number
        self.link = link
        self.pipes = pipes
        self._near = near
        self._far = far
        self._ended = ended
        self._wakers = {pipe: partial(tell, pipe) for pipe in pipes.values()}
        self._unsaid: set[Direction] = set()  # resets that wait while their direction is held
        self._is_over = False

    def begin(self, first: bytes, ended: bool, now_ns: int) -> None:
        """Take the bytes that the dialler has already sent, while the proxy dials the target."""
        pipe = self.pipes[Direction.FORWARD]
        if first:
            pipe.put(first, now_ns)
        if ended:
            pipe.has_read_end = True
            pipe.shaper.finish(pipe.flow, now_ns)

    def status(self) -> FlowStatus:
        """Return the status of this connection."""
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

    def move(self, pipe: ProxyPipe, now_ns: int) -> None:
        """Write arrived bytes, and read if there is room. The shaper must be at ``now_ns``."""
        self._write(pipe, now_ns)
        self._read(pipe, now_ns)

    def _read(self, pipe: ProxyPipe, now_ns: int) -> None:
        source = pipe.source
        if not source.is_open or pipe.has_read_end or not source.is_connected:
            return
        room_bytes = pipe.shaper.room_bytes(pipe.flow)
        if not room_bytes:
            source.unwatch_readable()  # until the next acknowledgement
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

    def _write(self, pipe: ProxyPipe, now_ns: int) -> None:
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
        """Detect a reset of a socket that the proxy is not reading."""
        for end in (self._near, self._far):
            if end.is_open and end.is_connected and not end.is_read and failure_of(end.sock):
                self._lose(end)

    def dialled(self) -> None:
        """Begin to proxy after the dial of the target, or end the connection if the dial failed."""
        if failure_of(self._far.sock):
            self._lose(self._far)
            return
        self._far.is_connected = True
        for wake in self._wakers.values():
            wake()

    def _lose(self, end: ProxyEnd) -> None:
        """Pass the reset of one end to the other end, now or when the direction is released."""
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
        """Hold a direction for a reason: no byte, end or reset passes."""
        pipe, back = self.pipes[direction], self.pipes[direction.reverse]
        pipe.holds.add(reason)
        pipe.shaper.hold(pipe.flow, now_ns)
        back.shaper.hold_acks(back.flow, now_ns)

    def release(self, direction: Direction, reason: str, now_ns: int) -> None:
        """Remove a reason, and release the direction if no reason is left."""
        pipe, back = self.pipes[direction], self.pipes[direction.reverse]
        pipe.holds.discard(reason)
        if pipe.holds:
            return
        pipe.shaper.release(pipe.flow, now_ns)
        back.shaper.release_acks(back.flow, now_ns)
        if direction in self._unsaid:
            self._finish(with_reset=True)

    def reset(self) -> None:
        """Reset both ends at once."""
        self._finish(with_reset=True)

    def half_open(self, gone: Side) -> None:
        """Reset one side. The other side does not notice, and its bytes are discarded."""
        for pipe in self.pipes.values():
            pipe.swallow()
        end, other = (self._near, self._far) if gone is Side.DIALLER else (self._far, self._near)
        end.close(with_reset=True)
        if not other.is_open:
            self._finish(with_reset=True)
