"""What peers report of their links."""

from __future__ import annotations

from pccl.machines.master.links.link_states import LinkStates
from pccl.protocol.types import PeerId

A, B, C, D = (PeerId(n) for n in range(1, 5))
AB, AC = frozenset((A, B)), frozenset((A, C))


def test_a_link_is_up_if_one_end_says_so() -> None:
    links = LinkStates()
    assert not links.are_linked(A, B)
    links.report(A, B, "refused", 0)
    links.report(B, A, None, 0)
    assert links.are_linked(A, B)
    assert links.are_linked(B, A)
    assert not links.have_given_up(A, B)
    links.report(B, A, "reset", 0)
    assert links.have_given_up(B, A)
    assert (links.why_down(A, B), links.why_down(B, A)) == ("refused", "reset")


def test_a_link_is_down_since_it_was_up_last() -> None:
    links = LinkStates()
    links.report(A, B, "reset", 10)
    links.report(A, B, "refused", 20)  # still down
    assert list(links.broken([A, B], until_ns=9)) == []
    assert list(links.broken([A, B], until_ns=10)) == [(AB, "refused")]
    trouble = "its connections to the master and peer 1 broke ({})"
    assert links.trouble(B, [A], since_ns=10) == trouble.format("refused")
    assert links.trouble(B, [A], since_ns=11) is None
    links.shift(5, now_ns=12)
    assert links.trouble(B, [A], since_ns=12) == trouble.format("refused")
    links.report(A, B, None, 30)
    links.report(A, B, "reset", 40)
    assert links.trouble(B, [A], since_ns=40) == trouble.format("reset")


def test_only_these_count() -> None:
    links = LinkStates()
    for other in (B, C, D):
        links.report(A, other, "refused", 0)
    assert dict(links.broken([A, B, C])) == {AB: "refused", AC: "refused"}
    assert list(links.broken([B, C, D])) == []  # they have said nothing
    assert links.trouble(A, [B, C, D], since_ns=0) is None


def test_who_is_gone_has_no_links() -> None:
    links = LinkStates()
    for one, other in ((A, B), (B, A), (B, C), (C, A)):
        links.report(one, other, "refused", 0)
    links.remove({A})
    assert links.why_down(A, B) is None
    assert links.why_down(B, A) is None
    assert list(links.broken([A, B, C])) == [(frozenset((B, C)), "refused")]
