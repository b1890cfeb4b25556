"""One peer of the measurement of recovery: a survivor, or the one that dies in a reduce."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl

SMALL = 1024
"""Elements of a newcomer's first reduce."""

WARM_COUNT = 2
"""Reduces of full size before the one that counts: they open the lanes and touch the memory."""

Array = npt.NDArray[np.float32]


def say(**what: Any) -> None:
    """Tell the measuring process, at once."""
    os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


class RecoveryValues:
    """Whole numbers that differ from place to place and from peer to peer; sums are exact."""

    def __init__(self, count: int) -> None:
        self._base = np.arange(count, dtype=np.float32) % 17

    def of(self, peers: Sequence[int]) -> Array:
        """The sum of what these peers bring."""
        return self._base * np.float32(len(peers)) + np.float32(sum(p % 61 for p in peers))


class RecoveryPeer:
    """The process.

    Args:
        comm: not connected.
        count: elements of the tensor.
        peers: how many have to be there.
    """

    def __init__(self, comm: pccl.Communicator, count: int, peers: int) -> None:
        self._comm = comm
        self._peers = peers
        self._small = RecoveryValues(SMALL)
        self._values = RecoveryValues(count)

    def join(self) -> None:
        """Connect and reduce; the time of both together is the time of a join."""
        began_s = time.monotonic()
        self._comm.connect()
        if self._comm.world_size == self._peers:
            self._comm.all_reduce(self._small.of([self._comm.peer_id]))
            say(event="joined", seconds=time.monotonic() - began_s)

    def survive(self) -> None:
        """Trial after trial, until killed."""
        while True:
            self.warm()
            x = self._values.of([self._comm.peer_id])
            info = self._comm.all_reduce(x, retry=True)
            at = time.monotonic()
            exact = bool((x == self._values.of(info.contributors)).all())
            say(event="result", at=at, contributors=info.contributors, exact=exact)
            while self._comm.world_size == self._peers:  # the victim died after the reduce
                self._comm.update_topology()

    def warm(self) -> float:
        """Wait until all are there and reduce; returns the seconds of the last reduce."""
        if self._comm.world_size < self._peers:
            while self._comm.world_size < self._peers:
                self._comm.update_topology()
            self._comm.all_reduce(self._small.of([self._comm.peer_id]))
        seconds = 0.0
        for _ in range(WARM_COUNT):
            x = self._values.of([self._comm.peer_id])
            began_s = time.monotonic()
            self._comm.all_reduce(x)
            seconds = time.monotonic() - began_s
        return seconds

    def die(self, share: float) -> None:
        """Die when this share of the time that a reduce takes has passed in one."""
        wait_s = self.warm() * share
        x = self._values.of([self._comm.peer_id])
        began = threading.Event()

        def kill() -> None:
            began.wait()
            time.sleep(wait_s)
            say(event="killed", at=time.monotonic(), peer=self._comm.peer_id)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        began.set()
        self._comm.all_reduce(x)
        threading.Event().wait()


def main() -> None:
    """Read the command line and take part."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.chaos.recovery.peer")
    parser.add_argument("--master", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--die", type=float, metavar="SHARE")
    given = parser.parse_args()
    comm = pccl.Communicator(given.master)
    peer = RecoveryPeer(comm, given.count, given.peers)
    say(event="ready")
    peer.join()
    if given.die is None:
        peer.survive()
    else:
        peer.die(given.die)


if __name__ == "__main__":
    main()
