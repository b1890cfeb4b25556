"""Where a peer listens, and the address that it announces.

Not in :mod:`pccl.addresses`, because a master needs addresses, but nothing of a peer's engine.
"""

from __future__ import annotations

from ipaddress import ip_address

from pccl.addresses import Advertised
from pccl.machines.router_path import why_not_asked
from pccl.runtime.requests import PeerOptions
from pccl.transports.base import Address


def reachable_at(
    master: Address, advertised: Advertised, bound: Advertised | None, interface: str = ""
) -> PeerOptions:
    """Return the address at which a peer listens, and the address that it announces.

    With a master on this machine, only this machine can reach the peer, unless an argument says
    otherwise.

    Args:
        master: address of the master.
        advertised: announced address; the peer also listens there, unless ``bound`` is given.
        bound: address to listen at.
        interface: network interface to listen at; empty: any.

    Raises:
        ValueError: ``bound`` is given, and ``advertised`` has a range of ports.
    """
    # An interface tells by itself who can reach the peer.
    anywhere = Address("::", 0) if interface else _any_port(advertised.host or master.host)
    if bound is None:
        return PeerOptions(
            listen=anywhere,
            ports=advertised.ports,
            advertise_host=advertised.host,
            interface=interface,
        )
    first, last = advertised.ports or (0, 0)
    if first != last:
        raise ValueError(
            f"advertise: with listen, give one port for other peers to dial, not {first}-{last}"
        )
    return PeerOptions(
        listen=Address(bound.host, 0) if bound.host else anywhere,
        ports=bound.ports or advertised.ports,
        advertise_host=advertised.host,
        advertise_port=first,
        interface=interface,
    )


def why_unmapped(advertised: Advertised, bound: Advertised | None, *, switched_on: bool) -> str:
    """Return why the settings of a peer let it ask its router for no port; empty: it may."""
    announces = advertised != Advertised() or bound is not None
    return why_not_asked(None, switched_on=switched_on, announces=announces)


def _any_port(host: str) -> Address:
    """Return the address to listen at if other peers reach this one as ``host``."""
    try:
        literal = ip_address(host)
    except ValueError:  # a name may have IPv4 or IPv6 addresses
        return Address("::", 0)
    if literal.is_loopback:
        return Address(host, 0)
    return Address("::" if literal.version == 6 else "0.0.0.0", 0)
