"""One process of the part of ``pccl bench state`` that is about joins.

Members compute and synchronize, and somebody joins them. What it is to do is one argument, a
:class:`pccl.cli.bench.state.words.JoinTask`.
"""

from __future__ import annotations

import contextlib
import sys
import time

import pccl
from pccl.cli.bench.peers.peer import say
from pccl.cli.bench.peers.words import Failed
from pccl.cli.bench.state.peer import OTHER_ROUNDS, Contents, open_control, open_one
from pccl.cli.bench.state.words import JoinMeasured, JoinTask
from pccl.errors import PCCLError

STEPS_BEFORE = 4
"""That members take while nobody joins; the first is not counted, for it is their first."""

CONTENTS = 1
"""The round whose values all other tensors hold."""

CHANGING = 0
"""The tensor that changes at every step, in the same way everywhere."""


class JoinMember:
    """What this process is and has.

    Args:
        task: what it does.
        control: connected to all others.
    """

    def __init__(self, task: JoinTask, control: pccl.Communicator) -> None:
        self._task = task
        self._control = control
        self._contents = Contents(task.bytes)

    def take_part(self) -> JoinMeasured:
        """In the join; what this process has seen of it."""
        with contextlib.ExitStack() as stack:
            [gathering] = self._task.gatherings
            comm = open_one(gathering, stack)
            state = self._contents.state()
            if self._task.joins:
                found = self._join(comm, state)
            else:
                found = self._be_joined(gathering.sources, comm, state)
            self._control.barrier()  # nobody leaves before all are done
        return found

    def _be_joined(
        self, members: int, comm: pccl.Communicator, state: pccl.SharedState
    ) -> JoinMeasured:
        self._contents.fill(CONTENTS)
        comm.connect(min_peers=members)
        before_s = [self._step(comm, state) for _ in range(STEPS_BEFORE)][1:]
        self._control.barrier()
        during_s = [self._step(comm, state)]
        while comm.world_size == members:
            during_s.append(self._step(comm, state))
        self._step(comm, state)
        return JoinMeasured(tuple(before_s), tuple(during_s), 0.0, 0.0, 0, self._fault(state))

    def _join(self, comm: pccl.Communicator, state: pccl.SharedState) -> JoinMeasured:
        self._contents.fill(OTHER_ROUNDS)
        self._control.barrier()
        began_s = time.perf_counter()
        comm.connect(shared_state=state if self._task.prefetches else None)
        connected_s = time.perf_counter()
        info = comm.sync_shared_state(state)
        ended_s = time.perf_counter()
        fault = self._fault(state)
        self._step(comm, state)
        connect_s, sync_s = connected_s - began_s, ended_s - connected_s
        return JoinMeasured((), (), connect_s, sync_s, info.rx_bytes, fault or self._fault(state))

    def _step(self, comm: pccl.Communicator, state: pccl.SharedState) -> float:
        """Compute, and synchronize; seconds of what is not computing."""
        time.sleep(self._task.compute_s)
        self._contents.fill_one(CHANGING, state.revision + 1)
        began_s = time.perf_counter()
        if comm.are_peers_pending():
            comm.update_topology()
        state.push_revision()
        comm.sync_shared_state(state)
        return time.perf_counter() - began_s

    def _fault(self, state: pccl.SharedState) -> str:
        changing = self._contents.fault_of(CHANGING, state.revision)
        return changing or self._contents.fault(CONTENTS, CHANGING)


def run(task: JoinTask) -> None:
    """Do a task and report it.

    Raises:
        PCCLError: the run was lost.
    """
    with contextlib.ExitStack() as stack:
        say(JoinMember(task, open_control(task, stack)).take_part())


def main() -> None:
    """Do the task that is the one argument."""
    try:
        run(JoinTask.from_json(sys.argv[1]))
    except (PCCLError, OSError, RuntimeError, ValueError) as error:
        say(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
