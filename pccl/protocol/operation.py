"""The life cycle of one operation, as a member and the master see it.

requested ──all asked for the same──> started ──own result complete──> done
│                                    │                               │
└──────────────┬─────────────────────┴───────────────┬───────────────┘
v                                     v
aborted                              committed
"""

from __future__ import annotations

import enum

from pccl.protocol.types import PeerId


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


def name_peers(peers: list[PeerId]) -> str:
    """Return ``peer 3`` or ``peers 1, 2``, for messages to users."""
    return f"peer{'s' if len(peers) > 1 else ''} " + ", ".join(str(peer) for peer in sorted(peers))
