"""What :class:`LinkUpkeep` wants to be done."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import Member, PeerId


@dataclass(frozen=True, slots=True)
class DialLane:
    """Dial a lane; if there is a pause, call ``LinkUpkeep.due`` after the pause instead."""

    member: Member
    number: int
    pause_ns: int = 0
    segment_bytes: int = 0
    """The largest segment of its connection; 0: as the system chooses."""
    met_at: Member | None = None
    """The relay that tells how others see a new port, if both sides dial; None: only this one does.
    """
    is_brief: bool = False
    """Whether to wait for an answer for a third of ``dial_s`` only."""


@dataclass(frozen=True, slots=True)
class GiveUpLane:
    """Stop dialling a lane; close the lane if it is spare."""

    peer: PeerId
    number: int
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class DropLink:
    """Close a link and forget it."""

    peer: PeerId
    why: str = ""
    """Text for the log; empty for no log line."""


@dataclass(frozen=True, slots=True)
class LeaveRelay:
    """Abort the lane to a peer that a relay forwards, because the relay has left the run."""

    peer: PeerId
    relay: PeerId


@dataclass(frozen=True, slots=True)
class TellLink:
    """Report that a link is up (``reason`` is None), or why it is down or cannot be made."""

    peer: PeerId
    reason: str | None
    relay: PeerId | None = None
    """The relay that carries the link, if it is up; 0: the master. None: it is direct."""
    path: LinkPath = LinkPath.DIRECT
    """How the two peers are connected, if the link is up."""


@dataclass(frozen=True, slots=True)
class NarrowLink:
    """Report that large packets vanish on the way to a peer, and that the link avoids them."""

    peer: PeerId
    segment_bytes: int
    is_proven: bool
    """Whether segments of this size have passed; otherwise the next lanes try them."""


LinkStep = DialLane | GiveUpLane | DropLink | LeaveRelay | TellLink | NarrowLink
