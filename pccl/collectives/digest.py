"""The fingerprint of a result: hashes of its segments, in the order of their position.

Each segment is hashed while it is still in cache, in whatever order it arrives; the digest of the
list says whether two members hold the same bits. It detects accidents (a broken machine, a bug),
not lies: XXH3 is not a cryptographic hash.
"""

from __future__ import annotations

from array import array

import xxhash

DIGEST_BYTES = 16


class ResultDigest:
    """Collects segment hashes of one result.

    Args:
        segment_count: number of segments of the whole tensor.
    """

    def __init__(self, segment_count: int) -> None:
        self._hashes = array("Q", bytes(8 * segment_count))

    def add(self, position: int, *data: memoryview) -> None:
        """Hash the final bytes of the segment at ``position``, in one piece or in several."""
        if len(data) == 1:
            self._hashes[position] = xxhash.xxh3_64_intdigest(data[0])
            return
        hasher = xxhash.xxh3_64()
        for part in data:
            hasher.update(part)
        self._hashes[position] = hasher.intdigest()

    def value(self) -> bytes:
        """The 16-byte digest over all segments (meaningful once each was added)."""
        return xxhash.xxh3_128_digest(self._hashes.tobytes())
