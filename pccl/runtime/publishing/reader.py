"""``ReaderEngine``: carries out what a ``ReaderMachine`` decides; it fetches and shows versions."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pccl.machines.peer.events import CloseControl, DialControl, PeerEvent, Send
from pccl.machines.peer.membership import PeerIdentity
from pccl.machines.publication.reader import (
    AssembleVersion,
    DialSource,
    FetchState,
    RaiseToReader,
    ReaderEffect,
    ReaderEvent,
    ReaderMachine,
    ReaderTick,
    SetSources,
    ShowVersion,
    SourceLinked,
    StateFetched,
    VersionAssembled,
)
from pccl.protocol.errors import (
    DeadlineExceeded,
    LinkError,
    LocalProtocolError,
    NotConnected,
    PCCLError,
    RemoteProtocolError,
)
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.opening import READS, Channel, Opening
from pccl.protocol.publication.versions import PublishedVersion
from pccl.protocol.types import HOSTS_MAX, Member, PeerId
from pccl.runtime.clock import ThreadClock, Ticker
from pccl.runtime.control.greeting import Credentials, Reception, introduce, opening_of
from pccl.runtime.control.keeper import ControlKeeper
from pccl.runtime.hashing import Hasher
from pccl.runtime.links.listening import listen
from pccl.runtime.publishing.copies import apply_deltas, fresh_memory
from pccl.runtime.publishing.exchange import VersionExchange
from pccl.runtime.publishing.fetch import VersionFetch
from pccl.runtime.requests import PeerOptions
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.tasks import Tasks
from pccl.runtime.waiting import settled
from pccl.state.layout import StateLayout
from pccl.state.versions import fits_deltas, name_of
from pccl.transports.base import Address, Connection, Listener, Transport
from pccl.transports.link import Link
from pccl.transports.pacing.transport import limited

_log = logging.getLogger("pccl.reader")


@dataclass(frozen=True, slots=True)
class ReadVersion:
    """A complete version of this reader. Its memory never changes."""

    version: PublishedVersion
    memory: StateMemory


class ReaderEngine:
    """One reader, without its API. All methods run on the loop.

    Args:
        loop: event loop that the engine runs on.
        clock: gives the time.
        transport: the network.
        masters: addresses of the masters.
        group: the group whose versions it reads.
        options: settings, as for a peer.
        hasher: copies and hashes, off the event loop.
        make_link: makes a link.
        observer: called with each event and its effects after they were carried out (traces).
    """

    machine: ReaderMachine

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: ThreadClock,
        transport: Transport,
        masters: tuple[Address, ...],
        group: int,
        options: PeerOptions,
        hasher: Hasher,
        make_link: Callable[[PeerId], Link] = Link,
        observer: Callable[[ReaderEvent, list[ReaderEffect]], None] | None = None,
    ) -> None:
        self.held: ReadVersion | None = None
        self._loop = loop
        self._clock = clock
        self._transport = limited(transport, clock, options.upload_bytes_per_s_max)
        self._options = options
        self._timing = timing = options.timing
        self._group = group
        self._hasher = hasher
        self._observer = observer
        self._tasks = Tasks(loop)
        self._credentials = Credentials(
            options.token, options.random_bytes, options.curves, encrypts=options.encrypts
        )
        self.exchange = VersionExchange(
            clock, group, timing.ns(timing.lane_stall_s), make_link, self._link_changed
        )
        self._control = ControlKeeper(
            clock, self._transport, masters, timing.dial_s, self._credentials,
            PeerIdentity, self.feed, self._tasks.create, self._hosts,
        )  # fmt: skip
        self._reception = Reception(
            clock, timing.ns(timing.dial_s), transport.port_limits.unproven, self._credentials,
            lambda: opening_of(Channel.LANE, self.machine), self._on_proven, self._judge,
        )  # fmt: skip
        self._ticker = Ticker(clock, timing.ns(timing.tick_s), lambda _: self._tick())
        self._listener: Listener | None = None
        self._holders: tuple[PeerId, ...] = ()
        self._place_among = (0, 1)
        """Rank and number of the readers."""
        self._got: list[StateMemory] = []
        """The fetched deltas of the chain, or the whole state."""
        self._deltas: tuple[StateMemory, ...] = ()
        """The deltas that led to the held version, for other readers."""
        self._error: PCCLError | None = None
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._queue: deque[ReaderEvent] = deque()
        self._is_busy = self._is_closed = False

    async def start(self) -> None:
        """Open the port, and dial a master.

        Raises:
            LinkError: the port cannot be opened.
        """
        options = self._options
        self._listener = await listen(self._transport, options, self._reception.accept)
        port = options.advertise_port or self._listener.address.port
        self.machine = ReaderMachine(
            self._timing, self._group, port, options.advertise_host, options.name,
            self._clock.now_ns(),
        )  # fmt: skip
        self._ticker.start()
        self._control.dial(0)

    def _hosts(self) -> tuple[str, ...]:
        if self._options.advertise_host or self._listener is None:
            return ()
        return self._transport.hosts(self._listener.address)[:HOSTS_MAX]

    async def next(self, after: ReadVersion | None, timeout_s: float | None) -> ReadVersion:
        """Wait for another version than ``after``, and return the newest.

        Raises:
            DeadlineExceeded: there is none within ``timeout_s``; the reason says what is missing.
            NotAdmitted: the master refuses this reader.
            NotConnected: the reader was closed.
        """
        timer = None
        late = False

        def is_late() -> None:
            nonlocal late
            late = True
            self._wake()

        if timeout_s is not None:
            when_ns = self._clock.now_ns() + self._timing.ns(timeout_s)
            timer = self._clock.call_at_ns(when_ns, is_late)
        try:
            while self.held is None or self.held is after:
                if self._error is not None:
                    raise self._error
                if late:
                    raise DeadlineExceeded(reason=f"no version came: {self.machine.waits_for}")
                turn: asyncio.Future[None] = self._loop.create_future()
                self._waiting[turn] = None
                try:
                    await settled(turn)
                finally:
                    self._waiting.pop(turn, None)
            return self.held
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for turn in list(self._waiting):
            if not turn.done():
                turn.set_result(None)

    async def close(self) -> None:
        """Close all connections; calls that wait raise NotConnected."""
        if self._is_closed:
            return
        self._is_closed = True
        self._error = NotConnected(reason="the subscriber is closed; make a new one")
        self._wake()
        self._ticker.stop()
        self._control.close("the subscriber is closed")
        if self._listener is not None:
            self._listener.close()
        self._reception.close()
        self.exchange.close()
        await self._tasks.cancel()
        self._hasher.close()

    # -- the machine -----------------------------------------------------------------------------

    def feed(self, event: PeerEvent | ReaderEvent) -> None:
        """Handle an event, after all events that are queued already."""
        if self._is_closed or not isinstance(event, ReaderEvent):
            return
        self._queue.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._is_busy = False

    def _step(self, event: ReaderEvent) -> None:
        effects = self.machine.handle(event, self._clock.now_ns())
        for effect in effects:
            self._carry_out(effect)
        if self._observer is not None:
            self._observer(event, effects)

    def _carry_out(self, effect: ReaderEffect) -> None:
        match effect:
            case Send(message):
                self._control.send(message)
            case DialControl(delay_ns):
                self._control.dial(delay_ns)
            case CloseControl(reason):
                self._control.close(reason)
            case DialSource(member):
                self._tasks.create(self._dial(member))
            case SetSources(holders, rank, count):
                self._holders, self._place_among = holders, (rank, count)
                if self.exchange.fetch is not None:
                    self.exchange.fetch.set_sources(holders, self._place_among)
            case FetchState():
                self._fetch(effect)
            case AssembleVersion(version, chain):
                self._tasks.create(self._assemble(version, is_chain=bool(chain)))
            case ShowVersion(version):
                _log.info("version %d is complete: %d bytes", version.number, version.nbytes)
                self._wake()
            case RaiseToReader(error):
                self._error = error
                self._wake()

    def _tick(self) -> None:
        self.exchange.tick()
        fetch = self.exchange.fetch
        moves = fetch is not None and fetch.moves
        self.feed(ReaderTick(moves, fetch is not None and fetch.starves))

    # -- links -----------------------------------------------------------------------------------

    async def _dial(self, member: Member) -> None:
        timing, peer = self._timing, member.peer
        may_dial = partial(self._control.may_dial, self._options.advertise_host, member.host)
        try:
            connection = await self._transport.dial(
                Address(member.host, member.port), timing.dial_s, may_dial, member.hosts
            )
            opening = replace(opening_of(Channel.LANE, self.machine, peer), flags=READS)
            handshake = self._credentials.dial(connection, opening, fingerprint_of(member.key))
            deadline_ns = self._clock.now_ns() + timing.ns(timing.dial_s)
            await introduce(connection, handshake, self._clock, deadline_ns, self._attach)
        except (LinkError, RemoteProtocolError) as error:
            _log.debug("cannot reach peer %d: %s", peer, error.reason)
            self.feed(SourceLinked(peer, up=False))

    def _attach(self, connection: Connection, remote: Opening) -> None:
        self.exchange.attach(connection, remote.source)

    def _judge(self, remote: Opening) -> str:
        """Return why the sender of an opening may not connect; empty: it may."""
        if not remote.flags & READS or remote.channel is not Channel.LANE:
            return "this process is a reader, and serves other readers only"
        authority = self.machine.certificate.authority
        is_registered = self._credentials.is_registered(authority, remote)
        return "" if is_registered else "the master of this reader has not registered it"

    def _on_proven(self, connection: Connection, remote: Opening, deadline_ns: int) -> None:
        self.exchange.accept(connection, remote.source)

    def _link_changed(self, peer: PeerId, up: bool) -> None:
        self.feed(SourceLinked(peer, up))

    # -- versions --------------------------------------------------------------------------------

    def _fetch(self, wanted: FetchState) -> None:
        if wanted.is_first:
            self._got.clear()
        self._end_fetch()
        fetch = VersionFetch(
            wanted.name,
            self._group,
            self.machine.peer,
            self.exchange.links,
            self._clock.now_ns,
            self._timing.ns(self._timing.deadline_s) // 4,
            partial(self._place, wanted),
            partial(self._complete, wanted),
        )
        self.exchange.fetch = fetch
        fetch.set_sources(self._holders, self._place_among)
        held = self.held
        if held is not None and held.version.state.layout == wanted.name.layout:
            fetch.knows_layout(held.memory.layout)

    def _end_fetch(self) -> None:
        if self.exchange.fetch is not None:
            self.exchange.fetch.close()
            self.exchange.fetch = None

    def _place(self, wanted: FetchState, fetch: VersionFetch, layout: StateLayout) -> None:
        """Make memory for a state whose layout has come, or report that it does not fit."""
        held = self.held
        fits = layout.nbytes == wanted.nbytes and not any(e.may_differ for e in layout.entries)
        if wanted.is_delta:
            fits &= held is not None and fits_deltas(held.memory.layout, layout)
        if not fits:
            self._end_fetch()
            self.feed(StateFetched(wanted.name, fits=False))
            return
        is_like = held is not None and held.version.state.layout == wanted.name.layout
        base = held.memory if held is not None and is_like else None
        self._tasks.create(self._begin(fetch, layout, base))

    async def _begin(
        self, fetch: VersionFetch, layout: StateLayout, base: StateMemory | None
    ) -> None:
        try:
            memory = await self._hasher.run(lambda: fresh_memory(layout, base))
        except (MemoryError, ValueError) as error:
            self._lack_memory(layout.nbytes, error)
            return
        if self.exchange.fetch is fetch:
            fetch.begin(memory)

    def _lack_memory(self, nbytes: int, error: Exception) -> None:
        reason = f"this reader has no memory for {nbytes} bytes: {error}"
        self._error = LocalProtocolError(reason=reason)
        self._wake()

    def _complete(self, wanted: FetchState, fetch: VersionFetch) -> None:
        if self.exchange.fetch is not fetch or fetch.memory is None:
            return
        self._got.append(fetch.memory)
        self._loop.call_soon(self._finish, wanted, fetch)

    def _finish(self, wanted: FetchState, fetch: VersionFetch) -> None:
        """End a fetch outside of its own call, and serve what it has fetched as a whole."""
        if self.exchange.fetch is fetch:
            self._end_fetch()
            self._offer()
            self.feed(StateFetched(wanted.name, fits=True))

    def _offer(self) -> None:
        held = () if self.held is None else (self.held.memory,)
        self.exchange.offer((*held, *self._deltas, *self._got))

    async def _assemble(self, version: PublishedVersion, *, is_chain: bool) -> None:
        """Make a version from the fetched states, and check its digest."""
        held, got = self.held, tuple(self._got)
        if is_chain:
            assert held is not None
            try:
                memory = await self._changed(held.memory, got)
            except MemoryError as error:
                self._lack_memory(version.nbytes, error)
                return
        elif held is not None and held.version.state == version.state:  # only another number
            memory = held.memory
        else:
            (memory,) = got
        fits = memory is not None and name_of(memory.piece_map) == version.state
        if memory is not None and fits:
            self._deltas = got if is_chain else ()
            self.held = ReadVersion(version, memory)
        self._got.clear()
        self._offer()
        self.feed(VersionAssembled(version, fits))

    async def _changed(
        self, base: StateMemory, chain: tuple[StateMemory, ...]
    ) -> StateMemory | None:
        """Return a state changed by deltas, with its digests; None: a delta does not fit."""

        def change() -> tuple[StateMemory, list[int]]:
            memory = fresh_memory(base.layout, base)
            return memory, sorted({n for deltas in chain for n in apply_deltas(memory, deltas)})

        try:
            memory, changed = await self._hasher.run(change)
        except ValueError:
            return None
        await self._hasher.hash_pieces(memory, changed)
        return memory
