"""The values that members and master exchange about shared state.

The master never receives contents. It compares digests: of the layout (names, dtypes, lengths), of
the contents that all members must share, and of the contents that may differ.
:mod:`pccl.state.digests` computes them, and :mod:`pccl.state.election` elects one of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pccl.protocol.types import OperationId, PeerId

DIGEST_BYTES = 32

REVISION_MAX = (1 << 64) - 1
"""The last revision. After it, the group expects the same revision again."""

PIECE_BYTES = 1 << 20
"""Bytes of a piece, the unit in which peers send and verify contents. A tensor's last piece may
be shorter."""


class SharedStateSyncStrategy(enum.IntEnum):
    """The part of one member in a synchronization."""

    ENFORCE_POPULAR = 0
    """The member offers its contents, and receives the elected ones if they differ."""
    RECEIVE_ONLY = 1
    """The member does not offer its contents."""
    SEND_ONLY = 2
    """The member offers its contents, and receives none."""


class SyncPurpose(enum.IntEnum):
    """The purpose of a joint call about shared state."""

    SYNC = 0
    """Make the contents of all members equal."""
    VERIFY = 1
    """Compare the contents of all members."""

    @property
    def call_name(self) -> str:
        """The name of the call in the API."""
        return "verify" if self is SyncPurpose.VERIFY else "sync_shared_state"


class ResumePolicy(enum.IntEnum):
    """The contents that count if no member has the revision that the group expects."""

    NEVER = 0
    """No contents count: the call fails."""
    HIGHEST = 1
    """The highest revision on offer counts."""
    ADVANCED = 2
    """As HIGHEST, but revision 0 does not count once the group has synchronized a higher one:
    the group's work would be lost. A revision that the group cannot have reached comes last."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The last synchronization that gave these contents to a whole group."""

    run: bytes
    operation: OperationId


@dataclass(frozen=True, slots=True)
class Offer:
    """The state and the wishes of one member for a synchronization."""

    purpose: SyncPurpose
    strategy: SharedStateSyncStrategy
    resume: ResumePolicy
    revision: int
    lineage: Lineage | None
    """None: these contents have never been synchronized."""
    stale: bool
    """Whether these contents lack a result that the group has committed."""
    unchanged: bool
    """Whether the member expects to receive no contents."""
    layout: bytes
    content: bytes
    extra: bytes
    """Digest of the contents that may differ between members."""

    def __str__(self) -> str:
        if self.purpose is SyncPurpose.VERIFY:
            return self.purpose.call_name  # it has neither strategy nor policy
        how = self.strategy.name
        if self.resume is not ResumePolicy.NEVER:
            how += f", resume={self.resume.name.lower()}"
        return f"{self.purpose.call_name}({how})"


@dataclass(frozen=True, slots=True)
class Expected:
    """The shared state that the master expects in the next synchronization of a group."""

    revision: int = 0
    """Revision of valid contents; 0: the group has not synchronized yet."""
    lineage: Lineage | None = None
    """The last synchronization of the group."""

    @property
    def place(self) -> tuple[int, int, int]:
        """A key that orders a group's synchronizations: a later one has a larger key."""
        if self.lineage is None:
            return (0, 0, 0)
        operation = self.lineage.operation
        return (operation.term, operation.view, operation.n + 1)


NOTHING_EXPECTED = Expected()


@dataclass(frozen=True, slots=True)
class Elected:
    """The contents that all members have after the synchronization; the same on all members."""

    revision: int
    layout: bytes
    content: bytes
    sources: tuple[PeerId, ...]
    """Members that have the contents, in ring order."""
    behind: tuple[PeerId, ...]
    """Members with other contents, which receive the elected contents."""
    outdated: tuple[PeerId, ...]
    """Members whose revision does not count. They also receive the contents that may differ."""
    extra: bytes = b""
    extra_sources: tuple[PeerId, ...] = ()
    """Members that have the contents of the digest ``extra``."""


def expected_after(elected: Elected, lineage: Lineage) -> Expected:
    """Return the expected shared state of a group after this synchronization."""
    return Expected(min(elected.revision + 1, REVISION_MAX), lineage)


class Conflict(enum.StrEnum):
    """The kind of difference between states that must be equal, in words for users."""

    LAYOUTS = "the tensors' names, dtypes or lengths"
    CONTENTS = "contents that must be equal"
    SENDERS = "contents of SEND_ONLY members"
    CHANGED = "contents that a member expected to be unchanged"

    @property
    def remedy(self) -> str:
        """What users can do about it."""
        return _REMEDIES[self]


_REMEDIES = {
    Conflict.LAYOUTS: "give all members the same tensors in the same order",
    Conflict.CONTENTS: "sync_shared_state makes them equal",
    Conflict.SENDERS: "make members with other contents RECEIVE_ONLY",
    Conflict.CHANGED: "sync_shared_state without expect_unchanged makes them equal",
}


@dataclass(frozen=True, slots=True)
class Differ:
    """States that must be equal differ. The first member of each set compares for its set."""

    sets: tuple[tuple[PeerId, ...], ...]
    """Sets of members whose states agree. The first set is the reference for all others."""
    losers: tuple[PeerId, ...]
    """Members that fail, because they conflict with a majority. Empty: all members fail."""
    what: Conflict


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No member offers contents that count."""

    reason: str


Verdict = Elected | Differ | Unavailable


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two shared states."""

    tensor: str
    """Name of the tensor; empty: unknown."""
    piece: int | None
    """Piece of the tensor; None: the tensor has another type or size, or is missing on one side."""
    text: str
    """The difference in words for users."""
