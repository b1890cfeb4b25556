"""The network of a run: proxies in front of each peer, and the faults on them.

Each peer has one proxy in front of it, and one to each master. The other peers dial the front
proxy, which distinguishes their connections by the id of the dialler. The list of lasting
faults decides which faults act on which connections. When the list or an id changes, the network
computes this again. So faults may overlap, and the end of a fault does not undo another fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pccl.stress.chaos.garbage import pour
from pccl.stress.emulator.connection import Side
from pccl.stress.emulator.proxy import Proxy
from pccl.stress.emulator.shaper import Direction
from pccl.stress.emulator.sorting import peer_of
from pccl.stress.emulator.spec import RATE_BPS_MIN, LinkSpec
from pccl.stress.emulator.thread import LoopThread
from pccl.stress.timeline import LASTING, MASTER, FaultKind, TimelineFault


@dataclass(frozen=True, slots=True)
class ProxiedPlace:
    """The connections that ``source`` dials to ``target``, which a fault may affect."""

    source: int
    target: int


@dataclass(slots=True)
class _State:
    """The properties of the connections of a place, and the directions in which no data passes."""

    spec: LinkSpec
    held: frozenset[Direction] = frozenset()


@dataclass(slots=True)
class _Doors:
    """The proxies of one peer: in front of it, and to the masters; and its ids so far."""

    front: Proxy
    to_masters: list[Proxy]
    ids: list[int] = field(default_factory=list[int])

    def all(self) -> list[Proxy]:
        """Return all proxies."""
        return [self.front, *self.to_masters]


class Network:
    """A thread with all proxies. Use it as a context manager, from any other thread.

    Args:
        link: properties of each link without a fault.
        seed: seed of jitter and garbage.
    """

    def __init__(self, link: LinkSpec, seed: int) -> None:
        self._link = link
        self._seed = seed
        self._doors: dict[int, _Doors] = {}
        self._active: list[TimelineFault] = []
        self._done: dict[tuple[Proxy, int | None], _State] = {}
        """Proxy and key of the link in it -> state that was applied last."""
        self._stalled: dict[int, list[tuple[Proxy, int]]] = {}
        self._pouring: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("network", lambda: None, self._close)

    def __enter__(self) -> Network:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.close()

    # -- doors -----------------------------------------------------------------------------------

    def add(self, index: int, host: str, door: str, masters: Sequence[str]) -> list[str]:
        """Start the proxies of a peer.

        Args:
            index: index of the process.
            host: host at which its proxies listen.
            door: address at which it listens itself, ``HOST:PORT``.
            masters: the masters' own addresses.

        Returns:
            The address that other peers dial, then the address of each master for this peer.

        Raises:
            OSError: no port is free.
        """
        return self._thread.call(lambda: self._add(index, host, door, masters))

    def joined(self, index: int, peer: int) -> None:
        """Record that a process has a new id."""
        self._thread.call(lambda: self._joined(index, peer))

    def remove(self, index: int) -> None:
        """Close the proxies of a peer that will not return; a second call has no effect."""
        self._thread.call(lambda: self._remove(index))

    def free_port(self, host: str, first: int, last: int) -> int:
        """Return a port from ``first`` to ``last`` at which no process listens.

        Raises:
            OSError: no port is free.
        """
        return self._thread.wait(_free_port(host, first, last))

    # -- faults ----------------------------------------------------------------------------------

    def begin(self, fault: TimelineFault) -> None:
        """Begin a fault of the network; a fault without a duration is over at once."""
        self._thread.call(lambda: self._begin(fault))

    def end(self, fault: TimelineFault) -> None:
        """End a fault with a duration."""
        self._thread.call(lambda: self._end(fault))

    def pour_garbage(self, door: str, fault: TimelineFault) -> None:
        """Send hostile bytes to an address."""

        def begin() -> None:
            task = asyncio.create_task(pour(door, round(fault.amount), self._seed, fault.at_s))
            self._pouring.add(task)
            task.add_done_callback(self._pouring.discard)

        self._thread.call(begin)

    # -- in the loop -----------------------------------------------------------------------------

    def _add(self, index: int, host: str, door: str, masters: Sequence[str]) -> list[str]:
        listen = f"{host}:0"
        seed = self._seed + 10 * index
        front = Proxy(door, self._link, listen=listen, link_of=peer_of, seed=seed)
        to_masters = [
            Proxy(master, self._link, listen=listen, seed=seed + number)
            for number, master in enumerate(masters, 1)
        ]
        self._doors[index] = doors = _Doors(front, to_masters)
        for proxy in doors.all():
            proxy.start()
        self._settle()
        return [str(proxy.address) for proxy in doors.all()]

    def _remove(self, index: int) -> None:
        doors = self._doors.pop(index, None)
        if doors is None:
            return
        for proxy in doors.all():
            proxy.close()
        gone = doors.all()
        self._done = {at: done for at, done in self._done.items() if at[0] not in gone}
        for fault, flows in self._stalled.items():
            self._stalled[fault] = [each for each in flows if each[0] not in gone]

    def _joined(self, index: int, peer: int) -> None:
        self._doors[index].ids.append(peer)
        self._settle()

    def _begin(self, fault: TimelineFault) -> None:
        match fault.kind:
            case FaultKind.RESET:
                for place in self._places(fault):
                    for proxy, key in self._proxies(place):
                        proxy.reset(link=key)
            case FaultKind.HALF_OPEN:
                for place in self._places(fault):
                    gone = Side.DIALLER if place.target == fault.peer else Side.TARGET
                    for proxy, key in self._proxies(place):
                        proxy.half_open(gone, link=key)
            case FaultKind.STALL:
                flows = [
                    (proxy, each.flow)
                    for place in self._places(fault)
                    for proxy, key in self._proxies(place)
                    for each in proxy.flows()
                    if key is None or each.link == key
                ]
                for proxy, flow in flows:
                    proxy.stall(flow=flow)
                self._stalled[id(fault)] = flows
            case _:
                assert fault.kind in LASTING
                self._active.append(fault)
                self._settle()

    def _end(self, fault: TimelineFault) -> None:
        for proxy, flow in self._stalled.pop(id(fault), ()):
            with suppress(LookupError):  # it has ended
                proxy.resume(flow=flow)
        if fault in self._active:
            self._active.remove(fault)
            self._settle()

    def _settle(self) -> None:
        """Apply the lasting faults to each connection whose state is not up to date."""
        for source, target in self._all_places():
            wanted = self._wanted(ProxiedPlace(source, target))
            for proxy, key in self._proxies(ProxiedPlace(source, target)):
                done = self._done.setdefault((proxy, key), _State(self._link))
                if done.spec != wanted.spec:
                    proxy.change(wanted.spec, link=key)
                for direction in sorted(wanted.held - done.held, key=lambda each: each.value):
                    proxy.cut(link=key, direction=direction)
                for direction in sorted(done.held - wanted.held, key=lambda each: each.value):
                    proxy.resume(link=key, direction=direction)
                self._done[proxy, key] = wanted

    def _wanted(self, place: ProxiedPlace) -> _State:
        spec = self._link
        held: set[Direction] = set()
        for fault in self._active:
            if place not in self._places(fault):
                continue
            match fault.kind:
                case FaultKind.PARTITION | FaultKind.CLOCK_PAUSE:
                    held.update(Direction)
                case FaultKind.PARTITION_ONE_WAY:
                    from_peer = place.source == fault.peer
                    held.add(Direction.FORWARD if from_peer else Direction.BACKWARD)
                case FaultKind.BANDWIDTH:
                    rate_bps = max(RATE_BPS_MIN, round(fault.amount * 8))
                    spec = replace(spec, rate_bps=min(rate_bps, spec.rate_bps or rate_bps))
                case FaultKind.CORRUPT:
                    spec = replace(spec, corrupt=max(spec.corrupt, fault.amount))
                case _:
                    spec = replace(spec, rtt_s=spec.rtt_s + 2 * fault.amount)
        return _State(spec, frozenset(held))

    def _all_places(self) -> Iterator[tuple[int, int]]:
        for source in self._doors:
            yield source, MASTER
            for target in self._doors:
                if source != target:
                    yield source, target

    def _places(self, fault: TimelineFault) -> set[ProxiedPlace]:
        """Return the places whose connections a fault affects."""
        others: Iterable[int] = [fault.other] if fault.other is not None else self._everybody()
        pairs = [(fault.peer, other) for other in others if other != fault.peer]
        return {
            ProxiedPlace(*ends) for a, b in pairs for ends in ((a, b), (b, a)) if ends[0] != MASTER
        }

    def _everybody(self) -> list[int]:
        return [MASTER, *self._doors]

    def _proxies(self, place: ProxiedPlace) -> Iterator[tuple[Proxy, int | None]]:
        """Yield the proxies of a place, with the link's key: the dialler's newest id, or None."""
        dialler = self._doors.get(place.source)
        if dialler is None:
            return
        if place.target == MASTER:
            for proxy in dialler.to_masters:
                yield proxy, None
            return
        target = self._doors.get(place.target)
        if target is not None:
            for peer in dialler.ids[-1:]:
                yield target.front, peer

    def _close(self) -> None:
        for task in list(self._pouring):
            task.cancel()
        for doors in self._doors.values():
            for proxy in doors.all():
                proxy.close()


async def _free_port(host: str, first: int, last: int) -> int:
    for port in range(first, last + 1):
        try:
            server = await asyncio.start_server(lambda reader, writer: writer.close(), host, port)
        except OSError:
            continue
        server.close()
        await server.wait_closed()
        return port
    raise OSError(f"no port from {first} to {last} of {host} is free")
