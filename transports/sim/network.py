"""An in-memory network in virtual time: many hosts in one process, all determined by one seed.

It has the difficult properties of TCP: partial writes, reads of other sizes than the writes, full
windows, connections that end at any moment. The arriving bytes are a prefix of the sent bytes: none
is missing, repeated or out of order. Only a :class:`Noise` of a fault plan changes them. There are
no simulated packets, no congestion and no kernel. All processes share one loop, of which only
``create_future`` and the exception handler are used.

A :class:`SimNetwork` connects hosts; a :class:`SimHost` is one process and its ``Transport``. Each
fault is a method of the object that it affects.

Invariants:

* A seed gives one trace: nothing depends on hashes, addresses or the Python version.
* After a host has crashed, none of its dials returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from pccl.protocol.errors import LinkError
from pccl.protocol.types import NS_PER_S
from pccl.transports.base import Address, Connection, Listener, PortLimits
from pccl.transports.sim.addresses import Addresses, inside
from pccl.transports.sim.connection import SimConnection, Wires, report_bug
from pccl.transports.sim.events import Action, Events, Trace, VirtualClock
from pccl.transports.sim.memory import SimMemories
from pccl.transports.sim.nat import Nat
from pccl.transports.sim.ports import NO_PORT, Line, Port
from pccl.transports.sim.routes import HostRoute
from pccl.transports.sim.run_queue import RunQueue

_FIRST_PORT = 49152
_PORTS_PER_PROCESS = 64
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = ("", "0.0.0.0", "::")


class _SimListener:
    """A port that a simulated host listens on."""

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
    """A connection attempt. Its request travels to the other host, and the answer back.

    ``name``: the host, or the NAT before it; ``segment_bytes``: see ``Transport.dial``; ``origin``:
    the port that it comes from, for a simultaneous open.
    """

    def __init__(
        self,
        host: SimHost,
        name: str,
        remote: Address,
        segment_bytes: int,
        origin: int | None = None,
    ) -> None:
        self.answer: asyncio.Future[SimConnection] = asyncio.get_running_loop().create_future()
        self._host = host
        self._name = name
        self._remote = remote
        self._segment_bytes = segment_bytes
        self._origin = origin
        self._port = origin or 0
        self._connection: SimConnection | None = None

    def arrive(self) -> None:
        """Answer the request, which has arrived at the other host, or at the NAT before it."""
        network = self._host.network
        if self.answer.done() or not self._host.alive or self._name in network.wires.off:
            return
        back = network.route(self._name, self._host.name)
        if network.addresses.is_left(self._remote.host):
            return
        nat, there = self._nat(), Address(self._name, self._remote.port)
        if nat is not None:
            target_at = nat.inbound(there.port, self._seen(), network.events.now_ns())
            there = target_at or Address("", 0)
        target = network.hosts.get(there.host)
        if self._origin is not None:
            self._cross(target, there.port)
            return
        listener = None if target is None else target.listeners.get(there.port)
        if target is None or listener is None:
            if nat is None or nat.kind.refuses:
                back.carry(partial(self.fail, "connection refused"))
            return
        other = self._join(target, there.port)
        target.run(partial(self._hand_over, listener, other))

    def _nat(self) -> Nat | None:
        """Return the NAT that the request passes last, if there is one."""
        addresses = self._host.network.addresses
        if addresses.are_inside(self._host.name, self._remote.host):
            return None
        return addresses.nats.get(self._name)

    def _seen(self) -> Address:
        """Return where the request comes from, as the other host sees it."""
        if self._origin is None:
            self._port = self._port or self._host.take_port()
        local = Address(self._host.name, self._port)
        return self._host.network.addresses.seen(local, self._remote)

    def _join(self, target: SimHost, port: int) -> SimConnection:
        """Make both ends of a connection; return that of the other host."""
        network, here, there = self._host.network, self._host.name, target.name
        seen, mine = self._seen(), Address(here, self._port)
        end = SimConnection(network.wires, self._host.run_queue, mine, self._remote)
        other = SimConnection(network.wires, target.run_queue, Address(there, port), seen)
        back = network.route(there, here)
        end.join(other, network.route(here, there), back, self._segment_bytes)
        self._connection = end
        network.events.note("accept", other)
        back.carry(partial(self._host.run, self._established))
        return other

    def leave(self) -> None:
        """Let the NAT of this host note the request; that of a usual dial is noted on arrival."""
        if self._origin is not None:
            self._seen()

    def _cross(self, target: SimHost | None, port: int) -> None:
        """Connect with a dial of the other host to this one; if there is none, try again later."""
        network, seen = self._host.network, self._seen()
        dials = target.dials if target is not None else ()
        theirs = next((dial for dial in dials if dial._meets(port, seen, self._remote)), None)
        if target is None or theirs is None or theirs._connection is not None:
            network.events.at(network.events.now_ns() + NS_PER_S, self.arrive)
            return
        theirs._connection = self._join(target, port)
        target.run(theirs._established)

    def _meets(self, port: int, there: Address, seen: Address) -> bool:
        """Whether it goes from this port to this address, and is seen there as it is expected."""
        return self._origin == port and self._remote == there and self._seen() == seen

    def _hand_over(self, listener: _SimListener, theirs: SimConnection) -> None:
        if listener.is_closed:
            theirs.abort()
            return
        try:
            listener.on_connection(theirs)
        except Exception as error:  # noqa: BLE001 - a bug above must not stop the network
            theirs.abort()
            report_bug(f"closed a new connection to {theirs.local}: pccl failed: {error!r}", error)

    def _established(self) -> None:
        if not self.answer.done() and self._host.alive and self._connection is not None:
            self.answer.set_result(self._connection)

    def fail(self, reason: str) -> None:
        """Make the attempt fail for ``reason``."""
        self._host.run(partial(self._fail, reason))

    def _fail(self, reason: str) -> None:
        if not self.answer.done() and self._host.alive:
            reason = f"cannot reach {self._remote}: {reason}"
            self.answer.set_exception(LinkError(func="dial", reason=reason))

    def give_up(self) -> None:
        """Abort the connection, if there is one, because the caller stopped waiting."""
        if self._connection is not None:
            self._connection.abort()


class SimHost:
    """One process on one host, and its ``Transport``. Made by :meth:`SimNetwork.host`.

    Attributes:
        name: the host's name, which is also its address.
        network: the network of the host.
        listeners: open listeners, by port number.
        run_queue: decides when the process runs.
        port_limits: see ``Transport``; set it before opening ports.
        memory: see ``Transport``; None if the machine has no other host.
    """

    def __init__(self, network: SimNetwork, name: str, boots: int) -> None:
        self.name = name
        self.network = network
        self.listeners: dict[int, _SimListener] = {}
        self.run_queue = RunQueue(network.events)
        self.port_limits = PortLimits()
        self.memory = network.memories.boot(name, lambda: self.alive)
        self._next_port = _FIRST_PORT + boots % 250 * _PORTS_PER_PROCESS
        self.dials: dict[_Dial, None] = {}

    def __repr__(self) -> str:
        return f"<SimHost {self.name}{'' if self.alive else ' crashed'}>"

    @property
    def alive(self) -> bool:
        """False once the host has crashed."""
        return self.run_queue.alive

    @property
    def ends(self) -> list[SimConnection]:
        """This process's ends of open connections, oldest first."""
        return [end for end in self.network.ends if end.process is self.run_queue]

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen on a port. The host name, "any" and loopback addresses all mean the same port.

        Raises:
            LinkError: the address cannot be used, or the host is down.
        """
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

    def hosts(self, address: Address) -> tuple[str, ...]:
        """Return the host's address in its local network, if it is in one."""
        return (inside(self.name),) if self.name in self.network.addresses.local else ()

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
        hosts: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect in one round trip, to the address in the local network if both are in it.

        If the host crashes, this never returns.

        Raises:
            LinkError: no process listens there, or none answered within ``timeout_s``.
        """
        for host in hosts:
            if self.network.addresses.are_inside(self.name, host):
                address = Address(host, address.port)
        self.network.events.note("dial", self.name, address)
        is_own = address.host in _LOOPBACK
        name = self.name if is_own else self.network.addresses.name_of(address.host)
        dial = _Dial(self, name, address, segment_bytes)
        return await self._dial(dial, name, address, timeout_s, may_dial)

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to a process that dials this one at the same time.

        Raises:
            LinkError: the two have not met within ``timeout_s``.
        """
        self.network.events.note("punch", local, address)
        name = self.network.addresses.name_of(address.host)
        dial = _Dial(self, name, address, segment_bytes, local.port)
        return await self._dial(dial, name, address, timeout_s, may_dial)

    async def _dial(
        self,
        dial: _Dial,
        name: str,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
    ) -> Connection:
        events, addresses = self.network.events, self.network.addresses
        if not may_dial(address.host):
            dial.fail("this address is valid only on its own machine or network")
        elif name not in self.network.hosts and name not in addresses.nats:
            dial.fail("name or service not known")
        elif addresses.are_apart(self.name, name):
            dial.fail("network is unreachable")
        elif not addresses.may_leave(self.name, address):
            if addresses.nats[self.name].kind.refuses:
                dial.fail("connection refused")
        else:
            dial.leave()
            self.network.route(self.name, name).carry(dial.arrive)
        deadline_ns = events.now_ns() + round(timeout_s * NS_PER_S)
        timer = events.at(deadline_ns, partial(dial.fail, "no answer in time"))
        self.dials[dial] = None
        try:
            return await dial.answer
        except BaseException:
            dial.give_up()
            raise
        finally:
            events.cancel(timer)
            del self.dials[dial]

    def run(self, action: Action, *, timer: bool = False) -> None:
        """Let the process make a call as soon as it runs."""
        self.run_queue.run(action, timer=timer)

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does; its kernel runs. Each call needs its own ``thaw``."""
        self.network.events.note("freeze", self.name)
        self.run_queue.stop()

    def thaw(self) -> None:
        """Undo one :meth:`freeze`. The process then reads data that its kernel kept meanwhile."""
        self.network.events.note("thaw", self.name)
        self.run_queue.resume()

    def take_port(self) -> int:
        """Return an unused port number. For this module only."""
        while self._next_port in self.listeners:
            self._next_port += 1
        self._next_port += 1
        return self._next_port - 1

    def crash(self, *, silent: bool = False) -> None:
        """Kill the process: its listeners and connections end, and it gets no more callbacks.

        The other ends see their connections end after the latency. Tasks of the process
        continue on the shared loop, but cannot send; the simulation has to cancel them.

        Args:
            silent: switch the whole host off without notice. Connections stay half open until a
                new process on the host answers data with a reset.
        """
        if not self.alive:
            return
        self.network.events.note("crash", self.name, "silent" if silent else "")
        if silent:
            self.network.wires.off.add(self.name)
        ends = self.ends
        self.run_queue.kill()
        self.listeners.clear()
        for end in ends:
            end.die(silent=silent)


class SimNetwork:
    """Hosts, and the routes between them.

    Args:
        clock: virtual time, such as :class:`pccl.stress.sim.loop.VirtualLoop`.
        rng: source of all random decisions.
        trace: called with every important event, and its time in nanoseconds.
        latency_ns: one-way latency between two hosts, unless :meth:`set_link` changes it.
        bytes_per_s: bandwidth per direction, unless :meth:`set_link` changes it; None: unlimited.
        window_bytes: most unacknowledged bytes in one direction of a connection.
        ragged: whether reads and writes have random sizes; otherwise the largest possible.

    Attributes:
        events: events of the network.
        hosts: newest process of each host, by name.
        wires: state that all connections share.
        ends: ends of open connections, from which fault plans choose.
        noises: applied to all arriving data, in order.
        memories: machines on which several hosts share memory; fill it before booting hosts.
        addresses: who has which address, and who may reach whom.
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
        self.wires = Wires(self.events, window_bytes)
        self.ends, self.noises = self.wires.ends, self.wires.noises
        self.memories = SimMemories()
        self.addresses = Addresses(self.events.now_ns, self._has_connection)
        self._latency_ns = latency_ns
        self._bytes_per_s = bytes_per_s
        self._routes: dict[tuple[str, str], HostRoute] = {}
        self._ports: dict[str, Port] = {}
        self._boots: dict[str, int] = {}

    def host(self, name: str) -> SimHost:
        """Start a process on the host ``name``; an earlier one must have crashed."""
        before = self.hosts.get(name)
        assert before is None or not before.alive, f"a process runs on {name} already"
        self.events.note("boot", name)
        boots = self._boots.get(name, 0)
        self._boots[name] = boots + 1
        self.wires.off.discard(name)
        self.hosts[name] = SimHost(self, name, boots)
        return self.hosts[name]

    def move(self, name: str) -> list[str]:
        """Give a host, or the NAT before it, another address; return all hosts that have moved.

        Their connections deliver no more data, except in a local network.
        """
        names = [one for one in self.addresses.move(name) if one in self.hosts]
        self.events.note("move", *names)
        for end in list(self.ends):
            ends = (end, end.other)
            is_local = any(self.addresses.are_inside(e.local.host, e.remote.host) for e in ends)
            is_lost = not is_local and any(one.local.host in names for one in ends)
            if is_lost and not end.is_cut:
                end.cut()
        return names

    def _has_connection(self, local: Address, remote: Address) -> bool:
        return any((end.local, end.remote) == (local, remote) for end in self.ends)

    def route(self, source: str, target: str) -> HostRoute:
        """Return the route from one host to another; its attributes may be set at any time."""
        route = self._routes.get((source, target))
        if route is None:
            route = HostRoute(self.events, self._latency_ns, self._bytes_per_s)
            self._routes[source, target] = route
            self._join_ports(route, source, target)
        return route

    def _join_ports(self, route: HostRoute, source: str, target: str) -> None:
        if source != target:
            route.up = self._ports.get(source, NO_PORT).up
            route.down = self._ports.get(target, NO_PORT).down

    def set_port(self, name: str, *, up: int | None, down: int | None, buffer_bytes: int) -> Port:
        """Limit what all connections of a host carry together, to other hosts.

        Args:
            name: name of the host.
            up: bytes per second that it sends; None: no limit.
            down: bytes per second that it receives; None: no limit.
            buffer_bytes: length of the queue in each direction.
        """
        lines = [
            None if rate is None else Line(self.events, rate, buffer_bytes) for rate in (up, down)
        ]
        self._ports[name] = port = Port(*lines)
        for (source, target), route in self._routes.items():
            self._join_ports(route, source, target)
        return port

    def set_link(self, a: str, b: str, *, latency_ns: int, bytes_per_s: int | None) -> None:
        """Set both directions between two hosts. Bytes already in transit are not affected."""
        for route in (self.route(a, b), self.route(b, a)):
            route.latency_ns = latency_ns
            route.bytes_per_s = bytes_per_s

    def stall(self, a: str, b: str, duration_ns: int | None, *, one_way: bool = False) -> None:
        """Hold back all traffic from ``a`` to ``b`` and, unless ``one_way``, from ``b`` to ``a``.

        Nothing is lost: all bytes arrive afterwards, in order. If ``duration_ns`` is None, the
        partition lasts until :meth:`heal`.
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
