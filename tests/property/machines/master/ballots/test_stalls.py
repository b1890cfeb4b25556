"""Where a stuck ring is stuck: told from the members' reports alone, with a planted culprit.

The ring here is the dumbest there is: members hand segments on, one at a time, in any order of
links and of segments, until nothing can move any more. Nothing of the code under test takes part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master.ballots.ballot import Stall, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.protocol.data_type import DataType
from pccl.protocol.messages import Flow, Progress
from pccl.protocol.types import Algorithm, Descriptor, OperationId, PeerId, ReduceOp

OPERATION = OperationId(1, 0, 1, 0, 0)
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
BEFORE_NS, SINCE_NS, NOW_NS = 10, 50, 100


@dataclass
class Ring:
    """``size`` members; each chunk has ``width`` segments. Rank p receives over link p."""

    size: int
    width: int
    blocked: set[int]
    """Links that carry only as much as they still have ``credit`` for."""
    credit: int
    ready: list[set[int]] = field(default_factory=list[set[int]])
    received: list[set[int]] = field(default_factory=list[set[int]])

    def __post_init__(self) -> None:
        self.ready = [set(range(self.width)) for _ in range(self.size)]
        self.received = [set() for _ in range(self.size)]

    @property
    def total(self) -> int:
        return 2 * (self.size - 1) * self.width

    def under_way(self, rank: int) -> list[int]:
        return sorted(self.ready[rank - 1] - self.received[rank])

    def can_move(self) -> list[int]:
        links = [rank for rank in range(self.size) if self.under_way(rank)]
        return [rank for rank in links if rank not in self.blocked or self.credit]

    def move(self, rank: int, choice: int) -> None:
        waiting = self.under_way(rank)
        number = waiting[choice % len(waiting)]
        self.received[rank].add(number)
        if rank in self.blocked:
            self.credit -= 1
        if number + self.width < self.total:  # what came at one step goes on at the next
            self.ready[rank].add(number + self.width)

    def report(self, rank: int) -> Progress:
        received, ready = len(self.received[rank]), len(self.ready[rank])
        return Progress(OPERATION, received, ready, 100 * received)


@st.composite
def rings(draw: st.DrawFn, blocked_count: int) -> tuple[Ring, list[int]]:
    size = draw(st.integers(2, 8))
    links = st.lists(st.integers(0, size - 1), min_size=min(blocked_count, size), max_size=size)
    blocked = draw(links)[:blocked_count]
    ring = Ring(size, draw(st.integers(1, 4)), set(blocked), draw(st.integers(0, 12)))
    return ring, draw(st.lists(st.integers(0, 63), min_size=1, max_size=40))


def run_out(ring: Ring, choices: list[int], stop_after: int | None = None) -> None:
    moves = 0
    while (links := ring.can_move()) and moves != stop_after:
        choice = choices[moves % len(choices)]
        ring.move(links[choice % len(links)], choice // len(links))
        moves += 1


def started(ring: Ring, first_peer: int = 3) -> tuple[CollectiveBallot, list[PeerId]]:
    peers = [PeerId(first_peer + 2 * rank) for rank in range(ring.size)]
    made = CollectiveBallot(OPERATION, tuple(peers), peers[0], 0)
    decisions = [made.request(peer, SUM, 0) for peer in peers]
    assert decisions[-1] == Start()
    return made, peers


def tell(made: CollectiveBallot, peers: list[PeerId], ring: Ring, now_ns: int) -> None:
    for rank, peer in enumerate(peers):
        made.report(peer, ring.report(rank), now_ns)
        if len(ring.received[rank]) == ring.total:
            made.done(peer, b"x", now_ns)


@given(rings(1))
def test_one_stuck_link_is_found(case: tuple[Ring, list[int]]) -> None:
    ring, choices = case
    run_out(ring, choices)
    made, peers = started(ring)
    tell(made, peers, ring, NOW_NS)
    (stuck,) = ring.blocked
    stall = made.stall(SINCE_NS)
    if ring.under_way(stuck):
        ready, received = len(ring.ready[stuck - 1]), len(ring.received[stuck])
        assert stall == Stall(peers[stuck - 1], peers[stuck], ready, received)
    else:
        assert stall is None  # the credit was enough for everything
        assert made.waiting_for() == []


@given(rings(3))
def test_of_several_stuck_links_one_is_found_and_no_other_link(
    case: tuple[Ring, list[int]],
) -> None:
    ring, choices = case
    run_out(ring, choices)
    made, peers = started(ring)
    tell(made, peers, ring, NOW_NS)
    stall = made.stall(SINCE_NS)
    stuck = {rank for rank in ring.blocked if ring.under_way(rank)}
    assert (stall is None) == (not stuck)
    if stall is not None:
        assert peers.index(stall.downstream) in stuck
        assert stall.upstream == peers[peers.index(stall.downstream) - 1]


@given(rings(0), st.integers(0, 7), st.integers(0, 60))
def test_nobody_pays_for_a_member_that_fell_silent(
    case: tuple[Ring, list[int]], frozen: int, moves: int
) -> None:
    """It read and sent nothing any more, some time after it had spoken last."""
    ring, choices = case
    frozen %= ring.size
    made, peers = started(ring)
    run_out(ring, choices, moves // 2)
    tell(made, peers, ring, BEFORE_NS)
    run_out(ring, choices, moves - moves // 2)
    ring.blocked, ring.credit = {frozen, (frozen + 1) % ring.size}, 0
    run_out(ring, choices)
    for rank, peer in enumerate(peers):
        if rank != frozen:
            made.report(peer, ring.report(rank), NOW_NS)
    assert made.stall(SINCE_NS) is None


@given(rings(1), st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_a_chain_of_waiting_members_leads_to_its_head(
    case: tuple[Ring, list[int]], order: list[int]
) -> None:
    """Reports come in any order, and repeat themselves: the last ones count."""
    ring, choices = case
    made, peers = started(ring)
    run_out(ring, choices, len(choices) // 2)
    tell(made, peers, ring, SINCE_NS)
    run_out(ring, choices)
    for rank in sorted(range(ring.size), key=lambda rank: order[rank]):
        made.report(peers[rank], ring.report(rank), NOW_NS)
    (stuck,) = ring.blocked
    stall = made.stall(SINCE_NS)
    if ring.under_way(stuck):
        assert stall is not None
        assert (stall.upstream, stall.downstream) == (peers[stuck - 1], peers[stuck])
    else:
        assert stall is None


@given(st.integers(2, 6), st.data())
def test_in_a_mesh_the_stuck_link_is_found(size: int, data: st.DataObject) -> None:
    """Each member sends one segment to each owner, and its own result once all have come."""
    peers = [PeerId(3 + 2 * rank) for rank in range(size)]
    links = [(a, b) for a in range(size) for b in range(size) if a != b]
    blocked = data.draw(st.sampled_from(links))
    carried = data.draw(st.integers(0, 2))  # segments that the blocked link still carries
    passed = {link: 1 if link != blocked else min(carried, 1) for link in links}
    owners = [
        all(passed[other, rank] for other in range(size) if other != rank) for rank in range(size)
    ]
    ready = {(a, b): 1 + owners[a] for a, b in links}
    passed = {
        (a, b): passed[a, b] + (owners[a] and ((a, b) != blocked or carried == 2)) for a, b in links
    }
    mesh = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, algorithm=Algorithm.MESH)
    made = CollectiveBallot(OPERATION, tuple(peers), peers[0], 0)
    for peer in peers:
        made.request(peer, mesh, 0)
    for rank, peer in enumerate(peers):
        others = [other for other in range(size) if other != rank]
        flows = tuple(
            Flow(peers[other], passed[other, rank], ready[rank, other]) for other in others
        )
        received, could = sum(f.received for f in flows), sum(f.ready for f in flows)
        made.report(peer, Progress(OPERATION, received, could, 10 * received, flows), NOW_NS)
        if received == 2 * len(others):
            made.done(peer, b"x", NOW_NS)
    stall = made.stall(SINCE_NS)
    if carried == 2:
        assert stall is None
    else:
        a, b = blocked
        assert stall == Stall(peers[a], peers[b], ready[a, b], passed[a, b])
