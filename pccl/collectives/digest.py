"""The fingerprint of a result: hashes of its segments, in the order of their position.

Each segment is hashed while it is still in cache, in whatever order it arrives; the digest of the
list says whether two members hold the same bits. It detects accidents (a broken machine, a bug),
not lies: XXH3 is not a cryptographic hash.

The hash of a segment is also the checksum of the frame that carries its final bytes: it is made
once, by the owner of the segment, and what the others have verified they take over as it is.
"""

from __future__ import annotations

from array import array

import xxhash

from pccl.protocol.checksum import payload_hash

DIGEST_BYTES = 16


class ResultDigest:
    """Collects segment hashes of one result.

    Args:
        segment_count: number of segments of the whole tensor.
    """

    def __init__(self, segment_count: int) -> None:
        self._hashes = array("Q", bytes(8 * segment_count))

    def add(self, position: int, *data: memoryview) -> int:
        """Hash the final bytes of the segment at ``position``, in one piece or in several."""
        check = self._hashes[position] = payload_hash(*data)
        return check

    def take(self, position: int, check: int) -> None:
        """Likewise of bytes whose hash is known."""
        self._hashes[position] = check

    def value(self) -> bytes:
        """The 16-byte digest over all segments (meaningful once each was added)."""
        return xxhash.xxh3_128_digest(self._hashes.tobytes())
