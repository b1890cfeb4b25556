"""``PieceIntake``: pieces of shared state on their way in, each read straight to where it belongs.

While two lanes carry copies of the same piece, the newest one has the place and the other is
discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import PAYLOAD_BYTES_MAX, FrameHeader, FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import PeerId
from pccl.runtime.state.giver import MAP_PIECES_MAX, QUEUED_PIECES_MAX
from pccl.state.digests import piece_digest
from pccl.state.layout import StateLayout
from pccl.transports.lane import Sink
from pccl.transports.sinks import Drain, discard

_LISTS = (FrameKind.PIECE_ASK, FrameKind.PIECE_LACK, FrameKind.PIECE_HAVE)

_LENGTHS_MAX = {
    FrameKind.MAP_ASK: 0,
    FrameKind.LAYOUT_ASK: 0,
    FrameKind.WATCH: 0,
    FrameKind.MAP: MAP_PIECES_MAX * DIGEST_BYTES,
    FrameKind.LAYOUT: PAYLOAD_BYTES_MAX,
    FrameKind.RESULT: 64 << 10,
    **dict.fromkeys(_LISTS, 4 * QUEUED_PIECES_MAX),
}
"""Payloads of what is no piece, in bytes: nobody sends more at once."""


def check_length(header: FrameHeader) -> None:
    """Check the length of a frame that is no piece.

    Raises:
        RemoteProtocolError: nobody sends one like that.
    """
    most = _LENGTHS_MAX.get(header.kind, -1)
    if header.length > most or (header.kind in _LISTS and header.length % 4):
        reason = f"a {header.kind.name} of {header.length} bytes"
        raise RemoteProtocolError(func="lane", reason=reason)


@dataclass(slots=True)
class _Arrival:
    """The sink of a piece that is wanted."""

    intake: PieceIntake
    source: PeerId
    number: int
    slot: memoryview
    is_advisory: bool
    """Whether it is of no operation that members wait for."""
    received: int = 0

    def memory(self, received: int) -> memoryview:
        """See ``Sink``: its slot, unless a newer copy has that, or the piece is here."""
        self.note(received)
        if not self.intake.is_current(self):
            return discard(len(self.slot) - received)
        return self.slot[received:]

    def counts(self) -> bool:
        """See ``Sink``: what is shown while programs go on may change while it is sent.

        The digest of the piece tells, then; and nobody is to blame.
        """
        return self.intake.is_current(self) and not self.is_advisory

    def complete(self) -> None:
        """See ``Sink``."""
        self.note(len(self.slot))
        self.intake.complete(self)

    def lost(self) -> None:
        """See ``Sink``."""
        self.intake.drop(self)

    def note(self, received: int) -> None:
        """So much is here."""
        if received > self.received:
            self.intake.progressed(self.source, received - self.received)
            self.received = received


class PieceIntake:
    """Pieces on their way in.

    Args:
        layout: of the state.
        expects: whether a piece is missing that a source was asked for.
        wants: whether a piece is still missing.
        slot: where a piece belongs.
        progressed: told of bytes that have come from a source, also of copies.
        arrived: told of a piece that is here, and its digest, if it is still missing.
    """

    def __init__(
        self,
        layout: StateLayout,
        expects: Callable[[PeerId, int], bool],
        wants: Callable[[int], bool],
        slot: Callable[[int], memoryview],
        progressed: Callable[[PeerId, int], None],
        arrived: Callable[[PeerId, int, bytes], None],
    ) -> None:
        self.progressed = progressed
        self._layout = layout
        self._expects = expects
        self._wants = wants
        self._slot = slot
        self._arrived = arrived
        self._arrivals: dict[int, _Arrival] = {}
        """By number of the piece: the newest copy of each."""

    @property
    def arriving_bytes(self) -> int:
        """Bytes that are here of pieces that are not complete."""
        return sum(arrival.received for arrival in self._arrivals.values())

    def place(self, peer: PeerId, header: FrameHeader) -> Sink:
        """A piece is about to arrive.

        Raises:
            RemoteProtocolError: there is no such piece.
        """
        number = header.offset
        count = self._layout.piece_count
        if number >= count or header.length != self._layout.piece(number).length:
            raise RemoteProtocolError(func="lane", reason=f"no such piece: {number}")
        if not self._expects(peer, number):
            return Drain(header.length)
        arrival = self._arrivals[number] = _Arrival(
            self, peer, number, self._slot(number), is_advisory=header.operation.term == 0
        )
        return arrival

    def clear(self) -> None:
        """Nothing that is arriving has a place any more."""
        self._arrivals.clear()

    def is_current(self, arrival: _Arrival) -> bool:
        """Whether it has the place."""
        return self._arrivals.get(arrival.number) is arrival

    def drop(self, arrival: _Arrival) -> None:
        """It will not be complete."""
        if self.is_current(arrival):
            del self._arrivals[arrival.number]

    def complete(self, arrival: _Arrival) -> None:
        """Its last byte is here."""
        if not self.is_current(arrival):
            return
        del self._arrivals[arrival.number]
        if self._wants(arrival.number):
            self._arrived(arrival.source, arrival.number, piece_digest(arrival.slot))


@dataclass(slots=True)
class Whole:
    """The sink of a frame that is taken when all of it is here.

    ``progressed``, if there is one, is told how many bytes are here: on a slow link the last one
    may be long in coming.
    """

    take: Callable[[PeerId, FrameHeader, bytearray], None]
    peer: PeerId
    header: FrameHeader
    payload: bytearray
    progressed: Callable[[PeerId, FrameHeader, int], None] | None = None
    received: int = 0

    def memory(self, received: int) -> memoryview:
        """See ``Sink``."""
        self._note(received)
        return memoryview(self.payload)[received:]

    def counts(self) -> bool:
        """See ``Sink``."""
        return True

    def complete(self) -> None:
        """See ``Sink``."""
        self._note(len(self.payload))
        self.take(self.peer, self.header, self.payload)

    def _note(self, received: int) -> None:
        if received > self.received:
            self.received = received
            if self.progressed is not None:
                self.progressed(self.peer, self.header, received)

    def lost(self) -> None:
        """See ``Sink``."""
