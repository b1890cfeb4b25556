"""What a run consists of, and the deadlines that follow from its one deadline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pccl.protocol.limits import Timing
from pccl.stress.timeline import LASTING, Timeline

STAND_S = 5.0
"""For what no deadline counts: processes that start, and a busy machine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A run.

    Attributes:
        timeline: who takes part, and what goes wrong.
        folder: where the master's state and the stop file lie.
        netns: in network namespaces.
        plant: peer 0 spoils its result of this number, to see that the harness sees.
    """

    timeline: Timeline
    folder: Path
    netns: bool = False
    plant: int | None = None

    @property
    def stop(self) -> Path:
        """The file that ends the run."""
        return self.folder / "stop"


def timing_of(deadline_s: float) -> Timing:
    """Deadlines of master and peers, all in proportion to one."""
    return Timing(
        heartbeat_s=min(1.0, deadline_s / 10),
        tick_s=min(0.25, deadline_s / 20),
        deadline_s=deadline_s,
        lane_stall_s=deadline_s,
        progress_s=3 * deadline_s,
        link_s=max(2.0, deadline_s),
        connect_retry_s=0.1,
    )


def patience_s(timeline: Timeline) -> float:
    """How long a peer that nothing is wrong with may be without progress.

    Somebody else stands still, for as long as the longest fault; then he is removed for silence
    (``deadline_s``) or for want of progress (``progress_s``, the longest of all rules); the master
    restarts (recovery window, at most ``RECOVERY_S``); newcomers are linked (``link_s``). Each
    once: after that something must have moved.
    """
    timing = timing_of(timeline.deadline_s)
    longest_s = max((f.duration_s for f in timeline.faults if f.kind in LASTING), default=0.0)
    rules_s = timing.deadline_s + timing.progress_s + timing.link_s + RECOVERY_S
    return longest_s + rules_s + STAND_S


RECOVERY_S = 10.0
"""The longest recovery window of a master."""


def blame_s(timeline: Timeline) -> float:
    """How long after its end a fault may be the cause of a removal.

    A half-open connection is noticed by a stalled lane, then by want of progress; a process that
    thaws finds its removal under way.
    """
    timing = timing_of(timeline.deadline_s)
    return timing.lane_stall_s + timing.progress_s + STAND_S
