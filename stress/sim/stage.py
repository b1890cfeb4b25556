"""The stage of one run: its masters, peers and network, and what faults may do to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import compress
from random import Random
from typing import Any

from pccl.machines.peer.events import (
    Begin,
    BeginSync,
    Detach,
    LeaveCall,
    PeerEffect,
    PeerEvent,
    Post,
    PostSync,
    Send,
    SyncCall,
)
from pccl.machines.peer.machine import Standing
from pccl.protocol.errors import LinkError
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.messages import Withdraw
from pccl.protocol.operation import Eager
from pccl.protocol.types import PeerId, Roster
from pccl.stress.sim.builder import Builder
from pccl.stress.sim.checkers.excuses import MASTER_NAME, MASTERS, STANDBY_NAME, Excuses
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.links import LinkCheckers
from pccl.stress.sim.faults.base import MASTER, Fault, LifePhase
from pccl.stress.sim.links import Lips
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import (
    MASTER_ADDRESS,
    PeerProcess,
    ProcessClock,
)
from pccl.stress.sim.workloads.application import Application
from pccl.transports.base import Address
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimHost, SimNetwork
from pccl.transports.sim.routes import HostRoute

_BELIEVERS = (Standing.PENDING, Standing.MEMBER)

CALLER_LEFT = "caller left"
CALLER_LEFT_DIVIDED = "caller left, masters divided"
"""Names of counts of callers that left, by phase: DONE after their operation was done, and
REDUCE_SCATTER before that, whatever data moved."""

Watcher = Callable[["Seat", PeerEvent], None]


def in_phase(kind: str, phase: LifePhase) -> str:
    """Return the name under which a summary counts ``kind`` in a phase of life."""
    return f"{kind} in {phase.value}"


class Seat:
    """One place in the run: a process and its application, which a restart replaces."""

    def __init__(self, index: int, process: PeerProcess, workload: Application, lips: Lips) -> None:
        self.index = index
        self.process = process
        self.workload = workload
        self.lips = lips
        self.boots = 1
        self.task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether the present process of the seat is alive."""
        return self.process.alive

    @property
    def is_over(self) -> bool:
        """Whether the application of the seat has ended."""
        return self.task is not None and self.task.done()


class Stage:
    """The processes and the network of one run, and the operations of faults on them.

    Args:
        parts: shared objects of the run.
        excuses: records what faults do.
        on_done: called when an application has ended.
    """

    def __init__(
        self,
        parts: RunParts,
        excuses: Excuses,
        on_done: Callable[[PeerProcess, asyncio.Task[None]], None],
    ) -> None:
        self.scenario = scenario = parts.scenario
        self.checkers = checkers = parts.checkers
        self.excuses = excuses
        self.seats: list[Seat] = []
        self.kills: Counter[str] = Counter()
        """Phase of life -> number of kills."""
        self.strikes: Counter[str] = Counter()
        """Kind of fault -> how often it struck."""
        self.struck_in: Counter[str] = Counter()
        """Kind of fault and phase of its victim -> number of strikes; also callers that left."""
        self._divided_until_ns = 0
        self.struck_ns = 0
        """Time at which the last fault struck."""
        self.loop = loop = parts.loop
        self._on_done = on_done
        self._watchers: list[Watcher] = []
        self._spawned: dict[asyncio.Task[None], None] = {}
        self._stranger: SimHost | None = None
        checkers.believes = self._believes
        if checkers.training is not None:
            checkers.training.is_running = self._is_running
        checkers.waits = self._waits
        checkers.follows = self._follows
        checkers.before_goodbye = LinkCheckers(
            scenario.timing,
            checkers.done,
            loop.now_ns,
            self._quiet_since_ns,
            lambda: (seat.process for seat in self.seats),
            excuses.are_apart,
            excuses.need_relay,
            excuses.waits_for_kernel,
        ).check
        excuses.master_relays = scenario.relays
        if scenario.standby and not all(fault.keeps_majority for fault in scenario.faults):
            excuses.masters_died = True
        rng = Random(f"{scenario.seed}/network")
        self.network = SimNetwork(
            loop,
            rng,
            lambda now_ns, what: parts.trace.note(now_ns, "network", what),
            latency_ns=scenario.latency_ns,
            bytes_per_s=scenario.bytes_per_s,
            window_bytes=scenario.window_bytes,
        )
        self.network.memories.done = checkers.done
        self.network.wires.on_stuck = self._stuck
        self._build = Builder(parts, self.network, rng, self._on_event)
        self.master = self._build.master(MASTER_NAME)
        self.standby = self._build.master(STANDBY_NAME) if scenario.standby else None
        for _ in range(scenario.peers):
            self._add_seat()
        self._build.spread_links(self.names())

    def _add_seat(self) -> Seat:
        index = len(self.seats)
        lips = Lips()
        process = self._build.peer(index, 0, lips)
        starts = index < self.scenario.peers - self.scenario.late_peers
        seat = Seat(index, process, self._build.workload(process, starts=starts), lips)
        self.seats.append(seat)
        return seat

    # -- what faults see -----------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the virtual time in ns."""
        return self.loop.now_ns()

    def at(self, when_ns: int, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback`` at a time of the run."""
        self.loop.call_at_ns(when_ns, callback, *args)

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` after every event of a peer's machine."""
        self._watchers.append(watcher)

    def struck(self, fault: Fault, phase: LifePhase | None = None) -> None:
        """Record that ``fault`` takes effect now, in ``phase`` of its victim."""
        self.strikes[fault.kind] += 1
        if phase is not None:
            self.struck_in[in_phase(fault.kind, phase)] += 1
        self.struck_ns = self.now_ns()

    def flipped(self, what: str, end: SimConnection) -> None:
        """Record flipped bits in data that arrived at ``end``. ``what``: name of the count."""
        self.struck_in[what] += 1
        self.struck_ns = self.now_ns()
        self.excuses.flipped(end)

    def _stuck(self, end: SimConnection) -> None:
        self.checkers.done["lane stuck"] += 1
        self.excuses.stuck(end)

    def divided(self, duration_ns: int) -> None:
        """Record that some members cannot reach the living first master for ``duration_ns``."""
        self._divided_until_ns = max(self._divided_until_ns, self.now_ns() + duration_ns)
        self.excuses.masters_divided = True

    def name(self, index: int) -> str:
        """Return the host name of a process (-1: the master)."""
        return MASTER_NAME if index == MASTER else f"p{index}"

    def names(self) -> list[str]:
        """Return the host names of all processes, the masters' first."""
        masters = MASTERS if self.scenario.standby else (MASTER_NAME,)
        return [*masters, *(self.name(seat.index) for seat in self.seats)]

    def others(self, index: int, other: int | None = None) -> list[str]:
        """Return the host name of process ``other``; None: the names of all except ``index``."""
        if other is not None:
            return [self.name(other)]
        return [name for name in self.names() if name != self.name(index)]

    def routes(self, index: int, other: int | None) -> list[HostRoute]:
        """Return both directions between a process and ``other`` (None: all other processes)."""
        name, route = self.name(index), self.network.route
        pairs = [(route(name, far), route(far, name)) for far in self.others(index, other)]
        return [each for pair in pairs for each in pair]

    def host(self, index: int) -> SimHost:
        """Return the host of a process."""
        return self.network.hosts[self.name(index)]

    def clock(self, index: int) -> ProcessClock:
        """Return the clock of a process."""
        return self.master.clock if index == MASTER else self.seats[index].process.clock

    def address(self, index: int) -> Address:
        """Return the address at which others see the port of a process."""
        listens = MASTER_ADDRESS if index == MASTER else self.seats[index].process.address
        return Address(self.network.addresses.address_of(listens.host), listens.port)

    def stranger(self) -> SimHost:
        """Return the host of a stranger, which does not belong to the run."""
        if self._stranger is None:
            self._stranger = self.network.host("stranger")
        return self._stranger

    def lane_ends(self) -> list[SimConnection]:
        """Return the ends of all connections between peers."""
        return [
            end
            for end in self.network.ends
            if not {*MASTERS, "stranger"} & {end.local.host, end.other.local.host}
        ]

    # -- what faults do ------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task of a fault, which is no part of the library."""
        task = self.loop.create_task(work)
        self._spawned[task] = None
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._spawned[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, LinkError):
            self.loop.call_exception_handler({"message": "a fault failed", "exception": error})

    def begin(self, seat: Seat, wait_ns: int) -> None:
        """Start the application of a seat after ``wait_ns``."""

        async def work(workload: Application) -> None:
            await workload.sleep(wait_ns)
            await workload.run()

        process = seat.process
        seat.task = self.loop.create_task(work(seat.workload))
        seat.task.add_done_callback(partial(self._ended, process))

    def _ended(self, process: PeerProcess, task: asyncio.Task[None]) -> None:
        if not self.master.host.alive or self.excuses.was_cut_off(process.name):
            self._note_majority(process.engine.roster)  # perhaps no master received its goodbye
        self._on_done(process, task)
        training = self.checkers.training
        if training is not None and training.saved[process.group]:
            waits = Random(f"{self.scenario.seed}/{process.name}/{self.now_ns()}/comes back")
            wait_ns = waits.randrange(self.scenario.stop_ns // 4)
            self.at(self.now_ns() + wait_ns, self._continue_from_checkpoint, process)

    def _continue_from_checkpoint(self, process: PeerProcess) -> None:
        """Start a process on the machine of one that has ended, if nobody has continued."""
        training = self.checkers.training
        (seat,) = (seat for seat in self.seats if seat.process.name == process.name)
        has_saved = training is not None and bool(training.saved[process.group])
        if has_saved and seat.process is process and seat.is_over:
            process.kill()
            self.restart(seat)

    def _is_running(self, index: int) -> bool:
        seat = self.seats[index] if index < len(self.seats) else None
        return seat is not None and seat.alive and not seat.is_over

    def kill(self, seat: Seat) -> bool:
        """Kill the process of a seat if its application runs; return whether it did."""
        if not seat.alive or seat.task is None or seat.task.done():
            return False
        self.kills[seat.process.life_phase().value] += 1
        self.struck_ns = self.now_ns()
        roster = seat.process.engine.roster
        seat.process.kill()
        seat.task.cancel()
        self._note_majority(roster)
        return True

    def _note_majority(self, roster: Roster | None) -> None:
        """With a standby, note whether half of ``roster`` or more is gone."""
        if self.standby is None or roster is None:
            return
        seats = (seat for seat in self.seats if seat.alive and not seat.is_over)
        living = {seat.process.peer for seat in seats}
        if 2 * len(living.intersection(roster.ring)) <= roster.global_world_size:
            self.excuses.majority_died = True

    def restart(self, seat: Seat) -> None:
        """Start a new process on the machine of a killed one."""
        self.strikes["restart"] += 1
        self.struck_ns = self.now_ns()
        seat.process = self._build.peer(seat.index, seat.boots, seat.lips)
        seat.workload = self._build.workload(seat.process, starts=False)
        seat.boots += 1
        self.begin(seat, 0)

    async def start(self) -> None:
        """Start the masters."""
        await self.master.start()
        if self.standby is not None:
            await self.standby.start()

    def kill_master(self) -> bool:
        """Kill the (first) master; return whether it was alive."""
        alive = self.master.host.alive
        self.struck_ns = self.now_ns()
        if self.checkers.store is not None:
            self.checkers.store.may_lose = True
        self.master.kill()
        return alive

    @property
    def standby_knows(self) -> bool:
        """Whether the standby knows the run that it may have to take over, and most members."""
        if self.standby is None or self.standby.server.machine.run == NO_RUN:
            return False
        named = self.standby.server.machine.succession.vouched.keys or {}
        members = self.master.server.machine.membership.members()
        return 2 * sum(member.id in named for member in members) > len(members)

    def restart_master(self, away_ns: int, *, blank: bool) -> None:
        """Start a new master at the address of the killed one.

        Args:
            away_ns: how long there was none.
            blank: whether it starts without the data of the killed one.
        """
        self.struck_ns = self.now_ns()
        self.excuses.restarted_master(away_ns)
        if self.standby is not None:
            self.excuses.masters_divided = True  # some members may follow the standby
        if self.checkers.training is not None:
            self.checkers.training.master_restarted()
        if blank:
            self.excuses.master_blank = True
        self.master = self._build.master(MASTER_NAME, blank=blank)
        self.spawn(self.master.start())

    def close(self) -> None:
        """Close the masters, because all applications have ended."""
        self.master.server.close()
        if self.standby is not None:
            self.standby.server.close()

    def join(self) -> None:
        """Start one more process."""
        self.begin(self._add_seat(), 0)

    # -- what processes do ---------------------------------------------------------------------

    def _on_event(self, process: PeerProcess, event: PeerEvent, effects: list[PeerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Begin) and effect.eager:
                way = "announced" if effect.eager is Eager.ANNOUNCEMENTS else "sent"
                self.checkers.done[f"{way} ahead of the start"] += 1
            elif isinstance(effect, Post):
                self.checkers.done["in two levels"] += bool(effect.mesh.sites)
                content = process.engine.inputs[effect.call]
                posted = InRun(process.run, effect.operation)
                call, guards = process.asked(effect), self.checkers.guards
                weight = None if call is None else call.weight
                self.checkers.posted(posted, process.peer, content, weight)
                if guards is not None and effect.descriptor.guard is not None:
                    assert call is not None
                    assert content is not None
                    guards.posted(posted, process.peer, effect, call, content)
        if isinstance(event, LeaveCall):
            self._note_leaving(effects)
        self._note_state(process, effects)
        seat = self.seats[process.index]
        for watcher in self._watchers:
            watcher(seat, event)

    def _note_leaving(self, effects: list[PeerEffect]) -> None:
        divided = self.now_ns() < self._divided_until_ns
        for effect in effects:
            match effect:
                case Detach():
                    phase = LifePhase.DONE
                case Send(Withdraw()):
                    phase = LifePhase.REDUCE_SCATTER
                case _:
                    continue
            self.struck_in[in_phase(CALLER_LEFT, phase)] += 1
            if divided:
                self.struck_in[in_phase(CALLER_LEFT_DIVIDED, phase)] += 1

    def _note_state(self, process: PeerProcess, effects: list[PeerEffect]) -> None:
        state, training = self.checkers.state, self.checkers.training
        for effect in effects:
            match effect:
                case PostSync(call, operation):
                    posted = InRun(process.run, operation)
                    self.checkers.posted(posted, process.peer, None)
                    session = process.engine.exchange.sessions[operation]
                    contents = tuple(bytes(view) for view in session.memory.views)
                    caller = process.engine.calls.open.get(call)
                    assert caller is not None
                    assert isinstance(caller.event, SyncCall)
                    if state is not None:
                        offer = caller.event.offer
                        state.offered(process.name, posted, process.peer, offer, contents)
                    if training is not None:
                        entries = session.memory.layout.entries
                        same = [not entry.may_differ for entry in entries]
                        common = tuple(compress(contents, same))
                        training.offered(posted, process.peer, common)
                case BeginSync(_, elected) if state is not None:
                    state.begun(process.name, process.peer, elected)
                case _:
                    pass

    def everybody_is_member(self) -> bool:
        """Whether all living processes are members of the run."""
        alive = [seat.process.engine.machine for seat in self.seats if seat.alive]
        return all(machine.standing is Standing.MEMBER for machine in alive)

    def _quiet_since_ns(self) -> int:
        """Return when the last fault ended or will end, in ns."""
        planned = (fault.ends_ns for fault in self.scenario.faults)
        return max(self.struck_ns, self.excuses.until_ns, *planned, 0)

    def _believes(self, address: Address) -> tuple[bytes, PeerId] | None:
        for seat in self.seats:
            if seat.process.address == address and seat.alive:
                machine = seat.process.engine.machine
                believes = machine.standing in _BELIEVERS
                return (machine.run, machine.peer) if believes else None
        return None

    def _follows(self, address: Address) -> int:
        seats = [seat for seat in self.seats if seat.process.address == address]
        return max((seat.process.engine.machine.term for seat in seats), default=0)

    def _waits(self, address: Address) -> bool:
        # A process that left a round, or a reduce after it was done, still waits for its end. And
        # the run may not know yet that a process is dead.
        others = (seat.process for seat in self.seats if seat.process.address != address)
        return any(
            not process.alive
            or len(process.engine.calls) > 0
            or process.engine.machine.in_round
            or process.engine.data_plane.transfers
            or process.engine.exchange.sessions
            for process in others
        )

    def crash(self) -> None:
        """Crash all hosts at the end of the run, so that no more callbacks run."""
        for host in list(self.network.hosts.values()):
            host.crash()
