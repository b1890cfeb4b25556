"""Whole frames, as a peer may put them on a lane."""

from __future__ import annotations

import xxhash

from pccl.protocol.frame import FrameHeader, encode_header


def encode_frame(header: FrameHeader, payload: bytes) -> bytes:
    """The bytes of a frame; its header has the hash of its payload."""
    return encode_header(header, xxhash.xxh3_64_intdigest(payload) if payload else 0) + payload
