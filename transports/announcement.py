"""Payloads of the frames with which processes of one machine pull segments from each other.

ANNOUNCE says where a segment is in the memory of its sender. The receiver copies it from there, by
one system call. Before that, PULL_ASK and PULL_AT prove which process the sender is.
All integers are little-endian:

    ANNOUNCE  word u64 | generation u64 | then for each part: address u64 | length u64
    PULL_ASK  16 random bytes | process id u32 of the reader, of its parent, and so on
    PULL_AT   process id u32 | address u64 of the random bytes

``word`` is the address of the sender's copy of ``generation``, which it changes before it reuses
the memory. So a reader that finds this generation before and after the copy has the right bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import PAYLOAD_BYTES_MAX
from pccl.protocol.limits import ANNOUNCE_BYTES_MAX

ANCESTRY_MAX = 64
"""Most process ids in a PULL_ASK."""

PROOF_BYTES = 16
"""Length of the random bytes of a PULL_ASK."""

PID_MAX = (1 << 31) - 1
"""Largest process id. To prctl(2), greater numbers may stand for every process."""

_PAIR = struct.Struct("<QQ")
_PID = struct.Struct("<I")
_AT = struct.Struct("<IQ")

ASK_BYTES_MAX = PROOF_BYTES + ANCESTRY_MAX * _PID.size
AT_BYTES = _AT.size

_length_of = itemgetter(1)

Part = tuple[int, int]
"""Address and length in bytes of a contiguous range of memory."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a segment is.

    Attributes:
        word: address of the generation.
        generation: value of the word for as long as the segment is there.
        parts: the segment's ranges of memory, in order.
        length: length of the segment in bytes.
    """

    word: int
    generation: int
    parts: Sequence[Part]
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", sum(map(_length_of, self.parts)))


def encode_announcement(word: int, generation: int, parts: Sequence[Part]) -> bytes:
    """Return the payload of an ANNOUNCE of at most ``ANNOUNCED_PARTS_MAX`` parts."""
    return _PAIR.pack(word, generation) + b"".join(_PAIR.pack(*part) for part in parts)


encode_one_part = struct.Struct("<QQQQ").pack
"""Returns the same for a segment of one part: word, generation, address, length."""


def decode_announcement(payload: bytes | bytearray) -> Announcement:
    """Decode the payload of an ANNOUNCE.

    Raises:
        RemoteProtocolError: the payload is malformed, or the segment is empty or too long.
    """
    if len(payload) % _PAIR.size or not 2 * _PAIR.size <= len(payload) <= ANNOUNCE_BYTES_MAX:
        raise _malformed("an announcement", payload)
    (word, generation), *parts = _PAIR.iter_unpack(payload)
    announcement = Announcement(word, generation, parts)
    if not all(map(_length_of, parts)) or announcement.length > PAYLOAD_BYTES_MAX:
        reason = f"announced a segment with parts of {[length for _, length in parts]} bytes"
        raise RemoteProtocolError(func="lane", reason=reason)
    return announcement


def encode_ask(proof: bytes, ancestry: Iterable[int]) -> bytes:
    """Return the payload of a PULL_ASK; of a long ``ancestry``, the first ids."""
    return proof + b"".join(_PID.pack(pid) for pid in islice(ancestry, ANCESTRY_MAX))


def decode_ask(payload: bytes | bytearray) -> tuple[bytes, tuple[int, ...]]:
    """Return the random bytes and the process ids of a PULL_ASK.

    Raises:
        RemoteProtocolError: the payload is malformed, or a number is no process id.
    """
    ids = len(payload) - PROOF_BYTES
    if ids % _PID.size or not _PID.size <= ids <= ANCESTRY_MAX * _PID.size:
        raise _malformed("a question for memory", payload)
    ancestry = tuple(pid for (pid,) in _PID.iter_unpack(payload[PROOF_BYTES:]))
    if not all(map(_is_pid, ancestry)):
        raise _malformed("a question for memory", payload)
    return bytes(payload[:PROOF_BYTES]), ancestry


def encode_at(pid: int, address: int) -> bytes:
    """Return the payload of a PULL_AT."""
    return _AT.pack(pid, address)


def decode_at(payload: bytes | bytearray) -> tuple[int, int]:
    """Return process id and address of a PULL_AT.

    Raises:
        RemoteProtocolError: the payload is malformed, or the number is no process id.
    """
    if len(payload) != AT_BYTES:
        raise _malformed("a place in memory", payload)
    pid, address = _AT.unpack(payload)
    if not _is_pid(pid):
        raise _malformed("a place in memory", payload)
    return pid, address


def _is_pid(number: int) -> bool:
    return 0 < number <= PID_MAX


def _malformed(what: str, payload: bytes | bytearray) -> RemoteProtocolError:
    return RemoteProtocolError(func="lane", reason=f"{what} of {len(payload)} bytes is malformed")
