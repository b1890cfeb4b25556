"""One process of ``pccl bench state``: has contents that others fetch, or fetches them.

All processes meet before and after each case of each round at a master of its own (``control``), so
that whoever takes no part does nothing meanwhile. What it is to do is one argument, a
:class:`pccl.cli.bench.state.words.StateTask`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import pccl
from pccl import SharedStateSyncInfo, SharedStateSyncStrategy
from pccl.cli.bench.peers import memory
from pccl.cli.bench.peers.ours import split
from pccl.cli.bench.peers.peer import say
from pccl.cli.bench.peers.rounds import DIGITS, new_buffer, timed
from pccl.cli.bench.peers.values import Array, Pattern, pattern
from pccl.cli.bench.peers.words import Doing, Failed
from pccl.cli.bench.state.words import MEMORY, TIMED, Case, Gathering, Played, StateTask
from pccl.errors import PCCLError

TENSORS = 8
"""Of a state; they are about equally long."""

HASHED_BYTES = 1 << 20
"""A plain receiver hashes so much at a time, as the library does."""

MEMORY_ROUNDS = 2
"""More than one, for memory that a synchronization leaves behind shows when the next begins."""

NEVER_SPOOLED = 1 << 62
"""Bytes of staging memory that no state exceeds."""

PAUSE_S = 0.01
"""Between two looks whether a newcomer is there."""

LARGEST = 4095
OTHER_ROUNDS = 10_007
"""Contents of others are those of rounds that are never played; each joiner has its own."""


class Contents:
    """The memory of a state, and what is in it.

    Args:
        nbytes: of all tensors together; float32.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = new_buffer(nbytes // 4, np.dtype(np.float32))
        self.tensors = split(self.buffer, TENSORS)
        self._pattern = Pattern(pattern(LARGEST).astype(np.float32))

    def state(self, *, track_touched: bool = False) -> pccl.SharedState:
        """A shared state that consists of them."""
        infos = [
            pccl.TensorInfo.from_numpy(tensor, f"tensor {number}")
            for number, tensor in enumerate(self.tensors)
        ]
        return pccl.SharedState(infos, track_touched=track_touched)

    def fill(self, round_number: int) -> None:
        """Put in what belongs to a round."""
        for number in range(TENSORS):
            self.fill_one(number, round_number)

    def fill_one(self, number: int, round_number: int) -> None:
        """Put into one tensor what belongs to a round."""
        self._pattern.fill(self.tensors[number], TENSORS * round_number + number)

    def fault(self, round_number: int, skipped: int | None = None) -> str:
        """The first value that is another one, in words, or nothing; of all tensors but one."""
        numbers = (number for number in range(TENSORS) if number != skipped)
        return next(filter(None, (self.fault_of(each, round_number) for each in numbers)), "")

    def fault_of(self, number: int, round_number: int) -> str:
        """As ``fault``, of one tensor."""
        shift = TENSORS * round_number + number
        wrong = self._pattern.compare(self.tensors[number], shift)
        return f"tensor {number}, round {round_number}: {wrong}" if wrong else ""

    @property
    def view(self) -> memoryview:
        """All bytes, one behind the other."""
        found: Array = self.buffer.view(np.uint8)
        return found.data


@dataclass(slots=True)
class Watch:
    """When the phases of a synchronization began, and memory meanwhile.

    Attributes:
        weighs: whether to look at the memory.
        phases: name -> when it was heard of first.
        anonymous_bytes: the most that was seen.
    """

    weighs: bool
    phases: dict[str, float] = field(default_factory=dict[str, float])
    anonymous_bytes: int = 0

    def __call__(self, progress: pccl.SyncProgress) -> None:
        """Told by the library, in its thread."""
        self.phases.setdefault(progress.phase, time.perf_counter())
        if self.weighs:
            self.anonymous_bytes = max(self.anonymous_bytes, memory.anonymous_bytes())


@dataclass(slots=True)
class StateLog:
    """What the rounds of one case have shown so far."""

    seconds: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])
    hashing_s: list[float] = field(default_factory=list[float])
    fetching_s: list[float] = field(default_factory=list[float])
    placing_s: list[float] = field(default_factory=list[float])
    info: SharedStateSyncInfo | None = None
    extra_bytes: int = 0
    anonymous_bytes: int = 0
    fault: str = ""

    def add(self, began_s: float, seconds: float, cpu_s: float, watch: Watch) -> None:
        """A round that counts."""
        self.seconds.append(round(seconds, DIGITS))
        self.cpu_s.append(round(cpu_s, DIGITS))
        if watch.phases:
            waiting_s, placing_s = watch.phases["waiting"], watch.phases["placing"]
            self.hashing_s.append(round(waiting_s - began_s, DIGITS))
            self.fetching_s.append(round(placing_s - waiting_s, DIGITS))
            self.placing_s.append(round(began_s + seconds - placing_s, DIGITS))


class StatePeer:
    """What this process is and has.

    Args:
        task: what it does.
        control: connected to all others.
        comms: connected, for each gathering; None: without this process.
        socket: of the plain copy; None: without this process.
    """

    def __init__(
        self,
        task: StateTask,
        control: pccl.Communicator,
        comms: dict[tuple[int, int], pccl.Communicator | None],
        socket: Any,
    ) -> None:
        self._task = task
        self._control = control
        self._comms = comms
        self._socket = socket
        self._contents = Contents(task.bytes)
        self._states = {kind: self._contents.state(track_touched=True) for kind in comms}
        self._logs = {case: StateLog() for case in task.cases}
        self._round = 0

    def measure(self) -> None:
        """Play all rounds, and report."""
        task = self._task
        self._play([case for case in task.cases if case.kind in MEMORY], MEMORY_ROUNDS, keep=True)
        cases = [case for case in task.cases if case.kind in TIMED]
        self._play(cases, task.warmup, keep=False)
        self._play(cases, task.rounds, keep=True)
        for number, case in enumerate(task.cases):
            if self._takes_part(case):
                say(self._report(number, case))

    def _report(self, number: int, case: Case) -> Played:
        log, comm = self._logs[case], self._comms[case.sources, case.joiners]
        assert comm is not None
        lanes = [lane for link in comm.status().links for lane in link.lanes]
        return Played(
            case=number,
            seconds=tuple(log.seconds),
            cpu_s=tuple(log.cpu_s),
            hashing_s=tuple(log.hashing_s),
            fetching_s=tuple(log.fetching_s),
            placing_s=tuple(log.placing_s),
            rx_bytes=log.info.rx_bytes if log.info is not None else 0,
            tx_bytes=log.info.tx_bytes if log.info is not None else 0,
            extra_bytes=log.extra_bytes,
            anonymous_bytes=log.anonymous_bytes,
            congestion=tuple(sorted({lane.congestion for lane in lanes})),
            fault=log.fault,
        )

    def _takes_part(self, case: Case) -> bool:
        return self._task.number < (case.joiners if self._task.joins else case.sources)

    def _play(self, cases: list[Case], count: int, *, keep: bool) -> None:
        for done in range(count):
            for case in cases if done % 2 == 0 else reversed(cases):
                if not self._task.joins and not self._task.number:
                    say(Doing(str(case), self._task.bytes, done))
                self._round += 1
                if self._takes_part(case):
                    self._play_one(case, keep=keep)
                else:
                    self._control.barrier()
                    self._control.barrier()

    def _play_one(self, case: Case, *, keep: bool) -> None:
        task, log, contents = self._task, self._logs[case], self._contents
        other = OTHER_ROUNDS * (1 + task.number) if task.joins else 0
        if case.kind in ("unchanged", "touched"):
            other = 0
        contents.fill(self._round + other)
        watch = Watch(weighs=case.kind in MEMORY)
        act = self._copy if case.kind.startswith("copy") else self._sync(case, watch)
        before = 0, 0
        if case.kind in MEMORY:
            memory.give_back()
            memory.reset_peak()
            before = memory.resident_bytes(), memory.anonymous_bytes()
        self._control.barrier()
        began_s = time.perf_counter()
        seconds, cpu_s = timed(lambda: act(case))
        peak_bytes = memory.peak_bytes()
        self._control.barrier()
        log.fault = log.fault or contents.fault(self._round)
        if keep:
            log.add(began_s, seconds, cpu_s, watch)
        if case.kind in MEMORY:
            log.extra_bytes = max(log.extra_bytes, peak_bytes - before[0])
            log.anonymous_bytes = max(log.anonymous_bytes, watch.anonymous_bytes - before[1])

    def _copy(self, case: Case) -> None:
        from pccl.stress.emulator import stream

        if self._task.joins:
            piece_bytes = HASHED_BYTES if case.kind == "copy_hash" else 0
            stream.take(self._socket, self._contents.view, piece_bytes)
        else:
            stream.give(self._socket, self._contents.view)

    def _sync(self, case: Case, watch: Watch) -> Callable[[Case], None]:
        """What is to be timed; all that comes before it is done."""
        joins, comm = self._task.joins, self._comms[case.sources, case.joiners]
        assert comm is not None
        state = self._states[case.sources, case.joiners]
        state.touch()
        strategy = SharedStateSyncStrategy.ENFORCE_POPULAR
        if case.kind in ("unchanged", "touched"):
            state.push_revision()
            comm.sync_shared_state(state)
            state.push_revision()
            if case.kind == "unchanged":
                state.touch()
        else:  # who begins with which revision does not matter
            strategy = (
                SharedStateSyncStrategy.RECEIVE_ONLY if joins else SharedStateSyncStrategy.SEND_ONLY
            )
            if not joins:
                state.push_revision()
        staging_bytes_max = 0 if case.kind == "spooled" else NEVER_SPOOLED
        log, in_place = self._logs[case], joins and case.kind == "in_place"
        if in_place:  # for a first synchronization only
            state.synchronized(0, None)

        def act(_: Case) -> None:
            log.info = comm.sync_shared_state(
                state,
                strategy,
                in_place=in_place,
                staging_bytes_max=staging_bytes_max,
                on_progress=watch,
            )

        return act


def open_control(task: Any, stack: contextlib.ExitStack) -> pccl.Communicator:
    """Meet all others."""
    control = stack.enter_context(pccl.Communicator(task.control))
    control.connect(min_peers=task.sources + task.joiners)
    return control


def open_one(gathering: Gathering, stack: contextlib.ExitStack) -> pccl.Communicator:
    """A communicator for a gathering, not connected."""
    return stack.enter_context(
        pccl.Communicator(
            gathering.master,
            listen=gathering.listen or None,
            advertise=gathering.advertise or None,
        )
    )


def gather(
    task: StateTask, gathering: Gathering, control: pccl.Communicator, stack: contextlib.ExitStack
) -> pccl.Communicator | None:
    """Connect with those of a gathering; joiners come last, so that it is they who dial."""
    comm = None
    if task.number < (gathering.joiners if task.joins else gathering.sources):
        comm = open_one(gathering, stack)
    if comm is not None and not task.joins:
        comm.connect(min_peers=gathering.sources)
    control.barrier()
    if comm is None:
        return None
    if task.joins:
        comm.connect()
    while comm.world_size < gathering.sources + gathering.joiners:
        time.sleep(PAUSE_S)
        comm.update_topology()
    return comm


@contextlib.contextmanager
def copying(
    task: StateTask, control: pccl.Communicator, congestion: str
) -> Generator[Any, None, None]:
    """The connection of the plain copy, if this process has a part in it."""
    from pccl.stress.emulator import stream

    takes_part = bool(task.port) and not task.number
    with contextlib.ExitStack() as stack:
        listener = None
        if takes_part and not task.joins:
            listener = stack.enter_context(stream.listening(task.port))
        control.barrier()
        if listener is not None:
            yield stack.enter_context(stream.accepted(listener, congestion))
        elif takes_part:
            yield stack.enter_context(stream.dialled(task.port, congestion))
        else:
            yield None


def congestion_of(comm: pccl.Communicator | None) -> str:
    """The congestion control that connections have; nothing if there are none."""
    lanes = [lane for link in comm.status().links for lane in link.lanes] if comm else []
    return lanes[0].congestion if lanes else ""


def run(task: StateTask) -> None:
    """Do a task and report it.

    Raises:
        PCCLError: a run was lost.
        OSError: there is not enough memory, or the plain copy failed.
    """
    with contextlib.ExitStack() as stack:
        control = open_control(task, stack)
        comms = {
            (gathering.sources, gathering.joiners): gather(task, gathering, control, stack)
            for gathering in task.gatherings
        }
        socket = stack.enter_context(copying(task, control, congestion_of(comms.get((1, 1)))))
        StatePeer(task, control, comms, socket).measure()
        control.barrier()  # nobody leaves before all are done


def main() -> None:
    """Do the task that is the one argument."""
    try:
        run(StateTask.from_json(sys.argv[1]))
    except (PCCLError, OSError, RuntimeError, ValueError) as error:
        say(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
