"""The proxy, which forwards each connection to a target over an emulated link.

One proxy serves one port, of a peer or a master. By default all its connections share one link.
``link_of`` gives them several links, by the first bytes that the dialler sends.

Call all methods in the loop's thread, or use :class:`pccl.stress.emulator.thread.ProxyThread`.
Faults have a scope: one connection (``flow``), one link (``link``), or by default the whole proxy
with all later connections. They concern one direction or both. ``resume`` ends only a ``stall`` or
``cut`` of the same scope.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Hashable, Iterable
from functools import partial
from random import Random

from pccl.addresses import parse_address
from pccl.protocol.handshake.opening import OPENING_BYTES
from pccl.stress.emulator.alarm import Alarm
from pccl.stress.emulator.connection import FlowStatus, ProxiedConnection, ProxyEnd, ProxyPipe, Side
from pccl.stress.emulator.shaper import Direction, ShapedFlow, Shaper
from pccl.stress.emulator.sorting import SHARED, LinkOf
from pccl.stress.emulator.spec import WINDOW_BYTES_MIN, LinkSpec
from pccl.stress.emulator.tuning import BACKLOG, dialler, listener, resolve, tune
from pccl.transports.base import Address

TICK_NS = 250_000
"""Shortest time between two wake-ups for a link on which bytes wait; other wake-ups are exact."""

STEP_NS = 1_000_000
"""Length of the steps in which a late proxy catches up, if it is later than this."""

WAKES_NS = 100_000
"""Approximate delay of a byte by two wake-ups of the proxy's process, to read and to write it. The
proxy subtracts it from the link's delay."""

CHECK_S = 0.05
"""Time between two checks for resets of sockets that the proxy is not reading."""

ACCEPT_PAUSE_S = 0.2
"""Pause of a listener when the system has no free descriptor."""

_ACCEPTS_PER_TURN = 64

_log = logging.getLogger("pccl.stress.emulator")

_Flow = int | None
_Way = Direction | None
"""A direction; None: both."""


class _EmulatedLink:
    """One link: a shaper in each direction, and the directions in which it is stalled."""

    def __init__(self, key: Hashable, spec: LinkSpec, seed: int) -> None:
        self.spec = spec
        self.held: set[Direction] = set()
        self.shapers = {
            direction: Shaper(spec, Random(f"{seed} {key!r} {direction.value}"), WAKES_NS)
            for direction in Direction
        }


class _Newcomer:
    """An accepted connection whose first bytes the proxy needs to find its link."""

    def __init__(self, end: ProxyEnd, accepted_ns: int) -> None:
        self.end = end
        self.accepted_ns = accepted_ns
        self.first = bytearray()


class Proxy:
    """Forwards connections to a target over emulated links.

    Args:
        to: ``HOST:PORT`` of the target, which the proxy dials for each accepted connection.
        spec: description of each link.
        listen: ``HOST:PORT`` to listen on; port 0: any free port.
        link_of: function from the first bytes of a dialler to the key of its link; must not raise.
            It gets ``first_byte_count`` bytes, or fewer if the stream ends before. None: all
            connections share one link. With a function, the dialler must send first.
        first_byte_count: number of bytes that ``link_of`` needs, at most the smallest window.
        seed: seed of the links' jitter and flipped bits.

    Attributes:
        address: address at which the proxy listens, after ``start``.

    Raises:
        ValueError: an address or ``first_byte_count`` is invalid; the message says what is allowed.
    """

    def __init__(
        self,
        to: str,
        spec: LinkSpec,
        *,
        listen: str = "127.0.0.1:0",
        link_of: LinkOf | None = None,
        first_byte_count: int = OPENING_BYTES,
        seed: int = 0,
    ) -> None:
        if not 0 < first_byte_count <= WINDOW_BYTES_MIN:
            raise ValueError(f"first_byte_count must be between 1 and {WINDOW_BYTES_MIN}")
        self.address = parse_address(listen)
        self._to = parse_address(to)
        self._spec = spec
        self._link_of = link_of
        self._first_byte_count = first_byte_count
        self._seed = seed
        self._links: dict[Hashable, _EmulatedLink] = {}
        self._held: set[Direction] = set()
        self._newcomers: set[_Newcomer] = set()
        self._connections: dict[int, ProxiedConnection] = {}
        self._owners: dict[ShapedFlow, tuple[ProxiedConnection, ProxyPipe]] = {}
        self._due_ns: dict[Shaper, int | None] = {}
        self._connection_count = 0
        self._rang_ns = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_open = False

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen, in the running loop.

        Raises:
            OSError: ``listen`` cannot be bound, or the host of ``to`` is unknown.
        """
        self._loop = asyncio.get_running_loop()
        self._target = resolve(self._to.host, self._to.port)
        self._place = resolve(self.address.host, self.address.port)
        self._listener = listener(self._place)
        self.address = Address(self.address.host, int(self._listener.getsockname()[1]))
        self._place = resolve(self.address.host, self.address.port)
        self._alarm = Alarm(self._loop, self._on_alarm)
        self._is_open = True
        self._listens = self._accepts = False
        self.accept_new()
        self._check_soon()

    def close(self) -> None:
        """Reset all connections, and close all sockets and timers; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop_accepting()
        self._listener.close()
        for newcomer in list(self._newcomers):
            self._dismiss(newcomer)
        for connection in list(self._connections.values()):
            connection.reset()
        for timer in self._timers.values():
            timer.cancel()
        self._alarm.close()

    # -- status ----------------------------------------------------------------------------------

    def flows(self) -> tuple[FlowStatus, ...]:
        """Return the status of all connections, oldest first."""
        return tuple(connection.status() for connection in self._connections.values())

    # -- faults ----------------------------------------------------------------------------------

    def change(self, spec: LinkSpec, *, link: Hashable = None) -> None:
        """Change one link to ``spec``, or all links and all later ones.

        Bytes in transit arrive as planned. No byte is lost or overtaken.
        """
        now_ns = time.monotonic_ns()
        if link is None:
            self._spec = spec
        for one in self._links.values() if link is None else [self._link(link)]:
            one.spec = spec
            for shaper in one.shapers.values():
                shaper.change(spec, now_ns)
        self._settle(now_ns)

    def stall(self, *, link: Hashable = None, flow: _Flow = None, direction: _Way = None) -> None:
        """Hold all bytes where they are, until ``resume``. The connections stay open.

        Raises:
            LookupError: no open connection has the number ``flow``.
        """
        self._stop(link, flow, direction, lose=False)

    def cut(self, *, link: Hashable = None, flow: _Flow = None, direction: _Way = None) -> None:
        """Stall, and lose all bytes in transit, which are sent again after ``resume``.

        A pulled cable has the same effect. TCP sends the lost bytes again, so either no byte is
        missing, or the connection dies.

        Raises:
            LookupError: no open connection has the number ``flow``.
        """
        self._stop(link, flow, direction, lose=True)

    def resume(self, *, link: Hashable = None, flow: _Flow = None, direction: _Way = None) -> None:
        """End a stall or a cut of the same scope.

        Raises:
            LookupError: no open connection has the number ``flow``.
        """
        now_ns = time.monotonic_ns()
        reason, held, connections = self._scope(link, flow)
        for one in _directions(direction):
            held.discard(one)
            for connection in connections:
                connection.release(one, reason, now_ns)
        self._settle(now_ns)

    def reset(self, *, link: Hashable = None, flow: int | None = None) -> None:
        """Reset both ends of each connection at once, and discard its bytes.

        Raises:
            LookupError: no open connection has the number ``flow``.
        """
        for connection in self._scope(link, flow)[2]:
            connection.reset()
        if link is None and flow is None:
            for newcomer in list(self._newcomers):
                self._dismiss(newcomer)

    def half_open(self, gone: Side, *, link: Hashable = None, flow: int | None = None) -> None:
        """Reset the side ``gone`` of each connection. The other side does not notice.

        The proxy discards the bytes of the other side at the link's rate, and delivers nothing to
        that side, not even bytes in transit. Nothing undoes this.

        Raises:
            LookupError: no open connection has the number ``flow``.
        """
        for connection in self._scope(link, flow)[2]:
            connection.half_open(gone)
        self._settle(time.monotonic_ns())

    def refuse_new(self) -> None:
        """Refuse dials until :meth:`accept_new`. The proxy keeps its port."""
        self._stop_accepting()
        if self._listens:
            self._listens = False
            self._listener.close()
            self._listener = listener(self._place)

    def blackhole_new(self) -> None:
        """Leave new connections without an answer until :meth:`accept_new`; then proxy them.

        The dial itself succeeds, because the kernel answers up to ``BACKLOG`` dials. Some firewalls
        have the same effect.
        """
        self._stop_accepting()
        self._listen()

    def accept_new(self) -> None:
        """Proxy new connections again."""
        self._listen()
        if not self._accepts:
            self._accepts = True
            self._loop.add_reader(self._listener, self._on_dial)

    # -- connections -----------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            self._listener.listen(BACKLOG)

    def _stop_accepting(self) -> None:
        if self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._listener)
        timer = self._timers.pop("accept", None)
        if timer is not None:
            timer.cancel()

    def _on_dial(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the dialler has already closed it
                continue
            except OSError:
                _log.warning("proxy: cannot accept a connection; trying again", exc_info=True)
                self._stop_accepting()
                again = self._loop.call_later(ACCEPT_PAUSE_S, self.accept_new)
                self._timers["accept"] = again
                return
            sock.setblocking(False)
            tune(sock)
            newcomer = _Newcomer(ProxyEnd(self._loop, sock), time.monotonic_ns())
            newcomer.end.is_connected = True
            self._newcomers.add(newcomer)
            if self._link_of is None:
                self._begin(newcomer, SHARED, ended=False)
            else:
                newcomer.end.watch_readable(partial(self._on_first_bytes, newcomer))

    def _on_first_bytes(self, newcomer: _Newcomer) -> None:
        assert self._link_of is not None
        try:
            data = newcomer.end.sock.recv(self._first_byte_count - len(newcomer.first))
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(newcomer)
            return
        newcomer.first += data
        if not data or len(newcomer.first) == self._first_byte_count:
            newcomer.end.unwatch_readable()
            self._begin(newcomer, self._link_of(bytes(newcomer.first)), ended=not data)

    def _dismiss(self, newcomer: _Newcomer) -> None:
        self._newcomers.discard(newcomer)
        newcomer.end.close(with_reset=True)

    def _begin(self, newcomer: _Newcomer, key: Hashable, *, ended: bool) -> None:
        """Dial the target, and delay the flows by the time that a dial takes on the link."""
        try:
            far = ProxyEnd(self._loop, dialler(self._target))
        except OSError:
            _log.warning("proxy: cannot make a socket to dial %s", self._to, exc_info=True)
            self._dismiss(newcomer)
            return
        if far.sock.connect_ex(self._target[1]) not in (0, errno.EINPROGRESS):
            far.close()
            self._dismiss(newcomer)
            return
        self._newcomers.discard(newcomer)
        now_ns = time.monotonic_ns()
        link, near = self._link(key), newcomer.end
        self._connection_count += 1
        pipes: dict[Direction, ProxyPipe] = {}
        for direction, source, sink, half_trips in (
            (Direction.FORWARD, near, far, 2),
            (Direction.BACKWARD, far, near, 3),
        ):
            shaper = link.shapers[direction]
            ready_ns = newcomer.accepted_ns + half_trips * link.spec.half_rtt_ns
            pipes[direction] = ProxyPipe(source, sink, shaper, shaper.add(now_ns, ready_ns))
        connection = ProxiedConnection(
            self._connection_count, key, near, far, pipes, self._on_ready, self._on_end
        )
        self._connections[connection.number] = connection
        for pipe in pipes.values():
            self._owners[pipe.flow] = connection, pipe
        for reason, held in (("proxy", self._held), ("link", link.held)):
            for direction in held:
                connection.hold(direction, reason, now_ns)
        forward = pipes[Direction.FORWARD]
        self._advance(forward.shaper, now_ns)
        connection.begin(bytes(newcomer.first), ended, now_ns)
        far.await_writable(connection.dialled)
        self._on_ready(forward)

    def _on_end(self, connection: ProxiedConnection) -> None:
        del self._connections[connection.number]
        for pipe in connection.pipes.values():
            pipe.shaper.remove(pipe.flow)
            del self._owners[pipe.flow]

    # -- time ------------------------------------------------------------------------------------

    def _on_ready(self, pipe: ProxyPipe) -> None:
        """Move bytes of a pipe, because one of its sockets is readable or writable."""
        now_ns = time.monotonic_ns()
        self._advance(pipe.shaper, now_ns)
        owner = self._owners.get(pipe.flow)
        if owner is not None:
            owner[0].move(pipe, now_ns)
        self._plan(pipe.shaper)
        self._set_alarm()

    def _on_alarm(self) -> None:
        self._rang_ns = now_ns = time.monotonic_ns()
        for shaper, due_ns in list(self._due_ns.items()):
            if due_ns is not None and due_ns <= now_ns:
                self._advance(shaper, now_ns)
                self._plan(shaper)
        self._set_alarm()

    def _advance(self, shaper: Shaper, now_ns: int) -> None:
        """Process all events of ``shaper`` up to now. A late proxy does it in small steps.

        So a proxy that runs late does not reduce the link's rate: bytes that waited in the kernel
        are offered at the times when the window had room.
        """
        due_ns = shaper.next_event_ns()
        while due_ns is not None and due_ns + STEP_NS < now_ns:
            self._move_at(shaper, due_ns + STEP_NS)
            due_ns = shaper.next_event_ns()
        self._move_at(shaper, now_ns)

    def _move_at(self, shaper: Shaper, at_ns: int) -> None:
        for flow in shaper.advance(at_ns):
            owner = self._owners.get(flow)
            if owner is not None:  # the connection has not ended meanwhile
                owner[0].move(owner[1], at_ns)

    def _plan(self, shaper: Shaper) -> None:
        due_ns = shaper.next_event_ns()
        if due_ns is not None and shaper.is_busy:
            due_ns = max(due_ns, self._rang_ns + TICK_NS)
        self._due_ns[shaper] = due_ns

    def _set_alarm(self) -> None:
        if self._is_open:
            planned = (at_ns for at_ns in self._due_ns.values() if at_ns is not None)
            self._alarm.set(min(planned, default=None))

    def _settle(self, now_ns: int) -> None:
        """Move all bytes that can move after a change or fault, and set the alarm."""
        for connection in list(self._connections.values()):
            for pipe in connection.pipes.values():
                if pipe.flow in self._owners:
                    self._advance(pipe.shaper, now_ns)
                if pipe.flow in self._owners:
                    connection.move(pipe, now_ns)
        for link in self._links.values():
            for shaper in link.shapers.values():
                self._plan(shaper)
        self._set_alarm()

    def _check_soon(self) -> None:
        self._timers["check"] = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        for connection in list(self._connections.values()):
            connection.check()
        self._check_soon()

    # -- scopes ----------------------------------------------------------------------------------

    def _link(self, key: Hashable) -> _EmulatedLink:
        if key not in self._links:
            self._links[key] = _EmulatedLink(key, self._spec, self._seed)
        return self._links[key]

    def _scope(
        self, link: Hashable, flow: int | None
    ) -> tuple[str, set[Direction], Iterable[ProxiedConnection]]:
        """Return the name of a scope, the set of its stalled directions, and its connections."""
        connections = list(self._connections.values())
        if flow is not None:
            if flow not in self._connections:
                raise LookupError(f"the proxy has no connection {flow} now; see flows()")
            return "flow", set(), [self._connections[flow]]
        if link is not None:
            return "link", self._link(link).held, [c for c in connections if c.link == link]
        return "proxy", self._held, connections

    def _stop(
        self, link: Hashable, flow: int | None, direction: Direction | None, *, lose: bool
    ) -> None:
        now_ns = time.monotonic_ns()
        reason, held, connections = self._scope(link, flow)
        for one in _directions(direction):
            held.add(one)
            for connection in connections:
                connection.hold(one, reason, now_ns)
                if lose:
                    pipe = connection.pipes[one]
                    pipe.shaper.lose(pipe.flow)
        self._settle(now_ns)


def _directions(direction: Direction | None) -> tuple[Direction, ...]:
    return tuple(Direction) if direction is None else (direction,)
