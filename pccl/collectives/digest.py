"""The digest of a result: hashes of its segments, in the order of their position.

Segments are hashed in the order of arrival, while they are still in the cache. The digest of all
hashes shows whether two members hold the same bits. It detects accidents (a broken machine, a bug),
not attacks: XXH3 is not a cryptographic hash.

The hash of a segment is also the checksum of the frame that carries its final bytes. Only the owner
of the segment computes it; the other members verify the frame and reuse the hash.
"""

from __future__ import annotations

from array import array

import xxhash

from pccl.protocol.checksum import payload_hash

DIGEST_BYTES = 16


class ResultDigest:
    """Collects the segment hashes of one result.

    Args:
        segment_count: number of segments of the whole tensor.
    """

    def __init__(self, segment_count: int) -> None:
        self.hashes = array("Q", bytes(8 * segment_count))
        """By position: the hash of the segment's final bytes, once it is known."""

    def add(self, position: int, *data: memoryview) -> int:
        """Hash the final bytes of the segment at ``position``, given in one or several pieces."""
        check = self.hashes[position] = payload_hash(*data)
        return check

    def value(self) -> bytes:
        """Return the 16-byte digest; valid once the hash of every segment is recorded."""
        return xxhash.xxh3_128_digest(self.hashes.tobytes())
