"""A peer in a network namespace: reduces and synchronizes, and prints how it reaches the others.

Usage: nat_peer.py MASTER SIZE PATH. It goes on until the links of all members have this path.
"""

from __future__ import annotations

import sys

import numpy as np

import pccl
from pccl.protocol.types import PeerId
from pccl.transports.relay import is_punched, relay_of
from tests.support.insides import engine_of


def path_to(comm: pccl.Communicator, peer: int) -> str:
    """How a member reaches another one."""
    link = engine_of(comm).links.find(PeerId(peer))
    if link is None or not link.up:
        return "none"
    connection = link.lanes[0].connection
    if relay_of(connection) is not None:
        return "relayed"
    return "punched" if is_punched(connection) else "direct"


def main(master: str, size: int, wanted: str) -> None:
    with pccl.Communicator(master, map_port=False) as comm:
        comm.connect(min_peers=size)
        weights = np.full(1000, comm.rank, np.float32)
        comm.sync_shared_state(pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "weights")]))
        is_over = np.zeros(1, np.int64)
        while not is_over[0]:
            total = np.empty(1000, np.float32)
            comm.all_reduce(np.ones(1000, np.float32), total, op="sum", retry=True)
            assert (total == size).all()
            others = [one.peer_id for one in comm.members() if one.peer_id != comm.peer_id]
            has_all = [path_to(comm, one) == wanted for one in others] == [True] * (size - 1)
            comm.all_reduce(np.array([has_all], np.int64), is_over, op="min", retry=True)
        print(f"{wanted}, and the state is that of rank {int(weights[0])}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
