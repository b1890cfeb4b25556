"""For tests that look at what a simulated network carries."""

from __future__ import annotations

from pccl.transports.base import Connection


def in_the_clear(connection: Connection) -> bool:
    """Want no connection to be encrypted, wherever it goes."""
    return False
