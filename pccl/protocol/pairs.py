"""Tags: who takes part in the operations of a tag. Some tags are those of two members only."""

from __future__ import annotations

from typing import TypeVar

_Peer = TypeVar("_Peer")

SYNC_TAG = (1 << 64) - 1
"""The tag of shared state. Callers must not use it for anything else."""
_PAIRS = 1 << 63
"""Tags from here on are those of pairs, except ``SYNC_TAG``."""
_RANK_BITS, _PAIR_TAG_BITS = 12, 39
PAIR_TAG_MAX = (1 << _PAIR_TAG_BITS) - 1
"""The largest tag of a caller for values from one member to another."""


def pair_tag(source: int, target: int, tag: int) -> int:
    """Return the tag of operations in which one rank of a view gives values to another one.

    Only these two take part. Each pair counts its operations by itself, so it needs its own tags.
    """
    return _PAIRS | (source << _RANK_BITS | target) << _PAIR_TAG_BITS | tag


def pair_of(tag: int) -> tuple[int, int] | None:
    """Return source and target rank of the tag of a pair; None: all members take part."""
    if tag < _PAIRS or tag == SYNC_TAG:
        return None
    source, target = divmod((tag - _PAIRS) >> _PAIR_TAG_BITS, 1 << _RANK_BITS)
    return source, target


def members_of(tag: int, ring: tuple[_Peer, ...]) -> tuple[_Peer, ...]:
    """Return the members of a view that take part in operations of a tag; empty: there is no such.

    Args:
        tag: the tag.
        ring: all members of the view.
    """
    pair = pair_of(tag)
    if pair is None:
        return ring
    first, last = min(pair), max(pair)
    return (ring[first], ring[last]) if first < last < len(ring) else ()


def tag_text(tag: int) -> str:
    """Return a tag as its callers know it."""
    pair = pair_of(tag)
    if pair is None:
        return str(tag)
    return f"{tag & PAIR_TAG_MAX} from rank {pair[0]} to rank {pair[1]}"
