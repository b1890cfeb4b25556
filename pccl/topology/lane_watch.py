"""``LaneWatch``: detects lanes that owe progress and make none.

Pure: facts of each tick go in, and steps come out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pccl.protocol.types import NS_PER_S
from pccl.topology.segment_limit import STILL_BYTES, LaneFacts, Proof, StuckLane, Way, stuck_among


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

    If the other side asks, perhaps what was sent on the lane does not arrive. Then the other side
    decides whether to replace the lane, but this side finds out whether it is stuck.

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
    asks: int = 0
    """How often the other side has asked for one."""
    is_asked: bool = False
    """Whether it has, and what was sent is not acknowledged yet."""
    told_bytes: int = 0
    """Payload bytes that the other side knows to have arrived."""
    opened_ns: int = 0
    """When the lane came up."""
    asked_ns: int = 0
    """When it was last asked for a sign of life, if ``pinged``."""
    stuck: StuckLane | None = None
    """The lane, if no large packets have passed since it was asked for a sign of life."""

    _asked: Mapping[int, LaneFacts] | None = None
    """What was known of all lanes of its link when it was asked for a sign of life."""

    def look(
        self,
        moved_bytes: int,
        payload_bytes: int,
        now_ns: int,
        *,
        owes: bool,
        may_judge: bool,
        asks: int = 0,
        suspects: Proof | None = None,
        dials: bool = True,
    ) -> list[LaneStep]:
        """Decide on a tick whether to replace the lane, ask for a sign of life, or send one.

        Args:
            moved_bytes: see ``Lane.moved_bytes``.
            payload_bytes: payload bytes that have arrived on the lane so far.
            now_ns: current time.
            owes: whether the lane owes progress, as seen while this process was awake.
            may_judge: whether this process has read all that arrived.
            asks: how often the other side has asked for a sign of life.
            suspects: see ``SegmentLimit.suspects``.
            dials: whether this side dials the lanes of the link.
        """
        steps: list[LaneStep] = []
        still_ns, stall_ns = now_ns - self.since_ns, self.stall_ns
        if suspects is not None and not dials:
            stall_ns += stall_ns // 2  # the other side shall find out, because it can do something
        elif suspects is not None and self.stuck is not None and self.stuck.proof >= suspects:
            stall_ns = 0
        if asks != self.asks:
            self.asks, self.is_asked = asks, True
        if not owes or moved_bytes != self.moved_bytes:
            self.moved_bytes, self.since_ns, self.pinged = moved_bytes, now_ns, False
            if not self.is_asked:
                self.stuck = self._asked = None
        elif may_judge and still_ns >= stall_ns:
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

    def judge(self, number: int, facts: Mapping[int, LaneFacts], now_ns: int) -> None:
        """Decide on a tick whether the lane is stuck, once it was asked for a sign of life.

        Args:
            number: number of the lane.
            facts: what the kernel knows of each lane of the link, by number.
            now_ns: current time.
        """
        if not (self.pinged or self.is_asked):
            return
        if number not in facts:
            self.is_asked = False  # the kernel says nothing, and need not be asked again
            return
        own = facts[number]
        self.is_asked &= own.unacknowledged > 0
        if self._asked is None:
            self.asked_ns, self._asked = now_ns, facts
            return
        if number not in self._asked:
            return
        self.is_asked &= own.acked_bytes - self._asked[number].acked_bytes <= STILL_BYTES
        heard_ns, pause_ns = now_ns - own.ack_ago_ns, min(NS_PER_S, self.stall_ns // 8)
        is_heard = heard_ns >= self.since_ns + pause_ns
        is_young = self.asked_ns - self.opened_ns <= self.stall_ns
        found = stuck_among(
            number, self._asked, facts, self.asked_ns, is_heard=is_heard, is_young=is_young
        )
        is_expected = self.pinged or found is None or found.way is Way.OUT
        self.stuck = found if is_expected else None


def needs_facts(watches: Iterable[LaneWatch], *, suspects: Proof | None) -> bool:
    """Whether to ask the kernel about the lanes of a link, which costs time.

    ``suspects``: see ``SegmentLimit.suspects``.
    """
    if suspects is not None:
        return True
    for watch in watches:  # noqa: SIM110 - every tick asks, and a generator takes twice as long
        if watch.pinged or watch.is_asked:
            return True
    return False
