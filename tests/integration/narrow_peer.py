"""A peer whose large packets vanish: moves 4 MiB, prints what it got, and ends when that is named.

Usage: narrow_peer.py MASTER CALL, where CALL is ``reduce`` or the root of a broadcast.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

import pccl
from pccl.telemetry.events import LargePacketsLost


def main(master: str, call: str) -> None:
    with pccl.Communicator(master, map_port=False, timing=pccl.Timing(lane_stall_s=2.0)) as comm:
        is_told = threading.Event()
        comm.on_event(lambda told: is_told.set() if isinstance(told, LargePacketsLost) else None)
        comm.connect(min_peers=2)
        x = np.full(1 << 20, comm.rank + 1, np.float32)
        for _ in range(2):
            if call == "reduce":
                comm.all_reduce(x, op="sum", retry=True)
            else:
                comm.broadcast(x, root=int(call))
        print(f"got {x.min()}", flush=True)  # noqa: T201
        said = np.zeros(1, np.int64)
        while not said[0]:  # a tick finds out that the smaller segments have passed
            comm.all_reduce(np.array([is_told.is_set()], np.int64), said, op="max", retry=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
