"""One peer process of ``pccl bench allreduce``: plays the rounds and reports the times.

First come the rounds whose memory is measured, while nothing but this library has run in the
process; then, for each size, those whose time is. What it is to do is one argument, a
:class:`pccl.cli.bench.peers.words.Task`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pccl
from pccl.cli.bench.peers import memory
from pccl.cli.bench.peers.bounds import Bound
from pccl.cli.bench.peers.ours import Ours
from pccl.cli.bench.peers.rounds import (
    DIGITS,
    BenchRounds,
    Inputs,
    ReduceSide,
    RoundLog,
    Shifted,
    extra_bytes,
    new_buffer,
    timed,
)
from pccl.cli.bench.peers.samples import Approximate, Samples
from pccl.cli.bench.peers.values import Array, Values
from pccl.cli.bench.peers.words import (
    Committed,
    Connected,
    Doing,
    Failed,
    Measured,
    Report,
    Task,
    encode,
)
from pccl.cli.bench.variants import Variant
from pccl.errors import PCCLError

VARIANT_SHIFT = 1_009
"""Rounds between the values of two variants, which share their buffers."""


def say(report: Report) -> None:
    """Tell whoever started this process."""
    print(encode(report), flush=True)


class BenchPeer:
    """What this process is and has.

    Args:
        task: what it does.
        comm: connected, with all peers there.
        tell: is told what is being done.
    """

    def __init__(self, task: Task, comm: pccl.Communicator, tell: Callable[[Doing], None]) -> None:
        self._task = task
        self._comm = comm
        self._tell = tell
        types = {data_type.label: data_type for data_type in pccl.DataType}
        self._dtype = types[task.dtype].to_numpy_dtype()
        self._values = Values(self._dtype, task.peer, task.peers)
        self._samples: Samples | None = None
        self._bounds: dict[Variant, dict[str, Bound]] = {}
        quantized = [variant for variant in task.variants if not variant.exact]
        if quantized:
            self._samples = Samples(self._dtype, task.peer, task.peers, task.data)
            self._bounds = {variant: self._samples.bounds(variant) for variant in quantized}
        self._peaks: dict[tuple[int, int], tuple[int, str]] = {}

    def measure_memory(self) -> None:
        """For each case: the peak beyond the buffers in bytes, and the first wrong value."""
        memory.give_back()
        idle_bytes = memory.resident_bytes()
        for size in self._task.sizes:
            for number, (side, log) in enumerate(self._sides(size)):
                rounds = self._rounds("memory", size)
                peak = extra_bytes(rounds, side, log, idle_bytes)
                self._peaks[size, number] = peak, log.fault

    def measure_time(self, size: int) -> list[Measured]:
        """Play the rounds of one size; what each variant has done.

        Args:
            size: bytes of the tensor.
        """
        their_log = RoundLog()
        ours = self._sides(size)
        for number, (_, log) in enumerate(ours):
            log.fault = self._peaks[size, number][1]
        sides: list[tuple[ReduceSide, RoundLog]] = list(ours)
        if self._task.rendezvous:
            from pccl.cli.bench.peers.gloo import Gloo  # takes seconds, for torch comes along

            sides.append((Gloo(self._buffer(size)), their_log))
        self._rounds("warm up", size).play(sides, self._task.warmup, keep=False)
        self._rounds("rounds", size).play(sides, self._task.rounds, keep=True)
        links = self._comm.status().links
        found: list[Measured] = []
        for number, (side, log) in enumerate(ours):
            inexact = log.inputs if isinstance(log.inputs, Approximate) else None
            compared = self._task.rendezvous and inexact is None
            found.append(
                Measured(
                    bytes=size,
                    extra_bytes=self._peaks[size, number][0],
                    lanes=tuple(len(link.lanes) for link in links),
                    congestion=tuple(
                        sorted({lane.congestion for link in links for lane in link.lanes})
                    ),
                    ours=log.to_report(),
                    theirs=their_log.to_report() if compared else None,
                    variant=number,
                    algorithm=",".join(sorted(side.algorithms)),
                    wire_bytes_per_value=side.wire_bytes_per_value,
                    error=inexact.error if inexact is not None else 0.0,
                    digest=inexact.digest if inexact is not None else "",
                )
            )
        return found

    def measure_barriers(self) -> Committed:
        """What it costs to decide together."""
        self._tell(Doing("barriers", 0, 0))
        seconds = [timed(self._comm.barrier)[0] for _ in range(self._task.barriers)]
        return Committed(tuple(round(each, DIGITS) for each in seconds))

    def _rounds(self, part: str, size: int) -> BenchRounds:
        self._tell(Doing(part, size, 0))
        return BenchRounds(self._values, lambda done: self._tell(Doing(part, size, done)))

    def _sides(self, size: int) -> list[tuple[Ours, RoundLog]]:
        """Variants in turn, in the same buffers, each with values of other rounds."""
        send = self._buffer(size)
        recv = None if self._task.in_place else self._buffer(size)
        found: list[tuple[Ours, RoundLog]] = []
        for number, variant in enumerate(self._task.variants):
            ours = Ours(self._comm, send, recv, variant)
            inputs: Inputs
            if self._samples is None or variant.exact:
                inputs = Shifted(self._values, number * VARIANT_SHIFT)
            else:
                shift = number * VARIANT_SHIFT
                inputs = Approximate(self._samples, self._bounds[variant], ours, shift)
            found.append((ours, RoundLog(inputs)))
        return found

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
        peer = BenchPeer(task, comm, say)
        peer.measure_memory()
        if task.rendezvous:
            from pccl.cli.bench.peers import gloo

            stack.enter_context(gloo.group(Path(task.rendezvous), task.peer, task.peers))
        for size in task.sizes:
            for measured in peer.measure_time(size):
                say(measured)
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
