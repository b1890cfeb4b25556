"""Judges how the links of this machine to others would be made, and what would improve them. Pure.

A link is direct if one side can dial the other. Otherwise a relay introduces the two: both dial at
the same time, which needs routers that keep the port of a connection, or the relay forwards.
"""

from __future__ import annotations

import enum
from ipaddress import IPv6Address, ip_address

from pccl.cli.doctor.checks import Finding, Severity, is_inside
from pccl.inquiry import Examination, Sighting

BY_HAND = "forward a TCP port of the router, such as 48200, to this machine, and announce it: "
ANNOUNCE = "pccl join --advertise :48200 (or PCCL_ADVERTISE=:48200)"
"""Listens on this port, and announces it with the address that the master sees."""


UNREACHED = "cannot reach "
"""The reason of a failed dial begins with this. With another reason, a connection was made."""

ANOTHER = "another process answered"
"""The reason of a failed handshake with another process begins with this."""


class PortChange(enum.Enum):
    """What a router does with the port of a connection from this machine."""

    NO_ROUTER = enum.auto()
    """Other peers see the address of this machine."""
    KEPT = enum.auto()
    ONE = enum.auto()
    """Another port, which is the same for each destination."""
    EACH = enum.auto()
    """Another port for each destination: a symmetric NAT."""
    UNKNOWN = enum.auto()
    """Another port, reported by one destination only."""


def port_change(made: Examination) -> PortChange:
    """Return which port other processes see instead of the port of this machine."""
    outside = sightings_outside(made)
    if not outside:
        return PortChange.NO_ROUTER
    if len({(plain(one.host), one.port) for one in outside}) > 1:
        return PortChange.EACH
    if outside[0].port == made.local_port:
        return PortChange.KEPT
    return PortChange.ONE if len(outside) > 1 else PortChange.UNKNOWN


def sightings_outside(made: Examination) -> list[Sighting]:
    """Return the sightings from the other side of the router.

    A member that is reached by a VPN sees a private address, which tells nothing of the router.
    """
    outside = [one for one in made.sightings if one.host and plain(one.host) != plain(made.local)]
    public = [one for one in outside if not is_inside(one.host)]
    return public or outside


def nat_finding(made: Examination) -> Finding:
    """Judge the translation of addresses between this machine and others."""
    change, outside = port_change(made), sightings_outside(made)
    if change is PortChange.NO_ROUTER:
        found = f"none: the master sees this machine as {made.seen}, too"
        return Finding("NAT", Severity.OK, found)
    found = f"the master sees this machine as {made.seen}, and its own address is {made.local}"
    if made.is_reached:
        return Finding("NAT", Severity.OK, f"{found}; the NAT lets peers in")
    ports = ", ".join(f"{one.port} toward {one.by}" for one in outside)
    match change:
        case PortChange.KEPT:
            found += f"; the NAT keeps the port ({ports})"
        case PortChange.ONE:
            found += f"; the NAT replaces port {made.local_port} by one for all ({ports})"
        case PortChange.EACH:
            found += f"; the NAT is symmetric: another port for each destination ({ports})"
        case _:
            found += (
                f"; the NAT replaces port {made.local_port} ({ports}); whether it is symmetric "
                "could not be told, because no member outside has seen the port, too"
            )
    return Finding("NAT", Severity.WARN, found, BY_HAND + ANNOUNCE)


def links_finding(made: Examination) -> Finding:
    """Judge how links between this machine and others would be made."""
    if made.is_reached:
        forwarded = made.router.forwarded if made.router is not None else None
        how = f", which the router forwards ({forwarded.by})" if forwarded is not None else ""
        return Finding("links", Severity.OK, f"direct: others dial {made.dialled_at}{how}")
    if not made.was_dialled:
        found = "this machine dials others; whether they can dial it is not known"
        return Finding("links", Severity.OK, found)
    found = "direct to members that this machine can dial, because others cannot dial it"
    if not has_relay(made):
        level = Severity.FAIL if any(one.reason for one in made.members) else Severity.WARN
        found += "; no link to the others, because nobody forwards"
        return Finding("links", level, found, f"start the master with {RELAY}; or {_better(made)}")
    relay = "the master" if made.relays else "a member"
    match port_change(made):
        case PortChange.EACH:
            found += f"; {relay} forwards to the others, because the NAT is symmetric"
        case PortChange.UNKNOWN:
            found += f"; {relay} forwards to the others, unless the NAT is not symmetric"
        case _:
            found += (
                f"; to the others, both dial at the same time, and {relay} forwards until then, "
                "or if that fails"
            )
    return Finding("links", Severity.WARN, found, f"for direct links: {_better(made)}")


RELAY = "`pccl master --relay`"


def has_relay(made: Examination) -> bool:
    """Whether someone may forward for this machine: the master, or a member that it can dial."""
    return made.relays or any(not one.reason for one in made.members)


def reach_in_finding(made: Examination) -> Finding:
    """Judge whether others can dial this machine."""
    if made.is_reached:
        return Finding("reach in", Severity.OK, f"the master has reached {made.dialled_at}")
    if not made.was_dialled:
        remedy = "run the doctor again later"
        return Finding("reach in", Severity.WARN, f"not tested: {made.reason}", remedy)
    if not made.reason or not made.reason.startswith(UNREACHED):
        found = f"another process than this one has answered the master at {made.dialled_at}"
        if made.reason and not made.reason.startswith(ANOTHER):
            found += f": {made.reason}"
        remedy = "correct the address that this machine announces (PCCL_ADVERTISE, --advertise)"
        return Finding("reach in", Severity.WARN, found, remedy)
    reason = made.reason.removeprefix(f"cannot reach {made.dialled_at}: ")
    found = f"the master cannot reach {made.dialled_at}: {reason}"
    return Finding("reach in", Severity.WARN, found, _better(made))


def _better(made: Examination) -> str:
    if port_change(made) is not PortChange.NO_ROUTER:
        return BY_HAND + ANNOUNCE
    return (
        "open a TCP port, such as 48200, in the firewall of this machine and of its network (in a "
        f"cloud, the security group), and announce it: {ANNOUNCE}"
    )


def plain(host: str) -> object:
    """Return what two texts of one address have in common."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
