"""Control messages between masters: which run a master has, and who is in it.

They belong to :mod:`pccl.protocol.messages`, which names them all.
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
    """First and only message of a standby that asks which run it may have to take up."""

    run: bytes = NO_RUN
    """The run that it knows; zeros: none."""
    version: int | None = None
    """The newest roster of that run whose members it knows; None: it knows none."""


@dataclass(frozen=True, slots=True)
class RunIs:
    """Answer to ``RunQuery``."""

    run: bytes
    """Zeros: this master coordinates none."""
    term: Annotated[int, Below(1 << 32)]
    settled: bool
    """Whether it would not give way to an older run any more."""
    version: int = 0
    """Of the newest roster."""
    members: Annotated[tuple[MemberProof, ...], AtMost(PEERS_MAX)] | None = None
    """The members in that roster.

    None: the standby knows them already, or this master does not know them.
    """
