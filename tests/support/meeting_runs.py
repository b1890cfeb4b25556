"""Members and newcomers of a run in which some have no link, and whom the master tells to meet."""

from __future__ import annotations

from pccl.machines.master.links.meetings import Meetings
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol.limits import Timing
from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import PeerId
from pccl.topology.ring_order import Pair
from tests.support.scenarios import where

ONE, TWO = PeerId(1), PeerId(2)
TIMING = Timing(resume_s=2.0, link_s=10.0)

Told = list[tuple[int, int, int]]
"""Who is told to meet whom at which relay."""


class MeetingRun:
    """Members, all connected and reached by tests, and newcomers."""

    def __init__(self, members: int = 6, *, master_relays: bool = False) -> None:
        self.membership = Membership(1)
        self.links = self.membership.links
        self.dialable: dict[PeerId, bool | None] = {}
        """What tests have shown of peers; the others can be dialled."""
        self._carried = 0
        self.asked = 0
        """How often anybody asked whether a peer can be dialled."""
        self.meetings = Meetings(
            TIMING, self.membership, self._is_dialable, master_relays=master_relays
        )
        self.admit(*range(1, members + 1))

    def __getitem__(self, peer: PeerId) -> RegisteredPeer:
        return self.membership.peers[peer]

    def _is_dialable(self, peer: PeerId) -> bool | None:
        self.asked += 1
        return self.dialable.get(peer, True)

    def register(self, peer: int, group: int = 0, now_ns: int = 0) -> RegisteredPeer:
        one = RegisteredPeer(
            PeerId(peer), group, where(peer), connection=peer, registered_ns=now_ns
        )
        self.membership.peers[one.id] = one
        return one

    def admit(self, *peers: int, group: int = 0) -> None:
        """Peers become members; the ring has them in this order."""
        self.membership.admit([self.register(peer, group) for peer in peers], {}, set())
        assert self.membership.order(group) == list(peers)

    def link(self, one: PeerId, *others: PeerId, relay: PeerId | None = None) -> None:
        """One peer says that it has links to others."""
        for other in others:
            self.links.report(one, other, None, 0, relay)

    def load(self, relay: PeerId, links: int) -> None:
        """A relay carries so many more links, of peers that are nothing else here."""
        for _ in range(links):
            self._carried += 1
            self.links.report(PeerId(9000 + self._carried), PeerId(9000), None, 0, relay)

    def up(self, now_ns: int, one: PeerId = ONE, other: PeerId = TWO, relay: int = 0) -> None:
        for end, there in ((one, other), (other, one)):
            self.links.report(end, there, None, now_ns, PeerId(relay))

    def down(self, now_ns: int, one: PeerId = ONE, other: PeerId = TWO) -> None:
        """Both report that they have no link."""
        for end, there in ((one, other), (other, one)):
            self.links.report(end, there, "no answer in time", now_ns)

    def measure(self, one: PeerId, other: PeerId, rtt_ns: int) -> None:
        self.membership.note_measures(one, [MeasuredLink(other, LinkMeasure(rtt_ns, 0))])

    def relays(self, one: PeerId = ONE, other: PeerId = TWO) -> list[int]:
        """The relays that the two could meet at after a heartbeat, the best first."""
        self.beat(0)
        return [relay.peer for relay in self.meetings.relays(self[one], self[other])]

    def beat(self, now_ns: int) -> Told:
        found = list(self.meetings.beat(now_ns))
        assert all(told.member == where(told.member.peer) for _, told in found)
        return [(peer.id, told.member.peer, told.relay.peer) for peer, told in found]

    def tick(self, newcomer: PeerId, neighbour: PeerId, now_ns: int) -> Told:
        """A newcomer still lacks its link to a neighbour."""
        found = list(self.meetings.newcomer(self[newcomer], neighbour, now_ns))
        return [(peer.id, told.member.peer, told.relay.peer) for peer, told in found]

    def is_open(self, now_ns: int) -> bool:
        return self.meetings.is_open(Pair((ONE, TWO)), now_ns)


def meet(one: int, other: int, relay: int) -> Told:
    """What both are told."""
    return [(one, other, relay), (other, one, relay)]
