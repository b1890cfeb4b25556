"""Who is in the run: registered peers, groups, views, rosters, and who may be admitted.

State only: it sends nothing and decides no operation. Peers have ids in order of registration,
and the ring of every view is in that order, so newcomers are appended.

* Admission opens a new view of the newcomer's group and leaves the previous one open.
* Losing a member closes every open view of its group that contains it and opens a successor.
* Every change anywhere makes a new roster version, because callers are told global sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pccl.protocol.limits import ROSTERS_KEPT_MAX
from pccl.protocol.types import Member, PeerId, Roster


@dataclass(slots=True)
class RegisteredPeer:
    """One incarnation that the master knows."""

    id: PeerId
    group: int
    member: Member
    token: bytes
    min_peers: int = 1
    """It wants to be admitted into no smaller run (itself included)."""
    admitted: bool = False
    blocked: bool = False
    """Whether all its callers wait for other members, as far as it has said."""
    connection: int | None = None
    heard_ns: int = 0
    """When it was last heard of."""
    control_lost_ns: int | None = None
    """When its control connection was lost, if it is."""
    waited_for_ns: int | None = None
    """Since when somebody waits for it, if somebody does."""
    pending_ns: int = 0
    """Since when it waits to be linked (a newcomer)."""
    registered_ns: int = 0
    waits_told_s: int = 0
    """How long it had waited for its admission when it was told for what, the last time."""


@dataclass(slots=True)
class _Group:
    views: int = 0
    """Number of the newest view."""
    open_views: dict[int, tuple[PeerId, ...]] = field(default_factory=dict[int, tuple[PeerId, ...]])
    rosters: dict[int, Roster] = field(default_factory=dict[int, Roster])


class Membership:
    """The run's peers, groups and views."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, RegisteredPeer] = {}
        """Everybody who is registered, in order of id."""
        self.version = 0
        self._groups: dict[int, _Group] = {}
        self._links: dict[tuple[PeerId, PeerId], str | None] = {}
        """(reporter, other) -> None if the link is up, otherwise why not."""

    # -- peers ---------------------------------------------------------------------------------

    def members(self, group: int | None = None) -> list[RegisteredPeer]:
        """The admitted peers, of one group or of the run, in order of id."""
        return [p for p in self.peers.values() if p.admitted and group in (None, p.group)]

    def pending(self) -> list[RegisteredPeer]:
        """The newcomers, in order of id."""
        return [peer for peer in self.peers.values() if not peer.admitted]

    def elders(self, peer: RegisteredPeer) -> tuple[Member, ...]:
        """The older peers of its group: the ones that ``peer`` dials."""
        return tuple(
            p.member for p in self.peers.values() if p.group == peer.group and p.id < peer.id
        )

    # -- links ---------------------------------------------------------------------------------

    def report_link(self, reporter: PeerId, other: PeerId, down_reason: str | None) -> None:
        """``reporter`` says that its link to ``other`` is up (None) or why it is not."""
        if other in self.peers:
            self._links[reporter, other] = down_reason

    def link_trouble(self, peer: PeerId) -> str | None:
        """What a live member reports of its broken link to ``peer``; None if nobody does."""
        for (reporter, other), reason in self._links.items():
            if other == peer and reason is not None and self.may_accuse(reporter):
                return f"peer {reporter}: {reason}"
        return None

    def may_accuse(self, reporter: PeerId) -> bool:
        """Whether a broken link that ``reporter`` reports may cost the other side its place.

        Newcomers may not: that they reach nobody says more about them than about the members.
        """
        peer = self.peers[reporter]
        return peer.admitted and peer.connection is not None

    def admissible(self) -> list[RegisteredPeer]:
        """The newcomers that are linked to their future neighbours, and enough for each other."""
        wanted = self.pending()
        while True:
            ready, _ = self._linked(wanted)
            size = len(self.members()) + len(ready)
            too_few = {peer.id for peer in ready if peer.min_peers > size}
            if not too_few:
                return ready
            wanted = [peer for peer in wanted if peer.id not in too_few]

    def unlinked(self) -> dict[PeerId, tuple[PeerId, str]]:
        """The newcomers that can't be admitted for want of a link: to whom, and why."""
        _, missing = self._linked(self.pending())
        for peer in self.admissible():
            missing.pop(peer.id, None)
        return missing

    def _linked(
        self, newcomers: list[RegisteredPeer]
    ) -> tuple[list[RegisteredPeer], dict[PeerId, tuple[PeerId, str]]]:
        """Who of them fits into the rings, one behind the other, and what the others lack."""
        rings: dict[int, list[PeerId]] = {}
        ready: list[RegisteredPeer] = []
        unlinked: dict[PeerId, tuple[PeerId, str]] = {}
        for peer in newcomers:
            ring = rings.get(peer.group)
            if ring is None:
                ring = rings[peer.group] = [p.id for p in self.members(peer.group)]
            missing = self._missing_link(ring, peer.id)
            if missing is not None:
                unlinked[peer.id] = missing
            elif peer.connection is not None:
                ready.append(peer)
                ring.append(peer.id)
        return ready, unlinked

    def _missing_link(self, ring: list[PeerId], peer: PeerId) -> tuple[PeerId, str] | None:
        for neighbour in (ring[-1], ring[0]) if ring else ():
            if self._links.get((peer, neighbour), "") is None:
                continue
            if self._links.get((neighbour, peer), "") is None:
                continue
            return neighbour, self._links.get((peer, neighbour)) or "not connected yet"
        return None

    # -- changes -------------------------------------------------------------------------------

    def admit(
        self, newcomers: list[RegisteredPeer], renew: set[int], busy: set[tuple[int, int]]
    ) -> None:
        """Make them members and open a new view for each group concerned, and those to ``renew``.

        Of the views that admissions left behind, each group keeps the last one open, and those
        that are ``busy``: (group, number) of views with undecided operations.
        """
        for peer in newcomers:
            peer.admitted = True
        for group in sorted({*renew, *(peer.group for peer in newcomers)}):
            self._open_view(group)
            open_views = self._groups[group].open_views
            for number in list(open_views)[:-2]:
                if (group, number) not in busy:
                    del open_views[number]
        self._publish()

    def remove(self, peer: RegisteredPeer) -> list[int]:
        """Forget ``peer``; return the numbers of its group's views that are closed by that."""
        del self.peers[peer.id]
        self._links = {pair: why for pair, why in self._links.items() if peer.id not in pair}
        if not peer.admitted:
            return []
        state = self._groups[peer.group]
        closed = [number for number, ring in state.open_views.items() if peer.id in ring]
        for number in closed:
            del state.open_views[number]
        if self.members(peer.group):
            self._open_view(peer.group)
        self._publish()
        return closed

    def _open_view(self, group: int) -> None:
        state = self._groups.setdefault(group, _Group())
        state.views += 1
        state.open_views[state.views] = tuple(peer.id for peer in self.members(group))

    def _publish(self) -> None:
        self.version += 1
        members = self.members()
        sizes = {group: len(self.members(group)) for group in self._groups}
        for group, state in self._groups.items():
            if not sizes[group]:
                state.rosters.clear()  # there is nobody who could resume
                continue
            state.rosters[self.version] = Roster(
                version=self.version,
                group=group,
                view=state.views,
                members=tuple(peer.member for peer in self.members(group)),
                open_views=tuple(state.open_views),
                global_world_size=len(members),
                peer_groups=sum(1 for size in sizes.values() if size),
                largest_group_size=max(sizes.values(), default=0),
            )
            while len(state.rosters) > ROSTERS_KEPT_MAX:
                del state.rosters[next(iter(state.rosters))]

    # -- views and rosters ---------------------------------------------------------------------

    def ring(self, group: int, view: int) -> tuple[PeerId, ...] | None:
        """The members of an open view in ring order; None if the view is not open."""
        state = self._groups.get(group)
        return state.open_views.get(view) if state else None

    def newest_view(self, group: int) -> int:
        """Number of the group's newest view (0: it never had one)."""
        state = self._groups.get(group)
        return state.views if state else 0

    def roster(self, group: int) -> Roster:
        """The group's newest roster."""
        return self._groups[group].rosters[self.version]

    def rosters_after(self, group: int, version: int) -> list[Roster]:
        """The kept rosters newer than ``version``, oldest first."""
        state = self._groups.get(group)
        return [roster for v, roster in state.rosters.items() if v > version] if state else []
