"""``PhaseWatch``: lets a fault wait until a process is in a phase of its life."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pccl.machines.peer.events import (
    ControlMessage,
    JoinCall,
    PeerEvent,
    ReduceCall,
    ReduceDone,
    RoundCall,
    SyncCall,
)
from pccl.protocol import messages as msg
from pccl.protocol.types import OperationId
from pccl.stress.sim.faults.base import LifePhase

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage

_POLLS_MAX = 400
"""Maximum number of checks whether an operation reached the phase; it may abort before."""


class PhaseWatch:
    """Calls ``strike(seat)`` once, when a process enters a phase for the n-th time.

    The machine has no event for the start of a gather or a fetch. So the watch checks the process
    repeatedly from the start of the operation.

    Args:
        stage: the stage of the run.
        peer: index of the process; None: any process.
        phase: phase to wait for; not OTHER.
        occurrence: number of the entry into the phase, from 0. For a gather it counts as 0.
        strike: called with the seat; for a gather or fetch some time after its start.
    """

    def __init__(
        self,
        stage: Stage,
        peer: int | None,
        phase: LifePhase,
        occurrence: int,
        strike: Callable[[Seat], None],
    ) -> None:
        self._stage = stage
        self._peer = peer
        self._phase = phase
        self._left = 0 if phase is LifePhase.GATHER else occurrence
        """Number of entries still to skip; negative: ``strike`` was called."""
        self._strike = strike
        stage.watch(self._on_event)

    def _on_event(self, seat: Seat, event: PeerEvent) -> None:
        """Handle an event of a peer's machine: check whether it enters the phase."""
        if self._left < 0 or self._peer not in (None, seat.index):
            return
        entered = _phase_entered(event, seat)
        match self._phase, entered, event:
            case LifePhase.FETCHING, _, ControlMessage(msg.SyncStarted(operation)):
                self._look(seat, operation, 0)
            case LifePhase.GATHER, LifePhase.REDUCE_SCATTER, _:
                self._look(seat, None, 0)
            case phase, _, _ if entered is phase:
                self._entered(seat)
            case _:
                pass

    def _entered(self, seat: Seat) -> None:
        self._left -= 1
        if self._left < 0:
            self._strike(seat)

    def _look(self, seat: Seat, operation: OperationId | None, polls: int) -> None:
        """Check whether the phase has begun. ``operation``: the synchronization that may fetch."""
        stage = self._stage
        over = operation is not None and operation not in seat.process.engine.exchange.sessions
        if self._left < 0 or not seat.alive or over:
            return
        if seat.process.life_phase() is self._phase:
            self._entered(seat)
        elif polls < _POLLS_MAX:
            wait_ns = max(1000, stage.scenario.latency_ns // 20)
            stage.at(stage.now_ns() + wait_ns, self._look, seat, operation, polls + 1)


def _phase_entered(event: PeerEvent, seat: Seat) -> LifePhase | None:
    match event:
        case JoinCall():
            return LifePhase.CONNECTING
        case RoundCall():
            return LifePhase.ROUND
        case SyncCall():
            return LifePhase.SYNC
        case ControlMessage(msg.OperationStarted()):
            return LifePhase.REDUCE_SCATTER
        case ReduceCall() if seat.process.life_phase() is LifePhase.REDUCE_SCATTER:
            return LifePhase.REDUCE_SCATTER  # it sent its data early
        case ReduceDone():
            return LifePhase.DONE
        case _:
            return None
