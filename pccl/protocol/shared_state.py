"""What the members and the master of a run say to each other about shared state.

Contents never come to the master. It compares digests: of the layout (names, dtypes, lengths), of
the contents that all members must share, and of those that may differ. How they are made is told in
:mod:`pccl.state.digests`; how one of them is elected, in :mod:`pccl.state.election`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pccl.protocol.types import OperationId, PeerId

DIGEST_BYTES = 32

REVISION_MAX = (1 << 64) - 1
"""There is none after it: it is expected again."""

PIECE_BYTES = 1 << 20
"""Contents travel, and are verified, in pieces of so many bytes; a tensor's last one is shorter."""


class SharedStateSyncStrategy(enum.IntEnum):
    """Whose contents count in a synchronization."""

    ENFORCE_POPULAR = 0
    """Everybody's count, and whoever has others than the elected ones receives those."""
    RECEIVE_ONLY = 1
    """The own contents don't count."""
    SEND_ONLY = 2
    """The own contents count, and are not to be changed."""


class SyncPurpose(enum.IntEnum):
    """What members want of a joint look at their shared states."""

    SYNC = 0
    """To have the same contents afterwards."""
    VERIFY = 1
    """To know whether they have."""

    @property
    def call_name(self) -> str:
        """The call that users know it by."""
        return "verify" if self is SyncPurpose.VERIFY else "sync_shared_state"


class ResumePolicy(enum.IntEnum):
    """What counts when nobody has the revision that the group is at."""

    NEVER = 0
    """Nothing: the call fails."""
    HIGHEST = 1
    """The highest revision that anybody has."""
    ADVANCED = 2
    """Likewise, but not 0 once the group has got beyond it: that is a beginning, and what the
    group has done since would be lost; and not one that nobody but its holder can have reached."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The synchronization in which contents were shared by a whole group the last time."""

    run: bytes
    operation: OperationId


@dataclass(frozen=True, slots=True)
class Offer:
    """What one member has, and wants of the others."""

    purpose: SyncPurpose
    strategy: SharedStateSyncStrategy
    resume: ResumePolicy
    revision: int
    lineage: Lineage | None
    """None: these contents have never been synchronized."""
    stale: bool
    """Whether the others have committed something that these contents lack."""
    unchanged: bool
    """Whether the member expects that it need not receive anything."""
    layout: bytes
    content: bytes
    extra: bytes
    """Of the contents that members may hold differently."""

    def __str__(self) -> str:
        if self.purpose is SyncPurpose.VERIFY:
            return self.purpose.call_name  # it takes neither
        how = self.strategy.name
        if self.resume is not ResumePolicy.NEVER:
            how += f", resume={self.resume.name.lower()}"
        return f"{self.purpose.call_name}({how})"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the master knows of the shared state of one group."""

    revision: int = 0
    """With which valid contents come to the next synchronization; 0: there was none yet."""
    lineage: Lineage | None = None
    """Of the last one."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The order of a group's synchronizations: later ones have the larger place."""
        if self.lineage is None:
            return (0, 0, 0)
        operation = self.lineage.operation
        return (operation.term, operation.view, operation.n + 1)


NOTHING_EXPECTED = Expected()


@dataclass(frozen=True, slots=True)
class Elected:
    """What everybody has when the synchronization is committed; the same for all members."""

    revision: int
    layout: bytes
    content: bytes
    sources: tuple[PeerId, ...]
    """Who has the contents, in ring order."""
    behind: tuple[PeerId, ...]
    """Who has others, and receives these."""
    outdated: tuple[PeerId, ...]
    """Whose revision does not count. They receive also what members may hold differently."""
    extra: bytes = b""
    extra_sources: tuple[PeerId, ...] = ()
    """Who has that of this digest."""


def expected_after(elected: Elected, lineage: Lineage) -> Expected:
    """What is expected of a group's shared state after this synchronization."""
    return Expected(min(elected.revision + 1, REVISION_MAX), lineage)


class Conflict(enum.StrEnum):
    """What it is that differs, and must not, for people."""

    LAYOUTS = "the tensors' names, dtypes or lengths"
    CONTENTS = "contents that are to be equal"
    SENDERS = "contents that are only to be sent"
    CHANGED = "contents that should not have changed"

    @property
    def remedy(self) -> str:
        """What to do, for people."""
        return _REMEDIES[self]


_REMEDIES = {
    Conflict.LAYOUTS: "give all members the same tensors in the same order",
    Conflict.CONTENTS: "sync_shared_state makes them equal",
    Conflict.SENDERS: "let those that have other contents be RECEIVE_ONLY",
    Conflict.CHANGED: "sync_shared_state without expect_unchanged makes them equal",
}


@dataclass(frozen=True, slots=True)
class Differ:
    """States differ that must not. The first member of each set speaks for it."""

    sets: tuple[tuple[PeerId, ...], ...]
    """Members whose states agree with each other; the first set is what the others are compared
    with."""
    losers: tuple[PeerId, ...]
    """Who fails: those who conflict with a majority. Nobody: all do."""
    what: Conflict


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Nobody has what the group could go on with."""

    reason: str


Verdict = Elected | Differ | Unavailable


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two shared states differ first."""

    tensor: str
    """Its name; empty: that could not be found out."""
    piece: int | None
    """Of the tensor; None: it is not of the same kind on both sides, or missing on one."""
    text: str
    """For people."""
