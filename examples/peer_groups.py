"""Two groups in one run: reduces stay inside a group, admission spans all groups.

    pccl launch -n 4 -- python examples/peer_groups.py

Think of a model in two parts: even processes hold its first half, and odd processes its second
half. Each group averages its half. Numbers 0 and 2 become 1, numbers 1 and 3 become 2.
"""

import os

import numpy as np

import pccl
from pccl import Attribute


def main() -> None:
    """Average within the own group."""
    index, peers = int(os.environ["PCCL_PEER_INDEX"]), int(os.environ["PCCL_PEERS"])
    group = index % 2
    with pccl.Communicator(peer_group=group) as comm:
        comm.connect(min_peers=peers)  # counts the members of all groups
        x = np.full(2 + group, float(index))  # groups may reduce different sizes
        comm.all_reduce(x, op=pccl.ReduceOp.AVG)
        print(f"group {group}: {x} from {comm.world_size} peers")

        comm.update_topology()  # joint call of the whole run
        everybody = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        groups = comm.get_attribute(Attribute.NUM_DISTINCT_PEER_GROUPS)
        print(f"{everybody} peers in {groups} groups")


if __name__ == "__main__":
    main()
