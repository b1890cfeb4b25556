"""Outcomes of operations without this peer: how many are kept, and what becomes of the others."""

from __future__ import annotations

from pccl.machines.peer import events as ev
from pccl.protocol import errors
from pccl.protocol.types import SYNC_TAG, AbortCause, PeerId
from tests.support.peer_stage import BACK, QUORATE, PeerStage, ended, raised
from tests.support.scenarios import op

KEPT = 16
OTHERS = (PeerId(1), PeerId(3))


def missing(count: int, tag: int = 5) -> PeerStage:
    """A member that so many reduces have gone on without."""
    peer = PeerStage().member(1, 2, 3)
    for n in range(count):
        peer.do(ended(op(n, tag=tag), contributors=OTHERS))
    return peer


def test_as_many_results_as_are_kept_reach_their_calls_in_order() -> None:
    peer = missing(KEPT)
    for n in range(KEPT):
        assert peer.do(ev.ReduceCall(10 + n, 5, QUORATE)) == [
            ev.FetchResult(10 + n, op(n), QUORATE),
            BACK,
        ]
        peer.do(ev.ResultFetched(10 + n, has_arrived=True))
    post, request = peer.do(ev.ReduceCall(99, 5, QUORATE))
    assert isinstance(post, ev.Post)
    assert post.operation == op(KEPT)
    assert isinstance(request, ev.Send)


def test_one_more_requires_a_resync() -> None:
    error = raised(missing(KEPT + 1).do(ev.ReduceCall(9, 5, QUORATE)), errors.ResyncRequired)
    assert "tag 5, without this peer, which was late" in str(error)


def test_each_tag_keeps_its_own() -> None:
    peer = missing(KEPT)
    for n in range(KEPT):
        peer.do(ended(op(n, tag=6), contributors=OTHERS))
    for tag in (5, 6):
        assert peer.do(ev.ReduceCall(tag, tag, QUORATE)) == [
            ev.FetchResult(tag, op(tag=tag), QUORATE),
            BACK,
        ]


def test_aborts_that_are_forgotten_lack_nothing() -> None:
    peer = PeerStage().member(1, 2, 3)
    for n in range(KEPT + 1):
        peer.do(ended(op(n), AbortCause.WITHDRAWN, "peer 1 withdrew"))
    raised(peer.do(ev.ReduceCall(9, 5, QUORATE)), errors.CollectiveAborted)


def test_synchronizations_that_are_forgotten_lack_nothing() -> None:
    """The next one brings all that the members have."""
    peer = missing(KEPT + 1, SYNC_TAG)
    post, _ = peer.do(ev.ReduceCall(9, 5, QUORATE))
    assert isinstance(post, ev.Post)
