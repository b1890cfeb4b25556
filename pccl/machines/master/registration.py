"""How peers come into a run, and come back to it."""

from __future__ import annotations

from collections.abc import Callable

from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.connections import Connections, Outbox
from pccl.machines.master.credible import registration_flaw
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.peer_links import PeerLinks
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
    RESUME_TOKEN_BYTES,
    TERM_GAP,
    Timing,
)
from pccl.protocol.types import NS_PER_S, Member, PeerId, RemovalCause, RoundKind


class Registration:
    """Gives ids and tokens to newcomers, and knows peers again that come back."""

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
        self.last_peer = PeerId(0)
        """The highest id that was given out."""
        self.first_ns: int | None = None
        """When somebody came for the first time."""

    def register(self, connection: int, message: msg.Register) -> None:
        """Somebody comes for the first time."""
        if self.first_ns is None:
            self.first_ns = self._outbox.now_ns
        flaw = registration_flaw(message)
        if not flaw and not self._make_room(connection):
            flaw = "the run is full"
        if flaw:
            self._connections.refuse(connection, flaw)
            return
        self.last_peer = PeerId(self.last_peer + 1)
        seen, now_ns = self._connections.hosts[connection], self._outbox.now_ns
        host = dialled_at(message.host, seen)
        peer = RegisteredPeer(
            id=self.last_peer,
            group=message.group,
            member=Member(self.last_peer, host, message.port),
            token=self.random_bytes(RESUME_TOKEN_BYTES),
            seen=seen,
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
        known_as = msg.Registered(peer.id, us.term, us.run, peer.token, us.incumbent, us.standbys)
        self._outbox.send(peer, known_as)
        self._links.tell_plan(peer)
        self._outbox.announce("registered", peer, f"from {host}:{message.port}")
        self._links.test_addresses(peer)
        self._rounds.admit_into_empty_run()

    def _make_room(self, connection: int) -> bool:
        """Of too many that wait one has to go; return whether one more newcomer may come."""
        crowded = self.membership.crowded_out(self._connections.hosts[connection])
        if crowded is not None:
            why = f"{PENDING_MAX} newcomers wait, the most from its address; call connect() again"
            self._removals.remove(crowded, RemovalCause.CROWDED_OUT, why)
        return len(self.membership.peers) < PEERS_MAX

    def resume(self, connection: int, message: msg.Resume) -> None:
        """A peer that has lost its connection is back.

        Raises:
            RemoteProtocolError: it follows another master.
        """
        peer = self.membership.peers.get(message.peer)
        if peer is None or peer.token != message.token:
            removal = self._removals.recent.get(message.peer)
            if removal is None:
                self._connections.refuse(connection, "this master does not know you")
            else:
                told = removal.told(self._outbox.now_ns)
                self._connections.part_with(connection, told, removal.reason)
            return
        if not self._finals.are_acknowledged_by(peer.id):
            self._connections.refuse(connection, "it acknowledges nothing")
            return
        if message.incumbent != self._incarnation.incumbent:
            raise RemoteProtocolError(reason="it follows another master in this term")
        self._connections.bind(connection, peer)
        peer.control_lost_ns = None
        peer.heard_ns = self._outbox.now_ns
        peer.seen_version = max(peer.seen_version, message.roster_version)
        self.welcome_back(peer, message.roster_version)
        if not peer.admitted:
            self._rounds.admit_into_empty_run()

    def welcome_back(self, peer: RegisteredPeer, roster_version: int) -> None:
        """Tell a peer what it has missed; ``roster_version`` is the newest roster it knows."""
        us = self._incarnation
        self._ratification.tell_resumed(peer, msg.Resumed(us.term, us.incumbent, us.standbys))
        self._links.tell_plan(peer)
        if not peer.admitted:
            return
        if roster_version == 0:  # it was admitted, but that news was lost
            self._ratification.tell_admitted(peer, self._rounds.admission(peer))
        else:
            for roster in self.membership.rosters_after(peer.group, roster_version):
                self._outbox.send(peer, msg.RosterChanged(roster))
        for owed in (*self._ballots.owed_to(peer.id), *self._finals.owed_to(peer.id)):
            self._ratification.tell(peer, owed)

    def return_late(self, connection: int, header: msg.Return, *, had_master: bool) -> None:
        """A peer returns to the run that goes on already; perhaps with it.

        Args:
            connection: on which it is.
            header: its first word.
            had_master: whether the run had a master before this one.

        Raises:
            RemoteProtocolError: it follows another master.
        """
        us = self._incarnation
        if header.term > us.term:
            raise RemoteProtocolError(reason="it follows a later master")
        known = self.membership.peers.get(header.peer)
        follows = (header.term, header.incumbent) == (us.term, us.incumbent)
        if known is not None:
            if known.admitted and not self._ratification.is_sole and not follows:
                # Who knows whom it has followed since its report? What it had said is void.
                raise RemoteProtocolError(reason="it has not followed this master")
            resume = msg.Resume(header.peer, header.token, header.roster_version, us.incumbent)
            self.resume(connection, resume)
            return
        # A master before may have given out the id, though nobody knew of it. Each has jumped from
        # what it was told, and this one not always the furthest.
        may_have_id = had_master and header.peer <= self.last_peer + ID_JUMP_MAX
        if header.peer in self._removals.recent or header.roster_version or not may_have_id:
            self._removals.turn_away(connection, header.peer, header.registration.group)
        elif not self._make_room(connection):
            self._connections.refuse(connection, "the run is full")
        else:
            self._readmit(connection, header)

    def _readmit(self, connection: int, header: msg.Return) -> None:
        """A newcomer of a master before this one is back, of which nobody has known."""
        host, now_ns = self._connections.hosts[connection], self._outbox.now_ns
        peer = revive(header, host, connection, None, now_ns)
        self.last_peer = max(self.last_peer, peer.id)  # nobody else gets this id
        self.membership.peers[peer.id] = peer
        self.membership.sort_peers()
        self._connections.bind(connection, peer)
        self.welcome_back(peer, 0)
        self._links.comes(peer)
        self._rounds.admit_into_empty_run()

    def restore(self, recovered: Recovered) -> None:
        """The peers of a run that is taken up are registered as they were."""
        assert not self._connections.peers, "somebody is registered in no run"
        # Two restarts may follow each other with nobody to tell of whom the first one registered.
        jump = TERM_GAP + int.from_bytes(self.random_bytes(ID_JUMP_BYTES))
        self.last_peer = PeerId(recovered.last_peer + jump)
        peers = revive_all(recovered, self._outbox.now_ns)
        self.membership.restore(
            self._incarnation.term,
            recovered.version,
            recovered.groups,
            peers,
            updates=recovered.counts[RoundKind.UPDATE_TOPOLOGY],
            shared=not self._ratification.is_sole,
        )
        for peer in peers:
            if peer.connection is not None:
                self._connections.bind(peer.connection, peer)
        self._links.begin_anew()

    def report_admissions(self) -> None:
        """A tick: tell newcomers what they wait for, after pauses that double."""
        pending = [peer for peer in self.membership.pending() if peer.connection is not None]
        size = len(self.membership.members()) + len(pending)
        for peer in pending:
            waited_s = (self._outbox.now_ns - peer.registered_ns) // NS_PER_S
            if waited_s < max(self._timing.waiting_report_s, 2 * peer.waits_told_s):
                continue
            peer.waits_told_s = waited_s
            whom = admission_waits_for(peer, size)
            self._outbox.send(peer, msg.AdmissionWaits(waited_s, whom))
