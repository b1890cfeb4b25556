"""The live members of one process group.

Ranks and size of a process group stay as they are until ``reconfigure``: a lost rank is a hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import pccl
from pccl import AsyncReduceHandle


class RankLost(RuntimeError):
    """A collective needs the values of a rank that was lost."""


class Team:
    """The members of a process group that are still in the run.

    Args:
        comm: communicator of the run.
        peers: peer id of each rank.

    Attributes:
        rank: rank of this process.
        live: the ranks that are still there, ascending.
        calls: makes collectives of these, in this order.
    """

    def __init__(self, comm: pccl.Communicator, peers: Sequence[int]) -> None:
        self._comm, self.peers = comm, tuple(peers)
        self.rank = self.peers.index(comm.peer_id)
        self.live: tuple[int, ...] = ()
        self.calls: Any = None
        self.refresh()

    @property
    def size(self) -> int:
        """Number of ranks, lost ones included."""
        return len(self.peers)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost, ascending."""
        return tuple(rank for rank in range(self.size) if rank not in self.live)

    def refresh(self) -> bool:
        """Look who is still there; return whether somebody was lost since the last look."""
        ring = [member.peer_id for member in self._comm.members()]
        live = tuple(rank for rank, peer in enumerate(self.peers) if peer in ring)
        if live == self.live:
            return False
        self.live = live
        self.calls = self._comm.subgroup([ring.index(self.peers[rank]) for rank in live])
        return True

    def place(self, rank: int) -> int:
        """Return the rank in ``calls`` of a rank of the process group.

        Raises:
            RankLost: it was lost.
        """
        if rank not in self.live:
            raise RankLost(
                f"rank {rank} was lost; call pccl.torch.reconfigure() on all ranks to go "
                "on with new ranks"
            )
        return self.live.index(rank)

    # -- as a communicator of its live members ---------------------------------------------------

    @property
    def peer_id(self) -> int:
        """Id of this peer."""
        return self._comm.peer_id

    @property
    def world_size(self) -> int:
        """Number of live members."""
        self.refresh()
        return len(self.live)

    def all_reduce_async(self, send: Tensor, **options: Any) -> AsyncReduceHandle:
        """Start to reduce over the live members."""
        self.refresh()
        handle: AsyncReduceHandle = self.calls.all_reduce_async(send, **options)
        return handle

    # -- ranks -----------------------------------------------------------------------------------

    def require_all(self) -> None:
        """Check that no rank was lost.

        Raises:
            RankLost: one was.
        """
        for rank in self.lost:
            self.place(rank)

    def successor(self, rank: int) -> int:
        """Return the rank in ``calls`` that has the role of a rank: its own, or the lowest."""
        return self.live.index(rank) if rank in self.live else 0
