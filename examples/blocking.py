"""Average one array per process, with blocking calls.

    pccl launch -n 3 -- python examples/blocking.py

Each process begins with its own number and ends with the mean of all numbers: 0, 1 and 2 become 1.
"""

import os

import numpy as np

import pccl


def main() -> None:
    """Join the run, average two arrays, and leave."""
    index, peers = int(os.environ["PCCL_PEER_INDEX"]), int(os.environ["PCCL_PEERS"])
    with pccl.Communicator() as comm:  # PCCL_MASTER says where the master is
        comm.connect(min_peers=peers)  # returns when all peers have joined
        x = np.full(4, float(index))
        info = comm.all_reduce(x, op=pccl.ReduceOp.AVG)  # in place, the same bits on all peers
        print(f"rank {comm.rank} of {comm.world_size}: {x} from {len(info.contributors)} peers")

        smallest = np.array([index], np.int32)
        comm.all_reduce(smallest, op=pccl.ReduceOp.MIN)
        print(f"smallest number: {smallest[0]}")


if __name__ == "__main__":
    main()
