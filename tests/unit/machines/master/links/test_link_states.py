"""What peers report of their links."""

from __future__ import annotations

from pccl.machines.master.links.link_states import LinkStates
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import NOBODY, PeerId

A, B, C, D, E = (PeerId(n) for n in range(1, 6))
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


def test_a_link_that_needs_no_relay_is_direct() -> None:
    links = LinkStates()
    assert not links.are_direct(A, B)
    links.report(A, B, None, 0)
    assert links.are_direct(A, B)
    assert links.are_direct(B, A)
    links.report(B, A, None, 0, relay=C)
    assert (links.relay(A, B), links.relay(B, A)) == (None, C)
    assert not links.are_direct(A, B)
    assert not links.are_direct(B, A)
    links.report(B, A, None, 0)
    assert links.are_direct(A, B)
    links.report(A, B, "reset", 0)
    assert links.are_direct(A, B), "one end is enough"
    links.report(B, A, "reset", 0)
    assert not links.are_direct(A, B)


def test_the_master_is_a_relay_too() -> None:
    links = LinkStates()
    links.report(B, A, None, 0, relay=NOBODY)
    assert links.relay(B, A) == NOBODY
    assert not links.are_direct(A, B)
    assert links.carried_by(NOBODY) == 1


def test_a_link_that_is_down_has_no_relay() -> None:
    links = LinkStates()
    links.report(B, A, None, 0, relay=C)
    links.report(B, A, "reset", 0)
    assert links.relay(B, A) is None
    links.report(B, A, None, 0)
    assert links.relay(B, A) is None, "it is direct now"


def test_a_relay_carries_what_the_younger_ends_report() -> None:
    links = LinkStates()
    links.report(A, B, None, 0, relay=D)
    assert links.carried_by(D) == 0
    for other in (A, B, B):
        links.report(C, other, None, 0, relay=D)
    assert links.carried_by(D) == 2
    links.report(C, A, None, 0, relay=E)
    assert (links.carried_by(D), links.carried_by(E)) == (1, 1)
    links.report(C, A, "reset", 0)
    links.report(C, A, "refused", 0)
    assert (links.carried_by(D), links.carried_by(E)) == (1, 0)
    links.report(C, B, None, 0)
    assert (links.carried_by(D), links.carried_by(E)) == (0, 0)
    links.report(C, A, None, 0, relay=E)
    assert links.carried_by(E) == 1


def test_a_relay_carries_nothing_of_who_is_gone() -> None:
    links = LinkStates()
    for younger, elder in ((B, A), (C, A), (D, A), (C, B), (D, C)):
        links.report(younger, elder, None, 0, relay=E)
        links.report(elder, younger, None, 0, relay=E)
    assert links.carried_by(E) == 5
    links.remove({A})
    assert links.carried_by(E) == 2
    links.remove({B, C})
    assert links.carried_by(E) == 0
    links.report(D, B, None, 0, relay=E)
    assert links.carried_by(E) == 1


def test_a_link_is_down_since_the_first_of_its_ends_said_so() -> None:
    links = LinkStates()
    assert links.down_since_ns(A, B) == 0
    links.report(A, B, "a payload was damaged", 10)
    assert links.down_since_ns(A, B) == links.down_since_ns(B, A) == 10
    links.report(B, A, "reset", 30)
    links.report(A, B, "a header was damaged", 40)
    assert links.down_since_ns(A, B) == links.down_since_ns(B, A) == 10
    links.report(B, A, None, 50)
    assert links.down_since_ns(A, B) == 10
    links.report(B, A, "reset", 60)
    links.report(A, B, None, 70)
    assert links.down_since_ns(A, B) == links.down_since_ns(B, A) == 60
    links.shift(5, now_ns=100)
    assert links.down_since_ns(A, B) == 65
    links.report(B, A, None, 110)
    assert links.down_since_ns(A, B) == 0


def test_the_loss_of_a_relayed_link_says_nothing_of_its_ends() -> None:
    links = LinkStates()
    trouble = "its connections to the master and peer 1 broke (reset)"
    links.report(A, B, None, 0, relay=C)
    links.report(A, B, "reset", 10)
    assert links.trouble(B, [A], since_ns=0) is None
    links.report(A, B, "refused", 20)
    assert links.trouble(B, [A], since_ns=0) is None
    assert dict(links.broken([A, B])) == {AB: "refused"}
    links.report(D, B, None, 0)
    links.report(D, B, "reset", 10)
    assert links.trouble(B, [A, D], since_ns=0) == trouble.replace("1", "4")
    links.report(A, B, None, 30)
    links.report(A, B, "reset", 40)
    assert links.trouble(B, [A], since_ns=0) == trouble, "this one was direct"


def test_each_end_reports_its_path() -> None:
    links = LinkStates()
    assert links.path(A, B) is None
    links.report(A, B, None, 0, path=LinkPath.DIALLED_BACK)
    assert (links.path(A, B), links.path(B, A)) == (LinkPath.DIALLED_BACK, None)
    links.report(A, B, None, 0, C, LinkPath.RELAYED)
    assert links.path(A, B) is LinkPath.RELAYED
    links.report(A, B, None, 0, path=LinkPath.PUNCHED)
    assert links.path(A, B) is LinkPath.PUNCHED
    links.report(A, B, "reset", 0)
    assert links.path(A, B) is None
    links.report(A, B, None, 0, C)
    assert links.path(A, B) is LinkPath.RELAYED, "the relay shows it"


def test_the_other_end_may_know_that_its_port_is_mapped() -> None:
    links = LinkStates()
    links.report(A, B, None, 0, path=LinkPath.MAPPED)
    for path in (LinkPath.DIRECT, LinkPath.DIALLED_BACK):
        links.report(B, A, None, 0, path=path)
        assert links.path(A, B) is links.path(B, A) is LinkPath.MAPPED
    for path, relay in ((LinkPath.PUNCHED, None), (LinkPath.RELAYED, C)):
        links.report(B, A, None, 0, relay, path)
        assert links.path(B, A) is path, "it has changed since"
    links.report(B, A, None, 0)
    links.report(A, B, "reset", 0, path=LinkPath.MAPPED)
    assert links.path(B, A) is LinkPath.DIRECT
