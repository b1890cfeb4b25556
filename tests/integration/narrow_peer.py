"""A peer whose large packets vanish: moves 4 MiB, and says what it has got.

Usage: narrow_peer.py MASTER CALL, where CALL is ``reduce`` or the root of a broadcast.
"""

from __future__ import annotations

import sys

import numpy as np

import pccl


def main(master: str, call: str) -> None:
    with pccl.Communicator(master, map_port=False, timing=pccl.Timing(lane_stall_s=4.0)) as comm:
        comm.connect(min_peers=2)
        x = np.full(1 << 20, comm.rank + 1, np.float32)
        for _ in range(2):
            if call == "reduce":
                comm.all_reduce(x, op="sum", retry=True)
            else:
                comm.broadcast(x, root=int(call))
        print(f"got {x.min()}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
