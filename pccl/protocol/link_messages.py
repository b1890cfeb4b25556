"""Control messages about links: which peers to dial, the outcomes, and measured rates.

:mod:`pccl.protocol.messages` imports them, and has the list of all messages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.limits import LINKS_BATCH_MAX, PADDING_BYTES_MAX, PEERS_MAX, REASON_BYTES_MAX
from pccl.protocol.types import AtMost, Below, HostName, Member, PeerId


class LinkPath(enum.IntEnum):
    """How two peers are connected."""

    DIRECT = 0
    """The younger peer has dialled the elder, as a peer does first."""
    DIALLED_BACK = 1
    """The elder has dialled the younger, before a dial of the younger has succeeded."""
    MAPPED = 2
    """One has dialled a port that the router of the other forwards."""
    PUNCHED = 3
    """Both have dialled each other at the same time."""
    RELAYED = 4
    """A relay forwards their data."""


# -- peer to master ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """The measurements of a link in use by one of its ends; 0: unknown."""

    rtt_ns: int
    """Shortest round trip in nanoseconds."""
    bytes_per_s: int
    """Rate at which this end could send."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The peer at the other end of a link, and the measurements of this end."""

    peer: PeerId
    measure: LinkMeasure


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The link to another peer came up, broke, or could not be made."""

    peer: PeerId
    up: bool
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]
    """Why it is down; empty if it is up."""
    relay: PeerId | None = None
    """The relay that carries it; 0: the master, None: it is direct."""
    path: LinkPath = LinkPath.DIRECT
    """How the two are connected, if the link is up."""


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """Measures of links that changed much; 0: unknown."""

    links: Annotated[tuple[MeasuredLink, ...], AtMost(LINKS_BATCH_MAX)]


@dataclass(frozen=True, slots=True)
class AddressProbed:
    """Answer to ``ProbeAddress``."""

    peer: PeerId
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]
    """Why the sender cannot dial that peer; empty: it can."""


@dataclass(frozen=True, slots=True)
class AddressQuery:
    """A process outside the run asks how the master sees it, and for a test of a port."""

    host: HostName = ""
    """If empty, the address that the master sees."""
    port: Annotated[int, Below(1 << 16)] = 0
    """0: none."""
    padding: Annotated[bytes, AtMost(PADDING_BYTES_MAX)] = b""
    """Makes the message as long as a packet, to test whether long packets arrive."""


# -- master to peer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Changes among the older peers of the own group, newcomers included."""

    elders: Annotated[tuple[Member, ...], AtMost(PEERS_MAX)]
    """Dial these, too; after ``Registered`` and ``Resumed`` the complete list."""
    gone: Annotated[tuple[PeerId, ...], AtMost(PEERS_MAX)] = ()
    """Stop dialling these peers."""


@dataclass(frozen=True, slots=True)
class DialNewcomers:
    """Dial these newcomers, which cannot dial this peer. Replaces the last list."""

    newcomers: Annotated[tuple[Member, ...], AtMost(PEERS_MAX)]


@dataclass(frozen=True, slots=True)
class Meet:
    """Make the link to this member through a relay.

    Both peers dial the relay. Then the younger one begins the handshake of a lane.
    """

    member: Member
    relay: Member
    """If its id is 0, the master that sends this."""


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Test whether this newcomer can be dialled."""

    member: Member
    seen: HostName
    """The host from which it is connected."""


@dataclass(frozen=True, slots=True)
class Undialable:
    """No process can dial this peer at the address that it declares."""

    reason: str
    """The address, and who dialled it."""


@dataclass(frozen=True, slots=True)
class AddressIs:
    """Answer to ``AddressQuery``."""

    seen: HostName
    """The host from which the asking process is connected."""
    dialled: bool
    """Whether the master has dialled."""
    reason: str
    """Why no peer answered, or the master did not dial; empty: one did, or no port was given."""
    unix_us: int
    """The master's wall clock, in microseconds since 1970."""
    port: Annotated[int, Below(1 << 16)]
    """The port from which the sender of the query is connected to the master."""
    relays: bool
    """The master forwards between peers that cannot dial each other."""
    padding: Annotated[bytes, AtMost(PADDING_BYTES_MAX)] = b""
    """That of the query, if the master did not dial."""
