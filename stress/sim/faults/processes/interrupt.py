"""The calls that a process is in are cancelled, as by Ctrl-C, and repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pccl.stress.sim.faults.timed import CallerFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat


@dataclass(frozen=True)
class Interrupt(CallerFault):
    """Cancel whatever the process waits for at that time."""

    kind: ClassVar[str] = "interrupt"
    calm: ClassVar[bool] = True
    keeps_majority: ClassVar[bool] = True

    def _deed(self, seat: Seat) -> Callable[[], None]:
        return seat.workload.interrupt
