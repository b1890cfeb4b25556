"""Versions of a shared state that members publish, and control messages about them.

A *reader* is a process outside the run. It fetches versions from members and from other readers.
The master knows which version counts, and which processes have it; it never sees contents.

:mod:`pccl.protocol.messages` imports the messages, and has the list of all messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.handshake.certificates import Certificate
from pccl.protocol.limits import (
    DELTAS_MAX,
    ELDERS_TOLD_MAX,
    HOLDERS_TOLD_MAX,
    VERSIONS_ANNOUNCED_MAX,
)
from pccl.protocol.shared_state import Lineage
from pccl.protocol.types import AtMost, Below, HostName, Hosts, Member, PeerId, PeerName


@dataclass(frozen=True, slots=True)
class StateName:
    """The digests that name one state: of its layout, and of its contents."""

    layout: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class VersionDelta:
    """The changes between two versions. They are a state of their own, with a tensor per piece."""

    before: bytes
    """Digest of the contents before."""
    after: bytes
    """Digest of the contents after."""
    state: StateName
    nbytes: int


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """One version of a shared state."""

    number: int
    """The revision of the state."""
    state: StateName
    nbytes: int
    lineage: Lineage | None = None
    """The last synchronization that gave these contents to the group."""
    deltas: Annotated[tuple[VersionDelta, ...], AtMost(DELTAS_MAX)] = ()
    """A chain that ends with this version; the sender has all of these states."""

    @property
    def key(self) -> tuple[int, StateName, int, Lineage | None]:
        """What members must agree on. One that has joined lately has fewer deltas."""
        return self.number, self.state, self.nbytes, self.lineage


# -- to the master -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnnounceVersions:
    """The member publishes these versions, and no others any more."""

    versions: Annotated[tuple[PublishedVersion, ...], AtMost(VERSIONS_ANNOUNCED_MAX)]


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A process outside the run wants to read what a group publishes."""

    group: Annotated[int, Below(1 << 32)]
    port: Annotated[int, Below(1 << 16)]
    """The port at which it serves other readers."""
    host: HostName = ""
    """If empty, the address that the master sees."""
    hosts: Hosts = ()
    """Addresses of its machine."""
    name: PeerName = ""


@dataclass(frozen=True, slots=True)
class ReaderLives:
    """The reader lives. It may be its only message for a long time."""


# -- to readers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The identity of the reader. The versions follow."""

    peer: PeerId
    """An id like that of a peer, but the reader is no member."""
    term: Annotated[int, Below(1 << 32)]
    run: bytes
    certificate: Certificate
    """Members and other readers recognize the reader by it."""


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """The version that counts, and processes to dial. Sent again after each change."""

    version: PublishedVersion | None
    """Nil: no version has counted yet."""
    holders: Annotated[tuple[Member, ...], AtMost(HOLDERS_TOLD_MAX)]
    """Some members that have this version."""
    readers: Annotated[tuple[Member, ...], AtMost(ELDERS_TOLD_MAX)] = ()
    """Some older readers."""
    rank: Annotated[int, Below(1 << 32)] = 0
    """Place of this reader among all of the group: they begin to fetch at different pieces."""
    count: Annotated[int, Below(1 << 32)] = 1
    """How many there are."""
