"""Going ahead: a small all-reduce sends its data before all members are known to have asked for it.

What arrives at a member that has not asked yet waits in its early store, which is bounded, one per
link. So a member keeps account of what it has sent ahead. No link carries more of an operation
than the tensor once before everybody has asked: everything after that needs all contributions.

A weighted average does not go ahead: what is made of a contribution depends on all weights, which
the start tells.

It goes ahead only in a view in which all members have asked for something before: whoever has not
heard of a view yet would drain what comes of it.

A debt is paid by proof that every member has let go of what it kept:

* It has asked for the operation, so everything was taken out of its store. All have, once it has
  started, or is done here.
* It has asked for a later one of the same tag and view: the one before had ended for it.
* The view is closed, and it has asked for one in a view that is as new as the news of that, or
  newer: with the roster that told it so, its store has forgotten the closed view.

State only.
"""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from pccl.protocol.codec import encode
from pccl.protocol.frame import HEADER_BYTES, NO_OPERATION
from pccl.protocol.limits import EAGER_SEGMENT_BYTES, EARLY_STORE_BYTES_MAX
from pccl.protocol.messages import OperationRequest
from pccl.protocol.types import Collective, Descriptor, OperationId


@lru_cache(maxsize=1024)
def fingerprint(descriptor: Descriptor) -> int:
    """What frames that go ahead say of what their sender has asked for; 32 bits, never 0.

    Members may have asked for different things. Whoever is done has combined with its own only what
    was asked for alike, so that from one who is done it follows that all have asked for the same.
    """
    return crc32(encode(OperationRequest(NO_OPERATION, descriptor))) or 1


class EagerBudget:
    """Limits what one member sends before an operation starts.

    Args:
        tensor_bytes_max: the largest tensor that it sends early; 0 disables this.
        segment_bytes: the fixed size of segments, if there is one.
        bytes_max: bytes that each other member stores for it, headers included.
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
        """View -> tag -> number of an operation -> what it costs."""
        self._closed: dict[int, int] = {}
        """View of debts -> the newest view when that one was known to be closed."""
        self._entered: dict[int, None] = {}
        """Views in which all members have asked for something."""

    @property
    def free_bytes(self) -> int:
        """What may still be sent ahead."""
        return self._free

    def take(self, operation: OperationId, what: Descriptor, world_size: int) -> bool:
        """Whether an operation may go ahead; if so it is accounted for.

        Nobody is done with an all-reduce of something before all have asked for it; of a broadcast,
        a barrier or an all-reduce of nothing that is not so.
        """
        nbytes = what.count * what.dtype.itemsize
        if what.collective is not Collective.ALL_REDUCE or what.weighted:
            return False
        if operation.view not in self._entered:
            return False
        if not 0 < nbytes <= self._tensor_bytes_max:
            return False
        segments = world_size + nbytes // self._segment_bytes
        cost = nbytes + (segments + 1) * HEADER_BYTES  # a question after a lost lane counts, too
        if cost > self._free:
            return False
        self._free -= cost
        self._debts.setdefault(operation.view, {}).setdefault(operation.tag, {})[operation.n] = cost
        return True

    def all_asked(self, operation: OperationId) -> None:
        """Every member of its view is known to have asked for this one."""
        self._entered[operation.view] = None
        of_view = self._debts.get(operation.view, {})
        alike = of_view.get(operation.tag, {})
        for n in [n for n in alike if n <= operation.n]:
            self._free += alike.pop(n)
        if not alike:
            of_view.pop(operation.tag, None)
        for view in [view for view, by in self._closed.items() if operation.view >= by]:
            del self._closed[view]
            self._free += sum(sum(costs.values()) for costs in self._debts.pop(view).values())

    def close_views(self, open_views: tuple[int, ...], newest: int) -> None:
        """These views are open, and no others; nobody enters ``newest`` without knowing that."""
        self._entered = {view: None for view in self._entered if view in open_views}
        for view in self._debts:
            if view not in open_views:
                self._closed.setdefault(view, newest)
