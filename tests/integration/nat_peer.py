"""A peer in a network namespace: reduces and synchronizes, and prints what is said of its links.

Usage: nat_peer.py MASTER SIZE PLACE PATHS [train]. It joins when as many peers as PLACE are there,
and goes on until the master's status has these paths, in words: one for each end of each link,
sorted, with ``|`` between them. With ``train`` four of them train, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys

import numpy as np

import pccl
from pccl.errors import PCCLError
from pccl.observe import summary
from pccl.transports.base import Connection
from tests.support.insides import engine_of
from tests.support.waiting import until


def paths(master: str) -> str:
    """What ``pccl status`` says of the path of each link, in both directions."""
    status = pccl.master_status(master)
    names = summary.names_of(status)
    return "|".join(sorted(str(summary.path(link, names)) for link in status.links))


def are_there(master: str, count: int) -> bool:
    """Whether so many peers have registered."""
    with contextlib.suppress(PCCLError):  # the master may be about to start
        status = pccl.master_status(master)
        return status.member_count + status.newcomer_count >= count
    return False


def main(master: str, size: int, place: int, wanted: str, then: str = "") -> None:
    until(lambda: are_there(master, place), pause_s=0.05)
    with pccl.Communicator(master, map_port=False) as comm:
        comm.connect(min_peers=size)
        weights = np.full(1000, comm.rank, np.float32)
        comm.sync_shared_state(pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "weights")]))
        told, is_over = "", np.zeros(1, np.int64)
        ends = list[Connection]()
        while not is_over[0]:
            total = np.empty(1000, np.float32)
            comm.all_reduce(np.ones(1000, np.float32), total, op="sum", retry=True)
            assert (total == size).all()
            if told != (told := paths(master)):
                print(told, flush=True)  # noqa: T201
            ends = [link.lanes[0].connection for link in engine_of(comm).links.all()]
            comm.all_reduce(np.array([told == wanted], np.int64), is_over, op="min", retry=True)
        for end in ends:
            print(f"links lead from {end.local.host} to {end.remote.host}")  # noqa: T201
        if then == "train":
            from tests.support.diloco_work import train

            print(f"trained {hashlib.sha256(train(comm)).hexdigest()}", flush=True)  # noqa: T201
        print(f"the state is that of rank {int(weights[0])}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
