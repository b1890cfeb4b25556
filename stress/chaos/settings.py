"""The settings of a run, and the deadlines that follow from its one deadline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pccl.protocol.limits import Timing
from pccl.stress.timeline import LASTING, Timeline

STAND_S = 5.0
"""Slack for delays without a deadline: processes that start, and a busy machine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        timeline: processes and faults of the run.
        folder: folder of the master's state and of the stop file.
        netns: whether the processes run in network namespaces.
        program: module of the peers.
        arguments: further arguments of each peer; ``{index}`` stands for its index.
        kinds: further events that the peers report.
        slack_s: how much longer than ``patience_s`` a peer may be without progress, in seconds,
            because its calls take long.
        plant: number of the result that peer 0 spoils, to test the harness; None: no result.
    """

    timeline: Timeline
    folder: Path
    netns: bool = False
    program: str = "pccl.stress.chaos.peer_process"
    arguments: tuple[str, ...] = ()
    kinds: tuple[type[Any], ...] = ()
    slack_s: float = 0.0
    plant: int | None = None

    def nap(self, index: int) -> Path:
        """Return the file that exists while the program of a peer naps."""
        return self.folder / f"nap{index}"

    @property
    def stop(self) -> Path:
        """The file that ends the run."""
        return self.folder / "stop"


def timing_of(deadline_s: float) -> Timing:
    """Return the deadlines of master and peers, which follow from ``deadline_s``."""
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
    """Return how long a peer without a fault of its own may be without progress, in seconds.

    It may wait for a process with a fault, at most for the longest fault. Then the master
    removes that process for silence (``deadline_s``) or lack of progress (``progress_s``). The
    master may restart (``RECOVERY_S``), and newcomers get links (``link_s``). Each of these happens
    once; after that the peer must have made progress.
    """
    timing = timing_of(timeline.deadline_s)
    longest_s = max((f.duration_s for f in timeline.faults if f.kind in LASTING), default=0.0)
    rules_s = timing.deadline_s + timing.progress_s + timing.link_s + RECOVERY_S
    return longest_s + rules_s + STAND_S


RECOVERY_S = 10.0
"""The longest recovery window of a master."""


def blame_s(timeline: Timeline) -> float:
    """Return how long after its end a fault may still cause a removal, in seconds.

    Peers notice a half-open connection by a stalled lane, then by lack of progress. The master
    may already be removing a process that continues after a freeze.
    """
    timing = timing_of(timeline.deadline_s)
    return timing.lane_stall_s + timing.progress_s + STAND_S
