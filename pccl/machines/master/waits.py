"""Which rounds and operations members wait for, for which peers, and reports of long waits."""

from __future__ import annotations

from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.connections import Outbox
from pccl.machines.master.lockstep import (
    NO_CALL,
    AskBlocked,
    Finding,
    LockstepWatch,
    LongWait,
    Stuck,
    Wait,
)
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.rounds import JointRounds
from pccl.protocol import messages as msg
from pccl.protocol.limits import WAITS_NAMED_MAX, Timing
from pccl.protocol.types import NS_PER_S, OperationId, PeerId, RoundId, RoundKind


class Waits:
    """The rounds and operations that are requested but not decided."""

    def __init__(
        self,
        timing: Timing,
        membership: Membership,
        rounds: JointRounds,
        ballots: OpenBallots,
        outbox: Outbox,
    ) -> None:
        self._timing = timing
        self._membership = membership
        self._rounds = rounds
        self._ballots = ballots
        self._outbox = outbox
        self.lockstep = LockstepWatch(timing)

    def begin_anew(self) -> None:
        """Forget how long calls have waited, because this master continues another run."""
        self.lockstep = LockstepWatch(self._timing)

    def all(self) -> list[Wait]:
        """Return every round and operation that is requested but not decided."""
        waits: list[Wait] = []
        members = [peer.id for peer in self._membership.members()]
        for kind, requested in self._rounds.requested.items():
            if requested:
                missing = tuple(peer for peer in members if peer not in requested)
                if self._rounds.goes_on_by_itself(kind):
                    missing = ()
                subject = self._rounds.present(kind)
                waits.append(Wait(subject, kind.call_name, tuple(requested), missing))
        return [*waits, *(ballot.wait() for ballot in self._ballots.open.values())]

    def awaited(self) -> set[PeerId]:
        """Return the members whose calls or results other members or newcomers wait for."""
        awaited: set[PeerId] = set()
        members = self._membership.members()
        updating = self._rounds.requested[RoundKind.UPDATE_TOPOLOGY]
        for requested in self._rounds.requested.values():
            if requested:
                awaited.update(peer.id for peer in members if peer.id not in requested)
        if self._membership.admissible():  # these newcomers wait for update_topology
            awaited.update(peer.id for peer in members if peer.id not in updating)
        awaited.update(peer.id for peer in members if peer.left_out)
        for ballot in self._ballots.open.values():
            if len(awaited) == len(members):
                break  # all members are awaited
            if ballot.has_company:
                still_ns = self._outbox.now_ns - self._timing.ns(self._timing.progress_s) // 4
                awaited.update(ballot.awaited(still_ns))
        return awaited

    def note_awaited(self) -> None:
        """Record, at a tick, since when other peers wait for each peer."""
        awaited = self.awaited()
        for peer in self._membership.peers.values():
            if peer.id not in awaited:
                peer.waited_for_ns = None
            elif peer.waited_for_ns is None:
                peer.waited_for_ns = self._outbox.now_ns

    def answered(self, peer: RegisteredPeer, reply: msg.BlockedReply) -> None:
        """Record whether all callers of a member wait; without a query, it makes calls again."""
        peer.blocked = reply.blocked
        if not reply.query:
            peer.left_out = False
        now_ns = self._outbox.now_ns
        self.lockstep.answered(peer.id, reply.query, now_ns, blocked=reply.blocked)

    def look(self) -> None:
        """Report, at a tick, long waits to the members, and end calls that cannot complete."""
        blocked = [peer.id for peer in self._membership.members() if peer.blocked]
        for finding in self.lockstep.look(self.all(), blocked, self._outbox.now_ns):
            self._carry_out(finding)

    def _whom(self, wait: Wait, calls: tuple[str, ...]) -> str:
        """Return the missing members: where they are, what they do, and how far behind they are."""
        peers, now_ns = self._membership.peers, self._outbox.now_ns
        foremost = max((peers[peer].pace.step for peer in wait.requested), default=0)
        named: list[str] = []
        for missing, call in zip(wait.missing, calls, strict=True):
            peer = peers[missing]
            says = [f"in {call}"]
            if call == NO_CALL and (last := peer.pace.last_call):
                ago_s = (now_ns - peer.pace.called_ns) / NS_PER_S
                says.append(f"its last was {last}, {ago_s:.1f} s ago")
            if peer.pace.step:
                behind = foremost - peer.pace.step
                says.append(f"at step {peer.pace.step}" + (f", {behind} behind" * (behind > 0)))
            named.append(f"peer {missing} at {peer.member.host} ({'; '.join(says)})")
        return ", ".join(named)

    def _carry_out(self, finding: Finding) -> None:
        peers = self._membership.peers
        match finding:
            case LongWait(wait, waited_s, calls, others):
                subject, whom = wait.subject, self._whom(wait, calls)
                if isinstance(subject, RoundId):
                    told: msg.MasterMessage = msg.RoundWaits(subject, waited_s, whom)
                else:
                    named = [one.subject for one in others[:WAITS_NAMED_MAX]]
                    alike = tuple(one for one in named if isinstance(one, OperationId))
                    told = msg.OperationWaits(subject, waited_s, whom, alike, len(others))
                for peer in wait.requested:
                    self._outbox.send(peers[peer], told)
            case AskBlocked(query, asked):
                for peer in asked:
                    self._outbox.send(peers[peer], msg.BlockedQuery(query))
            case Stuck(subjects, reason):
                for subject in subjects:
                    if isinstance(subject, RoundId):
                        self._rounds.get_stuck(subject.kind, reason)
                    else:
                        ballot = self._ballots.open[subject]
                        self._ballots.decide(ballot, ballot.get_stuck(reason))
