"""The identity of one peer, what it knows of the membership, and its links to other peers.

A roster arrives whenever a peer joins or is lost. When a joint call returns, its caller sees the
roster that the answer names. So all callers see the same roster at the same call.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.reachability import AddressTried, MeetPeer, TryAddress
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake.certificates import NO_CERTIFICATE, Certificate
from pccl.protocol.limits import LINKS_BATCH_MAX, ROSTERS_KEPT_MAX
from pccl.protocol.link_messages import MeasuredLink
from pccl.protocol.types import NOBODY, Member, PeerId, Roster
from pccl.topology.link_measures import ToldMeasures


class Standing(enum.Enum):
    """The state of this process in the run."""

    OUTSIDE = "outside"
    JOINING = "joining"
    """The master has not registered this process yet."""
    PENDING = "pending"
    MEMBER = "member"
    LOST = "lost"
    """No longer part of the run."""
    CLOSED = "closed"


_NEXT = {
    Standing.OUTSIDE: (Standing.JOINING, Standing.LOST),
    Standing.JOINING: (Standing.PENDING, Standing.LOST),
    Standing.PENDING: (Standing.MEMBER, Standing.LOST),
    Standing.MEMBER: (Standing.LOST,),
    Standing.LOST: (Standing.LOST, Standing.CLOSED),
    Standing.CLOSED: (),
}
"""The allowed changes. A ``LOST`` machine is never used again: the peer rejoins with a new one."""


@dataclass(slots=True)
class PeerIdentity:
    """The identity of one peer in its run, and the master that it follows."""

    standing: Standing = Standing.OUTSIDE
    takes_part: bool = False
    """Whether this process is joining, or pending, or a member."""
    peer: PeerId = NOBODY
    """Id of this peer, once registered."""
    group: int = 0
    run: bytes = b""
    term: int = 0
    incumbent: bytes = b""
    """Id of the master that this peer follows."""
    certificate: Certificate = NO_CERTIFICATE
    """What this master has signed for this peer, last of all masters."""
    has_standby: bool = False
    """Whether the run has more than one master."""
    rejoins: bool = False
    """Whether this peer rejoins, or has rejoined, through ``update_topology``."""

    def place_of(self, sequence: int) -> int:
        """Return the place of a decision of the present master among those of all masters.

        A master that has found no decision to keep may count them from the beginning.
        """
        return (self.term << 64) + sequence

    @property
    def is_registered(self) -> bool:
        """Whether a master has given this peer an id."""
        return self.peer != NOBODY

    def become(self, standing: Standing) -> None:
        """Change the state of this process; assert that the change is allowed."""
        assert standing in _NEXT[self.standing], f"{self.standing} -> {standing}"
        self.standing = standing
        self.takes_part = standing in (Standing.JOINING, Standing.PENDING, Standing.MEMBER)


class KnownMembership:
    """The rosters of one peer. State only.

    Args:
        own: this peer.
    """

    def __init__(self, own: PeerIdentity) -> None:
        self._own = own
        self.seen: Roster | None = None
        """The roster that the caller knows."""
        self.newest: Roster | None = None
        """The newest roster that has arrived (callers may not know it yet)."""
        self._rosters: dict[int, Roster] = {}
        """By version: the rosters that the caller may still see, and the newest."""
        self.first_view = 0
        """The view with which this peer was admitted; 0: unknown, by a master before this one."""
        self.ratified = 0
        """Newest roster version that a majority of the members before it is known to have."""
        self._reported: dict[int, tuple[Roster, bytes]] = {}
        """By version: the ratified roster and all newer ones, each with the id of its master."""
        self._unclaimed: dict[int, int] = {}
        """Detached calls with an unread outcome -> the roster version to see with it."""

    @property
    def version(self) -> int:
        """Version of the newest roster; 0 before the first."""
        newest = self.newest
        return newest.version if newest is not None else 0

    def is_open(self, view: int) -> bool:
        """Whether ``view`` of the own group is open, as far as this peer knows."""
        newest = self.newest
        return newest is not None and view in newest.open_views

    def roster_reports(self) -> list[msg.KnownRoster]:
        """Return the newest kept rosters for another master, the oldest of them first."""
        known = {version: (roster, b"") for version, roster in self._rosters.items()}
        known.update(self._reported)
        newest = sorted(known.items())[-ROSTERS_KEPT_MAX:]
        return [msg.KnownRoster(roster, by) for _, (roster, by) in newest]

    @property
    def is_alone(self) -> bool:
        """Whether the caller knows of no other member in the run."""
        return self.seen is not None and self.seen.global_world_size < 2

    def learn(self, roster: Roster) -> bool:
        """Record a roster from the master; return False if this peer has it, or a newer one."""
        if self._own.peer not in roster.ring or roster.view not in roster.open_views:
            raise errors.RemoteProtocolError(
                func="control", reason="the master sent an invalid roster, or one without this peer"
            )
        if not roster.algorithms.is_sound_for(len(roster.members)):
            raise errors.RemoteProtocolError(
                func="control", reason="the master sent an invalid algorithm table"
            )
        newest = self.newest
        if newest is not None and roster.version <= newest.version:
            return False
        self._rosters[roster.version] = self.newest = roster
        self._reported[roster.version] = (roster, self._own.incumbent)
        return True

    def ratify(self, version: int) -> None:
        """Record that a majority has roster ``version``, so that older ones need no report."""
        if version > self.ratified:
            self.ratified = version
            floor = max((known for known in self._reported if known <= version), default=0)
            self._reported = {v: known for v, known in self._reported.items() if v >= floor}

    def see(self, version: int) -> None:
        """Let the caller see the roster ``version``, or the oldest known one that is newer."""
        if self.seen is not None and version <= self.seen.version:
            return
        for known in [v for v in self._rosters if v < version]:
            if len(self._rosters) > 1:
                del self._rosters[known]
        self.seen = next(iter(self._rosters.values()))

    def follow(self, version: int) -> None:
        """Let the caller see ``version`` if it is another view of exactly the same members."""
        told = next((roster for v, roster in self._rosters.items() if v >= version), None)
        if self.seen is None or told is None:
            return
        if told.view != self.seen.view and told.ring == self.seen.ring:
            self.see(version)

    def show(self, call: int, version: int, *, detached: bool) -> None:
        """Let the caller see a roster now, or once it claims the outcome of a ``detached`` call."""
        if detached:
            self._unclaimed[call] = version
        else:
            self.see(version)

    def claim(self, call: int) -> None:
        """Let the caller see the roster of a detached call whose outcome it reads."""
        version = self._unclaimed.pop(call, None)
        if version is not None:
            self.see(version)

    def forget(self, call: int) -> None:
        """Drop an outcome that no caller will read; those decided after it show its roster."""
        self._unclaimed.pop(call, None)

    @property
    def has_unclaimed(self) -> bool:
        """Whether a detached call has an outcome that no caller has read."""
        return bool(self._unclaimed)

    def leave(self) -> None:
        """Drop the unread outcomes, because this peer leaves the run."""
        self._unclaimed.clear()


class OwnLinks:
    """The links that one peer keeps: which are up, and what was measured on them.

    Args:
        out: for effects.
        own: this peer.
        membership: the members of the own group.
    """

    def __init__(self, out: PeerOutbox, own: PeerIdentity, membership: KnownMembership) -> None:
        self._out, self._own, self._membership = out, own, membership
        self._elders: dict[PeerId, Member] = {}
        """Older peers of the own group that this peer dials."""
        self._newcomers: tuple[Member, ...] = ()
        """Newcomers that this peer dials, because they cannot dial it."""
        self._wanted: tuple[Member, ...] = ()
        self._awaits_plan = False
        """Whether the master is about to resend all plans; until then the links do not change."""
        self._links: dict[PeerId, ev.LinkChanged] = {}
        """Peer -> how its link is."""
        self._measures = ToldMeasures()

    def plan(
        self,
        message: msg.LinkPlan | msg.DialNewcomers | msg.Meet | msg.ProbeAddress | msg.Undialable,
    ) -> None:
        """Follow the master's dial plan, test an address, or report this peer as undialable."""
        match message:
            case msg.LinkPlan(elders, gone):
                self._awaits_plan = False
                self._elders.update({member.peer: member for member in elders})
                self._forget_elders(gone)
                self.want()
            case msg.DialNewcomers(newcomers):
                self._newcomers = newcomers
                self.want()
            case msg.Meet(member, relay):
                self._out.add(MeetPeer(member, relay))
            case msg.ProbeAddress(member, seen):
                self._out.add(TryAddress(member, (member.host,), seen))
            case msg.Undialable():
                self._out.add(ev.ReportUndialable(words.undialable(message.reason)))

    def members_changed(self, before: Roster | None, now: Roster) -> None:
        """Adapt the links to a newer roster: former members need no link."""
        if before is not None:
            self._forget_elders(set(before.ring).difference(now.ring))
        self.want()

    def _forget_elders(self, gone: Iterable[PeerId]) -> None:
        for peer in gone:
            self._elders.pop(peer, None)

    def forget_plans(self) -> None:
        """Forget the former connection's plan; the master resends it, with the elders last."""
        self._elders.clear()
        self._newcomers = ()
        self._awaits_plan = True

    def want(self) -> None:
        """Keep links to the members and to the peers of the plan; request only a changed set."""
        if self._awaits_plan:
            return
        newest = self._membership.newest
        wanted = {member.peer: member for member in (*self._elders.values(), *self._newcomers)}
        wanted.update({member.peer: member for member in (newest.members if newest else ())})
        wanted.pop(self._own.peer, None)
        peers = tuple(wanted[peer] for peer in sorted(wanted))
        if peers != self._wanted:
            self._wanted = peers
            self._links = {peer: link for peer, link in self._links.items() if peer in wanted}
            self._measures.keep({*wanted, self._own.peer})
            self._out.add(ev.SetLinks(peers))

    def changed(self, link: ev.LinkChanged) -> None:
        """Record that a link is up or down; report a change to the master."""
        registered = self._own.standing in (Standing.PENDING, Standing.MEMBER)
        if not registered or self._links.get(link.peer) == link:
            return
        if link.reason is None or any(member.peer == link.peer for member in self._wanted):
            self._links[link.peer] = link
        else:
            self._links.pop(link.peer, None)  # a newcomer that never became a member
        self._report(link)

    def measured(self, event: ev.LinkMeasurements | AddressTried) -> None:
        """Report new measurements of links, or the result of an address test, to the master."""
        if self._own.standing not in (Standing.PENDING, Standing.MEMBER):
            return
        if not isinstance(event, AddressTried):
            self._tell_measured(self._measures.news(event.links))
        elif self._own.standing is Standing.MEMBER:  # the master asks only members
            self._out.send(msg.AddressProbed(event.peer, event.reason))

    def tell_newest(self) -> None:
        """Report all measurements exactly, because the master may plan in the next round."""
        self._tell_measured(self._measures.newest())

    def repeat(self) -> None:
        """Report all links and measurements again, to a master with a new connection."""
        self._tell_measured(tuple(self._measures.all()))
        for link in self._links.values():
            self._report(link)

    def _report(self, link: ev.LinkChanged) -> None:
        why = link.reason
        self._out.send(msg.LinkReport(link.peer, why is None, why or "", link.relay, link.path))

    def _tell_measured(self, links: tuple[MeasuredLink, ...]) -> None:
        for start in range(0, len(links), LINKS_BATCH_MAX):
            self._out.send(msg.LinksMeasured(links[start : start + LINKS_BATCH_MAX]))

    def leave(self) -> None:
        """Drop all links, because this peer leaves the run."""
        self._links.clear()
        self._measures.keep(())
        self._wanted = ()
        self._out.add(ev.SetLinks(()))
