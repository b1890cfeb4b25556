"""Waits until a process comes to a phase of its life."""

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
from pccl.stress.sim.faults.base import LifePhase

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Seat, Stage

_POLLS_MAX = 400
"""How often to look whether a reduce has come to its gather (it may be aborted before)."""


class PhaseWatch:
    """Calls ``strike(seat)`` once, when its process enters a phase for the n-th time.

    Args:
        stage: the run.
        peer: the index of the process.
        phase: what it has to be doing; not OTHER.
        occurrence: which time (from 0).
        strike: what to do then; of a gather it is called some time after it has begun.
    """

    def __init__(
        self,
        stage: Stage,
        peer: int,
        phase: LifePhase,
        occurrence: int,
        strike: Callable[[Seat], None],
    ) -> None:
        self._stage = stage
        self._peer = peer
        self._phase = phase
        self._occurrence = occurrence
        self._strike = strike
        self._entered = -1
        self._armed = True
        stage.watch(self._on_event)

    def _on_event(self, seat: Seat, event: PeerEvent) -> None:
        """A peer's machine has handled an event: is it time?"""
        if not self._armed or seat.index != self._peer:
            return
        entered = _phase_entered(event, seat)
        if entered is self._phase:
            self._entered += 1
            if self._entered == self._occurrence:
                self._armed = False
                self._strike(seat)
        elif entered is LifePhase.REDUCE_SCATTER and self._phase is LifePhase.GATHER:
            self._await_gather(seat, 0)

    def _await_gather(self, seat: Seat, polls: int) -> None:
        stage = self._stage
        if not self._armed or not seat.alive:
            return
        if seat.process.life_phase() is LifePhase.GATHER:
            self._armed = False
            self._strike(seat)
        elif polls < _POLLS_MAX:
            wait_ns = max(1000, stage.scenario.latency_ns // 20)
            stage.at(stage.now_ns() + wait_ns, self._await_gather, seat, polls + 1)


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
