"""One peer process of ``pccl bench allreduce``: plays the rounds and reports the times.

First come the rounds whose memory is measured, while nothing but this library has run in the
process; then, for each size, those whose time is. What it is to do is one argument, a
:class:`pccl.cli.bench.words.Task`.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pccl
from pccl.cli.bench import memory
from pccl.cli.bench.rounds import (
    DIGITS,
    Log,
    Ours,
    Rounds,
    Side,
    extra_bytes,
    new_buffer,
    timed,
)
from pccl.cli.bench.values import Array, Values
from pccl.cli.bench.words import Committed, Connected, Doing, Failed, Measured, Report, Task, encode
from pccl.errors import PCCLError


def say(report: Report) -> None:
    """Tell whoever started this process."""
    print(encode(report), flush=True)


class Peer:
    """What this process is and has.

    Args:
        task: what it does.
        comm: connected, with all peers there.
    """

    def __init__(self, task: Task, comm: pccl.Communicator) -> None:
        self._task = task
        self._comm = comm
        types = {data_type.label: data_type for data_type in pccl.DataType}
        self._dtype = types[task.dtype].to_numpy_dtype()
        self._values = Values(self._dtype, task.peer, task.peers)

    def measure_memory(self) -> dict[int, tuple[int, str]]:
        """For each size: the peak beyond the buffers in bytes, and the first wrong value."""
        found: dict[int, tuple[int, str]] = {}
        memory.give_back()
        idle_bytes = memory.resident_bytes()
        for size in self._task.sizes:
            log, rounds = Log(), self._rounds("memory", size)
            found[size] = extra_bytes(rounds, self._ours(size), log, idle_bytes), log.fault
        return found

    def measure_time(self, size: int, extra: int, fault: str) -> Measured:
        """Play the rounds of one size.

        Args:
            size: bytes of the tensor.
            extra: peak of memory, as measured before.
            fault: a wrong value that was found then, or nothing.
        """
        log, their_log = Log(), Log()
        log.fault = fault
        sides: list[tuple[Side, Log]] = [(self._ours(size), log)]
        if self._task.rendezvous:
            from pccl.cli.bench.gloo import Gloo  # takes seconds, for torch comes along

            sides.append((Gloo(self._buffer(size)), their_log))
        self._rounds("warm up", size).play(sides, self._task.warmup, keep=False)
        self._rounds("rounds", size).play(sides, self._task.rounds, keep=True)
        links = self._comm.status().links
        return Measured(
            bytes=size,
            extra_bytes=extra,
            lanes=tuple(len(link.lanes) for link in links),
            congestion=tuple(sorted({lane.congestion for link in links for lane in link.lanes})),
            ours=log.to_report(),
            theirs=their_log.to_report() if len(sides) > 1 else None,
        )

    def measure_barriers(self) -> Committed:
        """What it costs to decide together."""
        say(Doing("barriers", 0, 0))
        seconds = [timed(self._comm.barrier)[0] for _ in range(self._task.barriers)]
        return Committed(tuple(round(each, DIGITS) for each in seconds))

    def _rounds(self, part: str, size: int) -> Rounds:
        say(Doing(part, size, 0))
        return Rounds(self._values, lambda done: say(Doing(part, size, done)))

    def _ours(self, size: int) -> Ours:
        recv = None if self._task.in_place else self._buffer(size)
        return Ours(self._comm, self._buffer(size), recv)

    def _buffer(self, size: int) -> Array:
        return new_buffer(size // self._dtype.itemsize, self._dtype)


def run(task: Task) -> None:
    """Do a task and report it.

    Raises:
        PCCLError: the run was lost.
        RuntimeError, ImportError: the other side cannot be used.
        OSError: there is not enough memory.
    """
    before_bytes = memory.resident_bytes()
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(
            pccl.Communicator(
                task.master,
                lanes=task.lanes,
                listen=task.listen or None,
                advertise=task.advertise or None,
            )
        )
        comm.connect(min_peers=task.peers)
        say(Connected(memory.resident_bytes() - before_bytes))
        peer = Peer(task, comm)
        peaks = peer.measure_memory()
        if task.rendezvous:
            from pccl.cli.bench import gloo

            stack.enter_context(gloo.group(Path(task.rendezvous), task.peer, task.peers))
        for size in task.sizes:
            say(peer.measure_time(size, *peaks[size]))
        if task.barriers:
            say(peer.measure_barriers())


def main() -> None:
    """Do the task that is the one argument."""
    try:
        run(Task.from_json(sys.argv[1]))
    except (PCCLError, ImportError, OSError, RuntimeError) as error:
        say(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
