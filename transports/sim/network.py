"""An in-memory network in virtual time: many hosts in one process, everything from one seed.

It behaves as TCP does where it hurts: writes are taken in part, reads come in other portions than
writes went out, windows fill, connections end in the middle of anything. Inside a connection no
byte is lost, doubled or reordered, and what arrives is a prefix of what was sent, unless a fault
plan adds a :class:`Noise`, which flips bits. It does not simulate packets, congestion or a kernel.
All processes share one loop (it uses only ``create_future``; a ``VirtualClock`` tells time).

A :class:`SimNetwork` joins hosts; a :class:`SimHost` is one process and its ``Transport``. Faults
are methods of whom they befall. How bytes move is told in :mod:`pccl.transports.sim.pipe`.

Invariants:

* A seed gives one trace: nothing depends on hashes, addresses or the Python version.
* A receiver is called from events of the network only, its ``connection_lost`` once and last.
* After a crash no callback is made to anything of that host, and none of its dials returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Protocol

from pccl.protocol.errors import LinkError, LocalProtocolError, RemoteProtocolError
from pccl.protocol.types import NS_PER_S
from pccl.transports.base import Address, Connection, Listener, PathMeasure, PortLimits, Receiver
from pccl.transports.sim.pipe import Action, Events, HostRoute, Pipe, Trace, VirtualClock
from pccl.transports.sim.run_queue import RunQueue

_FIRST_PORT = 49152
_PORTS_PER_PROCESS = 64
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = ("", "0.0.0.0", "::")
_RESET = "connection reset by peer"


def _report_bug(what: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


class Noise(Protocol):
    """Flips bits on the way: the one thing that a faulty network shows beside what TCP does."""

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        """What arrives at ``end`` instead of ``data``: as many bytes, or the same object."""
        ...


class SimConnection:
    """One end of a connection. See :class:`pccl.transports.base.Connection`.

    Attributes:
        awaits_start: nobody reads yet.
        vanished: the host went away without a word.
    """

    def __init__(self, host: SimHost, local: Address, remote: Address) -> None:
        self.awaits_start = True
        self.vanished = False
        self._host = host
        self._network = host.network
        self._events = host.network.events
        self._local = local
        self._remote = remote
        self._receiver: Receiver | None = None
        self._open = True
        self._error: LinkError | None = None
        self._paused = False
        self._resuming = False
        self._rest: memoryview | None = None
        """What was delivered when reading was paused, and is not read."""
        self._held: list[Action] = []
        """What its process would do next, if it read."""
        self._other: SimConnection
        self._out: Pipe
        self._in: Pipe
        host.ends[self] = host.network.ends[self] = None

    def __repr__(self) -> str:
        return f"{self._local}>{self._remote}"

    def join(self, other: SimConnection) -> None:
        """Connect this end with the ``other`` one. For this module."""
        network = self._network
        there = network.route(self._local.host, other.local.host)
        back = network.route(other.local.host, self._local.host)
        window = network.window_bytes
        self._other, other._other = other, self
        self._out = other._in = Pipe(self._events, self, other, there, back, window)
        self._in = other._out = Pipe(self._events, other, self, back, there, window)

    @property
    def receiver(self) -> Receiver | None:
        """Who reads here (for fault plans)."""
        return self._receiver

    @property
    def other(self) -> SimConnection:
        """The other end (for fault plans)."""
        return self._other

    @property
    def remote(self) -> Address:
        """The other side."""
        return self._remote

    @property
    def local(self) -> Address:
        """This side."""
        return self._local

    @property
    def congestion(self) -> str:
        """See ``Connection``: nothing is lost here."""
        return ""

    def measure(self) -> PathMeasure | None:
        """See ``Connection``: the truth. Connections between two hosts share alike."""
        if not self._open:
            return None
        there, back = self._out.route, self._in.route
        sharing = sum(end.remote.host == self._remote.host for end in self._host.ends)
        rate = there.rate
        speed = 0 if rate is None else rate // sharing
        return PathMeasure(there.delay_ns + back.delay_ns, speed, is_lower_bound=False)

    def start(self, receiver: Receiver) -> None:
        """See ``Connection``."""
        handed_over, self._receiver = self._receiver is not None, receiver
        self.awaits_start = False
        if handed_over:
            return
        if self._error is not None:
            lost = partial(self._tell_lost, receiver, self._error)
            self._events.soon(partial(self._host.run, lost))
        elif self._open:
            self._in.arm()

    def pause_reading(self) -> None:
        """See ``Connection``."""
        self._paused = True

    def resume_reading(self) -> None:
        """See ``Connection``."""
        if self._paused:
            self._paused = False
            self._resuming = True
            self._events.soon(partial(self._host.run, self._read_on))

    def _read_on(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self.take_delivery(rest)
        self._resuming = False
        while self._held and not self._paused:
            self._held.pop(0)()

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """See ``Connection``."""
        return self._out.take(buffers) if self._open else 0

    def notify_writable(self) -> None:
        """See ``Connection``."""
        if self._open:
            assert self._receiver is not None, "a connection is started before anything else"
            self._out.want_room()

    def close(self) -> None:
        """See ``Connection``."""
        if self._open:
            self._leave()
            self._tell_lost_soon(None)
            self._out.finish(f"{self._local} closed the connection")

    def abort(self) -> None:
        """See ``Connection``."""
        self._reset(None)

    # -- faults ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Something on the way forgets the connection: both ends lose it now."""
        self._events.note("reset", self)
        for end in (self, self._other):
            self._events.soon(partial(end.lose, "connection reset by the network"))

    def forget(self) -> None:
        """This end loses the connection, and the other one is not told: it is half open.

        What the other end sends from now on is answered with a reset.
        """
        self._events.note("forget", self)
        if self._open:
            self.vanished = True
            self._out.drop_unsent()
            self.lose("connection timed out")

    def stall(self, duration_ns: int | None) -> None:
        """Hold up what this end sends for ``duration_ns``, or until :meth:`heal` if None."""
        self._events.note("stall", self, duration_ns)
        self._out.gate.shut(duration_ns)

    def heal(self) -> None:
        """End a :meth:`stall`."""
        self._events.note("heal", self)
        self._out.gate.open()

    def die(self, *, silent: bool) -> None:
        """The process of this end is dead. For this module."""
        self._leave()
        if silent:
            self.vanished = True
            self._out.drop_unsent()
        elif self._events.some(2) == 1:  # a kernel closes in order,
            self._out.finish(f"{self._local} closed the connection")
        else:  # ... or not, if something was left to read
            self._out.reset(_RESET)

    # -- what pipes call, from events of the network -----------------------------------------------

    @property
    def disowned(self) -> bool:
        """It ``vanished``, but its host is up and knows no such connection.

        That is for the kernel there to say: it makes no difference whether a process runs.
        """
        return self.vanished and not self._network.hosts[self._host.name].gone

    @property
    def is_late(self) -> bool:
        """Its process does not read now; its kernel does."""
        return self._paused or self._resuming or self._host.run_queue.is_late

    def run(self, action: Action) -> None:
        """Let its process do something, as soon as it runs and reads from here."""
        if self._paused or self._resuming:
            self._held.append(action)
        else:
            self._host.run(action)

    def take_delivery(self, data: memoryview) -> None:
        """Bytes have arrived; they are read in as many portions as the receiver's memory makes."""
        if self._open:
            self._events.note("deliver", self, len(data))
            for noise in list(self._network.noises):
                data = noise.changed(self, data)
        try:
            while data and self._open:
                if self._paused:
                    self._rest = data
                    return
                assert self._receiver is not None
                buffer = self._receiver.get_buffer()
                nbytes = min(len(buffer), len(data))
                assert nbytes, "memory for a read must not be empty"
                buffer[:nbytes] = data[:nbytes]
                data = data[nbytes:]
                self._receiver.buffer_updated(nbytes)
        except Exception as error:  # noqa: BLE001 - reported there
            self._receiver_failed(error)

    def tell_writable(self) -> None:
        """There is room again."""
        self._host.run(self._tell_writable)

    def _tell_writable(self) -> None:
        if self._open and self._receiver is not None:
            self._events.note("writable", self)
            try:
                self._receiver.writable()
            except Exception as error:  # noqa: BLE001 - reported there
                self._receiver_failed(error)

    def lose(self, reason: str) -> None:
        """The network, or the other side, ends it."""
        self._host.run(partial(self._lose, reason))

    def _lose(self, reason: str) -> None:
        if self._open:
            self._leave()
            self._error = LinkError(func="connection", reason=f"lost {self._remote}: {reason}")
            if self._receiver is not None:
                self._tell_lost(self._receiver, self._error)

    def _receiver_failed(self, error: Exception) -> None:
        if isinstance(error, RemoteProtocolError):
            self._reset(error)
            return
        bug = LocalProtocolError(
            func="connection", reason=f"the receiver of {self._remote} failed: {error!r}"
        )
        bug.__cause__ = error
        self._reset(bug)
        _report_bug(str(bug), error)

    def _reset(self, error: Exception | None) -> None:
        if self._open:
            self._leave()
            self._tell_lost_soon(error)
            self._out.reset(_RESET)

    def _leave(self) -> None:
        self._open = False
        self.awaits_start = False
        del self._host.ends[self]
        del self._network.ends[self]

    def _tell_lost_soon(self, error: Exception | None) -> None:
        if self._receiver is not None:
            lost = partial(self._tell_lost, self._receiver, error)
            self._events.soon(partial(self._host.run, lost))

    def _tell_lost(self, receiver: Receiver, error: Exception | None) -> None:
        if self._host.alive:
            self._events.note("lost", self, error)
            receiver.connection_lost(error)


class _SimListener:
    """See :class:`pccl.transports.base.Listener`."""

    def __init__(
        self, host: SimHost, address: Address, on_connection: Callable[[Connection], None]
    ) -> None:
        self.on_connection = on_connection
        self._host = host
        self._address = address

    @property
    def address(self) -> Address:
        return self._address

    @property
    def is_closed(self) -> bool:
        return self._host.listeners.get(self._address.port) is not self

    def close(self) -> None:
        if not self.is_closed:
            del self._host.listeners[self._address.port]


class _Dial:
    """A connection that is being made. The request travels there, the answer back."""

    def __init__(self, host: SimHost, name: str, remote: Address) -> None:
        self.answer: asyncio.Future[SimConnection] = asyncio.get_running_loop().create_future()
        self._host = host
        self._name = name
        self._remote = remote
        self._connection: SimConnection | None = None

    def arrive(self) -> None:
        """The request is at the other host."""
        network = self._host.network
        target = network.hosts[self._name]
        if self.answer.done() or not self._host.alive or target.gone:
            return
        back = network.route(self._name, self._host.name)
        listener = None if self._name in network.shut else target.listeners.get(self._remote.port)
        if listener is None:
            if network.shut.get(self._name, True):
                back.carry(partial(self.fail, "connection refused"))
            return
        mine = Address(self._host.name, self._host.take_port())
        self._connection = SimConnection(self._host, mine, self._remote)
        theirs = SimConnection(target, Address(self._name, self._remote.port), mine)
        self._connection.join(theirs)
        network.events.note("accept", theirs)
        back.carry(partial(self._host.run, self._established))
        target.run(partial(self._hand_over, listener, theirs))

    def _hand_over(self, listener: _SimListener, theirs: SimConnection) -> None:
        if listener.is_closed:
            theirs.abort()
            return
        try:
            listener.on_connection(theirs)
        except Exception as error:  # noqa: BLE001 - a bug above must not stop the network
            theirs.abort()
            _report_bug(f"a connection to {theirs.local} was not taken over: {error!r}", error)

    def _established(self) -> None:
        if not self.answer.done() and self._host.alive and self._connection is not None:
            self.answer.set_result(self._connection)

    def fail(self, reason: str) -> None:
        """There will be no connection."""
        self._host.run(partial(self._fail, reason))

    def _fail(self, reason: str) -> None:
        if not self.answer.done() and self._host.alive:
            reason = f"cannot reach {self._remote}: {reason}"
            self.answer.set_exception(LinkError(func="dial", reason=reason))

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        if self._connection is not None:
            self._connection.abort()


class SimHost:
    """One process on one host, and its ``Transport``. Made by :meth:`SimNetwork.host`.

    Attributes:
        name: the host's name, which is its address too.
        network: what it is connected to.
        alive: False once it has crashed.
        gone: the whole host is off, not only the process: nobody answers for it.
        run_queue: when the process gets to run.
        port_limits: see ``Transport``; may be set before its ports are opened.
    """

    def __init__(self, network: SimNetwork, name: str, boots: int) -> None:
        self.name = name
        self.network = network
        self.alive = True
        self.gone = False
        self.ends: dict[SimConnection, None] = {}
        self.listeners: dict[int, _SimListener] = {}
        self.run_queue = RunQueue(network.events)
        self.port_limits = PortLimits()
        self._next_port = _FIRST_PORT + boots % 250 * _PORTS_PER_PROCESS
        self._dials: dict[_Dial, None] = {}

    def __repr__(self) -> str:
        return f"<SimHost {self.name}{'' if self.alive else ' crashed'}>"

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """See ``Transport``. All addresses of a host (own name, any, loopback) are one."""
        reason = None
        if address.host not in (self.name, *_ANY, *_LOOPBACK):
            reason = "cannot assign requested address"
        elif address.port in self.listeners:
            reason = "address already in use"
        elif not self.alive:
            reason = "the host is down"
        if reason is not None:
            raise LinkError(func="listen", reason=f"cannot listen on {address}: {reason}")
        address = Address(address.host, address.port or self.take_port())
        self.listeners[address.port] = listener = _SimListener(self, address, on_connection)
        return listener

    async def dial(
        self, address: Address, timeout_s: float, may_dial: Callable[[str], bool] = lambda _: True
    ) -> Connection:
        """See ``Transport``. It takes a round trip; on a crashed host it takes for ever."""
        (events := self.network.events).note("dial", self.name, address)
        name = self.name if address.host in _LOOPBACK else address.host
        dial = _Dial(self, name, address)
        if not may_dial(address.host):
            dial.fail("it is an address of its own machine or network only")
        elif name not in self.network.hosts:
            dial.fail("name or service not known")
        else:
            self.network.route(self.name, name).carry(dial.arrive)
        deadline_ns = events.now_ns() + round(timeout_s * NS_PER_S)
        timer = events.at(deadline_ns, partial(dial.fail, "no answer in time"))
        self._dials[dial] = None
        try:
            return await dial.answer
        except BaseException:
            dial.give_up()
            raise
        finally:
            timer.cancel()
            del self._dials[dial]

    def run(self, action: Action, *, timer: bool = False) -> None:
        """Let the process do something as soon as it runs."""
        self.run_queue.run(action, timer=timer)

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does; its kernel goes on. Freezes add up."""
        self.network.events.note("freeze", self.name)
        self.run_queue.stop()

    def thaw(self) -> None:
        """Undo one :meth:`freeze`: it finds what its kernel has kept, and all its timers late."""
        self.network.events.note("thaw", self.name)
        self.run_queue.resume()

    def take_port(self) -> int:
        """Return a port that nothing uses. For this module."""
        while self._next_port in self.listeners:
            self._next_port += 1
        self._next_port += 1
        return self._next_port - 1

    def crash(self, *, silent: bool = False) -> None:
        """The process dies: its listeners and connections vanish, nothing is called any more.

        The other ends see their connections end after the latency. Its tasks live on (the loop
        is shared) but reach nobody; whoever runs the simulation cancels them.

        Args:
            silent: the whole host goes off and nobody is told; connections stay half open until
                a new process on the host answers what is sent on them with a reset.
        """
        if not self.alive:
            return
        self.network.events.note("crash", self.name, "silent" if silent else "")
        self.alive = False
        self.gone = silent
        self.run_queue.clear()
        self.listeners.clear()
        for end in list(self.ends):
            end.die(silent=silent)


class SimNetwork:
    """Hosts, and what is between them.

    Args:
        clock: virtual time; :class:`pccl.stress.sim.loop.VirtualLoop` is one.
        rng: decides all that chance decides.
        trace: told of every event that matters, with its time in nanoseconds.
        latency_ns: from any host to any other, unless :meth:`set_link` says otherwise.
        bytes_per_s: the bandwidth likewise, for each direction of a pair; None for any.
        window_bytes: most bytes on the way in one direction of a connection.
        ragged: whether chance cuts reads and writes up (or they are as large as can be).

    Attributes:
        events: the order of everything.
        hosts: by name; of several incarnations the newest.
        window_bytes: see above.
        ends: the live connections' ends, oldest first: what a fault plan chooses from.
        noises: whatever arrives anywhere goes through these, in order.
        shut: hosts that nobody can dial, by name: whether they refuse that, or do not answer.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rng: Random,
        trace: Trace | None = None,
        *,
        latency_ns: int = 1_000_000,
        bytes_per_s: int | None = 125_000_000,
        window_bytes: int = 256 << 10,
        ragged: bool = True,
    ) -> None:
        self.events = Events(clock, rng, trace, ragged=ragged)
        self.hosts: dict[str, SimHost] = {}
        self.window_bytes = window_bytes
        self.ends: dict[SimConnection, None] = {}
        self.noises: list[Noise] = []
        self.shut: dict[str, bool] = {}
        self._latency_ns = latency_ns
        self._bytes_per_s = bytes_per_s
        self._routes: dict[tuple[str, str], HostRoute] = {}
        self._boots: dict[str, int] = {}

    def host(self, name: str) -> SimHost:
        """Start a process on the host ``name``; the one before it must have crashed."""
        before = self.hosts.get(name)
        assert before is None or not before.alive, f"a process runs on {name} already"
        self.events.note("boot", name)
        boots = self._boots.get(name, 0)
        self._boots[name] = boots + 1
        self.hosts[name] = SimHost(self, name, boots)
        return self.hosts[name]

    def route(self, source: str, target: str) -> HostRoute:
        """Return the way from one host to another; its attributes can be set at any time."""
        route = self._routes.get((source, target))
        if route is None:
            route = HostRoute(self.events, self._latency_ns, self._bytes_per_s)
            self._routes[source, target] = route
        return route

    def set_link(self, a: str, b: str, *, latency_ns: int, bytes_per_s: int | None) -> None:
        """Set both directions between two hosts; what is on its way already is not affected."""
        for route in (self.route(a, b), self.route(b, a)):
            route.latency_ns = latency_ns
            route.bytes_per_s = bytes_per_s

    def stall(self, a: str, b: str, duration_ns: int | None, *, one_way: bool = False) -> None:
        """Let nothing arrive at ``b`` from ``a`` (nor at ``a`` from ``b``) for a while.

        Nothing is lost: it arrives afterwards, in order. Without a duration it is a partition,
        until :meth:`heal`.
        """
        self.events.note("stall", a, b, duration_ns, "one way" if one_way else "")
        self.route(a, b).gate.shut(duration_ns)
        if not one_way:
            self.route(b, a).gate.shut(duration_ns)

    def heal(self, a: str, b: str) -> None:
        """End all stalls between two hosts."""
        self.events.note("heal", a, b)
        self.route(a, b).gate.open()
        self.route(b, a).gate.open()


__all__ = ["SimConnection", "SimHost", "SimNetwork"]
