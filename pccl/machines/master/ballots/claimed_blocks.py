"""What the members of an exchange say about the lengths of their blocks."""

from __future__ import annotations

from pccl.machines.blocks import disagreement
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
        self._claims: dict[PeerId, BlockLengths] = {}

    def note(self, peer: PeerId, asked: Descriptor, blocks: BlockLengths | None) -> None:
        """Record what a member says in its request.

        Raises:
            RemoteProtocolError: it does not name one block for each member of an exchange.
        """
        wanted = len(self._members) if asked.is_exchange else 0
        gives, takes = (blocks.gives, blocks.takes) if blocks is not None else ((), ())
        if not len(gives) == len(takes) == wanted:
            raise RemoteProtocolError(
                reason=f"{self._operation} has {wanted} blocks, not {len(gives)} and {len(takes)}"
            )
        if blocks is not None:
            self._claims[peer] = blocks

    def differ(self) -> str:
        """Return which member expects another length than it gets; empty: none does."""
        said = [self._claims[peer] for peer in self._members if peer in self._claims]
        found = disagreement(said)
        if found is None:
            return ""
        giver, taker = found
        gives, takes = said[giver].gives[taker], said[taker].takes[giver]
        return (
            f"peer {self._members[giver]} gives {gives} elements to peer {self._members[taker]}, "
            f"which expects {takes}"
        )
