"""The fixed binary header of every frame on a lane (the data plane).

A lane is a byte stream of frames: 56 bytes of header, then ``length`` bytes of payload. All
integers are little-endian. The header has the complete id of the operation. So no peer can confuse
a frame with one of an aborted attempt, an older view or another term.

    kind u8 | flags u8 | step u16 | length u32 | term u32 | group u32 | view u32 | n u32
    tag u64 | offset u64 | check u64 | what u32 | seal u32

``check`` is the XXH3-64 of the payload (0: there is none), and ``seal`` the CRC-32 of the 52 bytes
before it. The receiver verifies a header before it acts on it, and a payload before the payload
counts.

In a segment, ``offset`` counts bytes from the start of the tensor, and ``step`` is the step number
of the schedule. If the sender sent the segment before the operation's start, ``what`` is the
fingerprint of its request. In QUERY and its answer HAVE, ``offset`` is the number of the query. In
frames of shared state (MAP_ASK to RESULT), ``offset`` is the number of the frame's first piece.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

from pccl.protocol.checksum import SEAL_BYTES, DamagedData
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.types import OperationId, PeerId

_HEADER = struct.Struct("<BBHIIIIIQQQI")
_SEALED = struct.Struct("<BBHIIIIIQQQII")
_SEAL = struct.Struct("<I")
HEADER_BYTES = _SEALED.size
assert HEADER_BYTES == _HEADER.size + SEAL_BYTES == 56

PAYLOAD_BYTES_MAX = 16 << 20
"""The largest payload of one frame.

Segments are far smaller; the limit makes a forged length harmless."""


class FrameKind(enum.IntEnum):
    """The kinds of frames, by their payload."""

    DATA = 1
    """One segment of an operation."""
    QUERY = 2
    """The sender lost a lane, and asks which segments of an operation the receiver still lacks."""
    HAVE = 3
    """Answer to QUERY, on the same lane: a bitmap of the segments that arrived."""
    PING = 4
    """The sender asks whether this lane is alive; no payload and no operation."""
    PONG = 5
    """Answer to PING: bytes arrive on this lane. A receiver of segments also sends PONG at
    intervals."""
    ANNOUNCE = 6
    """A segment in the sender's memory, as ``announcement`` packs it: the receiver pulls it."""
    PULL_ASK = 7
    """The sender wants to pull segments from the receiver's memory."""
    PULL_AT = 8
    """Answer to PULL_ASK: a place in the sender's memory, which proves whose memory it is."""
    PULL_READY = 9
    """The sender has verified the place: it pulls announced segments from now on."""
    PULL_FAILED = 10
    """The sender can no longer pull: the receiver has to send the announced segments."""
    MEET = 11
    """The sender, the younger of two that have met at a relay, dials the receiver for a further
    lane, and asks to be dialled: ``n`` is the number of the lane, ``what`` the port from which the
    relay sees it dial. No payload."""
    MAP_ASK = 16
    """The sender asks for the digests of all pieces."""
    MAP = 17
    """Digests of consecutive pieces; ``what`` counts the pieces of the whole state."""
    PIECE_ASK = 18
    """The sender asks for pieces: their numbers, u32 each."""
    PIECE = 19
    """One piece."""
    PIECE_LACK = 20
    """The sender lacks these pieces: their numbers, u32 each; no numbers: it sends no more."""
    PIECE_HAVE = 21
    """The sender, which also fetches, now has these pieces: their numbers, u32 each."""
    LAYOUT_ASK = 22
    """The sender asks for the layout."""
    LAYOUT = 23
    """The tensors in order, as ``pccl.state.layout`` packs them."""
    WATCH = 24
    """The sender, a newcomer, asks for announcements of results."""
    RESULT = 25
    """Announcement of a committed reduction, as ``pccl.runtime.state.results`` packs it."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A decoded header."""

    kind: FrameKind
    operation: OperationId
    step: int
    offset: int
    length: int
    what: int = 0
    """``eager.fingerprint`` of the request in frames sent early; in MAP the number of pieces."""
    check: int = field(default=0, compare=False)
    """``checksum.payload_hash`` of the payload; 0: there is no payload, or no hash yet."""


Moved: TypeAlias = tuple[int, int, PeerId, int, bool, int, FrameHeader]
"""A segment that a lane has sent or received: a plain tuple, because there are many.

Begin and end in ns, the other peer, number of the lane, whether it was sent, bytes, and the header.
The bytes of a sent announcement are its own; those of a received one, the bytes pulled."""

SEGMENT_KINDS = (FrameKind.DATA, FrameKind.ANNOUNCE, FrameKind.PIECE)
"""Frames that the recorder notes: values, and pieces of shared state."""

_KINDS = {int(kind): kind for kind in FrameKind}

_BARE = (
    *(FrameKind.QUERY, FrameKind.PING, FrameKind.PONG, FrameKind.MEET),
    *(FrameKind.PULL_READY, FrameKind.PULL_FAILED),
    *(FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK, FrameKind.WATCH),
)

NO_OPERATION = OperationId(term=0, group=0, view=0, tag=0, n=0)
"""The id in the headers of frames that belong to no operation."""


def encode_header(header: FrameHeader, check: int = 0) -> bytes:
    """Return the 56 bytes of ``header`` for a payload of this ``check``."""
    op = header.operation
    packed = _HEADER.pack(
        header.kind, 0, header.step, header.length, op.term, op.group, op.view, op.n,
        op.tag, header.offset, check, header.what,
    )  # fmt: skip
    return packed + _SEAL.pack(crc32(packed))


def decode_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Decode the 56 bytes of a header.

    Raises:
        DamagedData: the bytes were changed in transit. Close the lane.
        RemoteProtocolError: the kind is unknown, a reserved field is set, or the length is not
            allowed. Close the lane, because the bytes after the header cannot be trusted.
    """
    if len(data) != HEADER_BYTES:
        raise DamagedData(func="lane", reason=f"the header of a frame has {len(data)} bytes")
    (
        kind, flags, step, length, term, group, view, n,
        tag, offset, check, what, sealed,
    ) = _SEALED.unpack(data)  # fmt: skip
    if crc32(memoryview(data)[: _HEADER.size]) != sealed:
        raise DamagedData(func="lane", reason="the header of a frame was damaged on the way")
    known = _KINDS.get(kind)
    if known is None or flags:
        raise RemoteProtocolError(func="lane", reason=f"not a frame header: {kind=}, {flags=}")
    if length > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(
            func="lane", reason=f"the frame has {length} bytes, over {PAYLOAD_BYTES_MAX}"
        )
    if length and known in _BARE:
        raise RemoteProtocolError(func="lane", reason=f"a {known.name} carries no payload")
    operation = OperationId(term, group, view, tag, n)
    return FrameHeader(known, operation, step, offset, length, what, check)
