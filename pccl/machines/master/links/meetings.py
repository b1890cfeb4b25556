"""``Meetings``: two peers that cannot dial each other meet at a relay; which one, and when.

A relay is a peer of their group that both can dial, or the master, if it is allowed to. The master
prefers peers that a test has reached or that forward already, then itself, then the others. Last
are peers to which one of the two reports that it has no link. Members come before newcomers, then
peers with links to both, then those that forward for fewer. After a failure, also one soon after a
success, the master names the next one.

Not every pair needs a link: neighbours in the ring do, all members of a small group, newcomers
their future neighbours, and pairs between which an operation has to move data.

Pure state: ``PeerLinks`` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice

from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.limits import PEERS_MAX, RTT_NS_MAX, Timing
from pccl.protocol.types import NOBODY, NS_PER_S, Member, PeerId
from pccl.topology.ring_order import Pair

SMALL_GROUP = 8
"""Up to this size, all members of a group get links, so that every algorithm works."""

_THE_MASTER = Member(NOBODY, "", 0)
_DOUBLINGS_MAX = 3
"""How often the pause between two meetings of a pair doubles: until a meeting has ``dial_s``. It
doubles when each relay has been tried twice."""

_OPEN_TRIES = 2
"""Meetings that an operation waits for, before the master changes the ring or removes a member."""

_CANDIDATES_MAX = 16
"""Relays that are compared for one pair: more would take a large run's master too long."""

_AT_ONCE_MAX = 4096
"""Pairs that are looked at for one heartbeat; the first ones of each ring come first."""

_LASTING_NS = 30 * NS_PER_S
"""A link that was up for so long after a meeting has worked: later, the first relay comes first."""


@dataclass(slots=True)
class _Meeting:
    """The meetings of a pair of peers that has no link, or got one lately."""

    tries: int = 0
    excused: int = 0
    """How many of these named relays before the last relay was removed from the run."""
    relay: PeerId = NOBODY
    """The last relay."""
    due_ns: int = 0
    told_ns: int = 0
    named: set[PeerId] = field(default_factory=set[PeerId])
    """Relays that were named since all of them had been."""


class Meetings:
    """The pairs that need a relay.

    Args:
        timing: deadlines.
        membership: the peers of the run.
        is_dialable: whether other peers can dial a peer; None: no test has shown it.
        master_relays: whether the master is a relay.
    """

    def __init__(
        self,
        timing: Timing,
        membership: Membership,
        is_dialable: Callable[[PeerId], bool | None],
        *,
        master_relays: bool,
    ) -> None:
        self._membership = membership
        self._is_dialable = is_dialable
        self._pause_ns = timing.ns(timing.resume_s / 2)
        self._link_ns = timing.ns(timing.link_s)
        self._master_relays = master_relays
        self._meetings: dict[Pair, _Meeting] = {}
        self._demanded: set[Pair] = set()
        """Pairs without a link between which an operation has to move data."""
        self._ranked: dict[int, list[PeerId]] = {}
        """Group -> its peers that may relay, as of the last heartbeat."""

    def beat(self, now_ns: int) -> Iterator[tuple[RegisteredPeer, msg.Meet]]:
        """Yield the meetings of members that are due, once for each of the two."""
        peers, links = self._membership.peers, self._membership.links
        self._meetings = {
            pair: one
            for pair, one in self._meetings.items()
            if all(peer in peers for peer in pair)
            and not (links.are_linked(*pair) and now_ns - one.told_ns >= _LASTING_NS)
        }
        self._ranked.clear()
        self._demanded = {
            pair
            for pair in self._demanded
            if all(peer in peers for peer in pair) and not links.are_linked(*pair)
        }
        groups = sorted({peer.group for peer in peers.values() if peer.admitted})
        lacking = (
            pair
            for group in groups
            for pair in self._members_that_need_links(group)
            if self._lacks(pair, now_ns)
        )
        for pair in islice(lacking, _AT_ONCE_MAX):
            yield from self._meet(pair, now_ns)

    def newcomer(
        self, newcomer: RegisteredPeer, neighbour: PeerId, now_ns: int
    ) -> Iterator[tuple[RegisteredPeer, msg.Meet]]:
        """Yield the meeting of a newcomer with its future neighbour, if it is due."""
        pair = Pair((newcomer.id, neighbour))
        if self._lacks(pair, now_ns):
            told = list(self._meet(pair, now_ns))
            is_new = now_ns - newcomer.registered_ns < 2 * self._link_ns
            if told and is_new and self._meetings[pair].tries == 1:
                newcomer.pending_ns = now_ns  # the deadline of its link begins anew
            yield from told

    def forget(self, gone: Collection[PeerId]) -> None:
        """Count tries anew where a relay is removed: the members need another one, and time."""
        for meeting in self._meetings.values():
            if meeting.relay in gone:
                meeting.excused = meeting.tries

    def demand(self, pairs: Iterable[Pair]) -> None:
        """Give these members a link, because an operation has to move data between them."""
        self._demanded.update(pairs)

    def is_open(self, pair: Pair, now_ns: int) -> bool:
        """Whether one of the first meetings of two members may still give them a demanded link."""
        known = self._meetings.get(pair) or _Meeting()
        if known.tries and self._membership.links.are_linked(*pair):
            return now_ns < known.told_ns + (self._pause_ns << _DOUBLINGS_MAX)  # one end knows it
        tries = known.tries - known.excused
        if tries > _OPEN_TRIES or (tries == _OPEN_TRIES and now_ns >= known.due_ns):
            return False  # after fewer tries, a heartbeat brings the next one
        one, other = (self._membership.peers[peer] for peer in pair)
        return bool(self.relays(one, other)) and self._has_given_up(pair)

    def relays(self, one: RegisteredPeer, other: RegisteredPeer) -> list[Member]:
        """Return what could carry a link of the two, the best first."""
        links, pair = self._membership.links, (one.id, other.id)
        found: list[tuple[bool, bool, bool, bool, int, int, PeerId]] = []
        for peer in self._candidates(one.group):
            if peer.id not in pair:
                is_doubtful, is_new, load, _ = self._rank(peer)
                is_cut = any(links.why_down(end, peer.id) is not None for end in pair)
                is_apart = any(not links.are_direct(end, peer.id) for end in pair)
                rtt_ns = sum(self._rtt_ns(end, peer.id) for end in pair)
                found.append((is_cut, is_doubtful, is_new, is_apart, load, rtt_ns, peer.id))
        if self._master_relays:  # after all peers that were reached
            found.append((False, False, True, True, PEERS_MAX**2, 0, NOBODY))
        peers = self._membership.peers
        return [peers[peer].member if peer else _THE_MASTER for *_, peer in sorted(found)]

    # -- which pairs -----------------------------------------------------------------------------

    def _members_that_need_links(self, group: int) -> list[Pair]:
        ring = self._membership.order(group)
        if len(ring) <= SMALL_GROUP:
            return [Pair(pair) for pair in combinations(sorted(ring), 2)]
        pairs = [Pair((ring[rank - 1], peer)) for rank, peer in enumerate(ring)]
        demanded = sorted(map(sorted, filter(set(ring).issuperset, self._demanded)))
        return list(dict.fromkeys((*pairs, *map(Pair, demanded))))

    def _has_given_up(self, pair: Pair) -> bool:
        """Whether no dial of the two will succeed, as far as is known."""
        links = self._membership.links
        if links.have_given_up(*pair):
            return True
        if links.are_linked(*pair):
            return False
        one, other = pair
        return all(
            self._is_dialable(end) is False or links.why_down(there, end) is not None
            for end, there in ((one, other), (other, one))
        )

    def _is_undialable(self, pair: Pair) -> bool:
        return all(self._is_dialable(peer) is False for peer in pair)

    def _lacks(self, pair: Pair, now_ns: int) -> bool:
        """Whether a pair has no link, and a direct dial will hardly bring it up soon."""
        if not self._has_given_up(pair):
            return False
        are_members = all(self._membership.peers[peer].admitted for peer in pair)
        if self._is_undialable(pair) or not are_members:
            return True
        return now_ns - self._membership.links.down_since_ns(*pair) >= self._pause_ns

    def _meet(self, pair: Pair, now_ns: int) -> Iterator[tuple[RegisteredPeer, msg.Meet]]:
        one, other = (self._membership.peers[peer] for peer in sorted(pair))
        meeting = self._meetings.setdefault(pair, _Meeting())
        if now_ns < meeting.due_ns or None in (one.connection, other.connection):
            return
        relays = self.relays(one, other)
        doublings = min(meeting.tries // max(2, 2 * len(relays)), _DOUBLINGS_MAX)
        meeting.due_ns = now_ns + (self._pause_ns << doublings)
        if relays:
            relay = next((one for one in relays if one.peer not in meeting.named), relays[0])
            if relay.peer in meeting.named:
                meeting.named.clear()
            meeting.named.add(relay.peer)
            meeting.tries += 1
            meeting.relay = relay.peer
            meeting.told_ns = now_ns
            yield one, msg.Meet(other.member, relay)
            yield other, msg.Meet(one.member, relay)

    # -- which relay -----------------------------------------------------------------------------

    def _rank(self, peer: RegisteredPeer) -> tuple[bool, bool, int, PeerId]:
        load = self._membership.links.carried_by(peer.id)
        is_doubtful = self._is_dialable(peer.id) is None and not load
        return is_doubtful, not peer.admitted, load, peer.id

    def _candidates(self, group: int) -> list[RegisteredPeer]:
        """Return the peers of a group that may relay: few, those first that any pair prefers."""
        peers = self._membership.peers
        if group not in self._ranked:
            able = [
                peer
                for peer in peers.values()
                if peer.group == group
                and peer.connection is not None
                and self._is_dialable(peer.id) is not False
            ]
            ranked = sorted(map(self._rank, able))
            self._ranked[group] = [peer for *_, peer in ranked[:_CANDIDATES_MAX]]
        known = [peers[peer] for peer in self._ranked[group] if peer in peers]
        return [peer for peer in known if peer.connection is not None]

    def _rtt_ns(self, one: PeerId, other: PeerId) -> int:
        measures = self._membership.measures
        ends = (measures.get((one, other)), measures.get((other, one)))
        return min((end.rtt_ns for end in ends if end and end.rtt_ns), default=RTT_NS_MAX)
