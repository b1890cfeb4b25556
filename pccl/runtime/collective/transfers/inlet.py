"""``Inlet`` and ``Placement``: the segments that one peer sends, and one that is arriving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pccl.collectives.route import Hop, Route
from pccl.protocol.types import PeerId
from pccl.transports.sinks import discard

if TYPE_CHECKING:
    from pccl.runtime.collective.transfers.transfer import Transfer


@dataclass(slots=True, eq=False)
class Placement:
    """A segment that is arriving; the sink of its frame."""

    transfer: Transfer
    peer: PeerId
    """Sender of the segment."""
    inlet: Inlet
    hop: Hop
    """The segment and its step."""
    check: int | None
    """Hash that the bytes must have, from the frame header; None: they were pulled."""
    buffer: memoryview | None
    """Buffer that the segment is read into; None: straight into the result."""
    view: memoryview | None
    """All memory that the segment is read into; None: several parts of the result."""
    received: int = 0
    """Bytes received before the current read."""

    def memory(self, received: int) -> memoryview:
        """Return memory for the next bytes, which are discarded if there is a newer copy."""
        self.received = received
        if self.inlet.claims.get(self.hop.number) is not self:
            return discard(self.hop.segment.wire_length - received)
        if self.view is not None:
            return self.view[received:]
        first, last = self.hop.segment.wire_span
        return self.transfer.result.beginning(first + received, last)

    def counts(self) -> bool:
        """Whether this is the newest copy of the segment."""
        return self.inlet.claims.get(self.hop.number) is self

    def complete(self) -> None:
        """Count the segment, whose last byte has arrived, unless there is a newer copy."""
        transfer, inlet, number = self.transfer, self.inlet, self.hop.number
        if inlet.claims.get(number) is not self:
            return
        del inlet.claims[number]
        inlet.missing.discard(number)
        transfer.rx_bytes += self.hop.segment.wire_length
        if transfer.unweighed is not None:
            transfer.unweighed.append(self)
            return
        transfer.arrived(self)
        if not inlet.missing:
            transfer.report_if_done()

    def lost(self) -> None:
        """Do nothing: the sender sends the segment again on another lane."""


class Inlet:
    """The segments that one peer sends.

    Args:
        route: all segments from the peer.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
        self.missing = set(range(route.count))
        """Numbers of the segments that have not arrived."""
        self.claims: dict[int, Placement] = {}
        """Segments that are arriving, by number: the newest copy of each."""

    @property
    def received_count(self) -> int:
        """Number of segments that have arrived."""
        return self.route.count - len(self.missing)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that have arrived of incomplete segments."""
        return sum(placement.received for placement in self.claims.values())
