"""Several arrays as one: what a range of bytes is, against the concatenation that is never made."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.runtime.collective.memory import PART_BYTES_MIN, LentRanges, Memory, Range, clash, cut

Array = npt.NDArray[Any]

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def parts_of(sizes: list[int], dtype: Any = np.int16) -> list[Array]:
    values: Array = np.arange(1, 1 + sum(sizes)).astype(dtype)
    ends = np.cumsum(sizes)
    return [values[end - size : end].copy() for size, end in zip(sizes, ends, strict=True)]


@given(SIZES, st.randoms(use_true_random=True))
def test_a_range_is_that_of_the_concatenation(sizes: list[int], rng: random.Random) -> None:
    parts = parts_of(sizes)
    memory = Memory(parts)
    whole = b"".join(part.tobytes() for part in parts)
    assert (memory.nbytes, memory.size) == (len(whole), len(whole) // 2)
    assert memory.copy().tobytes() == whole
    first = rng.randrange(len(whole))
    last = rng.randint(first + 1, len(whole))
    views = memory.views(first, last)
    assert all(len(view) for view in views)
    assert b"".join(views) == whole[first:last]
    assert bytes(memory.read(first, last)) == whole[first:last]
    assert memory.beginning(first, last) == views[0]
    made = memory.payload(first, last)
    made = made() if callable(made) else made
    assert b"".join(made if isinstance(made, list) else [made]) == whole[first:last]
    new = rng.randbytes(last - first)
    memory.write(first, new)
    assert b"".join(part.tobytes() for part in parts) == whole[:first] + new + whole[last:]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8, np.int64])
def test_elements_of_ranges(dtype: Any) -> None:
    parts = parts_of([3, 1, 4], dtype)
    memory, size = Memory(parts), np.dtype(dtype).itemsize
    inside = memory.whole(size, 3 * size)
    assert inside is not None
    assert inside.astype(int).tolist() == [2, 3]
    assert np.shares_memory(inside, parts[0])
    assert memory.whole(size, 5 * size) is None
    assert memory.elements(size, 5 * size).astype(int).tolist() == [2, 3, 4, 5]
    arrays = memory.arrays(size, 5 * size)
    assert [array.astype(int).tolist() for array in arrays] == [[2, 3], [4], [5]]
    assert all(array.dtype == memory.dtype == np.dtype(dtype) for array in arrays)
    arrays[2][0] = 9
    assert parts[2].astype(int).tolist() == [9, 6, 7, 8]


def test_one_array_is_never_copied() -> None:
    array = np.arange(6, dtype=np.int32)
    memory = Memory([array])
    assert not memory.is_shredded(0, 24)
    payload = memory.payload(4, 12)
    assert isinstance(payload, memoryview)
    for view in (memory.read(4, 12), *memory.views(4, 12), payload):
        assert np.shares_memory(np.frombuffer(view, np.int32), array)
    assert np.shares_memory(memory.elements(4, 12), array)


def test_small_parts_go_through_a_buffer_and_large_ones_do_not() -> None:
    def part(nbytes: int) -> Array:
        return np.zeros(nbytes, np.uint8)

    small = Memory([part(PART_BYTES_MIN - 1)] * 4)
    assert small.is_shredded(0, small.nbytes)
    assert not small.is_shredded(0, 10)  # within one part
    assert callable(small.payload(0, small.nbytes))
    large = Memory([part(PART_BYTES_MIN)] * 4)
    assert not large.is_shredded(0, large.nbytes)
    payload = large.payload(0, large.nbytes)
    assert not callable(payload)
    assert len(payload) == 4  # views, one of each part
    assert large.views(0, large.nbytes) == payload


def test_gathered_bytes_are_those_of_the_moment_they_are_asked_for() -> None:
    parts = [np.zeros(2, np.int8), np.zeros(2, np.int8)]
    payload = Memory(parts).payload(1, 3)
    assert callable(payload)
    parts[1][0] = 7
    assert bytes(payload()) == b"\x00\x07"


def test_cut() -> None:
    values, like = np.arange(6), [np.zeros(1), np.zeros(3), np.zeros(2)]
    assert [part.tolist() for part in cut([values], like)] == [[0], [1, 2, 3], [4, 5]]
    assert cut(like, like) is like


CLASHES: dict[str, tuple[list[Range], tuple[str, str] | None]] = {
    "beside": ([(0, 4, True, "a"), (4, 8, True, "b")], None),
    "both read": ([(0, 4, False, "a"), (0, 4, False, "b"), (4, 5, True, "c")], None),
    "read and written": ([(2, 6, False, "a"), (0, 3, True, "b")], ("b", "a")),
    "within": ([(3, 4, True, "a"), (0, 9, False, "b")], ("b", "a")),
    "behind a short one": (
        [(0, 9, True, "long"), (1, 1, True, "nothing"), (5, 6, False, "c")],
        ("long", "c"),
    ),
    "nothing twice": ([(3, 3, True, "a"), (3, 3, True, "b")], None),
}


@pytest.mark.parametrize(("ranges", "found"), CLASHES.values(), ids=CLASHES)
def test_clash(ranges: list[Range], found: tuple[str, str] | None) -> None:
    assert clash(ranges) == found
    assert clash(reversed(ranges)) == found


RANGES = st.tuples(st.integers(0, 20), st.integers(0, 6), st.booleans()).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], "")
)


@given(st.lists(st.tuples(RANGES, st.booleans()), max_size=12), RANGES)
def test_what_is_lent_clashes_as_two_ranges_do(
    calls: list[tuple[Range, bool]], wanted: Range
) -> None:
    """Calls come if their memory is free, and some of them end, in any order."""
    lent, here = LentRanges(), list[Range]()
    for mine, ends in calls:
        if not lent.clash([mine]):
            lent.add([mine])
            here.append(mine)
        if ends and here:
            lent.remove([here.pop(len(here) // 2)])
    assert len(lent) == sum(start < stop for start, stop, _, _ in here)
    assert lent.clash([wanted]) == any(clash([wanted, theirs]) is not None for theirs in here)
