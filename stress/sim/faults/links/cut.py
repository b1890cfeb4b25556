"""One lane of a link is reset; the others live on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pccl.stress.sim.faults.timed import ConnectionFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class Cut(ConnectionFault):
    """Reset a lane between two peers."""

    kind: ClassVar[str] = "cut"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    def _ends(self, stage: Stage) -> Iterable[SimConnection]:
        return stage.lane_ends()

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.checkers.done["lane cut"] += 1
        stage.excuses.broken(end)
        end.reset()
