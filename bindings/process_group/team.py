"""The live members of one process group.

Ranks and size of a process group stay as they are until ``reconfigure``: a lost rank is a hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import pccl
from pccl import AsyncReduceHandle


class RankLost(RuntimeError):
    """A collective needs the values of a rank that was lost."""


@dataclass(frozen=True, slots=True)
class LiveRanks:
    """The live ranks of a process group at one instant.

    Attributes:
        ranks: ascending.
        calls: makes collectives of these, in this order.
    """

    ranks: tuple[int, ...]
    calls: pccl.Subgroup

    def place(self, rank: int) -> int:
        """Return the rank in ``calls`` of a rank of the process group.

        Raises:
            RankLost: it was lost.
        """
        if rank not in self.ranks:
            raise RankLost(
                f"rank {rank} was lost; call pccl.torch.reconfigure() on all ranks to go "
                "on with new ranks"
            )
        return self.ranks.index(rank)

    def successor(self, rank: int) -> int:
        """Return the rank in ``calls`` that has the role of a rank: its own, or the lowest."""
        return self.ranks.index(rank) if rank in self.ranks else 0


class Team:
    """The members of a process group that are still in the run. Any thread may call it.

    Args:
        comm: communicator of the run.
        peers: peer id of each rank.

    Attributes:
        rank: rank of this process.
    """

    def __init__(self, comm: pccl.Communicator, peers: Sequence[int]) -> None:
        self._comm, self.peers = comm, tuple(peers)
        self.rank = self.peers.index(comm.peer_id)
        self._live: LiveRanks | None = None
        self.look()

    @property
    def size(self) -> int:
        """Number of ranks, lost ones included."""
        return len(self.peers)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost, ascending."""
        live = self.look().ranks
        return tuple(rank for rank in range(self.size) if rank not in live)

    def look(self) -> LiveRanks:
        """Return the ranks that are still there. Another thread may see the next loss at once."""
        ring = {member.peer_id: member for member in self._comm.members()}
        ranks = tuple(rank for rank, peer in enumerate(self.peers) if peer in ring)
        live = self._live
        if live is None or live.ranks != ranks:
            members = [ring[self.peers[rank]] for rank in ranks]
            calls = self._comm._subgroup_of(members)  # pyright: ignore[reportPrivateUsage]
            self._live = live = LiveRanks(ranks, calls)
        return live

    # -- as a communicator of its live members ---------------------------------------------------

    @property
    def peer_id(self) -> int:
        """Id of this peer."""
        return self._comm.peer_id

    @property
    def world_size(self) -> int:
        """Number of live members."""
        return len(self.look().ranks)

    def all_reduce_async(self, send: Tensor, **options: Any) -> AsyncReduceHandle:
        """Start to reduce over the live members."""
        handle: AsyncReduceHandle = self.look().calls.all_reduce_async(send, **options)
        return handle
