"""Where a peer listens, and what it tells others."""

from __future__ import annotations

import pytest

from pccl._api.listening import reachable_at, why_unmapped
from pccl.addresses import Advertised, parse_advertised
from pccl.transports.base import Address


@pytest.mark.parametrize(
    ("master", "advertised", "listens"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("::1", "", "::1"),
        ("10.0.0.1", "", "0.0.0.0"),
        ("2001:db8::1", "", "::"),
        ("name", "", "::"),
        ("127.0.0.1", "10.0.0.7", "0.0.0.0"),
        ("127.0.0.1", "name", "::"),
        ("10.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_where_a_peer_listens(master: str, advertised: str, listens: str) -> None:
    found = reachable_at(Address(master, 48148), Advertised(advertised, None), None)
    assert found.listen == Address(listens, 0)
    assert (found.ports, found.advertise_host, found.advertise_port) == (None, advertised, 0)


@pytest.mark.parametrize(
    ("advertised", "bound", "listens", "ports", "told"),
    [
        # without ``bound``, the port that is advertised is the one where it listens
        ("", None, "127.0.0.1", None, ("", 0)),
        (":5000-5010", None, "127.0.0.1", (5000, 5010), ("", 0)),
        ("10.0.0.7:5000", None, "0.0.0.0", (5000, 5000), ("10.0.0.7", 0)),
        # a host that is bound is bound; the others dial what is advertised, and the port with it
        ("10.0.0.7:5000", "127.0.0.1:6000", "127.0.0.1", (6000, 6000), ("10.0.0.7", 5000)),
        ("10.0.0.7:5000", "0.0.0.0:6000-6009", "0.0.0.0", (6000, 6009), ("10.0.0.7", 5000)),
        ("10.0.0.7", "127.0.0.1", "127.0.0.1", None, ("10.0.0.7", 0)),
        (":5000", "127.0.0.1", "127.0.0.1", (5000, 5000), ("", 5000)),
        # a port only: bound where the host that is advertised is reached
        ("10.0.0.7:5000", ":6000", "0.0.0.0", (6000, 6000), ("10.0.0.7", 5000)),
        (":5000", ":6000", "127.0.0.1", (6000, 6000), ("", 5000)),
        ("", ":6000", "127.0.0.1", (6000, 6000), ("", 0)),
    ],
)
def test_listening_elsewhere_than_others_are_told(
    advertised: str,
    bound: str | None,
    listens: str,
    ports: tuple[int, int] | None,
    told: tuple[str, int],
) -> None:
    found = reachable_at(
        Address("127.0.0.1", 48148),
        parse_advertised(advertised) if advertised else Advertised(),
        None if bound is None else parse_advertised(bound, "listen"),
    )
    assert found.listen == Address(listens, 0)
    assert found.ports == ports
    assert (found.advertise_host, found.advertise_port) == told


@pytest.mark.parametrize("master", ["127.0.0.1", "10.0.0.1", "name"])
def test_an_interface_says_who_can_reach_the_peer(master: str) -> None:
    found = reachable_at(Address(master, 48148), Advertised(), None, "eth0")
    assert (found.listen, found.interface) == (Address("::", 0), "eth0")
    bound = parse_advertised("10.0.0.7:6000", "listen")
    found = reachable_at(Address(master, 48148), Advertised(), bound, "eth0")
    assert (found.listen, found.interface) == (Address("10.0.0.7", 0), "eth0")


def test_a_range_cannot_be_told_to_others_when_it_listens_elsewhere() -> None:
    master, bound = Address("127.0.0.1", 48148), parse_advertised(":6000", "listen")
    with pytest.raises(ValueError, match=r"advertise: with listen, give one port .*not 5000-5001"):
        reachable_at(master, parse_advertised("host:5000-5001"), bound)


@pytest.mark.parametrize(
    ("advertised", "bound", "switched_on", "why"),
    [
        ("", None, True, ""),
        ("", None, False, "it is switched off (PCCL_MAP_PORT=0)"),
        (":5000", None, True, "the address of this peer is set (PCCL_ADVERTISE, PCCL_LISTEN)"),
        ("host", None, True, "the address of this peer is set (PCCL_ADVERTISE, PCCL_LISTEN)"),
        ("", ":5000", True, "the address of this peer is set (PCCL_ADVERTISE, PCCL_LISTEN)"),
        ("host", None, False, "it is switched off (PCCL_MAP_PORT=0)"),
    ],
)
def test_who_sets_an_address_needs_no_port_of_the_router(
    advertised: str, bound: str | None, switched_on: bool, why: str
) -> None:
    found = why_unmapped(
        parse_advertised(advertised) if advertised else Advertised(),
        None if bound is None else parse_advertised(bound, "listen"),
        switched_on=switched_on,
    )
    assert found == why
