"""The part of the master: which version counts, and which processes have it.

A version counts once more than half of the members of its group have announced it with the same
digests. So one member that lies cannot give readers other contents, unless it is alone in its
group. Readers have no vote: they neither delay a round nor enter a view.

The master stores none of this. Members announce their versions to another master, and readers
subscribe there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from pccl.machines.history import History, InvariantViolation
from pccl.machines.master.connections import Connections, Outbox
from pccl.machines.master.credible import is_host
from pccl.machines.master.events import SendTo
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.origin import Incarnation
from pccl.machines.reachability import dialled_at
from pccl.protocol.limits import ELDERS_TOLD_MAX, HOLDERS_TOLD_MAX, READERS_MAX, Timing
from pccl.protocol.messages import MasterHeartbeat
from pccl.protocol.publication.versions import (
    AnnounceVersions,
    CurrentVersion,
    PublishedVersion,
    Subscribe,
    Subscribed,
)
from pccl.protocol.types import Member, PeerId

_DISTANCES = (*range(1, 7), *(1 << power for power in range(3, ELDERS_TOLD_MAX - 3)))
"""The master names to a reader those that are so many places older: few hops lead to any other."""


@dataclass(slots=True)
class _Subscription:
    """One reader."""

    member: Member
    group: int
    heard_ns: int
    told: CurrentVersion | None = field(default=None)
    """What the master has sent last."""


class Publications:
    """The versions that members have announced, and the readers."""

    def __init__(
        self,
        timing: Timing,
        incarnation: Incarnation,
        membership: Membership,
        connections: Connections,
        outbox: Outbox,
    ) -> None:
        self._timing = timing
        self._incarnation = incarnation
        self._membership = membership
        self._connections = connections
        self._outbox = outbox
        self._announced: dict[PeerId, tuple[PublishedVersion, ...]] = {}
        self._current: dict[int, PublishedVersion] = {}
        """Group -> the version that has counted last."""
        self._readers: dict[int, _Subscription] = {}
        """By connection, in the order of their ids."""
        self._run = incarnation.run

    def current(self, group: int) -> PublishedVersion | None:
        """Return the version of a group that counts; None: none has counted yet."""
        return self._current.get(group)

    def is_reader(self, connection: int) -> bool:
        """Whether a reader is at the other end of a connection."""
        return connection in self._readers

    # -- members -------------------------------------------------------------------------------

    def announced(self, peer: RegisteredPeer, message: AnnounceVersions) -> None:
        """Record what a member publishes. Readers are told at the next tick."""
        self._follow_run()
        self._announced[peer.id] = message.versions
        self._count(peer.group)

    def _count(self, group: int) -> None:
        """Find the newest version that more than half of the members of a group have announced."""
        members = self._membership.members(group)
        votes: defaultdict[object, list[PublishedVersion]] = defaultdict(list)
        for peer in members:
            for version in {one.key: one for one in self._announced.get(peer.id, ())}.values():
                votes[version.key].append(version)
        counted = [alike for alike in votes.values() if 2 * len(alike) > len(members)]
        if not counted:
            return
        alike = max(counted, key=lambda versions: versions[0].number)
        known, newest = self._current.get(group), alike[0]
        if known is not None and known.number > newest.number and known.key in votes:
            return  # some members have a newer one, which has counted before the others left
        chains = Counter(version.deltas for version in alike)
        most = max(chains.items(), key=lambda chain: (chain[1], len(chain[0])))
        self._current[group] = replace(newest, deltas=most[0])

    def _holders(self, group: int) -> list[Member]:
        """Return the members that have the present version, in order of id."""
        current = self._current.get(group)
        return [
            peer.member
            for peer in self._membership.members(group)
            if current is not None
            and any(one.key == current.key for one in self._announced.get(peer.id, ()))
        ]

    # -- readers -------------------------------------------------------------------------------

    def subscribe(self, connection: int, message: Subscribe, waits_for: str) -> None:
        """Give a reader an id, and send it the version that counts; or refuse it.

        ``waits_for``: what a master without a run waits for; empty: it coordinates one.
        """
        if waits_for:
            reason = f"this master coordinates no run: {waits_for}"
            self._connections.refuse(connection, reason)
            return
        if not all(map(is_host, (message.host, *message.hosts))):
            self._connections.refuse(connection, "an advertised host is invalid or too long")
            return
        if len(self._readers) >= READERS_MAX:
            self._connections.refuse(connection, f"the run has {READERS_MAX} readers, the maximum")
            return
        self._follow_run()
        caller, us = self._connections.callers[connection], self._incarnation
        self._membership.newest_peer = newest = PeerId(self._membership.newest_peer + 1)
        host, hosts = dialled_at(message.host, message.hosts, caller.host)
        member = Member(newest, host, message.port, 0, message.name, caller.key, hosts)
        reader = _Subscription(member, message.group, self._outbox.now_ns)
        self._readers[connection] = reader
        told = Subscribed(newest, us.term, us.run, us.certify(member))
        self._outbox.add(SendTo(connection, told))
        self._tell(message.group, only=connection)

    def hears(self, connection: int) -> bool:
        """Note that a reader lives; return whether a reader is at the other end."""
        reader = self._readers.get(connection)
        if reader is not None:
            reader.heard_ns = self._outbox.now_ns
        return reader is not None

    def closed(self, connection: int) -> None:
        """Forget the reader of a closed connection."""
        self._readers.pop(connection, None)

    def beat(self) -> None:
        """Show the readers, at a heartbeat, that the master lives; forget silent readers."""
        now_ns = self._outbox.now_ns
        for connection, reader in list(self._readers.items()):
            if now_ns - reader.heard_ns >= 2 * self._timing.ns(self._timing.deadline_s):
                del self._readers[connection]
                self._connections.close(connection, "the reader is silent")
            else:
                self._outbox.add(SendTo(connection, MasterHeartbeat(now_ns)))

    def look(self) -> None:
        """Forget members that have left, at a tick, and tell readers what has changed."""
        self._follow_run()
        for peer in [one for one in self._announced if one not in self._membership.peers]:
            del self._announced[peer]
        for group in dict.fromkeys(reader.group for reader in self._readers.values()):
            self._count(group)
            self._tell(group)

    def _follow_run(self) -> None:
        """If the master coordinates another run now, forget all: its readers subscribe again.

        Members of that run announce their versions at once, so this comes before each of them.
        """
        if self._run == self._incarnation.run:
            return
        self._run = self._incarnation.run
        self._announced.clear()
        self._current.clear()
        for connection in list(self._readers):
            del self._readers[connection]
            self._connections.close(connection, "the master coordinates another run now")

    def _tell(self, group: int, only: int | None = None) -> None:
        """Tell each reader of a group what has changed for it.

        ``only``: the connection of the one reader to tell. What one process sends must not cause a
        message to each reader: they hear of it at a tick, together with all else.
        """
        holders = self._holders(group)
        readers = [item for item in self._readers.items() if item[1].group == group]
        for rank, (connection, reader) in enumerate(readers):
            if only not in (None, connection):
                continue
            first = rank % len(holders) if holders else 0
            some = (holders[first:] + holders[:first])[:HOLDERS_TOLD_MAX]
            elders = (readers[rank - step][1].member for step in _DISTANCES if step <= rank)
            current = self._current.get(group)
            told = CurrentVersion(current, tuple(some), tuple(elders), rank, len(readers))
            if told != reader.told:
                reader.told = told
                self._outbox.add(SendTo(connection, told))

    def check(self, history: History) -> None:
        """Assert that each reader has an open connection, and is no peer.

        Raises:
            InvariantViolation: a reader has none, or is a peer of the run.
        """
        strangers = self._connections.callers.keys() - self._connections.peers.keys()
        if not strangers.issuperset(self._readers):
            raise InvariantViolation("a reader has no connection of its own", history)
