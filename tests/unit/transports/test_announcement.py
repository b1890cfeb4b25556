"""The payloads of the frames for pulling: bytes written by hand, and every malformed input."""

from __future__ import annotations

import struct

import pytest

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import PAYLOAD_BYTES_MAX
from pccl.protocol.limits import ANNOUNCE_BYTES_MAX, ANNOUNCED_PARTS_MAX
from pccl.transports.announcement import (
    ANCESTRY_MAX,
    ASK_BYTES_MAX,
    AT_BYTES,
    PROOF_BYTES,
    Announcement,
    decode_announcement,
    decode_ask,
    decode_at,
    encode_announcement,
    encode_ask,
    encode_at,
)

LEASE = bytes.fromhex("8877665544332211 efcdab8967452301")
"""The word at 0x1122334455667788, with the generation 0x0123456789abcdef."""
PART = bytes.fromhex("00a0000000700000 0000010000000000")
"""65,536 bytes at 0x00007000_0000a000."""
PROOF = bytes(range(16))
HERE = Announcement(0x1122334455667788, 0x0123456789ABCDEF, [(0x70000000A000, 0x10000)])


def test_the_bytes_of_an_announcement() -> None:
    assert encode_announcement(HERE.word, HERE.generation, HERE.parts) == LEASE + PART
    found = decode_announcement(bytearray(LEASE + PART))
    assert found == HERE
    assert found.length == 0x10000


def test_several_parts() -> None:
    parts = [(1 << 64 - 1, 1), (8, 3), (16, 5)]
    payload = LEASE + b"".join(struct.pack("<QQ", *part) for part in parts)
    assert encode_announcement(HERE.word, HERE.generation, parts) == payload
    found = decode_announcement(payload)
    assert (found.parts, found.length) == (parts, 9)


def test_the_longest_ones() -> None:
    payload = LEASE + ANNOUNCED_PARTS_MAX * struct.pack("<QQ", 64, 1)
    assert len(payload) == ANNOUNCE_BYTES_MAX
    assert decode_announcement(payload).length == ANNOUNCED_PARTS_MAX
    longest = LEASE + struct.pack("<QQ", 64, PAYLOAD_BYTES_MAX)
    assert decode_announcement(longest).length == PAYLOAD_BYTES_MAX


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        LEASE,
        LEASE[:-1] + PART,
        LEASE + PART[:-1],
        LEASE + PART + b"\0",
        LEASE + PART[:8],
        LEASE + PART + PART[:8],
        LEASE + (ANNOUNCED_PARTS_MAX + 1) * PART,
        LEASE + struct.pack("<QQ", 64, 0),
        LEASE + PART + struct.pack("<QQ", 64, 0),
        LEASE + struct.pack("<QQ", 64, PAYLOAD_BYTES_MAX + 1),
        LEASE + PART + struct.pack("<QQ", 64, PAYLOAD_BYTES_MAX),
        LEASE + 2 * struct.pack("<QQ", 64, (1 << 64) - 1),
    ],
)
def test_malformed_announcements(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="announce"):
        decode_announcement(payload)


def test_the_bytes_of_a_question() -> None:
    payload = PROOF + bytes.fromhex("10270000 01000000")
    assert encode_ask(PROOF, (10_000, 1)) == payload
    assert decode_ask(bytearray(payload)) == (PROOF, (10_000, 1))


def test_of_a_long_ancestry_the_nearest_are_sent() -> None:
    payload = encode_ask(PROOF, range(1, 1000))
    assert len(payload) == ASK_BYTES_MAX
    assert decode_ask(payload) == (PROOF, tuple(range(1, 1 + ANCESTRY_MAX)))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        PROOF[:-1],
        PROOF,
        PROOF + b"\x01\0\0",
        PROOF + b"\x01\0\0\0\x01",
        PROOF + (ANCESTRY_MAX + 1) * b"\x01\0\0\0",
        PROOF + bytes(4),  # prctl(2) would take the permission from the others
        PROOF + b"\x01\0\0\0" + bytes(4),
        PROOF + b"\xff\xff\xff\xff",  # to prctl(2), every process
        PROOF + b"\0\0\0\x80",
    ],
)
def test_malformed_questions(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="question for memory"):
        decode_ask(payload)


def test_the_bytes_of_an_answer() -> None:
    payload = bytes.fromhex("10270000 00a0000000700000")
    assert encode_at(10_000, 0x70000000A000) == payload
    assert decode_at(bytearray(payload)) == (10_000, 0x70000000A000)
    assert len(payload) == AT_BYTES
    assert len(PROOF) == PROOF_BYTES
    assert decode_at(b"\xff\xff\xff\x7f" + bytes(8)) == ((1 << 31) - 1, 0)


@pytest.mark.parametrize(
    "payload",
    [b"", bytes(11), b"\x01" + bytes(12), bytes(12), b"\xff\xff\xff\xff" + bytes(8)],
)
def test_malformed_answers(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="place in memory"):
        decode_at(payload)
