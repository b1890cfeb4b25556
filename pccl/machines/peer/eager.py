"""Early sending: a reduction sends data before all members are known to have asked for it.

Frames that arrive at a member that has not asked yet wait in an early store. Each link has such a
store of bounded size, so each member accounts for what it sends early. Before all have asked, a
link carries at most the tensor once per operation: all later segments need all contributions.

A small tensor is sent. A larger one is announced, if the members share the memory of one machine.
Segments that cannot be announced then wait for the start.

A weighted average is never sent early: combining contributions needs all weights, and these come
with the start.

A member sends early only in a view in which all members have asked for an operation before. A
member that does not know the view yet would discard the data.

A member gets a cost back once every member has proven that it no longer stores the data:

* All have asked for the operation, so they have removed its data from their stores. This peer knows
  that once the operation has started, or is done here.
* All have asked for a later operation of the same tag and view: the earlier one had ended for them.
* The view is closed, and all have asked for an operation in a view at least as new as the roster
  that closed it. With that roster they dropped the data of the closed view.

State only.
"""

from __future__ import annotations

from zlib import crc32

from pccl.protocol.codec import encode
from pccl.protocol.frame import HEADER_BYTES, NO_OPERATION
from pccl.protocol.limits import (
    ANNOUNCE_BYTES_MAX,
    ANNOUNCED_EARLY_BYTES_MAX,
    EAGER_SEGMENT_BYTES,
    EARLY_STORE_BYTES_MAX,
)
from pccl.protocol.messages import OperationRequest
from pccl.protocol.operation import Eager
from pccl.protocol.types import Descriptor, OperationId, PeerId
from pccl.protocol.vocabulary.tags import is_of_subset

_ALL = -1


def fingerprint(descriptor: Descriptor, ring: tuple[PeerId, ...]) -> int:
    """Return a hash of a request, sent with early frames; 32 bits, never 0.

    Members may have asked for different operations under one tag. A member uses only early data
    with the hash of its own request. So if one member is done, all have asked for the same.

    All frames of an operation with a quorum have a hash of its participants, too: no frame counts
    that was sent for others, as when two masters have started it.
    """
    asked = crc32(encode(OperationRequest(NO_OPERATION, descriptor)))
    if descriptor.quorum is not None:
        asked = crc32(repr(ring).encode(), asked)
    return asked or 1


class EagerBudget:
    """Limits what one member sends before an operation starts.

    Args:
        tensor_bytes_max: the largest tensor that it sends early; 0: it neither sends nor announces
            anything early.
        segment_bytes: the fixed size of segments, if there is one.
        bytes_max: bytes that each other member stores for this member, headers included.
    """

    def __init__(
        self,
        tensor_bytes_max: int = 0,
        segment_bytes: int | None = None,
        bytes_max: int = EARLY_STORE_BYTES_MAX,
    ) -> None:
        self._tensor_bytes_max = tensor_bytes_max
        self._segment_bytes = segment_bytes or EAGER_SEGMENT_BYTES
        self._free = bytes_max
        self._debts: dict[int, dict[int, dict[int, int]]] = {}
        """View -> tag -> number of an operation -> its cost in bytes."""
        self._closed: dict[int, int] = {}
        """Closed view with costs -> the newest view when this peer learned of the closing."""
        self._entered: dict[tuple[int, int], None] = {}
        """(view, tag of a subset) if all its members have asked for one of its operations in the
        view; (view, _ALL) if all members of the view have asked for one."""

    @property
    def free_bytes(self) -> int:
        """Bytes that this member may still send early."""
        return self._free

    def take(self, operation: OperationId, what: Descriptor, world_size: int) -> Eager:
        """Decide what an operation sends early, and charge its cost.

        No member completes an all-reduce with elements before all have asked for it. The same holds
        for a reduce and a reduce-scatter if each member adds up at least one element. It does not
        hold for a broadcast, a barrier, an exchange or an empty all-reduce.
        """
        nbytes = what.count * what.dtype.itemsize
        if not (self._tensor_bytes_max and what.may_begin_early(world_size)):
            return Eager.NOTHING
        view, tag = operation.view, operation.tag
        if not ((view, _ALL) in self._entered or (view, tag) in self._entered):
            return Eager.NOTHING
        cost = HEADER_BYTES  # of one query after a lost lane
        if nbytes <= self._tensor_bytes_max:
            eager, frame_bytes = Eager.SEGMENTS, HEADER_BYTES
            cost += nbytes
        elif what.near and nbytes <= ANNOUNCED_EARLY_BYTES_MAX:
            eager, frame_bytes = Eager.ANNOUNCEMENTS, HEADER_BYTES + ANNOUNCE_BYTES_MAX
        else:
            return Eager.NOTHING
        segment_bytes = self._segment_bytes
        segment_bytes -= segment_bytes % min(segment_bytes, what.dtype.itemsize)
        cost += (world_size + nbytes // segment_bytes) * frame_bytes  # as many as all chunks have
        if cost > self._free:
            return Eager.NOTHING
        self._free -= cost
        self._debts.setdefault(operation.view, {}).setdefault(operation.tag, {})[operation.n] = cost
        return eager

    def all_asked(self, operation: OperationId) -> None:
        """Record that all its members have asked for ``operation``, and get costs back."""
        of_all = not is_of_subset(operation.tag)
        self._entered[operation.view, _ALL if of_all else operation.tag] = None
        of_view = self._debts.get(operation.view, {})
        alike = of_view.get(operation.tag, {})
        for n in list(alike):
            if n <= operation.n:
                self._free += alike.pop(n)
        if not alike:
            of_view.pop(operation.tag, None)
        for view, by in list(self._closed.items()):
            if operation.view >= by and of_all:
                del self._closed[view]
                self._free += sum(sum(costs.values()) for costs in self._debts.pop(view).values())

    def close_views(self, open_views: tuple[int, ...], newest: int) -> None:
        """Record the open views; every member that enters ``newest`` knows which views closed."""
        self._entered = {known: None for known in self._entered if known[0] in open_views}
        for view in self._debts:
            if view not in open_views:
                self._closed.setdefault(view, newest)
