"""What the pacer grants, in examples."""

from __future__ import annotations

import pytest

from pccl.transports.pacing.pacer import CREDIT_BYTES, RESERVE_BYTES_MIN, TURN_BYTES_MIN, Pacer

MS = 1_000_000


@pytest.mark.parametrize(
    ("bytes_per_s", "turn", "burst", "reserve"),
    [
        (64_000, TURN_BYTES_MIN, 3_200, RESERVE_BYTES_MIN),
        (10_000_000, 100_000, 500_000, 500_000),
    ],
)
def test_sizes_follow_the_rate(bytes_per_s: int, turn: int, burst: int, reserve: int) -> None:
    pacer = Pacer[str](bytes_per_s, 0)
    assert (pacer.turn_bytes, pacer.burst_bytes, pacer.reserve_bytes) == (turn, burst, reserve)


def test_a_turn_comes_when_enough_has_grown() -> None:
    pacer = Pacer[str](1_000_000, 0)
    one = pacer.open("one", 0)
    assert pacer.is_free(0)
    assert pacer.room(one, 1 << 30, 0) == 50_000
    pacer.spend(one, 50_000)
    assert pacer.due_ns is None, "no connection waits"
    assert not pacer.is_free(0)
    pacer.wait(one)
    assert pacer.due_ns == 10 * MS
    assert pacer.begin_turn(10 * MS - 1) is None
    assert pacer.begin_turn(10 * MS) == "one"
    assert pacer.room(one, 1 << 30, 10 * MS) == 10_000
    pacer.spend(one, 4_000)  # the network is full
    pacer.end_turn()
    other = pacer.open("other", 10 * MS)
    assert pacer.room(other, 5_000, 10 * MS) == 5_000, "the rest is not lost"


def test_a_short_message_goes_ahead_and_the_queue_pays_for_it() -> None:
    pacer = Pacer[str](1_000_000, 0)
    busy, beats = pacer.open("busy", 0), pacer.open("beats", 0)
    pacer.spend(busy, pacer.room(busy, 1 << 30, 0))
    pacer.wait(busy)
    assert pacer.room(beats, CREDIT_BYTES + 1, 0) == 0
    assert pacer.room(beats, 3_000, 0) == 3_000
    pacer.spend(beats, 3_000)
    assert pacer.due_ns == 13 * MS
    assert pacer.room(beats, 3_000, 0) == 0, "its credit is used up"
    assert pacer.room(busy, 100, 0) == 0, "a busy connection has none"


def test_a_place_in_the_queue() -> None:
    pacer = Pacer[str](1_000_000, 0)
    accounts = {name: pacer.open(name, 0) for name in ("a", "b", "c")}
    for name in ("a", "b", "c", "a"):
        pacer.wait(accounts[name])
    pacer.leave(accounts["b"])
    pacer.leave(accounts["b"])
    assert [pacer.begin_turn(0) for _ in range(3)] == ["a", "c", None]
