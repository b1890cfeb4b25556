"""Memory for bytes that nobody wants: written by all, read by none."""

from __future__ import annotations

_MEMORY = memoryview(bytearray(256 << 10))


def discard(length: int) -> memoryview:
    """Memory for the next of ``length`` bytes (at least one) that still come."""
    return _MEMORY[:length]
