"""What the members of an exchange say about the lengths of their blocks."""

from __future__ import annotations

from array import array

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.operation import BlockLengths
from pccl.protocol.types import Descriptor, OperationId, PeerId


class ClaimedBlocks:
    """The lengths of the members' blocks in one operation; none if it is no exchange.

    Args:
        operation: id of the operation.
        members: all members of its view, in ring order.
    """

    def __init__(self, operation: OperationId, members: tuple[PeerId, ...]) -> None:
        self._operation, self._members = operation, members
        self._claims: dict[int, tuple[array[int], array[int]]] = {}
        """By rank: the lengths that it gives, and those that it takes."""

    def note(self, peer: PeerId, asked: Descriptor, blocks: BlockLengths | None) -> str:
        """Record what a member says in its request, and compare it with what others have said.

        Returns:
            Which member expects another length than it gets; empty: none so far.

        Raises:
            RemoteProtocolError: it does not name one block for each member of an exchange.
        """
        if not asked.is_exchange:
            if blocks is not None:
                raise RemoteProtocolError(reason=f"{self._operation} exchanges no blocks")
            return ""
        size = len(self._members)
        gives, takes = (blocks.gives, blocks.takes) if blocks is not None else ((), ())
        if not len(gives) == len(takes) == size:
            raise RemoteProtocolError(
                reason=f"{self._operation} has {size} blocks, not {len(gives)} and {len(takes)}"
            )
        rank = self._members.index(peer)
        self._claims[rank] = array("Q", gives), array("Q", takes)  # compact: there may be many
        for other, (given, taken) in self._claims.items():
            if gives[other] != taken[rank] or given[rank] != takes[other]:
                return self._difference(rank, other)
        return ""

    def _difference(self, *pair: int) -> str:
        for giver, taker in (sorted(pair), sorted(pair, reverse=True)):
            gives, takes = self._claims[giver][0][taker], self._claims[taker][1][giver]
            if gives != takes:
                break
        return (
            f"peer {self._members[giver]} gives {gives} elements to peer {self._members[taker]}, "
            f"which expects {takes}"
        )
