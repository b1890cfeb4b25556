"""The form of what peers tell people: compressed JSON, bounded on every path."""

from __future__ import annotations

import json
import zlib
from typing import Any

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import EVIDENCE_BYTES_MAX

UNPACKED_BYTES_MAX = 16 << 20
"""The largest answer after decompression."""


def pack_evidence(evidence: Any) -> bytes:
    """Return ``evidence`` as compressed JSON, of any length; the caller compares it with limits."""
    return zlib.compress(json.dumps(evidence, separators=(",", ":")).encode(), 6)


def unpack_evidence(data: bytes) -> Any:
    """Return what ``pack_evidence`` has packed.

    Raises:
        RemoteProtocolError: the data is damaged, no JSON, or too large.
    """
    unpacker = zlib.decompressobj()
    try:
        if len(data) > EVIDENCE_BYTES_MAX:
            raise ValueError(f"{len(data)} bytes, at most {EVIDENCE_BYTES_MAX} are allowed")
        text = unpacker.decompress(data, UNPACKED_BYTES_MAX)
        if not unpacker.eof:
            raise ValueError(f"incomplete, or more than {UNPACKED_BYTES_MAX} bytes")
        if unpacker.unused_data:
            raise ValueError(f"{len(unpacker.unused_data)} bytes too many")
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        reason = f"the evidence of the peer is not valid: {error}"
        raise RemoteProtocolError(func="peer_evidence", reason=reason) from error
