"""A peer of a chaos run: reduces in a loop, checks every bit, and reports to the harness.

This is the loop of a program that expects churn. It admits newcomers, copies the eldest member's
position in the series, and reduces. It retries after an abort, and joins again after an eviction.
It ends when the eldest member has seen the stop file, or when the harness is gone. At SIGTERM it
calls ``close()``, even in the middle of a call.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np

import pccl
from pccl.errors import (
    CollectiveAborted,
    DescriptorMismatch,
    LockstepError,
    MembershipError,
    OutcomeUnknown,
    PCCLError,
    ResyncRequired,
    TooFewPeers,
)
from pccl.stress.chaos.events import (
    Alone,
    CallFailed,
    DamageFound,
    MemorySample,
    PeerJoined,
    ProcessReady,
    Reduced,
    sample,
    tell,
)
from pccl.stress.chaos.inputs import (
    Array,
    PlannedReduce,
    ReduceStyle,
    input_of,
    iteration,
    result_of,
)
from pccl.stress.chaos.settings import timing_of
from pccl.stress.emulator.thread import run_in_loop

_T = TypeVar("_T")

SAMPLE_S = 2.0
ALONE_S = 0.05
NAP_S = 0.05
NEWS_COUNT = 6
"""Number of latest events that a peer reports with an unexpected failure."""
SETTLE_S = 5.0
"""How long a closed connection may keep its descriptor."""

DUMP_SIGNAL = signal.SIGUSR1
"""The signal by which the harness asks a hanging process for its stacks."""


class Leaving(BaseException):
    """The peer must close: SIGTERM came, or the run ended while the peer tried to connect."""


@dataclass(slots=True)
class Series:
    """The position of the group in the series of iterations: the same for all members.

    Attributes:
        lineage: drawn by an eldest member that knew no series; 0: no series is known.
        number: number of the iteration. Each agreement begins a new iteration, even after an
            abort. So no reduce of a lineage has two outcomes.
    """

    lineage: int = 0
    number: int = 0


class ChaosPeer:
    """The loop of one peer.

    Args:
        comm: a communicator that is not connected.
        seed: seed of the inputs.
        stop: a file; when it exists, the run ends.
        nap: a file; while it exists, the peer makes no calls.
        plant: number of the result to spoil before its check, to test the harness.
    """

    def __init__(
        self, comm: pccl.Communicator, seed: int, stop: Path, nap: Path, plant: int | None
    ) -> None:
        self._comm = comm
        self._nap = nap
        self._seed = seed
        self._stop = stop
        self._plant = plant
        self._series = Series()
        self._results = 0
        self._id = 0
        self._in_call = False
        self._must_leave = False
        self._sampled_s = 0.0
        self._last: tuple[Array, Array] | None = None

    def run(self) -> None:
        """Work until the run ends.

        Raises:
            Leaving: SIGTERM came, or the run ended while the peer tried to connect.
        """
        self._connect()
        ended = False
        while not ended:
            if self._must_leave:
                raise Leaving
            if self._nap.exists():
                time.sleep(NAP_S)
                continue
            ended = self._turn()

    def leave(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: leave the current call, or else leave at the next turn."""
        self._must_leave = True
        if self._in_call:
            raise Leaving

    # -- one turn --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        call = "update_topology"
        try:
            self._call(self._comm.update_topology)
            self._follow()
            call = "broadcast"
            if self._agree():
                return True
            call = "all_reduce"
            self._reduce_all()
        except TooFewPeers:
            return self._wait_alone()
        except ResyncRequired as error:
            self._fail(call, error, expected=True)
            self._series = Series()
            self._connect()
        except (DescriptorMismatch, LockstepError) as error:
            self._fail(call, error, expected=False)
        except CollectiveAborted as error:
            self._fail(call, error, expected=True)
        except (MembershipError, OutcomeUnknown) as error:
            # The next update_topology joins again, or raises ResyncRequired.
            self._fail(call, error, expected=True)
            self._series = Series()
        except PCCLError as error:
            self._fail(call, error, expected=False)
        if time.monotonic() - self._sampled_s > SAMPLE_S:
            self._sampled_s = time.monotonic()
            tell(sample())
        return False

    def _wait_alone(self) -> bool:
        if self._stop.exists():
            return True
        tell(Alone(time.monotonic()))
        time.sleep(ALONE_S)
        return False

    def _connect(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                self._call(lambda: self._comm.connect(n_attempts=1))
            except PCCLError as error:  # refused, or no master: try again
                self._fail("connect", error, expected=isinstance(error, MembershipError))
                if self._stop.exists():
                    raise Leaving from None
                time.sleep(ALONE_S)
                continue
            self._id = self._comm.peer_id
            tell(PeerJoined(time.monotonic(), self._id, time.monotonic() - began_s))
            return

    def _follow(self) -> None:
        """Check after ``update_topology`` whether this peer has joined again, with another id."""
        if self._comm.peer_id != self._id:
            self._id = self._comm.peer_id
            self._series = Series()
            tell(PeerJoined(time.monotonic(), self._id, 0.0))

    def _agree(self) -> bool:
        """Copy the eldest member's series; return True if that member ends the run."""
        eldest = min(self._comm.members(), key=lambda member: member.peer_id)
        mine = self._series
        if eldest.peer_id == self._id and mine.lineage == 0:
            mine = Series(int.from_bytes(os.urandom(6), "big") + 1)
        stops = self._stop.exists()
        said = np.array([mine.lineage, mine.number + 1, stops, eldest.peer_id], np.int64)
        if eldest.peer_id != self._id:
            said[:] = -1
        self._call(lambda: self._comm.broadcast(said, root=eldest.rank))
        lineage, number, ends, author = (int(each) for each in said)
        if author != eldest.peer_id or (eldest.peer_id == self._id and lineage != mine.lineage):
            tell(DamageFound(time.monotonic(), f"a broadcast of peer {eldest.peer_id} gave {said}"))
        self._series = Series(lineage, number)
        return bool(ends)

    # -- reduces ---------------------------------------------------------------------------------

    def _reduce_all(self) -> None:
        plan = iteration(self._seed, self._series.number)
        if plan.style is ReduceStyle.HANDLES:
            self._reduce_together(plan.reduces)
            return
        for what in plan.reduces:
            send, recv = self._buffers(what)
            try:
                info = self._call(
                    partial(
                        self._comm.all_reduce,
                        send,
                        recv,
                        op=what.op,
                        tag=what.tag,
                        retry=plan.style is ReduceStyle.RETRYING,
                    )
                )
            except BaseException:
                self._check_input(what, send, "after a failure")
                raise
            self._on_result(what, send, recv, info)

    def _reduce_together(self, reduces: tuple[PlannedReduce, ...]) -> None:
        buffers = [self._buffers(what) for what in reduces]
        handles: list[pccl.AsyncReduceHandle] = []
        errors: list[PCCLError] = []
        for what, (send, recv) in zip(reduces, buffers, strict=True):
            try:
                handles.append(self._comm.all_reduce_async(send, recv, op=what.op, tag=what.tag))
            except PCCLError as error:
                errors.append(error)
                break
        for what, (send, recv), handle in zip(reduces, buffers, handles, strict=False):
            try:
                info = self._call(handle.result)
            except PCCLError as error:
                self._check_input(what, send, "after a failure")
                errors.append(error)
                continue
            self._on_result(what, send, recv, info)
        if errors:
            # The worst error: an abort adds nothing if the membership is lost as well.
            raise next((e for e in errors if not isinstance(e, CollectiveAborted)), errors[0])

    def _buffers(self, what: PlannedReduce) -> tuple[Array, Array]:
        send = input_of(self._seed, self._id, self._series.number, what)
        recv = send if what.in_place else np.zeros(what.count, what.dtype)
        return send, recv

    def _on_result(
        self, what: PlannedReduce, send: Array, recv: Array, info: pccl.ReduceInfo
    ) -> None:
        at = time.monotonic()
        self._check_last()
        expected = result_of(self._seed, info.contributors, self._series.number, what)
        self._results += 1
        if self._plant is not None and self._results >= self._plant:
            recv[len(recv) // 2] += 1
            self._plant = None
        wrong = "" if recv.tobytes() == expected.tobytes() else _difference(what, recv, expected)
        if self._id not in info.contributors:
            wrong = f"peer {self._id} is not among its own contributors {info.contributors}"
        tell(
            Reduced(
                at,
                self._series.lineage,
                self._series.number,
                what.tag,
                tuple(info.contributors),
                info.attempts,
                wrong,
            )
        )
        if not what.in_place:
            self._check_input(what, send, "after a success")
        self._last = recv, recv.copy()

    def _check_input(self, what: PlannedReduce, send: Array, when: str) -> None:
        expected = input_of(self._seed, self._id, self._series.number, what)
        if send.tobytes() != expected.tobytes():
            text = f"the input {when}: {_difference(what, send, expected)}"
            tell(DamageFound(time.monotonic(), text))

    def _check_last(self) -> None:
        """Check that the last result has not changed since its call returned."""
        if self._last is not None and self._last[0].tobytes() != self._last[1].tobytes():
            tell(DamageFound(time.monotonic(), "a result changed after it had been returned"))

    # -- calls -----------------------------------------------------------------------------------

    def _call(self, work: Callable[[], _T]) -> _T:
        self._in_call = True
        try:
            if self._must_leave:
                raise Leaving
            return work()
        finally:
            self._in_call = False

    def _fail(self, call: str, error: PCCLError, *, expected: bool) -> None:
        at = time.monotonic()
        reason = error.reason
        if not expected:
            news = self._comm.status().happened[:NEWS_COUNT]
            reason += "; before: " + ", ".join(f"{n.ago_s:.3f} s ago {n.text}" for n in news)
        tell(CallFailed(at, call, type(error).__name__, reason, expected))


def _difference(what: PlannedReduce, got: Array, expected: Array) -> str:
    (where,) = np.nonzero(got != expected)
    if not len(where):
        return f"{what}: equal values with different bits"
    first = int(where[0])
    return (
        f"{what}: {len(where)} elements differ, the first at {first}: "
        f"{got[first]} instead of {expected[first]}"
    )


def baseline() -> MemorySample:
    """Return the resources that a process holds before it takes part in a run.

    The first event loop of a process leaves two descriptors open until the process ends: a
    pipe for signals, which all loops share (libuv).
    """

    async def nothing() -> None:
        pass

    run_in_loop(nothing())
    return sample()


def settled(descriptors: int, threads: int) -> None:
    """Wait at most ``SETTLE_S`` for the process to hold at most these descriptors and threads."""
    for handler in logging.getLogger("pccl").handlers:
        handler.close()  # the log has a thread of its own
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        gc.collect()
        found = sample()
        if found.descriptors <= descriptors and found.threads <= threads:
            return
        time.sleep(0.05)


def main() -> None:
    """Read the command line and take part."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.chaos.peer_process")
    parser.add_argument("--master", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--advertise", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=10.0)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--nap", type=Path, required=True)
    parser.add_argument("--plant", type=int)
    given = parser.parse_args()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness ends the peer
    before = baseline()
    comm = pccl.Communicator(
        given.master,
        given.group,
        timing=timing_of(given.deadline),
        listen=given.listen,
        advertise=given.advertise,
        lanes=given.lanes,
    )
    peer = ChaosPeer(comm, given.seed, given.stop, given.nap, given.plant)
    signal.signal(signal.SIGTERM, peer.leave)
    tell(ProcessReady(time.monotonic()))
    tell(before)
    with suppress(Leaving):
        peer.run()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    comm.close()
    settled(before.descriptors, before.threads)
    tell(sample(ends=True))


if __name__ == "__main__":
    main()
