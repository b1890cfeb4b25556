"""Who one peer is to its run, what it knows of the membership, and its links to other peers.

Rosters arrive whenever somebody joins or is lost; the caller sees one when a joint call
of his returns, and it is the one that the answer names, so that all callers see the same at the
same call.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.reachability import AddressTried, TryAddress
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import LINKS_BATCH_MAX, ROSTERS_KEPT_MAX
from pccl.protocol.types import NOBODY, MeasuredLink, Member, PeerId, Roster
from pccl.topology.link_measures import ToldMeasures


class Standing(enum.Enum):
    """What this process is to the run."""

    OUTSIDE = "outside"
    JOINING = "joining"
    """Not yet registered."""
    PENDING = "pending"
    MEMBER = "member"
    LOST = "lost"
    """No longer a member."""
    CLOSED = "closed"


_NEXT = {
    Standing.OUTSIDE: (Standing.JOINING, Standing.LOST),
    Standing.JOINING: (Standing.PENDING, Standing.LOST),
    Standing.PENDING: (Standing.MEMBER, Standing.LOST),
    Standing.MEMBER: (Standing.LOST,),
    Standing.LOST: (Standing.LOST, Standing.CLOSED),
    Standing.CLOSED: (),
}
"""Nobody comes back from ``LOST``: another machine joins again."""


@dataclass(slots=True)
class PeerIdentity:
    """Who one peer is to its run, and which master it follows."""

    standing: Standing = Standing.OUTSIDE
    peer: PeerId = NOBODY
    """Own id, once registered."""
    group: int = 0
    run: bytes = b""
    term: int = 0
    token: bytes = b""
    """Proves that this peer is the one that registered; empty before that."""
    incumbent: bytes = b""
    """Id of the master that is followed."""
    has_standby: bool = False
    """Whether the run has more than one master."""
    rejoins: bool = False
    """Whether an ``update_topology`` has brought this peer back, or does so now."""

    def become(self, standing: Standing) -> None:
        """Change what this process is to the run."""
        assert standing in _NEXT[self.standing], f"{self.standing} -> {standing}"
        self.standing = standing

    @property
    def takes_part(self) -> bool:
        """Whether this peer joins, or has joined, and is not lost."""
        return self.standing in (Standing.JOINING, Standing.PENDING, Standing.MEMBER)


class KnownMembership:
    """The rosters of one peer. State only.

    Args:
        own: this peer.
    """

    def __init__(self, own: PeerIdentity) -> None:
        self._own = own
        self.seen: Roster | None = None
        """Membership as the caller may know it."""
        self._rosters: dict[int, Roster] = {}
        """By version: those that the caller may still be shown, and the newest."""
        self.ratified = 0
        """The newest roster that a majority of the members before it is known to have."""
        self._reported: dict[int, tuple[Roster, bytes]] = {}
        """By version: that one and all newer ones, and the master that told it."""
        self._unclaimed: dict[int, int] = {}
        """Detached calls with an outcome -> the roster version to see with it."""
        self._forgotten = 0
        """The newest of those that no caller will look at."""

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return next(reversed(self._rosters.values()), None)

    @property
    def version(self) -> int:
        """Of the newest roster; 0 before the first."""
        newest = self.newest
        return newest.version if newest is not None else 0

    def is_open(self, view: int) -> bool:
        """Whether a view of the own group is open, as far as this peer knows."""
        newest = self.newest
        return newest is not None and view in newest.open_views

    def roster_reports(self) -> list[msg.KnownRoster]:
        """All that another master has to know: the ratified one, newer ones, what callers see."""
        known = {version: (roster, b"") for version, roster in self._rosters.items()}
        known.update(self._reported)
        newest = sorted(known.items())[-ROSTERS_KEPT_MAX:]
        return [msg.KnownRoster(roster, by) for _, (roster, by) in newest]

    @property
    def is_alone(self) -> bool:
        """Whether the caller knows of nobody else in the run."""
        return self.seen is not None and self.seen.global_world_size < 2

    def learn(self, roster: Roster) -> bool:
        """A roster has arrived from the master; return False if it is not news."""
        if self._own.peer not in roster.ring or roster.view not in roster.open_views:
            raise errors.RemoteProtocolError(func="control", reason="a roster of others")
        if not roster.algorithms.is_sound:
            raise errors.RemoteProtocolError(func="control", reason="a table that no master makes")
        newest = self.newest
        if newest is not None and roster.version <= newest.version:
            return False
        self._rosters[roster.version] = roster
        self._reported[roster.version] = (roster, self._own.incumbent)
        return True

    def ratify(self, version: int) -> None:
        """A majority had this roster, and the older ones do not matter any more."""
        if version > self.ratified:
            self.ratified = version
            floor = max((known for known in self._reported if known <= version), default=0)
            self._reported = {v: known for v, known in self._reported.items() if v >= floor}

    def see(self, version: int) -> None:
        """Let the caller see the roster ``version`` (or the oldest newer one that is known)."""
        version = max(version, self._forgotten)
        if self.seen is not None and version <= self.seen.version:
            return
        for known in [v for v in self._rosters if v < version]:
            if len(self._rosters) > 1:
                del self._rosters[known]
        self.seen = next(iter(self._rosters.values()))

    def follow(self, version: int) -> None:
        """Let the caller go on in another view of the same members, if that roster is of one.

        Of losses he hears when a collective raises.
        """
        told = next((roster for v, roster in self._rosters.items() if v >= version), None)
        if self.seen is None or told is None:
            return
        if told.view != self.seen.view and told.ring == self.seen.ring:
            self.see(version)

    def show(self, call: int, version: int, *, detached: bool) -> None:
        """Let the caller see a roster: now, or when he claims the outcome of his call."""
        if detached:
            self._unclaimed[call] = version
        else:
            self.see(version)

    def claim(self, call: int) -> None:
        """The caller looks at the outcome of a detached call."""
        version = self._unclaimed.pop(call, None)
        if version is not None:
            self.see(version)

    def forget(self, call: int) -> None:
        """Nobody will look at that outcome: what came with it is seen with the next call's."""
        version = self._unclaimed.pop(call, 0)
        self._forgotten = max(self._forgotten, version)

    @property
    def has_unclaimed(self) -> bool:
        """Whether there are outcomes that no caller has looked at."""
        return bool(self._unclaimed)

    def leave(self) -> None:
        """This peer is no longer a part of the run: nobody looks at these outcomes any more."""
        self._unclaimed.clear()


class OwnLinks:
    """Which links one peer keeps, which of them are up, and what they can do.

    Args:
        out: for effects.
        own: this peer.
        membership: the members of the own group.
    """

    def __init__(self, out: PeerOutbox, own: PeerIdentity, membership: KnownMembership) -> None:
        self._out, self._own, self._membership = out, own, membership
        self._elders: dict[PeerId, Member] = {}
        """Older peers of the own group that are to be dialled."""
        self._newcomers: tuple[Member, ...] = ()
        """Those that cannot dial this peer."""
        self._wanted: tuple[Member, ...] = ()
        self._awaits_plan = False
        """The master is about to send all plans again: what is linked stays until it has."""
        self._links: dict[PeerId, str | None] = {}
        """Peer -> None if the link is up, otherwise why not."""
        self._measures = ToldMeasures()

    def plan(
        self, message: msg.LinkPlan | msg.DialNewcomers | msg.ProbeAddress | msg.Undialable
    ) -> None:
        """The master says whom to dial, or who can dial this peer."""
        match message:
            case msg.LinkPlan(elders, gone):
                self._awaits_plan = False
                self._elders.update({member.peer: member for member in elders})
                self._forget_elders(gone)
                self.want()
            case msg.DialNewcomers(newcomers):
                self._newcomers = newcomers
                self.want()
            case msg.ProbeAddress(member, seen):
                self._out.add(TryAddress(member, (member.host,), seen))
            case msg.Undialable():
                self._out.add(ev.ReportUndialable(words.undialable(message.reason)))

    def members_changed(self, before: Roster | None, now: Roster) -> None:
        """A newer roster has arrived: former members need no link."""
        if before is not None:
            self._forget_elders(set(before.ring).difference(now.ring))
        self.want()

    def _forget_elders(self, gone: Iterable[PeerId]) -> None:
        for peer in gone:
            self._elders.pop(peer, None)

    def forget_plans(self) -> None:
        """Forget whom to dial besides the members: the master sends it again, elders last."""
        self._elders.clear()
        self._newcomers = ()
        self._awaits_plan = True

    def want(self) -> None:
        """Keep links to the members and to the peers of the plan, if these have changed."""
        if self._awaits_plan:
            return
        newest = self._membership.newest
        wanted = {member.peer: member for member in (*self._elders.values(), *self._newcomers)}
        wanted.update({member.peer: member for member in (newest.members if newest else ())})
        wanted.pop(self._own.peer, None)
        peers = tuple(wanted[peer] for peer in sorted(wanted))
        if peers != self._wanted:
            self._wanted = peers
            self._links = {peer: why for peer, why in self._links.items() if peer in wanted}
            self._measures.keep(wanted)
            self._out.add(ev.SetLinks(peers))

    def changed(self, peer: PeerId, why: str | None) -> None:
        """A link is up (None) or down; the master is told if that is news."""
        registered = self._own.standing in (Standing.PENDING, Standing.MEMBER)
        if not registered or self._links.get(peer, "") == why:
            return
        if why is None or any(member.peer == peer for member in self._wanted):
            self._links[peer] = why
        else:
            self._links.pop(peer, None)  # a newcomer that never became a member
        self._report(peer, why)

    def measured(self, event: ev.LinkMeasurements | AddressTried) -> None:
        """Links were measured, or an address that the master asked about was tried."""
        if self._own.standing not in (Standing.PENDING, Standing.MEMBER):
            return
        if not isinstance(event, AddressTried):
            self._tell_measured(self._measures.news(event.links))
        elif self._own.standing is Standing.MEMBER:  # the master asks only members
            self._out.send(msg.AddressProbed(event.peer, event.reason))

    def repeat(self) -> None:
        """Tell a master everything that has not seen this connection before."""
        self._tell_measured(tuple(self._measures.all()))
        for peer, why in self._links.items():
            self._report(peer, why)

    def _report(self, peer: PeerId, why: str | None) -> None:
        self._out.send(msg.LinkReport(peer, why is None, why or ""))

    def _tell_measured(self, links: tuple[MeasuredLink, ...]) -> None:
        for start in range(0, len(links), LINKS_BATCH_MAX):
            self._out.send(msg.LinksMeasured(links[start : start + LINKS_BATCH_MAX]))

    def leave(self) -> None:
        """This peer is no longer a part of the run, and needs nobody."""
        self._links.clear()
        self._measures.keep(())
        self._wanted = ()
        self._out.add(ev.SetLinks(()))
