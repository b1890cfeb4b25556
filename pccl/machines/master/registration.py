"""How peers register with a run, resume a lost connection, and return to a new master."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pccl.machines.master.admission import Admission
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.connections import Connections, Outbox
from pccl.machines.master.credible import is_host, registration_flaw
from pccl.machines.master.links.peer_links import PeerLinks
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.removal import Removals
from pccl.machines.master.rounds import JointRounds
from pccl.machines.master.status import admission_waits_for
from pccl.machines.master.succession.origin import Incarnation
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovered import Recovered
from pccl.machines.master.succession.revival import revive, revive_all
from pccl.machines.reachability import dialled_at
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import (
    ID_JUMP_BYTES,
    ID_JUMP_MAX,
    PEERS_MAX,
    PENDING_MAX,
    TERM_GAP,
    Timing,
)
from pccl.protocol.types import NS_PER_S, Member, PeerId, RemovalCause, RoundKind


class Registration:
    """Gives ids to newcomers, and recognizes peers that return."""

    def __init__(
        self,
        timing: Timing,
        incarnation: Incarnation,
        random_bytes: Callable[[int], bytes],
        membership: Membership,
        connections: Connections,
        links: PeerLinks,
        removals: Removals,
        ballots: OpenBallots,
        finals: Finals,
        rounds: JointRounds,
        ratification: Ratification,
        outbox: Outbox,
        admission: Admission,
    ) -> None:
        self._timing = timing
        self._incarnation = incarnation
        self.random_bytes = random_bytes
        self.membership = membership
        self._connections = connections
        self._links = links
        self._removals = removals
        self._ballots = ballots
        self._finals = finals
        self._rounds = rounds
        self._ratification = ratification
        self._outbox = outbox
        self._admission = admission
        self.first_ns: int | None = None
        """When the first newcomer registered; None before that."""

    def register(self, connection: int, message: msg.Register) -> None:
        """Register a newcomer, or refuse it."""
        if self.first_ns is None:
            self.first_ns = self._outbox.now_ns
        flaw = registration_flaw(message)
        if not flaw and not self._make_room(connection):
            flaw = f"the run has {PEERS_MAX} peers, the maximum"
        if flaw:
            self._connections.refuse(connection, flaw)
            return
        if self._admission.refuses(connection, message):
            return
        self._admission.spend(connection)
        caller = self._connections.callers[connection]
        self._remove_earlier(caller.key)
        self.membership.newest_peer = newest = PeerId(self.membership.newest_peer + 1)
        now_ns = self._outbox.now_ns
        host, hosts = dialled_at(message.host, message.hosts, caller.host)
        peer = RegisteredPeer(
            id=newest,
            group=message.group,
            member=Member(
                newest,
                host,
                message.port,
                message.machine,
                message.name,
                caller.key,
                hosts,
            ),
            declared=message.host,
            seen=caller.host,
            min_peers=message.min_peers,
            masters=message.masters,
            prefetching=message.prefetches,
            heard_ns=now_ns,
            pending_ns=now_ns,
            registered_ns=now_ns,
        )
        self.membership.peers[peer.id] = peer
        self._connections.bind(connection, peer)
        us = self._incarnation
        certificate = us.certify(peer.member)
        self._outbox.send(
            peer,
            msg.Registered(peer.id, us.term, us.run, us.incumbent, us.standbys, certificate),
        )
        self._links.tell_plan(peer)
        self._outbox.announce("registered", peer, f"from {host}:{message.port}")
        self._links.test_addresses(peer)
        self._rounds.admit_into_empty_run()

    def _remove_earlier(self, key: bytes) -> None:
        """Remove the peer with this key, because its process has begun anew: a key has one peer."""
        for peer in [one for one in self.membership.peers.values() if one.member.key == key]:
            self._removals.remove(peer, RemovalCause.CONTROL_LOST, "its process registered anew")

    def _make_room(self, connection: int) -> bool:
        """Remove a newcomer if too many are pending; return whether one more may register."""
        crowded = self.membership.crowded_out(self._connections.callers[connection].host)
        if crowded is not None:
            why = f"{PENDING_MAX} newcomers are pending, and its address has the most of them"
            self._removals.remove(crowded, RemovalCause.CROWDED_OUT, why)
        return len(self.membership.peers) < PEERS_MAX

    def resume(self, connection: int, message: msg.Resume) -> None:
        """Bind a new connection to a peer that lost its old one, and send what the peer missed.

        Raises:
            RemoteProtocolError: the peer follows another master, or names an invalid host.
        """
        peer = self.membership.peers.get(message.peer)
        key = self._connections.callers[connection].key
        if peer is None or peer.absent or peer.member.key != key:
            removal = self._removals.recent.get(message.peer)
            if removal is None:
                self._connections.refuse(connection, "this master does not know this peer")
            else:
                told = removal.told(self._outbox.now_ns)
                self._connections.part_with(connection, told, removal.reason)
            return
        if not self._finals.are_acknowledged_by(peer.id):
            self._connections.refuse(connection, "the peer has too many unacknowledged results")
            return
        if not all(map(is_host, message.hosts)):
            raise RemoteProtocolError(reason="an advertised host is invalid or too long")
        if message.incumbent != self._incarnation.incumbent:
            raise RemoteProtocolError(reason="the peer follows another master in this term")
        self._connections.bind(connection, peer)
        peer.control_lost_ns = None
        peer.heard_ns = self._outbox.now_ns
        peer.has_roster(message.roster_version)
        self.welcome_back(peer, message.roster_version)
        self._note_address(peer, connection, message.hosts)
        if not peer.admitted:
            self._rounds.admit_into_empty_run()

    def _note_address(self, peer: RegisteredPeer, connection: int, hosts: tuple[str, ...]) -> None:
        """Record where to dial a peer that has resumed, perhaps from another address."""
        peer.seen = self._connections.callers[connection].host
        host, more = dialled_at(peer.declared, hosts, peer.seen)
        if (host, more) == (peer.member.host, peer.member.hosts):
            return
        self.membership.move(peer, replace(peer.member, host=host, hosts=more))
        self._links.moved(peer)
        self._outbox.announce("moved", peer, f"to {host}:{peer.member.port}")

    def beat(self) -> None:
        """Send, at a heartbeat, new addresses of peers to the members, and new plans of links."""
        if self.membership.publish_moves():
            self._finals.tell_rosters(self.membership.members())
        self._links.beat()

    def welcome_back(self, peer: RegisteredPeer, roster_version: int) -> None:
        """Send a peer what it has missed; ``roster_version`` is that of its newest roster."""
        us = self._incarnation
        certificate = us.certify(peer.member)
        resumed = msg.Resumed(us.term, us.incumbent, us.standbys, certificate)
        self._ratification.tell_resumed(peer, resumed)
        self._links.tell_plan(peer)
        if not peer.admitted:
            return
        if roster_version == 0:  # it was admitted, but Admitted was lost
            admission = self._rounds.admission(peer)
            if peer.left_out and peer.admission is not None:
                admission = peer.admission  # its calls take all that it has missed since
            self._ratification.tell_admitted(peer, admission)
            roster_version = admission.roster.version
        for roster in self.membership.rosters_after(peer.group, roster_version):
            self._outbox.send(peer, msg.RosterChanged(roster))
        for owed in (*self._ballots.owed_to(peer.id), *self._finals.owed_to(peer.id)):
            self._ratification.tell([peer], owed)

    def return_late(self, connection: int, header: msg.Return, *, had_master: bool) -> None:
        """Resume, register or refuse a peer that returns to the run of this master.

        Args:
            connection: the peer's connection.
            header: the peer's first message.
            had_master: whether the run had a master before this one.

        Raises:
            RemoteProtocolError: the peer follows another master.
        """
        us = self._incarnation
        if header.term > us.term:
            raise RemoteProtocolError(reason="the peer follows a later master")
        known = self.membership.peers.get(header.peer)
        follows = (header.term, header.incumbent) == (us.term, us.incumbent)
        if known is not None:
            if known.admitted and not self._ratification.is_sole and not follows:
                # It may have followed another master since its report, which is void for that.
                raise RemoteProtocolError(reason="the peer does not follow this master")
            hosts = header.registration.hosts
            resume = msg.Resume(header.peer, header.roster_version, us.incumbent, hosts)
            self.resume(connection, resume)
            return
        # An earlier master may have given out the id, unknown to every returning member. Each
        # master jumped ahead at random, and this one not always the furthest.
        may_have_id = had_master and header.peer <= self.membership.newest_peer + ID_JUMP_MAX
        if header.peer in self._removals.recent or header.roster_version or not may_have_id:
            self._removals.turn_away(connection, header.peer, header.registration.group)
        elif not self._make_room(connection):
            self._connections.refuse(connection, f"the run has {PEERS_MAX} peers, the maximum")
        else:
            self._readmit(connection, header)

    def _readmit(self, connection: int, header: msg.Return) -> None:
        """Register a newcomer that an earlier master registered, and that no report has named."""
        caller = self._connections.callers[connection]
        self._remove_earlier(caller.key)
        peer = revive(header, caller, connection, None, self._outbox.now_ns)
        if self.membership.readmit(peer):
            self._finals.tell_rosters(self.membership.members())
        self._connections.bind(connection, peer)
        self.welcome_back(peer, 0)
        self._links.comes(peer)
        self._links.test_addresses(peer)
        self._rounds.admit_into_empty_run()

    def restore(self, recovered: Recovered) -> None:
        """Register the peers of a recovered run as the earlier master had them."""
        assert not self._connections.peers, "a peer is registered already"
        # After two restarts in a row, no peer may report which ones the first master registered.
        jump = TERM_GAP + int.from_bytes(self.random_bytes(ID_JUMP_BYTES))
        peers = revive_all(recovered, self._outbox.now_ns)
        self.membership.restore(
            self._incarnation.term,
            recovered.version,
            recovered.groups,
            peers,
            updates=recovered.counts[RoundKind.UPDATE_TOPOLOGY],
            shared=not self._ratification.is_sole,
        )
        # The rosters so far do not say that newcomers who will return have left.
        self.membership.newest_peer = PeerId(recovered.last_peer + jump)
        for peer in peers:
            if peer.connection is not None:
                self._connections.bind(peer.connection, peer)
        self._links.begin_anew()
        for report in recovered.returned:
            if report.connection is not None:  # its address may have changed with the master away
                hosts = report.header.registration.hosts
                self._note_address(self.membership.peers[report.peer], report.connection, hosts)
        for peer in peers:
            if peer.connection is not None:
                self._links.test_addresses(peer)

    def report_admissions(self) -> None:
        """Report to newcomers, at a tick, what they wait for, after pauses that double."""
        pending = [peer for peer in self.membership.pending() if peer.connection is not None]
        size = self.membership.size + len(pending)
        for peer in pending:
            waited_s = (self._outbox.now_ns - peer.registered_ns) // NS_PER_S
            if waited_s < max(self._timing.waiting_report_s, 2 * peer.waits_told_s):
                continue
            peer.waits_told_s = waited_s
            whom = admission_waits_for(peer, size)
            self._outbox.send(peer, msg.AdmissionWaits(waited_s, whom))
