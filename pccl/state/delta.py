"""Deltas: what has changed in a piece, as the changed elements and their places.

    count u32 | gaps: a varint each (LEB128) | values: the new elements

A gap is the number of equal elements before a changed one. With 1 % of the elements changed, a
delta takes about 1.7 % of the bytes of a bfloat16 tensor. If it would take as much as the piece, it
is the piece itself. Without a change it is empty.

The deltas of all pieces make up a state of their own: a tensor of bytes for each piece, in order.
So peers send, verify and share them as they do any other state.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pccl.protocol.data_type import DataType
from pccl.state.layout import Entry, StateLayout

_COUNT_BYTES = 4
_GAP_BYTES_MAX = 3
"""Gaps are below 2**20, because a piece has at most that many elements."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Bytes = npt.NDArray[np.uint8]


def delta_layout(lengths: Iterable[int]) -> StateLayout:
    """Return the layout of the deltas of all pieces, from their lengths in bytes."""
    return StateLayout(Entry("", DataType.UINT8, length) for length in lengths)


def encode_delta(before: memoryview, after: memoryview, itemsize: int) -> bytes | memoryview:
    """Return what makes ``after`` of ``before``, two pieces of the same length."""
    kind = _UNSIGNED[itemsize]
    new = np.frombuffer(after, kind)
    places = np.flatnonzero(np.frombuffer(before, kind) != new)
    if not len(places):
        return b""
    if _COUNT_BYTES + len(places) * (1 + itemsize) >= len(after):
        return after
    gaps = np.diff(places, prepend=-1) - 1
    sizes = 1 + (gaps >= 1 << 7).astype(np.int64) + (gaps >= 1 << 14)
    ends = np.cumsum(sizes)
    varints = np.empty(int(ends[-1]), np.uint8)
    for at in range(_GAP_BYTES_MAX):
        some = sizes > at
        more = (sizes > at + 1)[some]
        part = (gaps[some] >> 7 * at) & 0x7F
        varints[(ends - sizes)[some] + at] = part | np.where(more, 0x80, 0)
    head = len(places).to_bytes(_COUNT_BYTES, "little")
    encoded = b"".join((head, varints.tobytes(), new[places].tobytes()))
    return encoded if len(encoded) < len(after) else after


def apply_delta(delta: memoryview, piece: memoryview, itemsize: int) -> None:
    """Change ``piece`` as ``delta`` says.

    Raises:
        ValueError: ``delta`` does not fit the piece; then the piece is unchanged.
    """
    if not len(delta):
        return
    if len(delta) == len(piece):
        piece[:] = delta
        return
    items = np.frombuffer(piece, _UNSIGNED[itemsize])
    count = int.from_bytes(delta[:_COUNT_BYTES], "little")
    values_bytes = count * itemsize
    varints = np.frombuffer(delta, np.uint8)[_COUNT_BYTES : max(len(delta) - values_bytes, 0)]
    places = _places(varints, count)
    if places is None or (count and places[-1] >= len(items)):
        raise ValueError("a delta does not fit its piece")
    values = np.frombuffer(bytes(delta[len(delta) - values_bytes :]), items.dtype)
    items[places] = values


def _places(varints: Bytes, count: int) -> npt.NDArray[np.int64] | None:
    """Return the places of ``count`` changed elements; None: these are not their gaps."""
    lasts = np.flatnonzero(varints < 0x80)
    if len(lasts) != count or (lasts[-1] + 1 if count else 0) != len(varints):
        return None
    sizes = np.diff(lasts, prepend=-1)
    if count and sizes.max() > _GAP_BYTES_MAX:
        return None
    gaps = np.zeros(count, np.int64)
    for at in range(_GAP_BYTES_MAX):
        some = sizes > at
        gaps[some] |= (varints[(lasts - sizes + 1)[some] + at].astype(np.int64) & 0x7F) << 7 * at
    return np.cumsum(gaps + 1) - 1
