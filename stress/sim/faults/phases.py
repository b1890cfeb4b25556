"""How a fault waits until a process is in a phase of its life."""

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
"""How often to look whether an operation has come to its phase (it may be aborted before)."""


class PhaseWatch:
    """Calls ``strike(seat)`` once, when its process enters a phase for the n-th time.

    That a process gathers or fetches, its machine does not hear: from the start of the operation on
    the process is looked at again and again.

    Args:
        stage: the run.
        peer: the index of the process; None: any.
        phase: what it has to be doing; not OTHER.
        occurrence: which time (from 0). A gather is always the first.
        strike: what to do then; of what is looked for, it is called some time after it has begun.
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
        """How many times are to be let pass; negative: it has struck."""
        self._strike = strike
        stage.watch(self._on_event)

    def _on_event(self, seat: Seat, event: PeerEvent) -> None:
        """A peer's machine has handled an event: is it time?"""
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
        """Check whether the phase is here; ``operation``: the synchronization that would fetch."""
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
            return LifePhase.REDUCE_SCATTER  # its data has gone ahead
        case ReduceDone():
            return LifePhase.DONE
        case _:
            return None
