"""One process of the part of ``pccl bench state`` that is about joins.

Members compute and synchronize; each join has a master and a gathering of its own. What it is to do
is one argument, a :class:`pccl.cli.bench.state_words.JoinTask`.
"""

from __future__ import annotations

import contextlib
import sys
import time

import pccl
from pccl.cli.bench.peer import say
from pccl.cli.bench.rounds import DIGITS
from pccl.cli.bench.state_peer import OTHER_ROUNDS, Contents, open_control, open_one
from pccl.cli.bench.state_words import Gathering, Joined, JoinTask
from pccl.cli.bench.words import Doing, Failed
from pccl.errors import PCCLError

STEPS_BEFORE = 4
"""That members take while nobody joins; the first is not counted, for it is their first."""

CHANGING = 0
"""The tensor that changes at every step, in the same way everywhere."""


class Member:
    """What this process is and has.

    Args:
        task: what it does.
        control: connected to all others.
    """

    def __init__(self, task: JoinTask, control: pccl.Communicator) -> None:
        self._task = task
        self._control = control
        self._contents = Contents(task.bytes)

    def take_part(self, number: int) -> Joined:
        """In one join; what this process has seen of it."""
        gathering = self._task.gatherings[number]
        with contextlib.ExitStack() as stack:
            comm = open_one(gathering, stack)
            state = self._contents.state()
            if self._task.joins:
                found = self._join(number, comm, state)
            else:
                found = self._be_joined(number, gathering, comm, state)
            self._control.barrier()
        return found

    def _be_joined(
        self, number: int, gathering: Gathering, comm: pccl.Communicator, state: pccl.SharedState
    ) -> Joined:
        self._contents.fill(number)
        comm.connect(min_peers=gathering.sources)
        before_s = [self._step(comm, state) for _ in range(STEPS_BEFORE)][1:]
        self._control.barrier()
        during_s = [self._step(comm, state)]
        while comm.world_size == gathering.sources:
            during_s.append(self._step(comm, state))
        self._step(comm, state)
        return Joined(
            number, tuple(before_s), tuple(during_s), 0.0, 0.0, 0, self._fault(number, state)
        )

    def _join(self, number: int, comm: pccl.Communicator, state: pccl.SharedState) -> Joined:
        self._contents.fill(number + OTHER_ROUNDS)
        self._control.barrier()
        began_s = time.perf_counter()
        comm.connect(shared_state=state if self._task.ways[number] else None)
        connected_s = time.perf_counter()
        info = comm.sync_shared_state(state)
        ended_s = time.perf_counter()
        fault = self._fault(number, state)
        self._step(comm, state)
        return Joined(
            number,
            (),
            (),
            round(connected_s - began_s, DIGITS),
            round(ended_s - connected_s, DIGITS),
            info.rx_bytes,
            fault or self._fault(number, state),
        )

    def _step(self, comm: pccl.Communicator, state: pccl.SharedState) -> float:
        """Compute, and synchronize; seconds of what is not computing."""
        time.sleep(self._task.compute_s)
        self._contents.fill_one(CHANGING, state.revision + 1)
        began_s = time.perf_counter()
        if comm.are_peers_pending():
            comm.update_topology()
        state.push_revision()
        comm.sync_shared_state(state)
        return round(time.perf_counter() - began_s, DIGITS)

    def _fault(self, number: int, state: pccl.SharedState) -> str:
        changing = self._contents.fault_of(CHANGING, state.revision)
        return changing or self._contents.fault(number, CHANGING)


def run(task: JoinTask) -> None:
    """Do a task and report it.

    Raises:
        PCCLError: a run was lost.
    """
    with contextlib.ExitStack() as stack:
        control = open_control(task, stack)
        member = Member(task, control)
        for number, prefetches in enumerate(task.ways):
            if not task.joins and not task.number:
                say(Doing("prefetch" if prefetches else "connect", task.bytes, number))
            say(member.take_part(number))


def main() -> None:
    """Do the task that is the one argument."""
    try:
        run(JoinTask.from_json(sys.argv[1]))
    except (PCCLError, OSError, RuntimeError, ValueError) as error:
        say(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
