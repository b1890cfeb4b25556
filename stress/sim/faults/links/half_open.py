"""A connection that one end still believes in: nothing arrives any more, and nobody is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pccl.stress.sim.faults.timed import ConnectionFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class DeadLane(ConnectionFault):
    """A lane delivers nothing more one way; new connections between the two work.

    One of its number takes its place once somebody finds out.
    """

    kind: ClassVar[str] = "dead_lane"

    def _ends(self, stage: Stage) -> Iterable[SimConnection]:
        return stage.lane_ends()

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.stall(None)


@dataclass(frozen=True)
class HalfOpen(ConnectionFault):
    """One end of any connection is told that it is lost; the other hears when it sends."""

    kind: ClassVar[str] = "half_open"

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.forget()


@dataclass(frozen=True)
class SilentLoss(ConnectionFault):
    """A box on the way forgets a lane and drops all that belongs to it.

    One end gives the lane up. The other end is told nothing, also when it sends.
    """

    kind: ClassVar[str] = "silent_loss"

    def _ends(self, stage: Stage) -> Iterable[SimConnection]:
        return stage.lane_ends()

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.stall(None)
        end.other.stall(None)
        end.forget()
