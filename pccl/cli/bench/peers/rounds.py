"""Rounds of a benchmark: fill, meet, reduce with a clock beside it, check.

Only the reduce itself is timed. Each side meets at a barrier of its own kind right before, so that
the peers begin together and its own code is what the caches hold.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pccl.cli.bench.peers import memory
from pccl.cli.bench.peers.values import Array
from pccl.cli.bench.peers.words import Timed

MEMORY_ROUNDS = 4
"""More than one, for memory that an operation leaves behind shows when the next one begins."""

SPOKEN_S = 1.0
"""How long a peer measures in silence before it says how far it is."""

DIGITS = 9
"""Times are reported in whole nanoseconds."""


class ReduceSide(Protocol):
    """One library's way to reduce a tensor over all peers."""

    name: str
    input: Array
    """What this peer puts in, shape (n,)."""
    result: Array
    """Where the sum is afterwards; the input itself, if it reduces in place."""

    def barrier(self) -> None:
        """Wait for all peers."""
        ...

    def reduce(self) -> None:
        """Add all peers' inputs."""
        ...


class Inputs(Protocol):
    """What one peer puts in, and whether a result is right."""

    def fill(self, tensor: Array, round_number: int) -> None:
        """Write this peer's values of a round."""
        ...

    def check_input(self, tensor: Array, round_number: int) -> object | None:
        """What is wrong with an input after a reduce, in words."""
        ...

    def check_sum(self, tensor: Array, round_number: int) -> object | None:
        """What is wrong with a result, in words."""
        ...


class Shifted:
    """Inputs of other rounds: what another side left in the same memory is no right result.

    Args:
        inputs: whose.
        by: by how many rounds.
    """

    def __init__(self, inputs: Inputs, by: int) -> None:
        self._inputs = inputs
        self._by = by

    def fill(self, tensor: Array, round_number: int) -> None:
        """Write this peer's values of a round."""
        self._inputs.fill(tensor, round_number + self._by)

    def check_input(self, tensor: Array, round_number: int) -> object | None:
        """What is wrong with an input after a reduce, in words."""
        return self._inputs.check_input(tensor, round_number + self._by)

    def check_sum(self, tensor: Array, round_number: int) -> object | None:
        """What is wrong with a result, in words."""
        return self._inputs.check_sum(tensor, round_number + self._by)


class RoundLog:
    """What the rounds of one side have shown so far.

    Args:
        inputs: what this side reduces; None: what all do that have none of their own.
    """

    def __init__(self, inputs: Inputs | None = None) -> None:
        self.inputs = inputs
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []
        self.fault = ""

    def to_report(self) -> Timed:
        """For the pipe."""
        return Timed(tuple(self.seconds), tuple(self.cpu_s), self.fault)


class BenchRounds:
    """Plays rounds, each with values of its own.

    Args:
        values: what goes in and what must come out, unless a side's log says otherwise.
        tell: called now and then, between rounds, with how many of a part have ended.
    """

    def __init__(self, values: Inputs, tell: Callable[[int], None]) -> None:
        self._values = values
        self._tell = tell
        self._number = 0
        self._told_s = time.monotonic()

    def play(self, logs: Sequence[tuple[ReduceSide, RoundLog]], count: int, *, keep: bool) -> None:
        """Let all sides play so many rounds, in turn; they alternate in who begins.

        Args:
            logs: each side and what is written down about it.
            count: how many rounds.
            keep: whether the times count; wrong values always do.
        """
        for done in range(count):
            for side, log in logs if done % 2 == 0 else reversed(logs):
                inputs = log.inputs or self._values
                inputs.fill(side.input, self._number)
                side.barrier()
                seconds, cpu_s = timed(side.reduce)
                log.fault = log.fault or self._check(side, inputs)
                if keep:
                    log.seconds.append(round(seconds, DIGITS))
                    log.cpu_s.append(round(cpu_s, DIGITS))
            self._number += 1
            if time.monotonic() - self._told_s > SPOKEN_S:
                self._tell(done + 1)
                self._told_s = time.monotonic()

    def _check(self, side: ReduceSide, inputs: Inputs) -> str:
        """The first wrong value, in words, or nothing."""
        where = f"{side.result.nbytes} bytes, round {self._number}"
        if wrong := inputs.check_sum(side.result, self._number):
            return f"{where}: {wrong}"
        if side.result is side.input:
            return ""
        wrong = inputs.check_input(side.input, self._number)
        return f"{where}: the input was changed: {wrong}" if wrong else ""


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, and CPU seconds of the process's threads meanwhile."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    call()
    ended_s = time.perf_counter()
    return ended_s - started_s, time.process_time() - cpu_s


def new_buffer(count: int, dtype: np.dtype[Any]) -> Array:
    """A tensor of zeros, shape (count,), in memory of its own that is resident and goes back.

    An allocator may keep what is freed, and then the next peak would not be seen.
    """
    buffer = np.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)
    buffer.view(np.uint8).fill(0)
    return buffer


def extra_bytes(rounds: BenchRounds, side: ReduceSide, log: RoundLog, idle_bytes: int) -> int:
    """Play a few rounds of one side alone; the peak of memory beyond its buffers.

    Args:
        rounds: plays them.
        side: whose peak.
        log: gets wrong values.
        idle_bytes: what the process had before the first round of all and without any buffer.
            What earlier cases have left in the library so counts as well.
    """
    buffers = {id(array): array.nbytes for array in (side.input, side.result)}
    memory.reset_peak()
    rounds.play([(side, log)], MEMORY_ROUNDS, keep=False)
    return max(0, memory.peak_bytes() - sum(buffers.values()) - idle_bytes)
