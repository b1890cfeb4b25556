"""The fixed header of every frame on a lane (the data plane).

A lane is a byte stream of frames: 56 bytes of header, then ``length`` bytes of payload. All
integers are little-endian. The header names the operation completely, so that a frame of an
aborted attempt, an older view or another term can never be taken for one of the present.

    kind u8 | flags u8 | step u16 | length u32 | term u32 | group u32 | view u32 | n u32
    tag u64 | offset u64 | check u64 | what u32 | seal u32

``check`` is the XXH3-64 of the payload (0: there is none), and ``seal`` the CRC-32 of the 52 bytes
before it: a header is verified before anything is done because of it, and a payload before it
counts.

Of a segment, ``offset`` counts bytes from the start of the tensor, and ``step`` is the schedule's
step number; ``what`` is the fingerprint of what the sender has asked for, if it was sent ahead of
the operation's start. Of a question and its answer (QUERY and HAVE) ``offset`` is the
question's number. Of what belongs to shared state (MAP_ASK to RESULT)
``offset`` is the number of a piece, the first of those that the frame is about.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field

from pccl.protocol.checksum import SEAL_BYTES, seal, unpack_sealed
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.types import OperationId

_HEADER = struct.Struct("<BBHIIIIIQQQI")
HEADER_BYTES = _HEADER.size + SEAL_BYTES
assert HEADER_BYTES == 56

PAYLOAD_BYTES_MAX = 16 << 20
"""One frame.

Segments are far smaller; the bound keeps a forged length from mattering."""


class FrameKind(enum.IntEnum):
    """What a frame carries."""

    DATA = 1
    """One segment of an operation."""
    QUERY = 2
    """Sender asks what the receiver still lacks of an operation (after a lane was lost)."""
    HAVE = 3
    """Answer to QUERY, on the same lane: the receiver's bitmap of received segments."""
    PING = 4
    """Is this lane alive? Without payload, of no operation."""
    PONG = 5
    """Something arrives here on this lane: the answer to PING, and said from time to time by
    whoever receives segments."""
    MAP_ASK = 16
    """Sender asks for the digests of all pieces."""
    MAP = 17
    """Digests of consecutive pieces; ``what`` counts the pieces of the whole state."""
    PIECE_ASK = 18
    """Sender asks for pieces: their numbers, u32 each."""
    PIECE = 19
    """One piece."""
    PIECE_LACK = 20
    """Sender does not have these pieces: their numbers, u32 each; none: it has nothing to give."""
    PIECE_HAVE = 21
    """Sender, which fetches too, has these pieces by now: their numbers, u32 each."""
    LAYOUT_ASK = 22
    """Sender asks for the layout."""
    LAYOUT = 23
    """The tensors in order, as ``pccl.state.layout`` packs them."""
    WATCH = 24
    """Sender, a newcomer, wants to hear of results."""
    RESULT = 25
    """That a reduction was committed, as ``pccl.runtime.state.results`` packs it."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A decoded header."""

    kind: FrameKind
    operation: OperationId
    step: int
    offset: int
    length: int
    what: int = 0
    """Of what is sent ahead: see ``eager.fingerprint``; otherwise 0."""
    check: int = field(default=0, compare=False)
    """``checksum.payload_hash`` of the payload; 0: there is none, or it is not made yet."""


_KINDS = {int(kind): kind for kind in FrameKind}

_BARE = (
    *(FrameKind.QUERY, FrameKind.PING, FrameKind.PONG),
    *(FrameKind.MAP_ASK, FrameKind.LAYOUT_ASK, FrameKind.WATCH),
)

NO_OPERATION = OperationId(term=0, group=0, view=0, tag=0, n=0)
"""In the headers of frames that belong to none."""


def encode_header(header: FrameHeader, check: int = 0) -> bytes:
    """Return the 56 bytes of ``header`` for a payload of this ``check``."""
    op = header.operation
    packed = _HEADER.pack(
        header.kind, 0, header.step, header.length, op.term, op.group, op.view, op.n,
        op.tag, header.offset, check, header.what,
    )  # fmt: skip
    return seal(packed)


def decode_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Decode 56 bytes.

    Raises:
        DamagedData: they were changed on the way. Close the lane.
        RemoteProtocolError: the kind is unknown, a reserved field is set or the length is out of
            bounds. Close the lane; nothing after this can be trusted.
    """
    (
        kind, flags, step, length, term, group, view, n,
        tag, offset, check, what,
    ) = unpack_sealed(_HEADER, data, "lane", "the header of a frame")  # fmt: skip
    known = _KINDS.get(kind)
    if known is None or flags:
        raise RemoteProtocolError(func="lane", reason=f"not a frame header (kind {kind})")
    if length > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(
            func="lane", reason=f"frame of {length} bytes; at most {PAYLOAD_BYTES_MAX} are allowed"
        )
    if length and known in _BARE:
        raise RemoteProtocolError(func="lane", reason=f"a {known.name} carries no payload")
    operation = OperationId(term, group, view, tag, n)
    return FrameHeader(known, operation, step, offset, length, what, check)
