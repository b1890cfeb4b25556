"""Peers of one run tell each other what they know: by its own collectives, without another channel.

Both calls are joint calls of the group.
"""

from __future__ import annotations

import numpy as np

import pccl


def share(comm: pccl.Communicator, text: str) -> str:
    """What the peer of rank 0 says.

    Args:
        comm: connected.
        text: of this peer; only that of rank 0 counts.

    Raises:
        PCCLError: a peer was lost.
    """
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = np.array([len(data)], np.int64)
    comm.broadcast(size, root=0)
    if comm.rank != 0:
        data = np.zeros(int(size[0]), np.uint8)
    comm.broadcast(data, root=0)
    return data.tobytes().decode()


def gather(comm: pccl.Communicator, text: str) -> list[str]:
    """What each peer says, by rank; everybody is told.

    Args:
        comm: connected.
        text: of this peer, not empty.

    Raises:
        PCCLError: a peer was lost.
    """
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.zeros(comm.world_size, np.int64)
    sizes[comm.rank] = len(data)
    comm.all_reduce(sizes)
    # Everybody's row is zeros but one's own: their sum is all rows.
    rows = np.zeros((len(sizes), int(sizes.max())), np.uint8)
    rows[comm.rank, : len(data)] = data
    comm.all_reduce(rows)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
