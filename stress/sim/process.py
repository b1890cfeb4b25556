"""Simulated processes: the production classes with a simulated clock and host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy.typing as npt

from pccl.machines.master.events import Announce, MasterEvent
from pccl.machines.master.events import ConnectionMessage as MasterHears
from pccl.machines.master.events import SendTo as MasterSend
from pccl.machines.peer.events import (
    ControlMessage,
    PeerEffect,
    PeerEvent,
    Post,
    PostSync,
    ReduceCall,
    ReduceResult,
    ReturnCall,
)
from pccl.machines.peer.machine import Standing
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.messages import (
    HoldingsQuery,
    MasterAddress,
    OperationEnded,
    OperationStarted,
)
from pccl.protocol.operation import Phase
from pccl.protocol.types import OperationId, PeerId, RemovalCause
from pccl.runtime.clock import Timer
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.master_store import Remembered
from pccl.runtime.requests import PeerOptions
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.late_claims import LateClaims
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.checkers.round_quorums import RoundQuorums
from pccl.stress.sim.checkers.told_events import ToldEvents
from pccl.stress.sim.checkers.told_losses import ToldLosses
from pccl.stress.sim.curves import QuickCurves
from pccl.stress.sim.faults.base import LifePhase
from pccl.stress.sim.faults.between import BlackHole
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.parts import RunParts
from pccl.telemetry.events import LargePacketsLost
from pccl.telemetry.stream import Stamped
from pccl.transports.base import Address
from pccl.transports.link import Link
from pccl.transports.sim.network import SimHost

Array = npt.NDArray[Any]

MASTER_ADDRESS = Address("master", 48148)
STANDBY_ADDRESS = Address("standby", 48148)

_OUTDATED = "invalid or outdated Resumed"
"""Reason of the one protocol error an honest master may cause: its peer follows another master."""

_NO_OPERATION = OperationId(0, 0, 0, 0, 0)


class ProcessClock:
    """The clock of one process: late callbacks for a frozen or slow process, none for a dead one.

    Attributes:
        missed_ns: total time for which the clock stood still.
    """

    def __init__(self, loop: VirtualLoop, host: SimHost) -> None:
        self.missed_ns = 0
        self.host = host
        self._loop = loop

    def now_ns(self) -> int:
        """Return the time of this clock, in ns."""
        return self._loop.now_ns() - self.missed_ns

    def busy_ns(self) -> int:
        """Return the processor time that the process has used, in ns."""
        return self.host.run_queue.busy_ns

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Call ``callback`` at ``when_ns``, or as soon as the process runs after that."""
        return _ProcessTimer(self, when_ns, partial(callback, *args))

    def arm(self, when_ns: int, action: Callable[[], None]) -> Timer:
        """Call ``action`` at ``when_ns`` of this clock, even if the process does not run."""
        return self._loop.call_at_ns(when_ns + self.missed_ns, action)


class _ProcessTimer:
    """A pending callback of a process."""

    def __init__(self, clock: ProcessClock, when_ns: int, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._when_ns = when_ns
        self._callback: Callable[[], object] | None = callback
        self._timer = clock.arm(when_ns, self._due)

    def cancel(self) -> None:
        """Cancel the callback."""
        self._callback = None
        self._timer.cancel()

    def _due(self) -> None:
        if self._clock.host.alive:
            self._clock.host.run(self._fire, timer=True)

    def _fire(self) -> None:
        callback = self._callback
        if callback is None or not self._clock.host.alive:
            return
        if self._clock.now_ns() < self._when_ns:  # the clock stood still meanwhile
            self._timer = self._clock.arm(self._when_ns, self._due)
            return
        self._callback = None
        callback()


class MemoryStore:
    """The stored data of a master, in memory; it outlasts the process."""

    def __init__(self) -> None:
        self._kept: Remembered | None = None

    def load(self) -> Remembered | None:
        """Return the data that was saved last; None: no data is stored."""
        return self._kept

    def save(self, remembered: Remembered) -> None:
        """Store ``remembered`` in memory."""
        self._kept = remembered

    def clear(self) -> None:
        """Drop the stored data."""
        self._kept = None


class MasterProcess:
    """A process that runs the master."""

    def __init__(
        self,
        parts: RunParts,
        host: SimHost,
        rng: Random,
        store: MemoryStore,
        others: tuple[Address, ...],
        secret: bytes,
        *,
        standby: bool,
    ) -> None:
        self.host = host
        self._parts = parts
        self._checkers = parts.checkers
        self.clock = ProcessClock(parts.loop, host)
        self._quorums = RoundQuorums(parts.checkers.done)
        self._is_successor = not standby
        """Whether it may be a restarted master that does not know the run yet."""
        self.heard_ns: dict[int, int] = {}
        """Connection -> time of its last message."""
        standbys = tuple(MasterAddress(other.host, other.port) for other in others)
        self.server = MasterServer(
            self.clock,
            host,
            parts.scenario.timing,
            rng.randbytes,
            self._observe,
            parts.scenario.token,
            store,
            standbys,
            others if standby else (),
            curves=QuickCurves(),
            secret=secret,
            encrypts=parts.scenario.encrypts,
            relays=parts.scenario.relays,
        )

    async def start(self) -> None:
        """Listen at the master's port."""
        await self.server.start(Address(self.host.name, MASTER_ADDRESS.port))

    def kill(self) -> None:
        """Kill the process at once."""
        self.host.crash()
        self.server.close()

    def _observe(self, event: MasterEvent, effects: list[object]) -> None:
        state = self._checkers.state
        elections = state.take_elections() if state is not None else []
        if not self.host.alive:
            return
        now_ns = self._parts.loop.now_ns()
        self._parts.trace.note(now_ns, self.host.name, event)
        machine = self.server.machine
        machine.check()
        training = self._checkers.training
        if self._is_successor and not machine.recovering and training is not None:
            training.master_restarted()  # until now, words of the last one may have arrived
            self._is_successor = False
        if self._parts.scenario.quorum is not None:  # then no process makes a mistake, either
            self._quorums.saw(machine, event, effects)
        for election in elections:
            assert state is not None
            state.judge(machine.run, machine.term, election)
        if isinstance(event, MasterHears):
            self.heard_ns[event.connection] = now_ns
        if machine.standbys:
            gone = [e for e in effects if isinstance(e, Announce) and e.what == "removed"]
            lost = [effect for effect in gone if effect.cause is not RemovalCause.GOODBYE]
            self._checkers.removed_together(len(lost), len(machine.membership.members()))
        for effect in effects:
            if isinstance(effect, MasterSend) and isinstance(effect.message, HoldingsQuery):
                self._checkers.was_interrupted(InRun(machine.run, effect.message.operation))
            elif isinstance(effect, Announce) and effect.what == "registered":
                member = machine.membership.peers[effect.peer].member
                host = self.host.network.addresses.process_at(member.host, member.hosts)
                self._checkers.registered(machine.run, effect.peer, host, member.port)
            elif isinstance(effect, Announce) and effect.what == "admitted":
                membership = machine.membership
                size, group = len(membership.members()), membership.peers[effect.peer].group
                view = membership.roster(group).view
                self._checkers.admitted(machine.run, effect.peer, size, view)
            elif isinstance(effect, Announce) and effect.what == "removed":
                assert effect.cause is not None
                self._checkers.removed(machine.run, effect.peer, effect.cause, effect.text)
            elif isinstance(effect, Announce) and effect.what == "undialable":
                self._checkers.undialable(machine.run, effect.peer, effect.text)


class _RecordingEngine(PeerEngine):
    """Copies every input before the engine uses it, because the engine adds early data at once."""

    inputs: dict[int, Array | None]
    """Open call -> copy of its input; None: a barrier."""

    def _step(self, event: PeerEvent) -> None:
        if isinstance(event, ReduceCall):
            lender = self.calls.open.get(event.call)
            assert lender is not None
            operand = lender.operand
            self.inputs[event.call] = operand.source.copy() if operand is not None else None
        try:
            super()._step(event)
        except RemoteProtocolError as error:
            if error.reason != _OUTDATED:
                raise Violation(f"a master broke the protocol: {error.reason}") from error
            raise
        for call in [call for call in self.inputs if self.calls.open.get(call) is None]:
            del self.inputs[call]


class PeerProcess:
    """A process that runs a peer."""

    def __init__(
        self,
        parts: RunParts,
        host: SimHost,
        options: PeerOptions,
        on_event: Callable[[PeerProcess, PeerEvent, list[PeerEffect]], None],
        make_link: Callable[[PeerId], Link],
        index: int,
        port: int,
    ) -> None:
        self.host = host
        self.name = host.name
        self.index = index
        self.address = Address(host.name, port)
        self.sync_ring: tuple[PeerId, ...] = ()
        """Members that were to take part in the last requested synchronization."""
        self.results: dict[int, tuple[bytes, ReduceResult]] = {}
        """Tag -> run and result of the last operation that committed for a caller here."""
        self.posted_sync = InRun(b"", _NO_OPERATION)
        """The last synchronization that this process took part in."""
        self.caught_lying: set[int] = set()
        """Tags of guarded averages that a lie of this process has ended; it tells no more there."""
        self.napping = 0
        """Callers that sleep before a joint call, while others may be inside one."""
        self._losses = ToldLosses(self.name)
        self._claims = LateClaims(self.name, parts.checkers.done, self._first_view)
        self._parts = parts
        self._on_event = on_event
        loop, self.group = parts.loop, index % parts.scenario.groups
        self.clock = ProcessClock(loop, host)
        random_bytes = Random(str(self.address)).randbytes
        listen, curves = Address("", port), QuickCurves()
        options = replace(
            options, random_bytes=random_bytes, curves=curves, listen=listen,
            encrypts=parts.scenario.encrypts, callers_blocked=self._callers_blocked,
        )  # fmt: skip
        self.engine = _RecordingEngine(
            loop, self.clock, host, MASTER_ADDRESS, self.group, options, self._observe, make_link
        )
        self.engine.inputs = {}
        may_lose = any(isinstance(fault, BlackHole) for fault in parts.scenario.faults)
        self._events = ToldEvents(self.name, self.engine, may_lose_packets=may_lose)
        self.engine.events.listen(self._hear)

    def _callers_blocked(self) -> bool:
        return self.engine.calls.work.is_undecided and not self.napping

    @property
    def alive(self) -> bool:
        """Whether the process has not been killed."""
        return self.host.alive

    @property
    def peer(self) -> PeerId:
        """Id of the process in the run; 0 before its registration."""
        return self.engine.machine.peer

    @property
    def run(self) -> bytes:
        """Run that the process is or was in; empty before its registration."""
        return self.engine.machine.run

    def life_phase(self) -> LifePhase:
        """Return what the process is doing right now."""
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
        sessions = self.engine.exchange.sessions.values()
        downloads = [session.download for session in sessions]
        if any(one.pieces is not None and not one.complete for one in downloads):
            return LifePhase.FETCHING
        if sessions:
            return LifePhase.SYNC
        if machine.in_round:
            return LifePhase.ROUND
        return LifePhase.OTHER

    def kill(self) -> None:
        """Kill the process at once, as SIGKILL does."""
        self.host.crash()
        self._parts.loop.create_task(self.engine.close())

    def _hear(self, stamped: Stamped) -> None:
        if isinstance(stamped.event, LargePacketsLost):
            self._parts.checkers.done["large packets lost"] += 1

    def asked(self, post: Post) -> ReduceCall | None:
        """Return the call of a weighted average; None: it is another operation."""
        call = self.engine.calls.open.get(post.call)
        if call is None or not isinstance(call.event, ReduceCall) or not post.descriptor.weighted:
            return None
        return call.event

    def _first_view(self) -> int:
        return self._parts.checkers.first_view(self.run, self.peer)

    def _observe(self, event: PeerEvent, effects: list[PeerEffect]) -> None:
        if not self.host.alive:
            return
        self._parts.trace.note(self._parts.loop.now_ns(), self.name, event)
        self.engine.machine.check()
        self._losses.saw(self.engine, event, effects)
        self._claims.saw(self.peer, event, effects)
        values = [effect.value for effect in effects if isinstance(effect, ReturnCall)]
        self._events.check([value for value in values if isinstance(value, ReduceResult)])
        checkers, guards = self._parts.checkers, self._parts.checkers.guards
        match event:
            case ControlMessage(OperationEnded() as ended):
                outcome = (ended.abort is None, ended.contributors)
                operation = InRun(self.run, ended.operation)
                checkers.outcome(operation, self.address, self.peer, outcome)
                is_missed = ended.elected is not None and self.peer not in ended.contributors
                if checkers.state is not None and is_missed:
                    checkers.state.missed(self.name, operation)
                if guards is not None and guards.refused(self.name, self.run, ended) == self.peer:
                    self.caught_lying.add(ended.operation.tag)
            case ControlMessage(OperationStarted() as start) if guards is not None:
                guards.started(self.name, InRun(self.run, start.operation), start)
            case _:
                pass
        for effect in effects:
            if isinstance(effect, PostSync):
                self.posted_sync = InRun(self.run, effect.operation)
                self.sync_ring = effect.ring
            if isinstance(effect, ReturnCall) and isinstance(effect.value, ReduceResult):
                self.results[effect.value.operation.tag] = self.run, effect.value
        self._on_event(self, event, effects)
