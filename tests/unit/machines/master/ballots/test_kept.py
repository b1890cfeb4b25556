"""What is owed to whom, until they have acknowledged it."""

from __future__ import annotations

from pccl.machines.master.ballots.kept import Kept
from pccl.protocol.types import PeerId

A, B, C = PeerId(1), PeerId(2), PeerId(3)


def test_each_peer_is_owed_a_message_until_it_acknowledges() -> None:
    kept: Kept[str, str] = Kept()
    kept.keep("first", "one", [A, B])
    assert "first" in kept
    assert kept.owed("first", A) == "one"
    kept.acknowledge(["first"], A)
    assert kept.owed("first", A) is None
    assert kept.owed("first", B) == "one"
    kept.acknowledge(["first"], A)  # once more changes nothing
    assert "first" in kept
    kept.acknowledge(["first"], B)
    assert "first" not in kept
    assert list(kept.everybody_owed()) == []


def test_a_message_for_nobody_is_not_kept() -> None:
    kept: Kept[str, str] = Kept()
    kept.keep("first", "one", [])
    assert "first" not in kept


def test_messages_are_owed_in_the_order_in_which_they_were_decided() -> None:
    kept: Kept[int, str] = Kept()
    for key, message, peers in ((9, "x", [A, B]), (2, "y", [B]), (5, "z", [B, A])):
        kept.keep(key, message, peers)
    assert kept.owed_to(A) == ["x", "z"]
    assert kept.owed_to(B) == ["x", "y", "z"]
    assert kept.owed_to(C) == []
    assert list(kept.everybody_owed()) == [[A, B], [B], [B, A]]


def test_how_much_is_owed() -> None:
    kept: Kept[int, str] = Kept()
    kept.keep(1, "x", [A, B])
    kept.keep(2, "y", [A])
    assert [kept.count_owed_to(peer) for peer in (A, B, C)] == [2, 1, 0]
    for _ in range(2):  # a second acknowledgement changes nothing
        kept.acknowledge([1], A)
        assert [kept.count_owed_to(peer) for peer in (A, B, C)] == [1, 1, 0]
    kept.forget(A)
    kept.forget(C)
    assert [kept.count_owed_to(peer) for peer in (A, B, C)] == [0, 1, 0]


def test_what_nobody_knows() -> None:
    kept: Kept[int, str] = Kept()
    kept.keep(1, "x", [A])
    kept.acknowledge([7], A)
    kept.acknowledge([1], C)
    assert kept.owed(7, A) is None
    assert kept.owed(1, C) is None
    assert kept.owed_to(A) == ["x"]


def test_nothing_is_owed_to_who_is_gone() -> None:
    kept: Kept[int, str] = Kept()
    kept.keep(1, "x", [A])
    kept.keep(2, "y", [A, B])
    kept.forget(A)
    assert 1 not in kept
    assert kept.owed_to(B) == ["y"]
    assert kept.owed_to(A) == []
