"""Who has to go at a full port, against a plain list of who is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.guards.source_shares import PortLimits, SourceShares, port_limits, source_of
from pccl.protocol.limits import LINGERING_MAX, NEWCOMERS_MAX, UNPROVEN_MAX

HOSTS = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "host"]


@dataclass(frozen=True)
class Waiting:
    """A connection that is there."""

    key: int
    host: str
    spoken: bool = False


@given(
    room=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "add", "spoke", "remove"]), st.integers(0, 50)),
        max_size=60,
    ),
)
def test_who_goes(room: int, steps: list[tuple[str, int]]) -> None:
    shares: SourceShares[int] = SourceShares(room)
    there: list[Waiting] = []  # the oldest first
    for number, (what, drawn) in enumerate(steps):
        if what == "add":
            host = HOSTS[drawn % len(HOSTS)]
            goes = shares.add(number, host)
            if len(there) < room:
                assert goes is None
            else:
                hosts = [one.host for one in there]
                counts = {at: hosts.count(at) + (at == host) for at in hosts}
                (gone,) = [one for one in there if one.key == goes]
                assert counts[gone.host] == max(counts.values())
                rivals = [one for one in there if one.host == gone.host]
                silent = [one for one in rivals if not one.spoken]
                assert gone == (silent or rivals)[0]
                there.remove(gone)
            there.append(Waiting(number, host))
        elif there:
            one = there[drawn % len(there)]
            if what == "spoke":
                shares.spoke(one.key)
                there = [replace(w, spoken=w.spoken or w == one) for w in there]
            else:
                shares.remove(one.key)
                shares.remove(one.key)
                there.remove(one)
        assert len(shares) == len(there) <= room
        assert all(one.key in shares for one in there)


@given(room=st.integers(2, 40), flood=st.integers(0, 200), spoken=st.booleans())
def test_one_address_never_pushes_out_another_ones_only_connection(
    room: int, flood: int, spoken: bool
) -> None:
    shares: SourceShares[int] = SourceShares(room)
    shares.add(-1, "192.0.2.1")
    for number in range(flood):
        shares.add(number, "192.0.2.2")
        if spoken:
            shares.spoke(number)
    assert -1 in shares
    assert len(shares) == min(room, 1 + flood)


@given(room=st.integers(2, 40), flood=st.integers(0, 200))
def test_who_has_spoken_stays_while_the_same_address_has_one_that_has_not(
    room: int, flood: int
) -> None:
    """Behind one NAT: an honest peer, and somebody who floods the port."""
    shares: SourceShares[int] = SourceShares(room)
    shares.add(-1, "192.0.2.1")
    shares.spoke(-1)
    for number in range(flood):
        shares.add(number, "192.0.2.1")
    assert -1 in shares


def test_alike_addresses_lose_the_one_that_has_been_there_for_longest() -> None:
    shares: SourceShares[int] = SourceShares(3)
    assert [shares.add(number, f"192.0.2.{number}") for number in range(3)] == [None] * 3
    assert shares.add(3, "192.0.2.3") == 0
    shares.spoke(1)
    assert shares.add(4, "192.0.2.4") == 2  # it has said nothing, and comes before the one that has
    assert [number in shares for number in range(5)] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:7::1", "2001:db8:0:7:ffff::2", True),
        ("2001:db8:0:7::1", "2001:db8:0:8::1", False),
        ("fe80::1%2", "fe80::2%2", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("no:address", "no:address", True),
        ("no:address", "no:other", False),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (source_of(one) == source_of(other)) is same


@pytest.mark.parametrize(
    ("descriptors", "limits"),
    [
        (256, PortLimits(64, 64, 16)),
        (1024, PortLimits(256, 256, 64)),
        (1 << 20, PortLimits(UNPROVEN_MAX, NEWCOMERS_MAX, LINGERING_MAX)),
        (3, PortLimits(1, 1, 1)),
        (0, PortLimits(1, 1, 1)),
    ],
)
def test_limits_follow_from_the_descriptors_of_the_process(
    descriptors: int, limits: PortLimits
) -> None:
    assert port_limits(descriptors) == limits


@given(st.integers(64, 1 << 21))
def test_strangers_leave_two_fifths_of_the_descriptors(descriptors: int) -> None:
    limits = port_limits(descriptors)
    strangers = limits.unproven + limits.newcomers + limits.lingering
    assert descriptors - strangers >= descriptors * 2 // 5
