"""Published versions: their names on the wire, their layouts with shapes, and how to get to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pccl.protocol.publication.versions import PublishedVersion, StateName, VersionDelta
from pccl.protocol.types import OperationId
from pccl.state.digests import PieceMap, content_digest, layout_digest
from pccl.state.layout import Entry, StateLayout

_SHAPE = "\0"
"""Separates the name of a tensor from its shape in the layout of a version."""

CHEAP_SHARE = 2
"""A reader fetches deltas if they have at most this fraction (1/2) of the bytes of the version."""


def name_of(piece_map: PieceMap) -> StateName:
    """Return the name of a state whose digests are up to date."""
    return StateName(layout_digest(piece_map.layout), piece_map.digest(may_differ=False))


def version_operation(name: StateName, group: int) -> OperationId:
    """Return the operation id in the frames about one published state."""
    tag = int.from_bytes(content_digest([name.layout, name.content])[:8])
    return OperationId(term=1, group=group, view=0, tag=tag, n=0)


def shaped(entry: Entry, shape: Sequence[int]) -> Entry:
    """Return the entry of a published tensor, whose name tells its shape."""
    text = "x".join(map(str, shape))
    return Entry(f"{entry.name}{_SHAPE}{text}", entry.dtype, entry.count)


def name_and_shape(entry: Entry) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of a published tensor.

    Raises:
        ValueError: the entry has no shape of its size.
    """
    name, found, text = entry.name.rpartition(_SHAPE)
    shape = tuple(int(one) for one in text.split("x")) if text else ()
    count = 1
    for length in shape:
        count *= length
    if not found or count != entry.count or min(shape, default=0) < 0:
        raise ValueError(f"a published tensor has no shape: {entry.name!r}")
    return name, shape


def fits_deltas(layout: StateLayout, deltas: StateLayout) -> bool:
    """Whether a state has one tensor for each piece of ``layout``, none longer than its piece."""
    return len(deltas.entries) == layout.piece_count and all(
        entry.count <= layout.piece(number).length and entry.nbytes == entry.count
        for number, entry in enumerate(deltas.entries)
    )


def chain_to(
    version: PublishedVersion, held: StateName | None, wrong: Collection[VersionDelta]
) -> tuple[VersionDelta, ...]:
    """Return the deltas that lead from the held state to a version; empty: fetch it as a whole.

    Args:
        version: the version to get to.
        held: the state that the reader has; None: it has none.
        wrong: deltas that did not lead where they should.
    """
    if held is None or held.layout != version.state.layout:
        return ()
    chain: list[VersionDelta] = []
    content = version.state.content
    for delta in reversed(version.deltas):
        if delta.after != content or delta in wrong:
            return ()
        chain.append(delta)
        content = delta.before
        if content == held.content:
            cheap = sum(one.nbytes for one in chain) * CHEAP_SHARE <= version.nbytes
            return tuple(reversed(chain)) if cheap else ()
    return ()


def kept_deltas(deltas: Iterable[VersionDelta], nbytes: int, most: int) -> tuple[VersionDelta, ...]:
    """Return the newest deltas of a chain that are worth keeping for a version of ``nbytes``."""
    kept: list[VersionDelta] = []
    total = 0
    for delta in reversed(tuple(deltas)):
        total += delta.nbytes
        if len(kept) >= most or total * CHEAP_SHARE > nbytes:
            break
        kept.append(delta)
    return tuple(reversed(kept))
