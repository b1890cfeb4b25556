"""One process of ``pccl bench state``: a source of the state, or a joiner.

All processes are members of one run. After the last round they gather their measurements,
and rank 0 reports the figures. The argument of the program is a
:class:`StateTask`, and its environment names the run.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

import pccl
from pccl import SharedStateSyncStrategy
from pccl.cli.bench import machine
from pccl.cli.bench.peer import gather, new_buffer, timed
from pccl.cli.bench.state.figures import (
    JoinPart,
    Played,
    StateTask,
    join_figures,
    sync_figures,
)
from pccl.cli.bench.statistics import CaseDone, SourcesReady
from pccl.cli.bench.values import Array, Pattern, pattern
from pccl.cli.processes.reports import Doing, WorkerReport, say, work

TENSORS = 8
"""Number of tensors of a state; they have about the same length."""

PAUSE_S = 0.01
"""Seconds between two checks for a newcomer."""

LARGEST = 4095
OTHER_ROUNDS = 10_007
"""Joiners begin with contents of rounds that are never played, at multiples of this number."""

STEPS_BEFORE = 4
"""Steps that members take before a peer joins. The first one is a warm-up, and is not counted."""

CONTENTS, CHANGING = 1, 0
"""In a join: round whose values the tensors hold, and number of the tensor that changes."""


class Contents:
    """A shared state of ``nbytes`` bytes, float32, with known contents."""

    def __init__(self, nbytes: int) -> None:
        buffer = new_buffer(nbytes, np.dtype(np.float32))
        self._tensors: list[Array] = np.array_split(buffer, TENSORS)
        self._pattern = Pattern(pattern(LARGEST).astype(np.float32))
        infos = [
            pccl.TensorInfo.from_numpy(tensor, f"tensor {number}")
            for number, tensor in enumerate(self._tensors)
        ]
        self.state = pccl.SharedState(infos)

    def fill(self, round_number: int) -> None:
        """Fill all tensors with the values of a round."""
        for number in range(TENSORS):
            self.fill_one(number, round_number)

    def fill_one(self, number: int, round_number: int) -> None:
        """Fill tensor ``number`` with its values of a round."""
        self._pattern.fill(self._tensors[number], TENSORS * round_number + number)

    def fault(self, round_number: int, *, changing: int | None = None) -> str:
        """Describe the first wrong value; empty: none. ``changing``: round of tensor CHANGING."""
        for number, tensor in enumerate(self._tensors):
            of = round_number if number != CHANGING or changing is None else changing
            if wrong := self._pattern.compare(tensor, TENSORS * of + number):
                return f"tensor {number}, round {of}: {wrong}"
        return ""


class StatePeer:
    """The peer of this process: a source or a joiner."""

    def __init__(self, task: StateTask, comm: pccl.Communicator) -> None:
        self._task = task
        self._comm = comm
        self._contents = Contents(task.bytes)

    def measure_sync(self) -> None:
        """Play all rounds, and report. Joiners connect last, so joiners dial the sources."""
        task, comm = self._task, self._comm
        comm.connect(min_peers=1 if task.joins else task.sources)
        tell(comm, SourcesReady())
        while comm.world_size < task.sources + task.joiners:
            time.sleep(PAUSE_S)
            comm.update_topology()
        who, log = f"{task.sources} sources, {task.joiners} joiners", Played(task.joins)
        for done in range(-task.warmup, task.rounds):
            tell(comm, Doing(f"{who}, {max(0, done)} of {task.rounds} rounds done"))
            self._play(done, log)
        tell(comm, CaseDone(sync_figures(task, gather(comm, log))))

    def _play(self, number: int, log: Played) -> None:
        """Play one round: fill, barrier, timed synchronization, barrier, check."""
        task, comm, contents = self._task, self._comm, self._contents
        right = number + task.warmup
        contents.fill(right + (OTHER_ROUNDS * (1 + task.number) if task.joins else 0))
        strategy = SharedStateSyncStrategy.RECEIVE_ONLY
        if not task.joins:
            strategy = SharedStateSyncStrategy.SEND_ONLY
            contents.state.push_revision()
        phases: dict[str, float] = {}

        def watch(progress: pccl.SyncProgress) -> None:
            phases.setdefault(progress.phase, time.perf_counter())

        machine.reset_peak()
        before_bytes = machine.own_bytes(machine.RESIDENT)
        comm.barrier()
        began_s = time.perf_counter()
        info, seconds, cpu_s = timed(
            lambda: comm.sync_shared_state(contents.state, strategy, on_progress=watch)
        )
        log.extra_bytes = max(log.extra_bytes, machine.own_bytes(machine.PEAK) - before_bytes)
        comm.barrier()
        log.fault = log.fault or contents.fault(right)
        log.tx_bytes = info.tx_bytes
        if number >= 0:
            waiting_s, placing_s = phases["waiting"], phases["placing"]
            log.seconds += (seconds,)
            log.cpu_s += (cpu_s,)
            ended_s = began_s + seconds
            log.phases += ((waiting_s - began_s, placing_s - waiting_s, ended_s - placing_s),)

    def measure_join(self) -> None:
        """Take part in one join, and report."""
        parts = gather(self._comm, self._join() if self._task.joins else self._be_joined())
        tell(self._comm, CaseDone(join_figures(self._task, parts)))

    def _be_joined(self) -> JoinPart:
        members = self._task.sources
        self._contents.fill(CONTENTS)
        self._comm.connect(min_peers=members)
        steps = [self._step() for _ in range(STEPS_BEFORE)][1:]
        tell(self._comm, SourcesReady())
        while self._comm.world_size == members:
            steps.append(self._step())
        self._step()
        return JoinPart(tuple(steps), fault=self._fault())

    def _join(self) -> JoinPart:
        state = self._contents.state
        self._contents.fill(OTHER_ROUNDS)
        began_s = time.monotonic()
        self._comm.connect(shared_state=state if self._task.prefetches else None)
        connected_s = time.monotonic()
        info = self._comm.sync_shared_state(state)
        sync_s = time.monotonic() - connected_s
        fault = self._fault()
        self._step()
        found = JoinPart((), began_s, connected_s - began_s, sync_s, info.rx_bytes)
        return replace(found, fault=fault or self._fault())

    def _step(self) -> tuple[float, float]:
        """Compute, then synchronize; return the step's end, and the synchronization's seconds."""
        state = self._contents.state
        time.sleep(self._task.compute_s)
        self._contents.fill_one(CHANGING, state.revision + 1)
        began_s = time.monotonic()
        if self._comm.are_peers_pending():
            self._comm.update_topology()
        state.push_revision()
        self._comm.sync_shared_state(state)
        ended_s = time.monotonic()
        return ended_s, ended_s - began_s

    def _fault(self) -> str:
        return self._contents.fault(CONTENTS, changing=self._contents.state.revision)


def tell(comm: pccl.Communicator, report: WorkerReport) -> None:
    """Send ``report`` to the command if this peer has rank 0."""
    if comm.rank == 0:
        say(report)


def run(task: StateTask) -> None:
    """Measure the part of ``task``, and report the figures."""
    with pccl.Communicator() as comm:
        peer = StatePeer(task, comm)
        (peer.measure_sync if task.part == "sync" else peer.measure_join)()


if __name__ == "__main__":
    work(StateTask, run)
