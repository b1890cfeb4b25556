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
    """The state of the link to another peer has changed."""

    peer: PeerId
    up: bool
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """What links can do, of those that have changed much since they were reported last."""

    links: Annotated[tuple[MeasuredLink, ...], AtMost(LINKS_BATCH_MAX)]


@dataclass(frozen=True, slots=True)
class AddressProbed:
    """Answer to ``ProbeAddress``."""

    peer: PeerId
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]
    """Why it cannot be dialled; empty: it can."""


# -- master to peer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Changes among the older peers of the own group, members and pending ones.

    After ``Registered`` and ``Resumed`` it is the complete list.
    """

    elders: Annotated[tuple[Member, ...], AtMost(PEERS_MAX)]
    """Older peers that this peer shall dial as well."""
    gone: Annotated[tuple[PeerId, ...], AtMost(PEERS_MAX)] = ()
    """Older peers that have left the run."""


@dataclass(frozen=True, slots=True)
class DialNewcomers:
    """All newcomers that this peer shall dial, since they cannot reach it."""

    newcomers: Annotated[tuple[Member, ...], AtMost(PEERS_MAX)]


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Find out whether this newcomer can be dialled; ``AddressProbed`` is the answer."""

    member: Member
    seen: Annotated[str, AtMost(HOST_CHARACTERS_MAX)]
    """The host that its master sees it at."""


@dataclass(frozen=True, slots=True)
class Undialable:
    """Nobody can dial this peer where it says that it can be reached."""

    reason: str
    """Where, and who has tried in vain."""
