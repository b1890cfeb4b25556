"""``Publisher``: the part of a member: copies a state, and serves the copy to readers.

``publish`` returns when the state is copied. Other threads then hash the copy, and compare it with
the version before, while the program trains. The next call waits until they have finished. No call
waits for a reader. The member keeps the newest two versions in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.errors import NotConnected
from pccl.protocol.limits import DELTAS_MAX
from pccl.protocol.publication.versions import PublishedVersion, StateName, VersionDelta
from pccl.protocol.shared_state import Lineage
from pccl.protocol.types import PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.hashing import Hasher
from pccl.runtime.publishing.copies import copy_of, delta_between
from pccl.runtime.publishing.exchange import VersionExchange
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.tasks import Tasks
from pccl.runtime.waiting import settled
from pccl.state.layout import Entry
from pccl.state.versions import kept_deltas, name_of
from pccl.transports.base import Connection, Transport
from pccl.transports.link import Link
from pccl.transports.pacing.transport import PacedConnection, PacedTransport

VERSIONS_KEPT = 2
"""The newest version, and the one before for slow readers."""


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """A call that publishes a state.

    Attributes:
        memory: memory of the state.
        entries: the entry of each tensor in the published layout; None: it is not published.
        number: the revision of the state.
        lineage: the last synchronization that gave the group these contents.
        readers_bytes_per_s_max: what the member sends to all readers together; None: no limit.
    """

    memory: StateMemory
    entries: tuple[Entry | None, ...]
    number: int
    lineage: Lineage | None = None
    readers_bytes_per_s_max: int | None = None


class Publisher:
    """Publishes the states of one member.

    Args:
        clock: gives the time.
        transport: the network, of which only the limits matter here.
        group: the peer group.
        hasher: copies, hashes and compares, off the event loop.
        tasks: runs the work after a call.
        stall_ns: see ``VersionExchange``.
        announce: tells the master which versions this peer publishes.
        make_link: makes the link to a reader.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        group: int,
        hasher: Hasher,
        tasks: Tasks,
        stall_ns: int,
        announce: Callable[[tuple[PublishedVersion, ...]], None],
        make_link: Callable[[PeerId], Link] = Link,
    ) -> None:
        self.exchange = VersionExchange(clock, group, stall_ns, make_link)
        self._clock = clock
        self._transport = transport
        self._hasher = hasher
        self._tasks = tasks
        self._announce = announce
        self._turn = asyncio.Lock()
        """Held by the call that copies: each version comes after the one before."""
        self._work: asyncio.Task[None] | None = None
        self._is_closed = False
        self._paced: PacedTransport | None = None
        """Limits what all readers receive together; None: no limit."""
        self._versions: tuple[PublishedVersion, ...] = ()
        """The newest first."""
        self._states: dict[StateName, StateMemory] = {}
        """Versions and deltas."""

    def accept(self, connection: Connection, peer: PeerId) -> None:
        """Serve a reader that has proven its id."""
        if self._paced is not None:
            connection = PacedConnection(connection, self._paced)
        self.exchange.accept(connection, peer)

    def say_again(self) -> None:
        """Announce the versions in the run that this peer has joined again."""
        if self._versions:
            self._announce(self._versions)

    async def publish(self, request: PublishRequest) -> int:
        """Copy a state; return the number of its version.

        Raises:
            ValueError: another call uses the state.
            NotConnected: this peer has closed meanwhile.
            MemoryError: there is no memory for the copy.
        """
        async with self._turn:
            if self._work is not None:
                await settled(self._work)
            self._limit(request.readers_bytes_per_s_max)
            with request.memory.claimed():
                request.memory.check_in_place()
                copied = await self._hasher.run(lambda: copy_of(request.memory, request.entries))
            if self._is_closed:
                raise NotConnected(reason="the communicator was closed meanwhile")
            self._work = self._tasks.create(self._finish(request, copied))
        return request.number

    def _limit(self, bytes_per_s: int | None) -> None:
        """Change the limit for readers that connect from now on."""
        known = None if self._paced is None else self._paced.bytes_per_s
        if bytes_per_s != known:
            self._paced = None
            if bytes_per_s is not None:
                self._paced = PacedTransport(self._transport, self._clock, bytes_per_s)

    async def _finish(self, request: PublishRequest, copied: StateMemory) -> None:
        """Hash a copy, compare it with the version before, and serve it."""
        layout = copied.layout
        await self._hasher.hash_pieces(copied, range(layout.piece_count))
        name, before = name_of(copied.piece_map), self._versions[:1]
        deltas: tuple[VersionDelta, ...] = ()
        if before and before[0].state.layout == name.layout:
            deltas = before[0].deltas
            if before[0].state != name:
                made = await self._compare(before[0].state, copied, name)
                chain = (*deltas, made) if made is not None else ()
                deltas = kept_deltas(chain, layout.nbytes, DELTAS_MAX)
        version = PublishedVersion(request.number, name, layout.nbytes, request.lineage, deltas)
        older = (one for one in self._versions if one.key != version.key)
        self._versions = (version, *older)[:VERSIONS_KEPT]
        self._states.setdefault(name, copied)
        kept = [one.state for one in self._versions]
        kept += [one.state for of in self._versions for one in of.deltas]
        self._states = {one: self._states[one] for one in dict.fromkeys(kept)}
        self.exchange.offer(self._states.values())
        self._announce(self._versions)

    async def _compare(
        self, before: StateName, copied: StateMemory, after: StateName
    ) -> VersionDelta | None:
        there = self._states[before]
        made = await self._hasher.run(lambda: delta_between(there, copied))
        if made is None:
            return None
        await self._hasher.hash_pieces(made, range(made.layout.piece_count))
        state = name_of(made.piece_map)
        self._states[state] = made
        return VersionDelta(before.content, after.content, state, made.layout.nbytes)

    def close(self) -> None:
        """Stop serving readers."""
        self._is_closed = True
        self.exchange.close()
