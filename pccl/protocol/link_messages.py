"""Control messages about links: who dials whom, what came of it, and what links can do.

They belong to :mod:`pccl.protocol.messages`, which names them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.limits import HOST_CHARACTERS_MAX, LINKS_BATCH_MAX, PEERS_MAX, REASON_BYTES_MAX
from pccl.protocol.types import AtMost, MeasuredLink, Member, PeerId

# -- peer to master ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The link to another peer came up, went down, or could not be made."""

    peer: PeerId
    up: bool
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """Measurements of links that have changed much since the last report; 0 is unknown."""

    links: Annotated[tuple[MeasuredLink, ...], AtMost(LINKS_BATCH_MAX)]


@dataclass(frozen=True, slots=True)
class AddressProbed:
    """Answer to ``ProbeAddress``."""

    peer: PeerId
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]
    """Why that peer cannot be dialled; empty if it can."""


# -- master to peer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Changes among the older peers of the own group, newcomers included."""

    elders: Annotated[tuple[Member, ...], AtMost(PEERS_MAX)]
    """Dial these, too. After ``Registered`` and ``Resumed`` the list is complete."""
    gone: Annotated[tuple[PeerId, ...], AtMost(PEERS_MAX)] = ()
    """Stop dialling these."""


@dataclass(frozen=True, slots=True)
class DialNewcomers:
    """Dial all these, since they cannot dial this peer; it replaces the last list."""

    newcomers: Annotated[tuple[Member, ...], AtMost(PEERS_MAX)]


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Find out whether this newcomer can be dialled."""

    member: Member
    seen: Annotated[str, AtMost(HOST_CHARACTERS_MAX)]
    """The host at which the master sees it."""


@dataclass(frozen=True, slots=True)
class Undialable:
    """This peer cannot be dialled at the address that it declares."""

    reason: str
    """The address, and the process that tried it."""
