"""The life cycle of one operation, as a member and the master see it.

requested ──all asked for the same──> started ──own result complete──> done
│                                    │                               │
└──────────────┬─────────────────────┴───────────────┬───────────────┘
v                                     v
aborted                              committed
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.types import AtMost, Below, Descriptor, PeerId
from pccl.protocol.vocabulary.tags import subset_tag, tag_text

LATE_BYTES_MAX = 256 << 20
"""Bytes of results that a member keeps for late members; it keeps no larger result."""


class Phase(enum.Enum):
    """The phase of an operation."""

    REQUESTED = "requested"
    STARTED = "started"
    DONE = "done"
    COMMITTED = "committed"
    ABORTED = "aborted"

    def __init__(self, what: str) -> None:
        self.ended = what in ("committed", "aborted")
        """Whether the operation has its outcome."""


TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.REQUESTED: (Phase.STARTED, Phase.ABORTED),
    Phase.STARTED: (Phase.DONE, Phase.ABORTED),
    Phase.DONE: (Phase.COMMITTED, Phase.ABORTED),
    Phase.COMMITTED: (),
    Phase.ABORTED: (),
}


class Eager(enum.IntEnum):
    """What a member sends of an all-reduce before it has started."""

    NOTHING = 0
    ANNOUNCEMENTS = 1
    """The places of segments in its memory. The rest waits for the start."""
    SEGMENTS = 2
    """Everything. The member does not wait for the start."""


EXCHANGE_MEMBERS_MAX = 1024
"""The largest group that exchanges blocks; a request has two lengths for each member."""
ELEMENTS_MAX = 1 << 63
Lengths = Annotated[tuple[Annotated[int, Below(ELEMENTS_MAX)], ...], AtMost(EXCHANGE_MEMBERS_MAX)]


@dataclass(frozen=True, slots=True)
class BlockLengths:
    """The lengths of the blocks that one member of an exchange gives and takes, by rank."""

    gives: Lengths
    """Number of elements for each member, this one included."""
    takes: Lengths
    """Number of elements that it expects from each member."""


_NAMED_MAX = 8


@dataclass(frozen=True, slots=True)
class Subset:
    """Some members of a view, in an order of their own, and the tag that they use."""

    peers: Annotated[tuple[PeerId, ...], AtMost(PEERS_MAX)]
    """At least two; a send goes from the first one to the second one."""
    tag: Annotated[int, Below(1 << 63)]
    """The caller's tag."""
    within: Annotated[int, Below(1 << 32)] = 0
    """For a send: 1, or a hash of the subgroup whose ranks it names; 0: another collective."""

    @property
    def operation_tag(self) -> int:
        """The tag of their operations."""
        return subset_tag(self.peers, self.tag, self.within)

    def __str__(self) -> str:
        more = len(self.peers) - _NAMED_MAX
        rest = f" and {more} more" if more > 0 else ""
        return f"{self.tag} of {name_peers(sorted(self.peers)[:_NAMED_MAX])}{rest}"


def name_tag(tag: int, among: Subset | None) -> str:
    """Return the tag of an operation as its callers know it."""
    return tag_text(tag) if among is None else str(among)


def to_ranks(peers: Collection[PeerId], ring: tuple[PeerId, ...]) -> bytes:
    """Return which ranks of a ring are those of ``peers``: bit ``i`` of byte ``i // 8``."""
    bits = sum(1 << rank for rank, peer in enumerate(ring) if peer in peers)
    return bits.to_bytes((len(ring) + 7) // 8, "little")


def of_ranks(ranks: bytes, ring: tuple[PeerId, ...]) -> tuple[PeerId, ...] | None:
    """Return the members that ``to_ranks`` has named, in ring order; None if it is malformed."""
    bits = int.from_bytes(ranks, "little")
    if len(ranks) != (len(ring) + 7) // 8 or bits >> len(ring):
        return None
    return tuple(peer for rank, peer in enumerate(ring) if bits >> rank & 1)


def is_kept_for_late(asked: Descriptor) -> bool:
    """Whether participants keep the result of a narrowed operation for late members."""
    return asked.tensor_bytes <= LATE_BYTES_MAX


def name_peers(peers: list[PeerId]) -> str:
    """Return ``peer 3`` or ``peers 1, 2``, for messages to users."""
    return f"peer{'s' if len(peers) > 1 else ''} " + ", ".join(str(peer) for peer in sorted(peers))
