"""A member that is a process of its own, with a clock that is ahead of the system's, and drifts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from unittest import mock

import numpy as np

import pccl
from pccl.runtime.clock import LoopClock
from tests.support.insides import engine_of
from tests.support.peers import obey, report
from tests.support.skewed_clock import skewed_ns

TIMING = pccl.Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01)


class RecordedPeer:
    """Carries out the commands on stdin, and reports on stdout."""

    def __init__(self, address: str, name: str, ahead_ns: int, ppm: int) -> None:
        init = LoopClock.__init__

        def skew(clock: LoopClock, loop: object) -> None:
            init(clock, loop)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
            clock.now_ns = lambda: skewed_ns(time.monotonic_ns(), ahead_ns, ppm)

        if ahead_ns or ppm:
            mock.patch.object(LoopClock, "__init__", skew).start()
        self.comm = pccl.Communicator(address, name=name, timing=TIMING)

    def connect(self, size: int) -> int:
        self.comm.connect(min_peers=size)
        return self.comm.peer_id

    def reduce(self, count: int, calls: int) -> int:
        """Make calls until the clock of the master is known well, and then some more."""
        values = np.ones(count, np.float32)
        for _ in range(calls):
            self.comm.all_reduce(values, np.empty_like(values), tag=1)
            self.comm.all_reduce(np.ones(16, np.float32), tag=2)
        return len(engine_of(self.comm).machine.contact.clocks.kept)

    def hang_in_c(self) -> None:
        """Report, then enter a C call that never ends, not even for signals; without the GIL."""
        mutex = ctypes.create_string_buffer(256)
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        report("hangs")
        lock(mutex)

    def fork(self) -> int:
        """Return the exit status of a child that SIGQUIT ends."""
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGQUIT)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    obey(RecordedPeer(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
