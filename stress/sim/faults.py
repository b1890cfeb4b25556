"""Carries out a scenario's fault plan: kills by phase, resets, cut lanes, stalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pccl.protocol import messages as msg
from pccl.protocol.peer_events import (
    ControlMessage,
    JoinCall,
    PeerEvent,
    ReduceDone,
    RoundCall,
)
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenario import Kill, LifePhase, Scenario, Stall
from pccl.transports.sim import SimConnection, SimNetwork

_POLLS_MAX = 400
"""How often to look whether a reduce has come to its gather (it may be aborted before)."""


class Faults:
    """The fault plan of one run.

    Args:
        kill: kills a process and counts it.
        done: where lanes that were cut are counted.
    """

    def __init__(
        self,
        scenario: Scenario,
        loop: VirtualLoop,
        network: SimNetwork,
        kill: Callable[[PeerProcess], None],
        done: Counter[str],
    ) -> None:
        self._scenario = scenario
        self._loop = loop
        self._network = network
        self._kill = kill
        self._done = done
        self._entered: dict[Kill, int] = {}
        self._armed: dict[Kill, bool] = dict.fromkeys(scenario.kills, True)

    def start(self, processes: list[PeerProcess]) -> None:
        """Schedule what happens at fixed times."""
        for kill in self._armed:
            if kill.phase is LifePhase.OTHER:
                self._loop.call_at_ns(kill.delay_ns, self._kill, processes[kill.victim])
        for reset in self._scenario.resets:
            self._loop.call_at_ns(reset.when_ns, self._reset, reset.choice)
        for cut in self._scenario.cuts:
            self._loop.call_at_ns(cut.when_ns, self._cut, cut.choice)
        for dead in self._scenario.dead_lanes:
            self._loop.call_at_ns(dead.when_ns, self._kill_lane, dead.choice)
        for stall in self._scenario.stalls:
            a, b = ("master" if i < 0 else processes[i].name for i in (stall.a, stall.b))
            self._loop.call_at_ns(stall.when_ns, self._stall, a, b, stall)

    def on_event(self, index: int, process: PeerProcess, event: PeerEvent) -> None:
        """A peer's machine has handled an event: is it time to kill it?"""
        entered = _phase_entered(event)
        if entered is None:
            return
        for kill, armed in self._armed.items():
            if not armed or kill.victim != index or kill.phase is not entered:
                continue
            times = self._entered[kill] = self._entered.get(kill, -1) + 1
            if times == kill.occurrence:
                self._armed[kill] = False
                when_ns = self._loop.now_ns() + kill.delay_ns
                self._loop.call_at_ns(when_ns, self._kill, process)
        if entered is LifePhase.REDUCE_SCATTER:
            for kill, armed in self._armed.items():
                if armed and kill.victim == index and kill.phase is LifePhase.GATHER:
                    self._await_gather(kill, process, 0)

    def _await_gather(self, kill: Kill, process: PeerProcess, polls: int) -> None:
        if not self._armed[kill] or not process.alive:
            return
        if process.life_phase() is LifePhase.GATHER:
            self._armed[kill] = False
            when_ns = self._loop.now_ns() + kill.delay_ns % 1000
            self._loop.call_at_ns(when_ns, self._kill, process)
        elif polls < _POLLS_MAX:
            when_ns = self._loop.now_ns() + max(1000, self._scenario.latency_ns // 20)
            self._loop.call_at_ns(when_ns, self._await_gather, kill, process, polls + 1)

    def _lane_ends(self) -> list[SimConnection]:
        return [
            end for end in self._network.ends if "master" not in (end.local.host, end.remote.host)
        ]

    def _cut(self, choice: int) -> None:
        ends = self._lane_ends()
        if ends:
            ends[choice % len(ends)].reset()
            self._done["lane cut"] += 1

    def _kill_lane(self, choice: int) -> None:
        ends = self._lane_ends()
        if ends:
            ends[choice % len(ends)].stall(None)

    def _stall(self, a: str, b: str, stall: Stall) -> None:
        self._network.stall(a, b, stall.duration_ns, one_way=stall.one_way)

    def _reset(self, choice: int) -> None:
        ends = list(self._network.ends)
        if ends:
            ends[choice % len(ends)].reset()


def _phase_entered(event: PeerEvent) -> LifePhase | None:
    match event:
        case JoinCall():
            return LifePhase.CONNECTING
        case RoundCall():
            return LifePhase.ROUND
        case ControlMessage(msg.OperationStarted()):
            return LifePhase.REDUCE_SCATTER
        case ReduceDone():
            return LifePhase.DONE
        case _:
            return None
