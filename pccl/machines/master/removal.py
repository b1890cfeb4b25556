"""Removes peers from the run, and keeps the causes for peers that return."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.key_value.server import StoreServer
from pccl.machines.master.ballots.ballot import Expel
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.connections import REMOVED, Connections, Outbox
from pccl.machines.master.links.peer_links import PeerLinks
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.rounds import JointRounds
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovered import Recovered
from pccl.protocol import messages as msg
from pccl.protocol.limits import DEPARTURES_MAX, REMOVED_KEPT_MAX, Timing
from pccl.protocol.types import NS_PER_MS, PeerId, RemovalCause


@dataclass(frozen=True, slots=True)
class Removal:
    """The removal of one peer from the run."""

    peer: PeerId
    group: int
    cause: RemovalCause
    reason: str
    at_ns: int
    name: str = ""

    def ago_ms(self, now_ns: int) -> int:
        """Return how long ago the peer was removed, in ms."""
        return max(0, now_ns - self.at_ns) // NS_PER_MS

    def told(self, now_ns: int) -> msg.Refused:
        """Return the message that reports the removal to the peer.

        If an earlier master removed it, that may have been before this machine's clock began. Then
        both times are later by the same amount.
        """
        shift_ns = max(0, -self.at_ns)
        at_ms, now_ms = (self.at_ns + shift_ns) // NS_PER_MS, (now_ns + shift_ns) // NS_PER_MS
        return msg.Refused(self.cause, self.reason, at_ms, now_ms)


class Removals:
    """Removes peers from the run, and keeps the latest causes."""

    def __init__(
        self,
        membership: Membership,
        connections: Connections,
        links: PeerLinks,
        ballots: OpenBallots,
        finals: Finals,
        rounds: JointRounds,
        ratification: Ratification,
        outbox: Outbox,
        store: StoreServer,
    ) -> None:
        self._membership = membership
        self._connections = connections
        self._links = links
        self._ballots = ballots
        self._finals = finals
        self._rounds = rounds
        self._ratification = ratification
        self._outbox = outbox
        self._store = store
        self.recent: dict[PeerId, Removal] = {}
        """The latest removals by peer, the newest last."""

    def expel(self, expel: Expel | None) -> None:
        """Remove peers in one step, with all effects on views, rounds and operations."""
        if expel is None:
            return
        gone = expel.peers
        peers = [self._membership.peers[peer] for peer in gone]
        for peer in peers:
            self._dismiss(peer, expel.cause, expel.reason)
        self._links.forget(peers)
        self._membership.remove(peers)
        if any(peer.admitted for peer in peers):
            left = [peer.id for peer in peers if peer.admitted][:DEPARTURES_MAX]
            why = tuple(msg.Departure(peer, expel.cause, expel.reason) for peer in left)
            self._finals.tell_rosters(self._membership.members(), why)
        self._ballots.forget_numbers()
        self._rounds.forget(gone)
        self._finals.forget(gone)
        self._store.forget(gone)
        self._ballots.lose(gone, f"{expel.cause.name.lower()}, {expel.reason}")
        self._rounds.close_complete()
        self._ballots.forget(gone)
        self._rounds.admit_into_empty_run()

    def expel_missing(self, recovered: Recovered) -> None:
        """Remove the members of a recovered run that did not return, or said goodbye since."""
        missing = [peer for peer in recovered.missing if peer in self._membership.peers]
        left = tuple(peer for peer in missing if peer in recovered.left)
        lost = tuple(peer for peer in missing if peer not in recovered.left)
        if left:
            self.expel(Expel(left, RemovalCause.GOODBYE, "it left"))
        if lost:
            reason = "it did not come back to the restarted master"
            self.expel(Expel(lost, RemovalCause.CONTROL_LOST, reason))

    def remove(self, peer: RegisteredPeer, cause: RemovalCause, reason: str) -> None:
        """Remove one peer from the run."""
        self.expel(Expel((peer.id,), cause, reason))

    def _dismiss(self, peer: RegisteredPeer, cause: RemovalCause, reason: str) -> None:
        """Send a peer the cause of its removal unless it left; disconnect it and keep the cause."""
        if cause is RemovalCause.GOODBYE:
            self._ratification.leave(peer.id)
        self._outbox.announce("removed", peer, reason, cause)
        now_ns = self._outbox.now_ns
        removal = Removal(peer.id, peer.group, cause, reason, now_ns, peer.member.name)
        self.recent[peer.id] = removal
        if len(self.recent) > REMOVED_KEPT_MAX:
            del self.recent[next(iter(self.recent))]
        if peer.connection is not None:
            if cause is not RemovalCause.GOODBYE:
                self._outbox.send(peer, removal.told(now_ns))
            self._connections.close(peer.connection, REMOVED)
            peer.connection = None

    def turn_away(self, connection: int, peer: PeerId, group: int) -> None:
        """Refuse a peer that was removed, with the cause if this master still knows it."""
        now_ns = self._outbox.now_ns
        removal = self.recent.get(peer)
        if removal is None:
            cause, reason = RemovalCause.CONTROL_LOST, "the run continued without it"
            removal = Removal(peer, group, cause, reason, now_ns)
        self._connections.part_with(connection, removal.told(now_ns), removal.reason)


def overdue(peer: RegisteredPeer, timing: Timing, now_ns: int) -> Expel | None:
    """Return the removal of a peer that was disconnected or silent for too long, else None."""
    if peer.control_lost_ns is not None:
        if now_ns - peer.control_lost_ns < timing.ns(timing.resume_s):
            return None
        return Expel((peer.id,), RemovalCause.CONTROL_LOST, "it did not reconnect in time")
    silent_since = max(peer.heard_ns, peer.held_until_ns)
    if peer.admitted:
        if peer.waited_for_ns is None:
            return None
        silent_since = max(silent_since, peer.waited_for_ns)
    if now_ns - silent_since < timing.ns(timing.deadline_s):
        return None
    silence_s = (now_ns - peer.heard_ns) / 1e9
    awaited = " while awaited" if peer.admitted else ""
    return Expel((peer.id,), RemovalCause.SILENT, f"silent for {silence_s:.1f} s{awaited}")
