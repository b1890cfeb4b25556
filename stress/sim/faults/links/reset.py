"""A connection is reset at both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pccl.stress.sim.faults.timed import ConnectionFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class Reset(ConnectionFault):
    """Reset any connection of the run, at both ends."""

    kind: ClassVar[str] = "reset"

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.broken(end)
        end.reset()
