"""Whether a peer asks its router for a port, and what it announces if the router forwards one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

from pccl.protocol.port_mapping.answers import ROUTER_PORT

PRIVATE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
"""Networks behind a router that translates addresses (RFC 1918)."""

SHARED = IPv4Network("100.64.0.0/10")
"""Addresses that a provider shares among its customers (RFC 6598). Some VPNs use them, too."""


class MappingProtocol(StrEnum):
    """How a router is asked for a port, in this order."""

    PCP = "PCP"
    NAT_PMP = "NAT-PMP"
    UPNP = "UPnP"


@dataclass(frozen=True, slots=True)
class ForwardedPort:
    """A port that a router forwards to this process.

    Attributes:
        by: the protocol in which the router was asked.
        host: the router's own address on the other side; empty: unknown.
        port: its port there.
    """

    by: MappingProtocol
    host: str
    port: int

    @property
    def public_host(self) -> str:
        """The router's address if everyone can dial it.

        Otherwise empty: another router lies before it, and only the master sees the public address.
        """
        address = _address(self.host)
        return self.host if address is not None and address.is_global else ""


@dataclass(frozen=True, slots=True)
class RouterPath:
    """How this machine reaches the master and its router, as numeric hosts.

    Attributes:
        own: address of this machine toward the master; empty: unknown.
        master: address of the master; empty: none is given.
        router: address of the router; empty: there is none.
        own_inside: address of this machine toward the router.
        no_router: why there is no router.
        router_port: where the router answers.
    """

    own: str
    master: str
    router: str = ""
    own_inside: str = ""
    no_router: str = ""
    router_port: int = ROUTER_PORT


def why_not_asked(
    path: RouterPath | None, *, switched_on: bool = True, announces: bool = False
) -> str:
    """Return why a peer asks its router for no port; empty: it asks.

    Args:
        path: what is known of the network; None: nothing yet.
        switched_on: whether the user allows it.
        announces: whether the user has set where this peer listens, or what it announces.
    """
    if not switched_on:
        return "it is switched off (PCCL_MAP_PORT=0)"
    if announces:
        return "the address of this peer is set (PCCL_ADVERTISE, PCCL_LISTEN)"
    if path is None:
        return ""
    own, master = _address(path.own), _address(path.master)
    if own is None:
        return "this machine has no route to the master"
    if own.is_loopback or own == master:
        return "the master is on this machine"
    if isinstance(own, IPv6Address):
        return f"this machine reaches the master over IPv6 ({own}), without address translation"
    if own in SHARED:
        return f"{own} is an address of the provider or of a VPN, which no home router forwards to"
    if not any(own in network for network in PRIVATE):
        return f"{own} is not a private address"
    if master is not None and not master.is_global:
        return f"the master ({master}) is in a private network, too"
    if not path.router:
        return path.no_router or "this machine has no router"
    if path.own_inside != path.own:
        return f"the path to the master does not lead through the router {path.router} (a VPN?)"
    return ""


def is_outside(host: str) -> bool:
    """Whether a connection from ``host`` to this machine comes through the router, over IPv4."""
    address = _address(host)
    if not isinstance(address, IPv4Address) or address.is_loopback or address.is_link_local:
        return False
    return not any(address in network for network in (*PRIVATE, SHARED))


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
