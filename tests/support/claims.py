"""Segments that a schedule expects, and claims that differ from them."""

from __future__ import annotations

from hypothesis import strategies as st

from pccl.collectives.schedules.broadcast import BroadcastSchedule
from pccl.collectives.schedules.ring import RingSchedule

Schedule = RingSchedule | BroadcastSchedule


def check_drawn_claims(
    data: st.DataObject, sender: Schedule, receiver: Schedule, steps: int
) -> None:
    """Of claims of any kind, with steps up to this one, it finds what the sender sends."""
    hops = sender.outgoing.hops
    expected = {(hop.step, hop.segment.offset, hop.segment.length): hop for hop in hops}
    nbytes = receiver.layout.nbytes
    for _ in range(6):
        claim = (
            data.draw(st.integers(0, steps) | st.just(65535)),
            data.draw(st.integers(0, nbytes + 9) | st.just((1 << 64) - 1)),
            data.draw(st.integers(0, nbytes + 9)),
        )
        assert receiver.incoming.find(*claim) == expected.get(claim)


def check_spoilt_claims(sender: Schedule, receiver: Schedule) -> None:
    """Of claims with one thing wrong it finds those that the sender sends all the same."""
    hops = sender.outgoing.hops
    expected = {(hop.step, hop.segment.offset, hop.segment.length) for hop in hops}
    for step, offset, length in sorted(expected)[:20]:
        for claim in (
            (step + 1, offset, length),
            (max(step - 1, 0), offset, length),
            (step, offset + 1, length),
            (step, offset, length + 1),
            (step, offset, length - 1),
        ):
            assert (receiver.incoming.find(*claim) is not None) == (claim in expected)
