"""Matrices of link measures, made by rule, for tests of costs and plans."""

from __future__ import annotations

from itertools import permutations

from pccl.protocol.link_messages import LinkMeasure
from pccl.protocol.types import PeerId

US, MS = 1_000, 1_000_000

LAN = (100 * US, 1_250_000_000)
"""0.1 ms there and back, 10 Gbit/s."""
WAN = (80 * MS, 25_000_000)
"""80 ms there and back, 200 Mbit/s."""

Measures = dict[tuple[PeerId, PeerId], LinkMeasure]


def peers(count: int) -> list[PeerId]:
    return [PeerId(number) for number in range(1, count + 1)]


def uniform(count: int, rtt_ns: int, bytes_per_s: int) -> Measures:
    """All links between ``count`` peers, alike."""
    measure = LinkMeasure(rtt_ns, bytes_per_s)
    return dict.fromkeys(permutations(peers(count), 2), measure)
