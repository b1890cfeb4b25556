"""The model of address translators, with values worked out by hand from RFC 4787 and RFC 5382."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.protocol.types import NS_PER_S
from pccl.transports.base import Address
from pccl.transports.sim.nat import (
    ADDRESS_RESTRICTED,
    FULL_CONE,
    PORT_RESTRICTED,
    SYMMETRIC,
    Dependence,
    Nat,
    NatKind,
)

INSIDE, NEIGHBOUR = Address("192.168.1.2", 4000), Address("192.168.1.3", 4000)
RELAY = Address("203.0.113.1", 80)
SAME_HOST, ELSEWHERE = Address("203.0.113.1", 81), Address("203.0.113.2", 80)
CONES = [FULL_CONE, ADDRESS_RESTRICTED, PORT_RESTRICTED]


def nat_of(kind: NatKind, **changes: object) -> Nat:
    return Nat(replace(kind, **changes), "198.51.100.1")  # type: ignore[arg-type]


# -- mapping: RFC 4787, section 4.1; RFC 5382, REQ-1 -----------------------------------------------


@pytest.mark.parametrize("kind", CONES)
def test_an_endpoint_independent_mapping_serves_all_destinations(kind: NatKind) -> None:
    nat = nat_of(kind)
    seen = {nat.outbound(INSIDE, remote, 0) for remote in (RELAY, SAME_HOST, ELSEWHERE)}
    assert seen == {Address("198.51.100.1", 4000)}


def test_an_address_dependent_mapping_serves_one_host() -> None:
    nat = nat_of(NatKind(mapping=Dependence.ADDRESS))
    first, same, other = (nat.outbound(INSIDE, to, 0) for to in (RELAY, SAME_HOST, ELSEWHERE))
    assert first == same != other


def test_an_address_and_port_dependent_mapping_serves_one_endpoint() -> None:
    nat = nat_of(SYMMETRIC)
    seen = [nat.outbound(INSIDE, to, 0) for to in (RELAY, SAME_HOST, ELSEWHERE, RELAY)]
    assert len(set(seen)) == 3
    assert seen[0] == seen[3]


def test_two_hosts_inside_never_share_a_port() -> None:
    """No port overloading: RFC 5382, REQ-7."""
    nat = nat_of(FULL_CONE)
    assert [nat.outbound(one, RELAY, 0).port for one in (INSIDE, NEIGHBOUR)] == [4000, 4001]
    assert nat.inbound(4000, RELAY, 0) == INSIDE
    assert nat.inbound(4001, RELAY, 0) == NEIGHBOUR


# -- filtering: RFC 4787, section 5 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "passing"),
    [
        (FULL_CONE, {RELAY, SAME_HOST, ELSEWHERE}),
        (ADDRESS_RESTRICTED, {RELAY, SAME_HOST}),
        (PORT_RESTRICTED, {RELAY}),
        (SYMMETRIC, {RELAY}),
    ],
)
def test_what_may_answer(kind: NatKind, passing: set[Address]) -> None:
    nat = nat_of(kind)
    port = nat.outbound(INSIDE, RELAY, 0).port
    everybody = (RELAY, SAME_HOST, ELSEWHERE)
    assert {one for one in everybody if nat.inbound(port, one, 0) == INSIDE} == passing
    assert {nat.inbound(port + 1, one, 0) for one in everybody} == {None}


@pytest.mark.parametrize("kind", [*CONES, SYMMETRIC])
def test_without_a_mapping_nothing_comes_in(kind: NatKind) -> None:
    assert nat_of(kind).inbound(INSIDE.port, RELAY, 0) is None


@pytest.mark.parametrize("kind", CONES)
def test_a_packet_to_a_host_lets_its_packets_in(kind: NatKind) -> None:
    """What makes a simultaneous open pass: RFC 5128, section 3.4."""
    nat = nat_of(kind)
    port = nat.outbound(INSIDE, RELAY, 0).port
    nat.outbound(INSIDE, ELSEWHERE, 0)
    assert nat.inbound(port, ELSEWHERE, 0) == INSIDE


def test_a_firewall_lets_out_what_goes_to_some_ports() -> None:
    nat = nat_of(PORT_RESTRICTED, ports=(443,))
    assert nat.lets_out(Address("203.0.113.1", 443))
    assert not nat.lets_out(RELAY)


# -- hairpinning: RFC 4787, section 6; RFC 5382, REQ-8 ---------------------------------------------


@pytest.mark.parametrize(("hairpins", "target"), [(True, INSIDE), (False, None)])
def test_hosts_inside_reach_each_other_outside(hairpins: bool, target: Address | None) -> None:
    nat = nat_of(PORT_RESTRICTED, hairpins=hairpins)
    one, other = (nat.outbound(inside, RELAY, 0) for inside in (INSIDE, NEIGHBOUR))
    assert nat.inbound(one.port, other, 0) is None, "nothing was sent there yet"
    assert nat.outbound(INSIDE, other, 0) == one
    assert nat.inbound(one.port, other, 0) == target


# -- time-outs: RFC 4787, REQ-6; RFC 5382, REQ-5 ---------------------------------------------------


def test_a_mapping_ends_after_four_minutes_without_a_packet_from_inside() -> None:
    nat = nat_of(PORT_RESTRICTED)
    nat.outbound(INSIDE, RELAY, 0)
    nat.outbound(INSIDE, RELAY, 100 * NS_PER_S)
    assert nat.inbound(4000, RELAY, 340 * NS_PER_S) == INSIDE
    assert nat.inbound(4000, RELAY, 340 * NS_PER_S + 1) is None


def test_a_filter_forgets_one_destination_and_the_mapping_stays() -> None:
    nat = nat_of(PORT_RESTRICTED, idle_ns=10)
    nat.outbound(INSIDE, RELAY, 0)
    nat.outbound(INSIDE, ELSEWHERE, 5)
    assert nat.inbound(4000, RELAY, 11) is None
    assert nat.inbound(4000, ELSEWHERE, 11) == INSIDE


def test_the_port_of_a_mapping_that_has_ended_is_free() -> None:
    nat = nat_of(PORT_RESTRICTED, idle_ns=10)
    nat.outbound(INSIDE, RELAY, 0)
    assert nat.outbound(NEIGHBOUR, RELAY, 11).port == 4000


def test_an_open_connection_keeps_its_mapping() -> None:
    held = {(INSIDE, RELAY)}

    def holds(inside: Address, remote: Address) -> bool:
        return (inside, remote) in held

    nat = Nat(replace(SYMMETRIC, idle_ns=10), "198.51.100.1", holds)
    port = nat.outbound(INSIDE, RELAY, 0).port
    assert nat.inbound(port, RELAY, 1000) == INSIDE
    held.clear()
    assert nat.inbound(port, RELAY, 1000) is None
