"""``LaneWatch``: detects lanes that owe progress and make none.

Pure: facts of each tick go in, and steps come out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LaneStep(enum.Enum):
    """What to do with a lane after a look at it."""

    REPLACE = enum.auto()
    PING = enum.auto()
    PONG = enum.auto()


@dataclass(slots=True)
class LaneWatch:
    """Detects that a lane owes progress and makes none.

    A lane owes progress while it has data to send, while a frame is arriving, or while a running
    transfer needs its link. A lane with nothing to send may have handed all data to a dead
    connection. So it first asks the other side for a sign of life. On a slow line this question
    waits behind a long queue in the kernel, so a receiver also sends signs of life unasked.

    Attributes:
        stall_ns: how long the lane may make no progress.
        since_ns: when the lane last moved data.
        told_ns: when the other side last knew how much has arrived here.
    """

    stall_ns: int
    since_ns: int
    told_ns: int
    moved_bytes: int = 0
    pinged: bool = False
    """Whether this side has asked for a sign of life since ``since_ns``."""
    told_bytes: int = 0
    """Payload bytes that the other side knows to have arrived."""

    def look(
        self, moved_bytes: int, payload_bytes: int, now_ns: int, *, owes: bool, may_judge: bool
    ) -> list[LaneStep]:
        """Decide on a tick whether to replace the lane, ask for a sign of life, or send one.

        ``owes``: whether the lane owes progress, as seen while this process was awake;
        ``may_judge``: whether this process has read all that arrived.
        """
        steps: list[LaneStep] = []
        still_ns = now_ns - self.since_ns
        if not owes or moved_bytes != self.moved_bytes:
            self.moved_bytes, self.since_ns, self.pinged = moved_bytes, now_ns, False
        elif may_judge and still_ns >= self.stall_ns:
            steps.append(LaneStep.REPLACE)
        elif still_ns >= self.stall_ns // 2 and not self.pinged:
            self.pinged = True
            steps.append(LaneStep.PING)
        if payload_bytes == self.told_bytes:
            self.told_ns = now_ns
        elif now_ns - self.told_ns >= self.stall_ns // 4:
            self.told_bytes, self.told_ns = payload_bytes, now_ns
            steps.append(LaneStep.PONG)
        return steps
