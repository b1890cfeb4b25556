"""Tags of operations. Those from 2**63 on are for operations of some members of a view only."""

from __future__ import annotations

from hashlib import blake2b

SYNC_TAG = (1 << 64) - 1
"""The tag of shared state. Callers must not use it for anything else."""
_SUBSETS = 1 << 63
_HASH_BITS, _SHOWN_BITS = 42, 20


def subset_tag(peers: tuple[int, ...], tag: int, within: int) -> int:
    """Return the tag of the operations in which only these members use ``tag``.

    Members count the operations of each tag, so each subset needs its own. The result has the low
    bits of ``tag``, for people, and a hash of everything. Two of 4000 subsets have the same result
    with a probability of 2 in a million.

    Args:
        peers: ids of the members in the order of their ranks; another order is another subset.
        tag: the caller's tag.
        within: see ``Subset``.
    """
    hashed = _hash(f"{','.join(map(str, peers))}/{tag}/{within}")
    return _SUBSETS | (hashed % (1 << _HASH_BITS)) << _SHOWN_BITS | tag % (1 << _SHOWN_BITS)


def hash_of(peers: tuple[int, ...]) -> int:
    """Return a hash of members in an order, of 32 bits; neither 0 nor 1."""
    return _hash(",".join(map(str, peers))) % ((1 << 32) - 2) + 2


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def is_of_subset(tag: int) -> bool:
    """Whether only some members of a view take part in the operations of a tag."""
    return _SUBSETS <= tag < SYNC_TAG


def shown_tag(tag: int) -> int:
    """Return the tag of a caller, for people; of a subset only its low bits are known."""
    return tag % (1 << _SHOWN_BITS) if is_of_subset(tag) else tag


def tag_text(tag: int) -> str:
    """Return a tag as text, different for each tag."""
    if not is_of_subset(tag):
        return str(tag)
    return f"{shown_tag(tag)}~{(tag - _SUBSETS) >> _SHOWN_BITS:x}"
