"""The form of a peer's answers to people: compressed JSON, bounded on every path."""

from __future__ import annotations

import json
import zlib
from typing import Any, cast

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import EVIDENCE_BYTES_MAX

UNPACKED_BYTES_MAX = 16 << 20
"""The largest answer after decompression."""


DEPTH_MAX = 32
"""Lists and objects inside each other. All code that goes through an answer can go so deep."""


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
        evidence = json.loads(text)
        if not _is_flat(evidence):
            raise ValueError(f"more than {DEPTH_MAX} lists or objects inside each other")
        return evidence
    except (zlib.error, ValueError, RecursionError) as error:
        reason = f"the evidence of the peer is not valid: {error}"
        raise RemoteProtocolError(func="peer_evidence", reason=reason) from error


def _is_flat(evidence: Any) -> bool:
    """Whether at most ``DEPTH_MAX`` lists and objects are inside each other."""
    level: list[Any] = [[evidence]]
    for _ in range(DEPTH_MAX + 1):  # the first one is not of the evidence
        level = [one for each in level for one in _inside(each)]
        if not level:
            return True
    return False


def _inside(outer: Any) -> list[Any]:
    """Return the lists and objects in a list or object."""
    values: Any = cast("dict[str, Any]", outer).values() if isinstance(outer, dict) else outer
    return [one for one in values if isinstance(one, dict | list)]
