"""``Announcer``: lets peers of this machine pull the segments of one operation."""

from __future__ import annotations

from pccl.protocol.limits import ANNOUNCED_PARTS_MAX
from pccl.transports.base import Lease, LocalMemory
from pccl.transports.outgoing import Payload


class Announcer:
    """Announces segments of one operation, from the first one to the end of the operation.

    Args:
        memory: the memory of this process.
    """

    def __init__(self, memory: LocalMemory) -> None:
        self._memory = memory
        self._lease: Lease | None = None

    def announce(self, payload: Payload) -> bytes | None:
        """Return the payload of an ANNOUNCE for the bytes of a segment; None: send the bytes.

        Short segments are sent. So are bytes that are made just before sending, in memory that is
        used again.
        """
        if callable(payload) or isinstance(payload, bytes):
            return None
        views = [payload] if isinstance(payload, memoryview) else payload
        length = sum(map(len, views))
        if length < self._memory.pull_bytes_min or len(views) > ANNOUNCED_PARTS_MAX:
            return None
        if self._lease is None:
            self._lease = self._memory.lease()
        return self._lease.announce(views)

    def withdraw(self) -> None:
        """Withdraw all announcements."""
        if self._lease is not None:
            self._lease.revoke()

    def end(self) -> None:
        """Withdraw all announcements; there will be no others."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
