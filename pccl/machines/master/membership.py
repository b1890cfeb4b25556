"""The peers of a run, its groups, views and rosters, and which newcomers may be admitted.

State only: this module sends nothing and decides no operation. Peer ids grow in order of
registration. A newcomer is placed at the end of its group's ring, or between two linked members.

* Admission opens a new view of the newcomer's group and leaves the previous one open.
* Losing a member closes every open view that contains the member, and opens a successor.
* If two neighbours in a ring have no link, the master puts the ring in another order.
* Every change in the run makes a new roster version, because rosters contain global sizes.
* The quickest algorithms are chosen when a view is opened, and do not change while it is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pccl.machines.master.links.link_states import LinkStates
from pccl.protocol.guards.source_shares import of_the_largest
from pccl.protocol.limits import PENDING_MAX, ROSTERS_KEPT_MAX, TERM_GAP
from pccl.protocol.link_messages import LinkPath, MeasuredLink
from pccl.protocol.messages import Admitted
from pccl.protocol.types import NOBODY, AlgorithmTable, Member, PeerId, Roster
from pccl.telemetry.pace import Pace
from pccl.topology.cost_model import AssumedLinks
from pccl.topology.link_measures import LinkMatrix, LinkMeasures
from pccl.topology.planner import plan_view
from pccl.topology.ring_order import Pair

_LATE_MAX = 64
"""The most newcomers for which one ``_seat`` searches the whole ring for a place."""

_SEATINGS_MAX = 8
"""The most attempts at seating newcomers. Each omits newcomers whose ``min_peers`` the attempt
before did not meet. After the last, newcomers that need other newcomers have to wait."""


@dataclass(slots=True)
class RegisteredPeer:
    """One incarnation of a process, as the master has registered it."""

    id: PeerId
    group: int
    member: Member
    min_peers: int = 1
    """The smallest run into which the peer may be admitted, itself included."""
    masters: int = 1
    """How many addresses of masters the peer knows."""
    declared: str = ""
    """The host that the peer declares as its own; empty: the master uses the host that it sees."""
    prefetching: bool = False
    """Whether the peer is still downloading its group's shared state before its admission."""
    admitted: bool = False
    absent: bool = False
    """Whether a recovered run has this member from the rosters of others. It returns too late,
    because it may know outcomes that this master has decided differently."""
    left_out: bool = False
    """Whether an operation or a round left the member out, which has made no call since."""
    blocked: bool = False
    """Whether all callers of the peer wait for other members, as last reported."""
    connection: int | None = None
    heard_ns: int = 0
    """When the peer's last message arrived."""
    held_until_ns: int = 0
    """Until when the master does not read from the peer, and its silence does not count."""
    control_lost_ns: int | None = None
    """When the control connection was lost; None while the peer is connected."""
    control_damaged: bool = False
    """Whether the last control connection was closed because bytes were damaged on the way."""
    waited_for_ns: int | None = None
    """Since when another peer waits for this one; None if no peer does."""
    seen_version: int = 0
    """Version of the newest roster that the peer has acknowledged."""
    admission: Admitted | None = None
    """How this master has admitted the peer; None once the peer is known to have it."""
    sent_place: int = 0
    """Place of the last proposal that was sent to the peer on the present connection."""
    stored_place: int = 0
    """Place of the last proposal that the peer has stored."""
    pending_ns: int = 0
    """Since when a newcomer waits for a link."""
    registered_ns: int = 0
    seen: str = ""
    """The host from which the peer registered; empty if it returned to this master."""
    untested: bool = False
    """Whether a newcomer's address is still being tested."""
    waits_told_s: int = 0
    """How long a newcomer had waited when the master last sent it the reason."""
    pace: Pace = field(default_factory=Pace)
    token: int = 0
    """Number of the token with which the peer registered, or returned to this master."""

    @property
    def versions(self) -> set[bool]:
        """The versions of IP of which the peer has an address; True: IPv6."""
        hosts = (self.member.host, *self.member.hosts, self.seen)
        return {":" in host for host in hosts if host}

    def has_roster(self, version: int) -> None:
        """Note the version of the newest roster that the peer has; 0: it has none yet."""
        self.seen_version = max(self.seen_version, version)
        if version:
            self.admission = None


@dataclass(frozen=True, slots=True)
class View:
    """A fixed membership of one group.

    Attributes:
        ring: its members in order.
        term: the term of the master that opened it.
        algorithms: the quickest algorithm for each range of tensor sizes.
    """

    ring: tuple[PeerId, ...]
    term: int
    algorithms: AlgorithmTable


@dataclass(slots=True)
class _Seating:
    """The places that newcomers would get if they were admitted now.

    Attributes:
        rings: by group: the ring with the newcomers in it.
        ready: the connected newcomers that have a place, in the order in which they got it.
        missing: newcomer -> the peer to which it lacks a link, and why.
    """

    rings: dict[int, list[PeerId]] = field(default_factory=dict[int, list[PeerId]])
    ready: list[RegisteredPeer] = field(default_factory=list[RegisteredPeer])
    missing: dict[PeerId, tuple[PeerId, str]] = field(
        default_factory=dict[PeerId, tuple[PeerId, str]]
    )

    def place(self, peer: RegisteredPeer, rank: int) -> None:
        """Give a newcomer this rank, if it is connected."""
        if peer.connection is not None:
            self.ready.append(peer)
            self.rings[peer.group].insert(rank, peer.id)


@dataclass(slots=True)
class RecoveredGroup:
    """One group of a recovered run, as returning peers report it.

    Attributes:
        rosters: by version: all rosters that its members know and may need.
        views: by number: its open views.
    """

    rosters: dict[int, Roster]
    views: dict[int, View]


def _enough(newcomers: list[RegisteredPeer], members: int) -> list[RegisteredPeer]:
    """Return the largest set of newcomers whose ``min_peers`` is met if all are admitted."""
    count = len(newcomers)
    for peer in sorted(newcomers, key=lambda peer: -peer.min_peers):
        if peer.min_peers <= members + count:
            break
        count -= 1
    return [peer for peer in newcomers if peer.min_peers <= members + count]


@dataclass(slots=True)
class _Group:
    newest_view: int = 0
    """Number of the newest view; 0 if there was none yet."""
    views_from: int = 0
    """The number of the next view has to be above this number, too."""
    open_views: dict[int, View] = field(default_factory=dict[int, View])
    rosters: dict[int, Roster] = field(default_factory=dict[int, Roster])
    order: list[PeerId] = field(default_factory=list[PeerId])
    """The members in ring order."""
    seniority: list[PeerId] = field(default_factory=list[PeerId])
    """The members in order of admission. The first one has rank 0."""

    def arrange(self, order: Iterable[PeerId]) -> None:
        """Put the ring into this order, rotated so that the eldest member has rank 0."""
        ring = list(order)
        self.seniority = [peer for peer in self.seniority if peer in ring]
        first = ring.index(self.seniority[0]) if ring else 0
        self.order = ring[first:] + ring[:first]


class Membership:
    """The run's peers, groups and views.

    Args:
        term: the master's term.
    """

    def __init__(self, term: int) -> None:
        self.peers: dict[PeerId, RegisteredPeer] = {}
        """All registered peers, in order of id."""
        self.newest_peer = NOBODY
        """The highest id that is used or skipped."""
        self.version = 0
        self.size = 0
        """How many members the run has in the present version."""
        self.updates = 0
        """Closed rounds of ``update_topology``, including one that closes with the next roster."""
        self._term = term
        self._has_moved = False
        """Whether a member has another address than in the newest roster."""
        self._groups: dict[int, _Group] = {}
        self.links = LinkStates()
        self._measures = LinkMeasures()
        self.measured: set[int] = set()
        """The groups of which a measure has changed since the last plan."""

    # -- peers ---------------------------------------------------------------------------------

    def members(self, group: int | None = None) -> list[RegisteredPeer]:
        """Return the admitted peers of one group or of the run, in order of id."""
        admitted = [peer for peer in self.peers.values() if peer.admitted]
        return admitted if group is None else [peer for peer in admitted if peer.group == group]

    def pending(self) -> list[RegisteredPeer]:
        """Return the newcomers, in order of id."""
        return [peer for peer in self.peers.values() if not peer.admitted]

    def tester_of(self, newcomer: RegisteredPeer) -> PeerId | None:
        """Return the youngest connected member, if possible on another host, to test an address.

        Only a member with an address of the same version of IP can tell.
        """
        connected = [peer for peer in self.members() if peer.connection is not None]
        is_v6 = ":" in newcomer.member.host
        members = [peer for peer in connected if peer is not newcomer and is_v6 in peer.versions]
        far = [peer for peer in members if peer.seen not in ("", newcomer.seen)]
        return max((peer.id for peer in far or members), default=None)

    # -- links ---------------------------------------------------------------------------------

    def report_link(
        self,
        reporter: PeerId,
        other: PeerId,
        why_down: str | None,
        now_ns: int,
        relay: PeerId | None = None,
        path: LinkPath = LinkPath.DIRECT,
    ) -> None:
        """Record the link of ``reporter`` to ``other``; see ``LinkStates.report``."""
        if other in self.peers and other != reporter:
            self.links.report(reporter, other, why_down, now_ns, relay, path)

    @property
    def measures(self) -> LinkMatrix:
        """What members have measured of their links."""
        return self._measures.matrix

    def uplink(self, peer: PeerId) -> int:
        """Return what a peer has sent over all its links at once, in bytes per second."""
        return self._measures.uplinks.get(peer, 0)

    def note_measures(self, reporter: PeerId, links: Iterable[MeasuredLink]) -> None:
        """Record what ``reporter`` measured of its uplink and of its links in its group."""
        for link in links:
            there = self.peers.get(link.peer)
            if there is None or there.group != self.peers[reporter].group:
                continue
            if self._measures.note(reporter, link.peer, link.measure) and there.admitted:
                self.measured.add(there.group)

    def groups(self) -> list[int]:
        """Return the groups that have members."""
        return [group for group, state in self._groups.items() if state.order]

    def better_plan(self, group: int) -> AlgorithmTable | None:
        """Return a plan that is much faster than that of the newest view; None: there is none."""
        state = self._groups[group]
        present = state.open_views[state.newest_view].algorithms
        plan = self._algorithms(group, present)
        return None if plan == present else plan

    def link_trouble(self, peer: PeerId, since_ns: int) -> str | None:
        """Return why a connected member lost its link to ``peer`` at ``since_ns`` or later.

        None if no member reports that. A link that broke earlier says nothing about the present.
        """
        return self.links.trouble(peer, filter(self.may_accuse, self.peers), since_ns)

    def broken_links(self, group: int, since_ns: int) -> dict[Pair, str]:
        """Return pairs of connected members without a link at least since ``since_ns``, and why."""
        ring = [peer for peer in self.order(group) if self.may_accuse(peer)]
        return dict(self.links.broken(ring, since_ns))

    def worse_linked(self, first: PeerId, second: PeerId) -> RegisteredPeer:
        """Return the end of a stuck link that has more broken links to other peers.

        If the counts are equal, return ``first``: the link itself does not show the end at fault.
        """
        broken = Counter[PeerId]()
        for pair, _ in self.links.broken([p for p in self.peers if self.may_accuse(p)]):
            if pair != Pair((first, second)):
                broken.update(pair)
        return self.peers[second if broken[second] > broken[first] else first]

    def may_accuse(self, reporter: PeerId) -> bool:
        """Whether a broken link that ``reporter`` reports may get the other end evicted.

        Only a connected member may accuse: a newcomer is more likely at fault than the members.
        """
        peer = self.peers[reporter]
        return peer.admitted and peer.connection is not None

    def admissible(self) -> list[RegisteredPeer]:
        """Return newcomers with links to their future neighbours, whose ``min_peers`` is met."""
        members, wanted = self.size, self.pending()
        for _ in range(_SEATINGS_MAX):
            wanted = _enough(wanted, members)
            ready = self._seat(wanted).ready
            too_few = {peer.id for peer in ready if peer.min_peers > members + len(ready)}
            if not too_few:
                return ready
            wanted = [peer for peer in wanted if peer.id not in too_few]
        return self._seat([peer for peer in wanted if peer.min_peers <= members + 1]).ready

    def unlinked(self) -> dict[PeerId, tuple[PeerId, str]]:
        """Return the newcomers that lack a link for their admission: to which peer, and why."""
        if not self.pending():
            return {}
        missing = self._seat(self.pending()).missing
        for peer in self.admissible():
            missing.pop(peer.id, None)
        return missing

    def _seat(self, newcomers: list[RegisteredPeer]) -> _Seating:
        """Place newcomers in the rings, and find out which links the other newcomers lack.

        A newcomer goes to the end of the ring. If the newcomer and a neighbour there have
        failed to dial each other, it goes between two other members. Such a place exists if at most
        half of all peers cannot be dialled: then two members that can be dialled are neighbours.
        """
        seating = _Seating()
        late: list[RegisteredPeer] = []
        peopled = {group for group, state in self._groups.items() if state.order}
        for peer in newcomers:
            ring = seating.rings.get(peer.group)
            if ring is None:
                ring = seating.rings[peer.group] = self.order(peer.group)
            if peer.untested or (peer.prefetching and peer.group in peopled):
                continue  # only a group with members has a state to download
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
        for peer in late[_LATE_MAX:]:  # they wait until earlier ones have got a place
            del seating.missing[peer.id]
        return seating

    def why_apart(self, newcomer: RegisteredPeer, neighbour: PeerId) -> str:
        """Return why a newcomer has no link to a neighbour that it needs, and what to do."""
        other = self.peers[neighbour]
        tries = [
            f"peer {one.id} cannot dial peer {target.id} at "
            f"{target.member.host}:{target.member.port} "
            f"({self.links.why_down(one.id, target.id) or 'no answer yet'})"
            for one, target in ((newcomer, other), (other, newcomer))
        ]
        return (
            f"it could not be linked to peer {neighbour}, and no ring avoids the pair: "
            f"{', and '.join(tries)}; one of the two must be reachable: check the address that it "
            "advertises, and open its port. Or let another process forward: a member that both can "
            "dial, or the master (pccl master --relay)"
        )

    def crowded_out(self, host: str) -> RegisteredPeer | None:
        """Return the newcomer to remove if one more comes from ``host``; None if there is room.

        The source with the most newcomers loses its oldest newcomer.
        """
        pending = self.pending()
        if len(pending) < PENDING_MAX or len(pending) == len(self.peers):  # all may begin together
            return None
        return self.peers[of_the_largest({peer.id: peer.seen for peer in pending}, host)]

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """Shift all deadlines by ``gap_ns``, because this process slept that long."""
        self.links.shift(gap_ns, now_ns)
        for peer in self.peers.values():
            peer.heard_ns = min(peer.heard_ns + gap_ns, now_ns)
            peer.pending_ns = min(peer.pending_ns + gap_ns, now_ns)
            if peer.control_lost_ns is not None:
                peer.control_lost_ns = min(peer.control_lost_ns + gap_ns, now_ns)
            if peer.waited_for_ns is not None:
                peer.waited_for_ns = min(peer.waited_for_ns + gap_ns, now_ns)

    # -- changes -------------------------------------------------------------------------------

    def readmit(self, newcomer: RegisteredPeer) -> bool:
        """Register a newcomer that an earlier master registered; return if there are new rosters.

        There are if the last ones said that it has left.
        """
        state = self._groups.get(newcomer.group)
        told = state.rosters if state is not None else {}
        had_left = bool(told) and told[max(told)].has_left(newcomer.id)
        self.newest_peer = max(self.newest_peer, newcomer.id)  # no other peer gets this id
        self.peers[newcomer.id] = newcomer
        self.peers = dict(sorted(self.peers.items()))
        if had_left:
            self._publish()
        return had_left

    def move(self, peer: RegisteredPeer, member: Member) -> None:
        """Record a peer's new address; the next rosters have it."""
        peer.member = member
        self._has_moved |= peer.admitted

    def publish_moves(self) -> bool:
        """Make new rosters if the last ones have an old address; return whether there are any."""
        has_moved = self._has_moved
        if has_moved:
            self._publish()
        return has_moved

    def admit(
        self,
        newcomers: list[RegisteredPeer],
        renew: Mapping[int, AlgorithmTable | None],
        busy: set[tuple[int, int]],
    ) -> None:
        """Make newcomers members, and open a new view of their groups and of groups to ``renew``.

        Each of these groups keeps its previous view open, and older views that are ``busy``.

        Args:
            newcomers: the peers to admit.
            renew: groups -> their new plan; None: the best one. Only groups without newcomers may
                have a plan.
            busy: (group, number) of each view with undecided operations.
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
            self._open_view(group, renew.get(group))
            open_views = self._groups[group].open_views
            for number in list(open_views)[:-2]:
                if (group, number) not in busy:
                    del open_views[number]
        self._publish()

    def remove(self, peers: Sequence[RegisteredPeer]) -> set[tuple[int, int]]:
        """Forget peers; return the views that this closes: (group, number)."""
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
            else:
                self.measured.discard(group)
        if members:
            self._publish()
        return closed

    def reorder(
        self, group: int, order: Sequence[PeerId], plan: AlgorithmTable | None = None
    ) -> list[int]:
        """Put a group's ring into this order; close all its open views, and return their numbers.

        In these views, members lacked a link, or the algorithm table was stale; then ``plan`` is
        the new one.
        """
        state = self._groups[group]
        assert sorted(order) == sorted(state.order)
        closed = list(state.open_views)
        state.open_views.clear()
        state.arrange(order)
        self._open_view(group, plan)
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
        """Replace the membership by that of a recovered run.

        ``version`` is that of the newest roster that any report names. Later numbers that earlier
        masters may have used are skipped (``TERM_GAP``). If the run is ``shared`` with other
        masters, no two terms use the same version.
        """
        self._term, self.updates = term, updates
        self.links, self._measures, self.measured = LinkStates(), LinkMeasures(), set()
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
        """Return the members of a group in ring order."""
        state = self._groups.get(group)
        return list(state.order) if state else []

    def _open_view(self, group: int, plan: AlgorithmTable | None = None) -> None:
        state = self._groups[group]
        state.newest_view = max(state.newest_view, state.views_from) + 1
        algorithms = self._algorithms(group) if plan is None else plan
        state.open_views[state.newest_view] = View(tuple(state.order), self._term, algorithms)

    def _algorithms(self, group: int, present: AlgorithmTable | None = None) -> AlgorithmTable:
        """Return the plan of a group's ring by what is measured now; see ``plan_view``."""
        self.measured.discard(group)
        ring = self._groups[group].order
        accusers = [peer for peer in ring if self.may_accuse(peer)]
        broken = {pair for pair, _ in self.links.broken(accusers)}
        links = AssumedLinks(self._measures.matrix, self._measures.uplinks)
        return plan_view(ring, links, broken, present)

    def _publish(self) -> None:
        self._has_moved = False
        self.version += 1
        sizes = {group: len(state.order) for group, state in self._groups.items()}
        self.size = sum(sizes.values())
        for group, state in self._groups.items():
            if not sizes[group]:
                state.rosters.clear()  # no member is left that could resume
                continue
            state.rosters[self.version] = Roster(
                version=self.version,
                group=group,
                view=state.newest_view,
                members=tuple(self.peers[peer].member for peer in state.order),
                open_views=tuple(state.open_views),
                global_world_size=self.size,
                peer_groups=sum(1 for size in sizes.values() if size),
                largest_group_size=max(sizes.values(), default=0),
                term=state.open_views[state.newest_view].term,
                updates=self.updates,
                algorithms=state.open_views[state.newest_view].algorithms,
                newest_peer=self.newest_peer,
                pending=tuple(peer.id for peer in self.pending() if peer.group == group),
            )
            while len(state.rosters) > ROSTERS_KEPT_MAX:
                del state.rosters[next(iter(state.rosters))]

    def keys(self) -> dict[PeerId, bytes]:
        """Return the public key of each member that may return."""
        return {peer.id: peer.member.key for peer in self.members() if not peer.absent}

    # -- views and rosters ---------------------------------------------------------------------

    def ring(self, group: int, view: int) -> tuple[PeerId, ...] | None:
        """Return the members of an open view in ring order; None if the view is not open."""
        known = self.view(group, view)
        return known.ring if known else None

    def view(self, group: int, view: int) -> View | None:
        """Return a view of a group; None if it is not open."""
        state = self._groups.get(group)
        return state.open_views.get(view) if state else None

    def newest_view(self, group: int) -> int:
        """Return the number of the group's newest view; 0 if it never had one."""
        state = self._groups.get(group)
        return state.newest_view if state else 0

    def roster(self, group: int) -> Roster:
        """Return the group's newest roster."""
        return self._groups[group].rosters[self.version]

    def rosters_after(self, group: int, version: int) -> list[Roster]:
        """Return the group's kept rosters that are newer than ``version``, oldest first."""
        state = self._groups.get(group)
        return [roster for v, roster in state.rosters.items() if v > version] if state else []
