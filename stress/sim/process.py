"""Simulated processes: the production classes, each behind a clock and a host that can die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from pccl.protocol.frame import FrameHeader
from pccl.protocol.limits import Timing
from pccl.protocol.master_events import Announce, MasterEvent
from pccl.protocol.master_events import Send as MasterSend
from pccl.protocol.messages import OperationEnded
from pccl.protocol.operation import Phase
from pccl.protocol.peer import Standing
from pccl.protocol.peer_events import PeerEffect, PeerEvent, ReduceResult, Return
from pccl.protocol.types import PeerId
from pccl.runtime.clock import Timer
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import PeerOptions
from pccl.stress.sim.checkers import Checkers
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.scenario import LifePhase
from pccl.stress.sim.trace import Trace
from pccl.transports.base import Address
from pccl.transports.link import Link
from pccl.transports.sim import SimHost

MASTER_ADDRESS = Address("master", 48148)


class ProcessClock:
    """The loop's time for one process: a dead process is never called back."""

    def __init__(self, loop: VirtualLoop, host: SimHost) -> None:
        self._loop = loop
        self._host = host

    def now_ns(self) -> int:
        """The present."""
        return self._loop.now_ns()

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back at ``when_ns`` if the process is still alive then."""
        return self._loop.call_at_ns(when_ns, self._fire, callback, args)

    def _fire(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._host.alive:
            callback(*args)


class RepeatingLink(Link):
    """Sends some segments twice, as a sender may that has lost a lane; they must count once."""

    def __init__(self, peer: PeerId, rng: Random, probability: float) -> None:
        super().__init__(peer)
        self._rng = rng
        self._probability = probability

    def send(self, header: FrameHeader, payload: memoryview, number: int) -> None:
        """Queue a segment, perhaps twice."""
        super().send(header, payload, number)
        if self._rng.random() < self._probability:
            super().send(header, payload, number)


class MasterProcess:
    """A process that runs the master."""

    def __init__(
        self,
        loop: VirtualLoop,
        host: SimHost,
        timing: Timing,
        rng: Random,
        trace: Trace,
        checkers: Checkers,
        token: bytes | None,
    ) -> None:
        self.host = host
        self._loop = loop
        self._trace = trace
        self._checkers = checkers
        clock = ProcessClock(loop, host)
        self.server = MasterServer(clock, host, timing, rng.randbytes, self._observe, token)

    async def start(self) -> None:
        """Listen."""
        await self.server.start(MASTER_ADDRESS)

    def kill(self) -> None:
        """Die at once."""
        self.host.crash()
        self.server.close()

    def _observe(self, event: MasterEvent, effects: list[object]) -> None:
        if not self.host.alive:
            return
        self._trace.note(self._loop.now_ns(), "master", repr(event))
        self.server.machine.check()
        for effect in effects:
            if isinstance(effect, MasterSend):
                if isinstance(effect.message, OperationEnded):
                    ended = effect.message
                    outcome = (ended.abort is None, ended.contributors)
                    self._checkers.outcome(ended.operation, "the master", outcome)
            elif isinstance(effect, Announce) and effect.what == "registered":
                host = self.server.machine.membership.peers[effect.peer].member.host
                self._checkers.registered(effect.peer, host)
            elif isinstance(effect, Announce) and effect.what == "removed":
                self._checkers.removed(effect.peer, effect.text)


class PeerProcess:
    """A process that runs a peer."""

    def __init__(
        self,
        loop: VirtualLoop,
        host: SimHost,
        options: PeerOptions,
        trace: Trace,
        on_event: Callable[[PeerProcess, PeerEvent, list[PeerEffect]], None],
        make_link: Callable[[PeerId], Link],
        index: int,
        group: int,
    ) -> None:
        self.host = host
        self.name = host.name
        self.index = index
        self.results: dict[int, ReduceResult] = {}
        """Tag -> the last operation that was committed for a caller here."""
        self._loop = loop
        self._trace = trace
        self._on_event = on_event
        clock = ProcessClock(loop, host)
        options = replace(options, random_bytes=Random(host.name).randbytes)
        self.engine = PeerEngine(
            loop, clock, host, MASTER_ADDRESS, group, options, self._observe, make_link
        )

    @property
    def alive(self) -> bool:
        """Whether it has not been killed."""
        return self.host.alive

    @property
    def peer(self) -> PeerId:
        """Its id in the run; 0 before it is registered."""
        return self.engine.machine.peer

    def life_phase(self) -> LifePhase:
        """What it is doing right now."""
        machine = self.engine.machine
        if machine.standing in (Standing.OUTSIDE, Standing.JOINING, Standing.PENDING):
            return LifePhase.CONNECTING
        transfers = self.engine.data_plane.transfers
        phases = [machine.phase_of(operation) for operation in transfers]
        if Phase.DONE in phases:
            return LifePhase.DONE
        begun = [transfer for transfer in transfers.values() if transfer.begun]
        if begun:
            gathering = any(transfer.phase == "gather" for transfer in begun)
            return LifePhase.GATHER if gathering else LifePhase.REDUCE_SCATTER
        if machine.in_round:
            return LifePhase.ROUND
        return LifePhase.OTHER

    def kill(self) -> None:
        """Die at once, as by SIGKILL."""
        self.host.crash()
        self._loop.create_task(self.engine.close())

    def _observe(self, event: PeerEvent, effects: list[PeerEffect]) -> None:
        if not self.host.alive:
            return
        self._trace.note(self._loop.now_ns(), self.name, repr(event))
        self.engine.machine.check()
        for effect in effects:
            if isinstance(effect, Return) and isinstance(effect.value, ReduceResult):
                self.results[effect.value.operation.tag] = effect.value
        self._on_event(self, event, effects)
