"""The table of when a peer asks its router for a port."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.router_path import (
    ForwardedPort,
    MappingProtocol,
    RouterPath,
    is_outside,
    why_not_asked,
)

HOME = RouterPath("192.168.1.7", "8.8.8.8", "192.168.1.1", "192.168.1.7")
"""At home, with a master elsewhere."""


@pytest.mark.parametrize("own", ["192.168.1.7", "10.0.0.7", "172.16.0.1", "172.31.255.254"])
def test_a_private_address_is_worth_a_question(own: str) -> None:
    assert why_not_asked(replace(HOME, own=own, own_inside=own)) == ""
    assert why_not_asked(replace(HOME, own=f"::ffff:{own}", own_inside=f"::ffff:{own}")) == ""


def test_without_a_master_the_router_is_asked() -> None:
    assert why_not_asked(replace(HOME, master="")) == ""
    assert why_not_asked(None) == ""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (replace(HOME, own="127.0.0.1", master="127.0.0.1"), "the master is on this machine"),
        (replace(HOME, own="::1", master="::1"), "the master is on this machine"),
        (replace(HOME, master="192.168.1.7"), "the master is on this machine"),
        (replace(HOME, own="2001:db8::7", master="2001:db8::1"), "over IPv6 (2001:db8::7)"),
        (replace(HOME, own="fd00::7", master="fd00::1"), "over IPv6 (fd00::7)"),
        (replace(HOME, own="100.64.1.2"), "100.64.1.2 is an address of the provider or of a VPN"),
        (replace(HOME, own="198.51.100.7"), "198.51.100.7 is not a private address"),
        (replace(HOME, own="9.9.9.9"), "9.9.9.9 is not a private address"),
        (replace(HOME, own="169.254.3.4"), "169.254.3.4 is not a private address"),
        (replace(HOME, own="172.32.0.1"), "172.32.0.1 is not a private address"),
        (replace(HOME, master="192.168.1.5"), "(192.168.1.5) is in a private network, too"),
        (replace(HOME, master="100.100.1.1"), "(100.100.1.1) is in a private network, too"),
        (replace(HOME, router="", no_router="known on Linux only"), "known on Linux only"),
        (replace(HOME, router=""), "this machine has no router"),
        (
            replace(HOME, own="10.8.0.2"),
            "the path to the master does not lead through the router 192.168.1.1 (a VPN?)",
        ),
        (replace(HOME, own=""), "no route to the master"),
        (replace(HOME, own="nonsense"), "no route to the master"),
    ],
)
def test_no_question(path: RouterPath, why: str) -> None:
    assert why in why_not_asked(path)


def test_settings_count_first() -> None:
    assert why_not_asked(HOME, switched_on=False) == "it is switched off (PCCL_MAP_PORT=0)"
    assert why_not_asked(None, switched_on=False, announces=True).startswith("it is switched off")
    assert why_not_asked(HOME, announces=True) == (
        "the address of this peer is set (PCCL_ADVERTISE, PCCL_LISTEN)"
    )


@pytest.mark.parametrize(
    ("host", "public"),
    [
        ("8.8.4.4", "8.8.4.4"),
        ("192.168.100.2", ""),  # a second router
        ("100.72.0.4", ""),  # the provider translates, too
        ("0.0.0.0", ""),
        ("203.0.113.7", ""),  # for documentation
        ("", ""),
        ("nonsense", ""),
    ],
)
def test_the_host_to_announce(host: str, public: str) -> None:
    assert ForwardedPort(MappingProtocol.PCP, host, 48200).public_host == public


@pytest.mark.parametrize(
    ("host", "outside"),
    [
        ("8.8.4.4", True),
        ("203.0.113.7", True),
        ("::ffff:8.8.4.4", True),
        ("192.168.1.9", False),
        ("100.72.0.4", False),  # perhaps a VPN
        ("127.0.0.1", False),
        ("169.254.3.3", False),
        ("2001:db8::7", False),  # not translated
        ("peer 3 through peer 4", False),
        ("", False),
    ],
)
def test_what_comes_through_the_router(host: str, outside: bool) -> None:
    assert is_outside(host) is outside
