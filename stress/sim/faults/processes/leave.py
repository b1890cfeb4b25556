"""A process closes its communicator while calls are open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pccl.stress.sim.faults.timed import CallerFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat


@dataclass(frozen=True)
class Leave(CallerFault):
    """``close()`` at some time, whatever goes on."""

    kind: ClassVar[str] = "leave"
    calm: ClassVar[bool] = True

    def _deed(self, seat: Seat) -> Callable[[], None]:
        return seat.workload.leave
