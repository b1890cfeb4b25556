"""What one peer knows of the run's membership, what its caller may know, and its links.

State only. Rosters arrive whenever somebody joins or is lost; the caller sees one when a joint call
of his returns, and it is the one that the answer names, so that all callers see the same at the
same call.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from pccl.protocol import messages as msg
from pccl.protocol.limits import ROSTERS_KEPT_MAX
from pccl.protocol.types import MeasuredLink, Member, PeerId, Roster
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


class KnownMembership:
    """Rosters and links of one peer."""

    def __init__(self) -> None:
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
        self._elders: dict[PeerId, Member] = {}
        self._newcomers: tuple[Member, ...] = ()
        """Those that cannot dial this peer."""
        self._links: dict[PeerId, str | None] = {}
        """Peer -> None if the link is up, otherwise why not."""
        self._links_wanted: tuple[Member, ...] = ()
        self._measures = ToldMeasures()

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return next(reversed(self._rosters.values()), None)

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

    def learn(self, roster: Roster, incumbent: bytes) -> bool:
        """A roster has arrived from a master; return False if it is not news."""
        newest = self.newest
        if newest is not None and roster.version <= newest.version:
            return False
        if newest is not None:
            self.learn_elders((), set(newest.ring).difference(roster.ring))
        self._rosters[roster.version] = roster
        self._reported[roster.version] = (roster, incumbent)
        return True

    def ratify(self, version: int) -> None:
        """A majority had this roster, and the older ones do not matter any more."""
        if version > self.ratified:
            self.ratified = version
            floor = max((known for known in self._reported if known <= version), default=0)
            self._reported = {v: known for v, known in self._reported.items() if v >= floor}

    def learn_elders(self, came: Iterable[Member], gone: Collection[PeerId]) -> None:
        """Add and remove older peers of the own group."""
        self._elders.update({member.peer: member for member in came})
        for peer in gone:
            self._elders.pop(peer, None)

    def learn_newcomers(self, newcomers: tuple[Member, ...]) -> None:
        """The newcomers that cannot dial this peer have changed."""
        self._newcomers = newcomers

    def forget_plans(self) -> None:
        """Forget the peers to dial besides the members: the master will send them again."""
        self._elders.clear()
        self._newcomers = ()

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

    # -- links ---------------------------------------------------------------------------------

    def want_links(self, own: PeerId) -> tuple[Member, ...] | None:
        """The peers to keep links to, in order of id; None if that has not changed."""
        newest = self.newest
        wanted = {member.peer: member for member in (*self._elders.values(), *self._newcomers)}
        wanted.update({member.peer: member for member in (newest.members if newest else ())})
        wanted.pop(own, None)
        peers = tuple(wanted[peer] for peer in sorted(wanted))
        if peers == self._links_wanted:
            return None
        self._links_wanted = peers
        self._links = {peer: why for peer, why in self._links.items() if peer in wanted}
        self._measures.keep(wanted)
        return peers

    def link_changed(self, peer: PeerId, why: str | None) -> bool:
        """A link is up (None) or down; return False if it was before."""
        if self._links.get(peer, "") == why:
            return False
        if why is None or any(member.peer == peer for member in self._links_wanted):
            self._links[peer] = why
        else:
            self._links.pop(peer, None)  # a newcomer that never became a member
        return True

    def link_reports(self) -> list[msg.LinkReport]:
        """What the master has to know of the own links, all of it."""
        return [msg.LinkReport(peer, why is None, why or "") for peer, why in self._links.items()]

    def measured(self, links: tuple[MeasuredLink, ...]) -> tuple[MeasuredLink, ...]:
        """Links were measured; return what is news of them."""
        return self._measures.news(links)

    def all_measured(self) -> tuple[MeasuredLink, ...]:
        """What the master has to know of the own links, all of it."""
        return tuple(self._measures.all())

    def leave(self) -> None:
        """This peer is no longer a part of the run, needs nobody, and has nothing to be told."""
        self._unclaimed.clear()
        self._links.clear()
        self._measures.keep(())
        self._links_wanted = ()
