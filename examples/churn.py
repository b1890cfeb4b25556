"""A loop that continues when peers die, and admits peers that join or come back.

    pccl launch -n 3 -- python examples/churn.py --kill 1

Process 1 kills itself half-way, and the other two continue: ten steps of 1 + 2 + 4, then ten of
1 + 4. To start process 1 again when it dies:

    pccl launch -n 3 -- sh -c 'python examples/churn.py --kill 1 || python examples/churn.py'

If the other peers have finished by then, process 1 gives up after ``--patience`` seconds.
"""

import argparse
import os
import signal
import time

import numpy as np

import pccl
from pccl.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    DescriptorMismatch,
    Evicted,
    TooFewPeers,
)


def main() -> None:
    """Add the contributions of all members to a total, step by step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, metavar="INDEX", help="process that dies half-way")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--patience", type=float, metavar="SECONDS", default=20.0)
    given = parser.parse_args()
    index, peers = int(os.environ["PCCL_PEER_INDEX"]), int(os.environ["PCCL_PEERS"])
    state = np.zeros(2)  # steps made, total so far: the same on all members

    with pccl.Communicator() as comm:
        try:
            comm.connect(min_peers=peers, timeout_s=given.patience)
        except DeadlineExceeded:
            print("too few peers joined: the run seems to be over")
            return
        while state[0] < given.steps:
            x = np.array([2.0**index])
            try:
                comm.update_topology()  # newcomers enter here, and only here
                comm.broadcast(state, root=0)  # rank 0 is the eldest; newcomers copy its state
                if index == given.kill and state[0] == given.steps // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                info = comm.all_reduce(x, retry=True)  # with the remaining members
            except DescriptorMismatch:
                raise  # a bug in the program: trying again does not help
            except (CollectiveAborted, Evicted):
                continue  # state is unchanged; update_topology() brings an evicted peer back
            except TooFewPeers:
                time.sleep(0.1)  # alone: wait for another peer
                continue
            state += 1, x[0]
            print(f"step {state[0]:g}: {x[0]:g} from peers {info.contributors}")
            time.sleep(0.1)  # stands for the work between two steps
    print(f"total after {state[0]:g} steps: {state[1]:g}")


if __name__ == "__main__":
    main()
