"""How far the data of an operation has come between its members, as they report it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pccl.protocol.messages import Progress
from pccl.protocol.types import PeerId


def flows_of(
    ring: Sequence[PeerId], reports: Mapping[PeerId, Progress], *, follows_ring: bool
) -> Iterator[tuple[PeerId, PeerId, int, int]]:
    """Yield sender, receiver, segments ready at the sender, and those that the receiver has.

    Args:
        ring: the remaining members, in order.
        reports: the last report of each member.
        follows_ring: whether each member sends to the next one only.
    """
    present = set(ring)
    ready = {
        upstream: {flow.peer: flow.ready for flow in reports[upstream].flows}
        for upstream in ring
        if upstream in reports
    }
    for rank, peer in enumerate(ring):
        mine = reports.get(peer)
        if mine is None:
            continue
        if follows_ring:
            theirs = reports.get(ring[rank - 1])
            yield ring[rank - 1], peer, theirs.ready if theirs is not None else 0, mine.received
            continue
        for flow in mine.flows:
            if flow.peer in present:
                yield flow.peer, peer, ready.get(flow.peer, {}).get(peer, 0), flow.received
