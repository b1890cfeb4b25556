"""Control messages from outside the run: questions of other masters, and of people.

:mod:`pccl.protocol.messages` imports them, and has the list of all messages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import EVIDENCE_BYTES_MAX, PEERS_MAX
from pccl.protocol.types import KEY_BYTES, AtMost, Below, PeerId


@dataclass(frozen=True, slots=True)
class MemberProof:
    """One member, and its public key."""

    peer: PeerId
    key: Annotated[bytes, AtMost(KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class RunQuery:
    """A standby asks which run it may have to continue; its only message."""

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
    """The run no longer gives way to an older one."""
    version: int = 0
    members: Annotated[tuple[MemberProof, ...], AtMost(PEERS_MAX)] | None = None
    """Of the newest roster; nil if the standby knows them, or the master does not."""


class EvidenceKind(enum.IntEnum):
    """What a person can ask a peer for, with the same right as for the status of the run."""

    STATE = 1
    """What it does now: calls, transfers, links."""
    RECORD = 2
    """What it has done lately: the recorder."""
    STACKS = 3
    """Where its threads are. Only in a run with a token, and only if the peer allows it."""
    PROCESS = 4
    """What the operating system of the master knows: of its connection to the peer, and of the
    peer's process, if the master's process has started it. The peer is not asked."""


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """A person asks one peer through its master; the only message."""

    peer: PeerId
    kind: EvidenceKind


@dataclass(frozen=True, slots=True)
class EvidenceQuery:
    """The master passes the request on."""

    query: Annotated[int, Below(1 << 32)]
    kind: EvidenceKind


@dataclass(frozen=True, slots=True)
class EvidenceReply:
    """Answer to ``EvidenceQuery``."""

    query: Annotated[int, Below(1 << 32)]
    data: Annotated[bytes, AtMost(EVIDENCE_BYTES_MAX)]
    """Compressed JSON (zlib); empty if the peer refuses."""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class EvidenceReport:
    """Answer to ``EvidenceRequest``."""

    data: Annotated[bytes, AtMost(EVIDENCE_BYTES_MAX)]
    refusal: str = ""
    """Why there is no evidence; empty if there is."""
    silent: bool = False
    """Whether the peer was asked, and has not answered in time."""
