"""Who is in the run: registered peers, groups, views, rosters, and who may be admitted.

State only: it sends nothing and decides no operation. Peers have ids in order of registration.
Newcomers are appended to the ring of their group, or put between two peers that they have links to.

* Admission opens a new view of the newcomer's group and leaves the previous one open.
* Losing a member closes every open view of its group that contains it and opens a successor.
* A ring whose neighbours cannot talk gives way to one in another order.
* Every change anywhere makes a new roster version, because callers are told global sizes.
* Which algorithm is the quickest is found when a view is opened, and holds as long as the view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pccl.machines.master.link_states import LinkStates
from pccl.machines.master.succession.vouched import token_digest
from pccl.protocol.guards.source_shares import of_the_largest
from pccl.protocol.limits import PENDING_MAX, ROSTERS_KEPT_MAX, TERM_GAP
from pccl.protocol.types import AlgorithmTable, LinkMeasure, Member, PeerId, Roster
from pccl.topology.cost_model import choose_algorithms
from pccl.topology.link_measures import LinkMeasures
from pccl.topology.ring_order import Pair

_LATE_MAX = 64
"""Newcomers for whom a place between two others is looked for at once; each look goes round."""

_SEATINGS_MAX = 8
"""How often to try without the newcomers whose ``min_peers`` was not met. After that, all newcomers
that need other newcomers for it have to wait."""


@dataclass(slots=True)
class RegisteredPeer:
    """One incarnation that the master knows."""

    id: PeerId
    group: int
    member: Member
    token: bytes
    min_peers: int = 1
    """It wants to be admitted into no smaller run (itself included)."""
    masters: int = 1
    """How many masters it knows the address of."""
    prefetching: bool = False
    """Whether it fetches what its group holds, and does not want to be admitted before."""
    admitted: bool = False
    blocked: bool = False
    """Whether all its callers wait for other members, as far as it has said."""
    connection: int | None = None
    heard_ns: int = 0
    """When it was last heard of."""
    held_until_ns: int = 0
    """Until when the master does not read from it: its silence until then does not count."""
    control_lost_ns: int | None = None
    """When its control connection was lost, if it is."""
    control_damaged: bool = False
    """Whether the last one was given up because bytes had changed on the way."""
    waited_for_ns: int | None = None
    """Since when somebody waits for it, if somebody does."""
    seen_version: int = 0
    """The newest roster that it has acknowledged."""
    sent_place: int = 0
    """Up to where it was sent what was proposed, on the present connection."""
    stored_place: int = 0
    """Up to where it has stored that."""
    pending_ns: int = 0
    """Since when it waits to be linked (a newcomer)."""
    registered_ns: int = 0
    seen: str = ""
    """The host that its connection came from when it registered; empty: it returned."""
    untested: bool = False
    """Whether it is still to be found out if it can be dialled (a newcomer)."""
    waits_told_s: int = 0
    """How long it had waited for its admission when it was told for what, the last time."""


@dataclass(frozen=True, slots=True)
class View:
    """A fixed membership of one group.

    Attributes:
        ring: its members in order.
        term: of the master that opened it.
        algorithms: which one is the quickest in it.
    """

    ring: tuple[PeerId, ...]
    term: int
    algorithms: AlgorithmTable


@dataclass(slots=True)
class _Seating:
    """Where newcomers would get their places, if they were admitted now.

    Attributes:
        rings: by group, with them.
        ready: those that have a place and are connected, in the order in which they got it.
        missing: of the others, which link they lack, and why.
    """

    rings: dict[int, list[PeerId]] = field(default_factory=dict[int, list[PeerId]])
    ready: list[RegisteredPeer] = field(default_factory=list[RegisteredPeer])
    missing: dict[PeerId, tuple[PeerId, str]] = field(
        default_factory=dict[PeerId, tuple[PeerId, str]]
    )

    def place(self, peer: RegisteredPeer, rank: int) -> None:
        """A newcomer could have this rank, and has it if it is connected."""
        if peer.connection is not None:
            self.ready.append(peer)
            self.rings[peer.group].insert(rank, peer.id)


@dataclass(slots=True)
class RecoveredGroup:
    """What is known of one group under the masters before.

    Attributes:
        rosters: by version, all that its members know and may need.
        views: the open ones.
    """

    rosters: dict[int, Roster]
    views: dict[int, View]


def _enough(newcomers: list[RegisteredPeer], members: int) -> list[RegisteredPeer]:
    """The newcomers whose ``min_peers`` could be met if all of these were admitted."""
    count = len(newcomers)
    for peer in sorted(newcomers, key=lambda peer: -peer.min_peers):
        if peer.min_peers <= members + count:
            break
        count -= 1
    return [peer for peer in newcomers if peer.min_peers <= members + count]


@dataclass(slots=True)
class _Group:
    newest_view: int = 0
    """Its number; 0: there was none yet."""
    views_from: int = 0
    """The next view gets a number above this, too."""
    open_views: dict[int, View] = field(default_factory=dict[int, View])
    rosters: dict[int, Roster] = field(default_factory=dict[int, Roster])
    order: list[PeerId] = field(default_factory=list[PeerId])
    """The members in ring order."""
    seniority: list[PeerId] = field(default_factory=list[PeerId])
    """The members in the order in which they were admitted: the first one has rank 0."""

    def arrange(self, order: Iterable[PeerId]) -> None:
        """Put the ring into this order, beginning with the eldest: its state is everybody's."""
        ring = list(order)
        self.seniority = [peer for peer in self.seniority if peer in ring]
        first = ring.index(self.seniority[0]) if ring else 0
        self.order = ring[first:] + ring[:first]


class Membership:
    """The run's peers, groups and views.

    Args:
        term: of the master.
    """

    def __init__(self, term: int) -> None:
        self.peers: dict[PeerId, RegisteredPeer] = {}
        """Everybody who is registered, in order of id."""
        self.version = 0
        self.updates = 0
        """Rounds of ``update_topology`` that are closed, or about to be by the next change."""
        self._term = term
        self._groups: dict[int, _Group] = {}
        self.links = LinkStates()
        self._measures = LinkMeasures()

    # -- peers ---------------------------------------------------------------------------------

    def members(self, group: int | None = None) -> list[RegisteredPeer]:
        """The admitted peers, of one group or of the run, in order of id."""
        return [p for p in self.peers.values() if p.admitted and group in (None, p.group)]

    def pending(self) -> list[RegisteredPeer]:
        """The newcomers, in order of id."""
        return [peer for peer in self.peers.values() if not peer.admitted]

    def tester_of(self, newcomer: RegisteredPeer) -> PeerId | None:
        """The member that tests a newcomer's address: the youngest, if possible far away."""
        members = [peer.id for peer in self.members() if peer.connection is not None]
        far = [peer for peer in members if self.peers[peer].seen not in ("", newcomer.seen)]
        return max(far or members, default=None)

    # -- links ---------------------------------------------------------------------------------

    def report_link(
        self, reporter: PeerId, other: PeerId, why_down: str | None, now_ns: int
    ) -> None:
        """``reporter`` says that its link to ``other`` is up (None) or why it is not."""
        if other in self.peers and other != reporter:
            self.links.report(reporter, other, why_down, now_ns)

    def note_measure(self, reporter: PeerId, other: PeerId, measure: LinkMeasure) -> None:
        """``reporter`` has measured its link to ``other``; only within a group that is of use."""
        there = self.peers.get(other)
        if there is not None and other != reporter and there.group == self.peers[reporter].group:
            self._measures.note(reporter, other, measure)

    def outdated(self) -> set[int]:
        """The groups whose newest view would do otherwise if it were opened now."""
        return {
            group
            for group, state in self._groups.items()
            if state.order
            and state.open_views[state.newest_view].algorithms != self._algorithms(group)
        }

    def link_trouble(self, peer: PeerId, since_ns: int) -> str | None:
        """What a live member reports of its link to ``peer`` that broke at ``since_ns`` or later.

        None if nobody does. A link that was broken before says nothing about the present.
        """
        return self.links.trouble(peer, filter(self.may_accuse, self.peers), since_ns)

    def broken_links(self, group: int, since_ns: int) -> dict[Pair, str]:
        """Pairs of connected members that cannot talk at least since ``since_ns``, and why."""
        ring = [peer for peer in self.order(group) if self.may_accuse(peer)]
        return dict(self.links.broken(ring, since_ns))

    def worse_linked(self, first: PeerId, second: PeerId) -> RegisteredPeer:
        """Of two whose link carries nothing, the one with more broken links to others.

        The first if they are alike: what is known of one link does not say which end is at fault.
        """
        broken = Counter[PeerId]()
        for pair, _ in self.links.broken([p for p in self.peers if self.may_accuse(p)]):
            if pair != Pair((first, second)):
                broken.update(pair)
        return self.peers[second if broken[second] > broken[first] else first]

    def may_accuse(self, reporter: PeerId) -> bool:
        """Whether a broken link that ``reporter`` reports may cost the other side its place.

        Newcomers may not: that they reach nobody says more about them than about the members.
        """
        peer = self.peers[reporter]
        return peer.admitted and peer.connection is not None

    def admissible(self) -> list[RegisteredPeer]:
        """The newcomers with links to their future neighbours, and a ``min_peers`` that is met."""
        members, wanted = len(self.members()), self.pending()
        for _ in range(_SEATINGS_MAX):
            wanted = _enough(wanted, members)
            ready = self._seat(wanted).ready
            too_few = {peer.id for peer in ready if peer.min_peers > members + len(ready)}
            if not too_few:
                return ready
            wanted = [peer for peer in wanted if peer.id not in too_few]
        return self._seat([peer for peer in wanted if peer.min_peers <= members + 1]).ready

    def unlinked(self) -> dict[PeerId, tuple[PeerId, str]]:
        """The newcomers that can't be admitted for want of a link: to whom, and why."""
        if not self.pending():
            return {}
        missing = self._seat(self.pending()).missing
        for peer in self.admissible():
            missing.pop(peer.id, None)
        return missing

    def _seat(self, newcomers: list[RegisteredPeer]) -> _Seating:
        """Who of them fits into the rings, and what the others lack.

        First they stand one behind the other. Whoever cannot, because both sides of a link have
        tried it in vain, gets a place between two others. If no more than half cannot be dialled,
        there is one: two that can be dialled follow each other somewhere in the ring.
        """
        seating = _Seating()
        late: list[RegisteredPeer] = []
        peopled = {group for group, state in self._groups.items() if state.order}
        for peer in newcomers:
            ring = seating.rings.get(peer.group)
            if ring is None:
                ring = seating.rings[peer.group] = self.order(peer.group)
            if peer.untested or (peer.prefetching and peer.group in peopled):
                continue  # where nobody is, nobody has a state to fetch
            ends = dict.fromkeys((ring[-1], ring[0]) if ring else ())
            lacking = [end for end in ends if not self.links.are_linked(peer.id, end)]
            if not lacking:
                seating.place(peer, len(ring))
                continue
            why = self.links.why_down(peer.id, lacking[0]) or "not connected yet"
            seating.missing[peer.id] = lacking[0], why
            if any(self.links.have_given_up(peer.id, end) for end in lacking):
                late.append(peer)
        for peer in late[:_LATE_MAX]:
            ring = seating.rings[peer.group]
            linked = self.links.linked(peer.id, ring)
            for place in range(len(ring) - 1, 0, -1):
                if linked.issuperset(ring[place - 1 : place + 1]):
                    del seating.missing[peer.id]
                    seating.place(peer, place)
                    break
        for peer in late[_LATE_MAX:]:  # their turn comes when those before them have got a place
            del seating.missing[peer.id]
        return seating

    def why_apart(self, newcomer: RegisteredPeer, neighbour: PeerId) -> str:
        """Why a newcomer cannot be linked to a neighbour that it needs, and what to do."""
        other = self.peers[neighbour]
        tries = [
            f"peer {one.id} cannot dial peer {target.id} at "
            f"{target.member.host}:{target.member.port} "
            f"({self.links.why_down(one.id, target.id) or 'no answer yet'})"
            for one, target in ((newcomer, other), (other, newcomer))
        ]
        return (
            f"it could not be linked to peer {neighbour}, and no ring avoids the pair: "
            f"{', and '.join(tries)}; one of the two must be reachable: check what it advertises, "
            "and open that port"
        )

    def crowded_out(self, host: str) -> RegisteredPeer | None:
        """The newcomer to remove if one more comes from ``host``; None: there is room.

        It is the oldest newcomer from the source with the most of them.
        """
        pending = self.pending()
        if len(pending) < PENDING_MAX or len(pending) == len(self.peers):  # all may begin together
            return None
        return self.peers[of_the_largest({peer.id: peer.seen for peer in pending}, host)]

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """This process slept: everybody has so much more time."""
        self.links.shift(gap_ns, now_ns)
        for peer in self.peers.values():
            peer.heard_ns = min(peer.heard_ns + gap_ns, now_ns)
            peer.pending_ns = min(peer.pending_ns + gap_ns, now_ns)
            if peer.control_lost_ns is not None:
                peer.control_lost_ns = min(peer.control_lost_ns + gap_ns, now_ns)
            if peer.waited_for_ns is not None:
                peer.waited_for_ns = min(peer.waited_for_ns + gap_ns, now_ns)

    def sort_peers(self) -> None:
        """Put the peers in order of id: one has come back that was not the last to come."""
        self.peers = dict(sorted(self.peers.items()))

    # -- changes -------------------------------------------------------------------------------

    def admit(
        self, newcomers: list[RegisteredPeer], renew: set[int], busy: set[tuple[int, int]]
    ) -> None:
        """Make them members and open a new view for each group concerned, and those to ``renew``.

        Of the views that admissions left behind, each group keeps the last one open, and those
        that are ``busy``: (group, number) of views with undecided operations.
        """
        rings = self._seat(newcomers).rings
        for peer in newcomers:
            peer.admitted = True
            self._groups.setdefault(peer.group, _Group()).seniority.append(peer.id)
        for group in dict.fromkeys(peer.group for peer in newcomers):
            ring = rings.get(group) or self.order(group)
            late = [p.id for p in newcomers if p.group == group and p.id not in ring]
            self._groups[group].arrange([*ring, *late])
        for group in sorted({*renew, *(peer.group for peer in newcomers)}):
            self._open_view(group)
            open_views = self._groups[group].open_views
            for number in list(open_views)[:-2]:
                if (group, number) not in busy:
                    del open_views[number]
        self._publish()

    def remove(self, peers: Sequence[RegisteredPeer]) -> set[tuple[int, int]]:
        """Forget them; return the views that are closed by that: (group, number)."""
        gone = {peer.id for peer in peers}
        for peer in gone:
            del self.peers[peer]
        self.links.remove(gone)
        self._measures.forget(gone)
        members = [peer for peer in peers if peer.admitted]
        closed: set[tuple[int, int]] = set()
        for group in sorted({peer.group for peer in members}):
            state = self._groups[group]
            state.arrange(peer for peer in state.order if peer not in gone)
            for number, view in list(state.open_views.items()):
                if not gone.isdisjoint(view.ring):
                    closed.add((group, number))
                    del state.open_views[number]
            if state.order:
                self._open_view(group)
        if members:
            self._publish()
        return closed

    def reorder(self, group: int, order: Sequence[PeerId]) -> list[int]:
        """Give a group's ring an order; return the numbers of the views closed by that: all.

        In them members that cannot talk had to, or the wrong algorithms were chosen.
        """
        state = self._groups[group]
        assert sorted(order) == sorted(state.order)
        closed = list(state.open_views)
        state.open_views.clear()
        state.arrange(order)
        self._open_view(group)
        self._publish()
        return closed

    def restore(
        self,
        term: int,
        version: int,
        groups: Mapping[int, RecoveredGroup],
        peers: Iterable[RegisteredPeer],
        *,
        updates: int,
        shared: bool,
    ) -> None:
        """Forget everything but what is known of the membership under the masters before.

        ``version`` is that of the newest roster that anybody knows. What the masters before may
        have given out besides is skipped: see ``TERM_GAP``. Where the run is ``shared`` with other
        masters, no two terms have a version in common.
        """
        self._term, self.updates = term, updates
        self.links, self._measures = LinkStates(), LinkMeasures()
        self.peers = {peer.id: peer for peer in sorted(peers, key=lambda peer: peer.id)}
        self._groups = {}
        for group, known in groups.items():
            newest = known.rosters[max(known.rosters)]
            self._groups[group] = _Group(
                newest.view,
                newest.view + TERM_GAP,
                dict(known.views),
                dict(sorted(known.rosters.items())),
                list(newest.ring),
                [newest.ring[0], *sorted(newest.ring[1:])],
            )
        self.version = version + TERM_GAP
        if shared:
            self.version = max(self.version, self._term << 31)
        self._publish()

    def order(self, group: int) -> list[PeerId]:
        """The members of a group in ring order."""
        state = self._groups.get(group)
        return list(state.order) if state else []

    def _open_view(self, group: int) -> None:
        state = self._groups[group]
        state.newest_view = max(state.newest_view, state.views_from) + 1
        algorithms = self._algorithms(group)
        state.open_views[state.newest_view] = View(tuple(state.order), self._term, algorithms)

    def _algorithms(self, group: int) -> AlgorithmTable:
        """What is the quickest in a group's ring, as far as is known now."""
        ring = self._groups[group].order
        accusers = [peer for peer in ring if self.may_accuse(peer)]
        broken = {pair for pair, _ in self.links.broken(accusers)}
        return choose_algorithms(ring, self._measures.matrix, broken)

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
                view=state.newest_view,
                members=tuple(self.peers[peer].member for peer in state.order),
                open_views=tuple(state.open_views),
                global_world_size=len(members),
                peer_groups=sum(1 for size in sizes.values() if size),
                largest_group_size=max(sizes.values(), default=0),
                term=state.open_views[state.newest_view].term,
                updates=self.updates,
                algorithms=state.open_views[state.newest_view].algorithms,
            )
            while len(state.rosters) > ROSTERS_KEPT_MAX:
                del state.rosters[next(iter(state.rosters))]

    def digests(self) -> dict[PeerId, bytes]:
        """The members, and the digests of their resume tokens."""
        return {peer.id: token_digest(peer.token) for peer in self.members() if peer.token}

    # -- views and rosters ---------------------------------------------------------------------

    def ring(self, group: int, view: int) -> tuple[PeerId, ...] | None:
        """The members of an open view in ring order; None if the view is not open."""
        known = self.view(group, view)
        return known.ring if known else None

    def view(self, group: int, view: int) -> View | None:
        """A view; None if it is not open."""
        state = self._groups.get(group)
        return state.open_views.get(view) if state else None

    def newest_view(self, group: int) -> int:
        """Number of the group's newest view (0: it never had one)."""
        state = self._groups.get(group)
        return state.newest_view if state else 0

    def roster(self, group: int) -> Roster:
        """The group's newest roster."""
        return self._groups[group].rosters[self.version]

    def rosters_after(self, group: int, version: int) -> list[Roster]:
        """The kept rosters newer than ``version``, oldest first."""
        state = self._groups.get(group)
        return [roster for v, roster in state.rosters.items() if v > version] if state else []
