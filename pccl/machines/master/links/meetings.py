"""``Meetings``: at which relay two peers meet that cannot dial each other, and when they try again.

A relay is a peer of their group that both can dial, or the master, if it is allowed to. The master
prefers peers that a test has reached, then itself, then the others. Of several peers it prefers one
with links to both, then the one with the fewest relayed links, then the shortest round trip. After
a failure it names the next one.

Pure state: ``PeerLinks`` sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.limits import MEETINGS_MAX, MEETINGS_PAIRS_MAX, PEERS_MAX
from pccl.protocol.types import NOBODY, Member, PeerId
from pccl.topology.ring_order import Pair

_THE_MASTER = Member(NOBODY, "", 0)
_DOUBLINGS_MAX = 2
"""How often the pause between two meetings of a pair doubles."""


@dataclass(slots=True)
class _Meeting:
    """A pair of peers that has no link, and needs a relay."""

    tries: int = 0
    due_ns: int = 0


class Meetings:
    """The pairs that need a relay.

    Args:
        membership: the peers of the run.
        is_dialable: whether other peers can dial a peer; None: no test has shown it.
        pause_ns: pause after the first meeting of a pair, and before it if one can dial the other.
        master_relays: whether the master is a relay.
    """

    def __init__(
        self,
        membership: Membership,
        is_dialable: Callable[[PeerId], bool | None],
        pause_ns: int,
        *,
        master_relays: bool,
    ) -> None:
        self._membership = membership
        self._is_dialable = is_dialable
        self._pause_ns = pause_ns
        self._master_relays = master_relays
        self._meetings: dict[Pair, _Meeting] = {}
        self._told: Counter[PeerId] = Counter()
        """How many meetings each peer was told since the last heartbeat."""

    def need(self, one: PeerId, other: PeerId, now_ns: int) -> None:
        """Record that two peers have no link.

        They meet at once if neither can be dialled, or if one is a newcomer, whose time for its
        links is short. Otherwise a direct dial may succeed meanwhile.
        """
        pair = Pair((one, other))
        if pair in self._meetings or len(self._meetings) >= MEETINGS_PAIRS_MAX:
            return
        are_members = all(self._membership.peers[peer].admitted for peer in pair)
        may_dial = any(self._is_dialable(peer) is not False for peer in pair)
        self._meetings[pair] = _Meeting(due_ns=now_ns + self._pause_ns * (are_members and may_dial))

    def is_open(self, pair: Pair, now_ns: int) -> bool:
        """Whether the first meeting of a pair may still give it a link."""
        meeting, peers = self._meetings.get(pair), self._membership.peers
        if meeting is None or meeting.tries > 1:
            return False
        until_ns = meeting.due_ns if meeting.tries else meeting.due_ns + self._pause_ns
        if now_ns >= until_ns:
            return False
        return bool(self.relays(*(peers[peer] for peer in pair)))

    def linked(self, one: PeerId, other: PeerId) -> None:
        """Record that two peers have a link."""
        self._meetings.pop(Pair((one, other)), None)

    def forget(self, gone: set[PeerId]) -> None:
        """Forget peers that were removed."""
        self._meetings = {pair: one for pair, one in self._meetings.items() if not pair & gone}

    def beat(self) -> None:
        """Let every peer be told of ``MEETINGS_MAX`` more meetings."""
        self._told.clear()

    def due(self, now_ns: int) -> Iterator[tuple[RegisteredPeer, msg.Meet]]:
        """Yield the meetings that are due, once for each of the two peers."""
        peers = self._membership.peers
        for pair, meeting in self._meetings.items():
            ends = [peers[peer] for peer in sorted(pair)]
            has_room = all(
                end.connection is not None and self._told[end.id] < MEETINGS_MAX for end in ends
            )
            if now_ns < meeting.due_ns or not has_room:
                continue
            relays = self.relays(ends[0], ends[1])
            if not relays:
                continue
            relay = relays[meeting.tries % len(relays)]
            meeting.due_ns = now_ns + (self._pause_ns << min(meeting.tries, _DOUBLINGS_MAX))
            meeting.tries += 1
            self._told.update(pair)
            for end in ends:
                if meeting.tries == 1 and not end.admitted:
                    end.pending_ns = now_ns  # the deadline of its link begins anew
            for end, other in (ends, reversed(ends)):
                yield end, msg.Meet(other.member, relay)

    def relays(self, one: RegisteredPeer, other: RegisteredPeer) -> list[Member]:
        """Return what could carry a link of the two, the best first."""
        links, pair = self._membership.links, (one.id, other.id)
        ranked: list[tuple[bool, bool, int, int, PeerId]] = []
        for peer in self._membership.peers.values():
            is_dialable = self._is_dialable(peer.id)
            is_other = peer.id in pair or peer.group != one.group or peer.connection is None
            if is_other or is_dialable is False:
                continue
            unlinked = any(not links.are_linked(end, peer.id) for end in pair)
            rtt_ns = sum(self._rtt_ns(end, peer.id) for end in pair)
            load = links.carried_by(peer.id)
            ranked.append((is_dialable is None, unlinked, load, rtt_ns, peer.id))
        if self._master_relays:
            ranked.append((False, True, PEERS_MAX**2, 0, NOBODY))  # after all that were reached
        peers = self._membership.peers
        return [peers[peer].member if peer else _THE_MASTER for *_, peer in sorted(ranked)]

    def _rtt_ns(self, one: PeerId, other: PeerId) -> int:
        measures = self._membership.measures
        ends = (measures.get((one, other)), measures.get((other, one)))
        return min((end.rtt_ns for end in ends if end is not None), default=0)
