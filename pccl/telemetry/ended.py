"""``EndedCalls``: the calls of a run that ended last, as its master saw them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pccl.protocol.types import AbortCause, PeerId

KEPT_MAX = 32
"""Calls that a master remembers. It forgets the oldest."""


class EndedCall(NamedTuple):
    """A joint call of a run, or a collective of a group, that has its outcome.

    Attributes:
        what: the call, as its callers know it.
        group: the peer group; None: all groups.
        opened_ns: when the first request arrived.
        last: the member whose request came last.
        last_ns: when that request arrived.
        ended_ns: when the master decided.
        tensor_bytes: size of each member's tensor; 0 for a call without one.
        cause: why there is no result; None: there is one.
    """

    what: str
    group: int | None
    opened_ns: int
    last: PeerId
    last_ns: int
    ended_ns: int
    tensor_bytes: int
    cause: AbortCause | None


class EndedCalls:
    """The last calls, and the number of all.

    Attributes:
        count: calls that have ended since the master started.
        latest: the last of them, the newest at the end.
    """

    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[EndedCall] = deque(maxlen=KEPT_MAX)

    def note(self, call: EndedCall) -> None:
        """Record the end of a call."""
        self.count += 1
        self.latest.append(call)
