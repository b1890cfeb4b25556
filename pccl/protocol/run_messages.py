"""Control messages between masters: the run of a master, and its members.

:mod:`pccl.protocol.messages` imports them, and has the list of all messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.handshake import NO_RUN
from pccl.protocol.limits import PEERS_MAX, TOKEN_DIGEST_BYTES
from pccl.protocol.types import AtMost, Below, PeerId


@dataclass(frozen=True, slots=True)
class MemberProof:
    """One member, and the digest of its resume token."""

    peer: PeerId
    digest: Annotated[bytes, AtMost(TOKEN_DIGEST_BYTES)]


@dataclass(frozen=True, slots=True)
class RunQuery:
    """A standby asks which run it may have to continue; its first and only message."""

    run: bytes = NO_RUN
    """Zeros if it knows none."""
    version: int | None = None
    """The newest roster whose members it knows."""


@dataclass(frozen=True, slots=True)
class RunIs:
    """Answer to ``RunQuery``."""

    run: bytes
    """Zeros if the master coordinates none."""
    term: Annotated[int, Below(1 << 32)]
    settled: bool
    """The master no longer ends this run in favour of an older one."""
    version: int = 0
    members: Annotated[tuple[MemberProof, ...], AtMost(PEERS_MAX)] | None = None
    """Members of the newest roster; nil if the standby knows them, or the master does not."""
