"""One peer of ``pccl bench allreduce``: plays the rounds, and gathers the measurements.

The peer first plays the rounds that measure memory, before other libraries run in the process. Then
it plays the timed rounds of each size. A round is: fill, barrier, timed reduce, check. Each side
(this library, Gloo, the bare ring) uses its own barrier right before its reduce. So the peers begin
together, and the caches hold the code of that side.

The environment of the program names the run. The argument of the program is the plan.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

import pccl
from pccl.cli.bench import machine, namespace
from pccl.cli.bench.plan import DTYPES, PLAIN, BenchPlan, Variant
from pccl.cli.bench.ring import Ring, RingReduce
from pccl.cli.bench.statistics import DIGITS, OURS, CaseDone, Figures, Timed, results_of
from pccl.cli.bench.values import Array, Exact, Rounded
from pccl.cli.processes.reports import Doing, WorkerReport, decode, encode, say, work
from pccl.cli.sizes import format_size

MEMORY_ROUNDS = 4
"""More than one, because memory that an operation leaves behind raises the peak of the next one."""

UNPACED = "reno"
"""Congestion control for the other libraries if that of our links is unknown."""

SPOKEN_S = 1.0
"""Minimum time between two reports of progress, in seconds."""

VARIANT_SHIFT = 1_009
"""Distance of the round numbers of two variants, so that their values in shared buffers differ."""

T = TypeVar("T")
R = TypeVar("R", bound=WorkerReport)


class Library(Protocol):
    """The all-reduce of one tensor by one library, on this peer.

    Attributes:
        result: buffer of the sum, shape (n,); the input itself for a reduce in place.
    """

    result: Array

    def barrier(self) -> None:
        """Wait for all peers."""
        ...

    def reduce(self) -> str:
        """Sum the inputs of all peers; return the algorithm, or an empty string."""
        ...

    def figures(self) -> Figures:
        """Return further figures of this peer."""
        ...


@dataclass(slots=True)
class ReduceSide:
    """One way to reduce a tensor over all peers, and the measurements of its rounds.

    Attributes:
        name: name of the library, as results have it.
        variant: variant of its reduce.
        input: input of this peer, shape (n,).
        library: reduces the input.
        values: fills the input, and checks the sum.
        shift: added to round numbers, so that sides with the same buffers have different values.
        log: measurements of the rounds.
    """

    name: str
    variant: Variant
    input: Array
    library: Library
    values: Exact | Rounded
    shift: int = 0
    log: Timed = field(default_factory=Timed)

    def play(self, number: int, *, keep: bool) -> None:
        """Play one round. Record the first wrong value in any case, and the times if ``keep``."""
        at, log, result = number + self.shift, self.log, self.library.result
        self.values.input.fill(self.input, at)
        self.library.barrier()
        began_s = time.monotonic()
        carrier, seconds, cpu_s = timed(self.library.reduce)
        wrong = self.values.check_sum(result, at, carrier)
        if not wrong and result is not self.input:
            changed = self.values.input.compare(self.input, at)
            wrong = changed and f"the input was changed: {changed}"
        if wrong and not log.fault:
            log.fault = f"{result.nbytes} bytes, round {number}: {wrong}"
        log.error, log.digest = self.values.error, self.values.digest
        if keep:
            log.began_s += (round(began_s, DIGITS),)
            log.seconds += (seconds,)
            log.cpu_s += (cpu_s,)


class Ours:
    """The reduce of this library in one variant, and totals over all calls."""

    def __init__(
        self, comm: pccl.Communicator, send: Array, recv: Array | None, variant: Variant
    ) -> None:
        self._comm = comm
        self._send, self._recv = send, recv
        self.result = send if recv is None else recv
        self.barrier = comm.barrier
        self._algorithm = variant.algorithm
        wire = None if variant.exact else variant.quantize
        self._options = pccl.QuantizationOptions(format=wire) if wire else None
        self._algorithms: set[str] = set()
        self._sent_bytes = 0
        self._raw_bytes = 0.0

    def reduce(self) -> str:
        """Sum the inputs of all peers; return the algorithm."""
        how, options = self._algorithm, self._options
        info = self._comm.all_reduce(
            self._send, self._recv, algorithm=how, quantization_options=options
        )
        self._algorithms.add(info.algorithm)
        self._sent_bytes += info.tx_bytes
        self._raw_bytes += info.tx_bytes * info.compression
        return info.algorithm

    def figures(self) -> Figures:
        """Return figures of this peer's links and of its payload, without frame headers."""
        links = self._comm.status().links
        share = self._sent_bytes / self._raw_bytes if self._raw_bytes else 1.0
        names = {lane.congestion for link in links for lane in link.lanes} - {""}
        return {
            "algorithm": ",".join(sorted(self._algorithms)),
            "lanes": max((len(link.lanes) for link in links), default=0),
            "wire_bytes_per_value": round(self._send.itemsize * share, 4),
            "congestion": ",".join(sorted(names)),
        }


@dataclass(frozen=True, slots=True)
class Meeting:
    """The report with which the peers meet when they join another library.

    Attributes:
        congestion: congestion control of this library's links.
        port: port at which the peer waits for others; 0: it does not wait.
    """

    congestion: str
    port: int


class BenchPeer:
    """The peer of this process.

    Args:
        plan: the plan to measure.
        comm: connected communicator, with all peers as members.
        tell: called with descriptions of the progress.
        network: descriptor of a network namespace for a second Gloo; None: only one Gloo.
    """

    def __init__(
        self,
        plan: BenchPlan,
        comm: pccl.Communicator,
        tell: Callable[[str], None],
        network: int | None = None,
    ) -> None:
        self._plan = plan
        self._comm = comm
        self._tell = tell
        self._network = network
        self._dtype = DTYPES[plan.dtype].to_numpy_dtype()
        self._values = {variant: self._values_of(variant) for variant in (PLAIN, *plan.variants)}
        self._number = 0
        self._logs: dict[tuple[int, int], Timed] = {}
        self._others: dict[str, Callable[[Array, Array], Library]] = {}

    def measure(self) -> Iterator[Figures]:
        """Measure the whole plan, and yield each case's figures on all peers.

        Raises:
            PCCLError: a member or the master was lost.
            RuntimeError, ImportError, OSError: another library does not work here.
        """
        self._measure_memory()
        with contextlib.ExitStack() as stack:
            if self._plan.against:
                self._join_others(stack)
            for size in self._plan.sizes:
                yield from self._measure_time(size)

    def _join_others(self, stack: contextlib.ExitStack) -> None:
        """Connect the peers by the other libraries, until ``stack`` ends."""
        lanes = (lane for link in self._comm.status().links for lane in link.lanes)
        congestion = next((lane.congestion for lane in lanes if lane.congestion), UNPACED)
        if "gloo" in self._plan.against:
            self._join_gloo(stack, congestion)
        if "ring" in self._plan.against:
            ring = stack.enter_context(Ring(congestion))
            met = gather(self._comm, Meeting(congestion, ring.port))
            ring.connect(self._comm.rank, [peer.port for peer in met])
            self._others["ring"] = partial(RingReduce, ring)

    def _join_gloo(self, stack: contextlib.ExitStack, congestion: str) -> None:
        from pccl.cli.bench import gloo  # takes seconds, because it imports torch

        rank, peers = self._comm.rank, self._comm.world_size
        store = gloo.store_at(0) if rank == 0 else None
        first = gather(self._comm, Meeting(congestion, store.port if store else 0))[0]
        store = store or gloo.store_at(first.port)
        joined = gloo.joined(store, rank, peers, self._network, first.congestion)
        for number, (name, group) in enumerate(stack.enter_context(joined).items()):
            side = f"gloo-{name}" if number else "gloo"
            self._others[side] = partial(gloo.Gloo, group, name)

    def _measure_memory(self) -> None:
        """Measure each case's peak memory beyond idle memory and buffers; check the values."""
        machine.give_back()
        idle_bytes = machine.own_bytes(machine.RESIDENT)
        for size in self._plan.sizes:
            self._tell(f"memory for {format_size(size)}")
            for number, side in enumerate(self._sides(size)):
                buffers = {id(array): array.nbytes for array in (side.input, side.library.result)}
                machine.reset_peak()
                for _ in range(MEMORY_ROUNDS):
                    side.play(self._number, keep=False)
                    self._number += 1
                peak_bytes = machine.own_bytes(machine.PEAK) - sum(buffers.values()) - idle_bytes
                side.log.extra_bytes = max(0, peak_bytes)
                self._logs[size, number] = side.log

    def _measure_time(self, size: int) -> Iterator[Figures]:
        """Play the timed rounds of one size, and yield the figures of each side."""
        sides = self._sides(size)
        for number, side in enumerate(sides):
            side.log = self._logs.get((size, number), side.log)
        self._play(sides)
        known = [side.library.figures() for side in sides]  # peers leave after the last joint call
        logs = [gather(self._comm, side.log) for side in sides]
        yield from results_of(
            self._plan, size, [(side.name, side.variant) for side in sides], known, logs
        )

    def _play(self, sides: Sequence[ReduceSide]) -> None:
        """Play all rounds, each with all sides in turn; every second round reverses their order."""
        size, told_s = format_size(sides[0].input.nbytes), time.monotonic()
        self._tell(size)
        warmup, rounds = self._plan.warmup, self._plan.rounds
        for done in range(-warmup, rounds):
            for side in sides if done % 2 == 0 else reversed(sides):
                side.play(self._number, keep=done >= 0)
            self._number += 1
            if time.monotonic() - told_s > SPOKEN_S:
                how_far = f"round {done + 1} of {rounds}" if done >= 0 else "warming up"
                self._tell(f"{size}, {how_far}")
                told_s = time.monotonic()

    def _sides(self, size: int) -> list[ReduceSide]:
        """Return the sides: our variants and others. They share buffers, but not values."""
        send = new_buffer(size, self._dtype)
        recv = None if self._plan.in_place else new_buffer(size, self._dtype)
        libraries: list[tuple[str, Variant, Library]] = [
            (OURS, variant, Ours(self._comm, send, recv, variant))
            for variant in self._plan.variants
        ]
        for name, make in self._others.items():
            libraries.append((name, PLAIN, make(send, send if recv is None else recv)))
        found: list[ReduceSide] = []
        for number, (name, variant, library) in enumerate(libraries):
            values = copy.copy(self._values[variant])  # a copy without results of checks
            shift = number * VARIANT_SHIFT
            found.append(ReduceSide(name, variant, send, library, values, shift))
        return found

    def _values_of(self, variant: Variant) -> Exact | Rounded:
        place = self._dtype, self._comm.rank, self._comm.world_size
        return Exact(*place) if variant.exact else Rounded(*place, variant.quantize)


def timed(call: Callable[[], T]) -> tuple[T, float, float]:
    """Make a call; return its result, its seconds, and the CPU seconds of all threads in it."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    found = call()
    seconds = time.perf_counter() - started_s
    return found, round(seconds, DIGITS), round(time.process_time() - cpu_s, DIGITS)


def new_buffer(nbytes: int, dtype: np.dtype[Any]) -> Array:
    """Return a tensor of zeros, shape (n,), in its own mapping, which is unmapped when freed."""
    buffer = np.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype)
    buffer.view(np.uint8).fill(0)
    return buffer


def gather(comm: pccl.Communicator, own: R) -> list[R]:
    """Return the reports of all peers, ordered by rank. All peers must call this together.

    Raises:
        PCCLError: a peer was lost.
        RuntimeError: a peer's report has another type, or other fields.
    """
    data = np.frombuffer(encode(own).encode(), np.uint8)
    sizes = np.zeros(comm.world_size, np.int64)
    sizes[comm.rank] = len(data)
    comm.all_reduce(sizes)
    # Each peer fills its own row and leaves zeros in the other rows, so the sum has all rows.
    rows = np.zeros((len(sizes), int(sizes.max())), np.uint8)
    rows[comm.rank, : len(data)] = data
    comm.all_reduce(rows)
    texts = [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
    found = [report for text in texts if (report := decode(text, (type(own),))) is not None]
    if len(found) < len(texts):
        raise RuntimeError("the peers' versions of pccl differ; install the same one on all hosts")
    return found


def run(plan: BenchPlan) -> None:
    """Measure as one peer. Rank 0 reports the figures."""
    network = namespace.enter(plan.holder) if plan.holder else None  # before there are threads
    with pccl.Communicator(lanes=plan.lanes[0]) as comm:
        comm.connect(min_peers=plan.peers[0])
        who = f"{plan.peers[0]} peers, {plan.lanes[0] or 'automatic'} lanes"

        def tell(report: WorkerReport) -> None:
            if comm.rank == 0:
                say(report)

        peer = BenchPeer(plan, comm, lambda text: tell(Doing(f"{who}: {text}")), network)
        for figures in peer.measure():
            tell(CaseDone(figures))


if __name__ == "__main__":
    work(BenchPlan, run)
