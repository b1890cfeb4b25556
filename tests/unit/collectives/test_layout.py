"""How chunks of a tensor split into segments."""

from __future__ import annotations

import pytest

from pccl.collectives.layout import SegmentLayout

KIB = 1024


@pytest.mark.parametrize(
    ("segment_bytes", "lengths"),
    [
        (896 * KIB, ([16 * KIB] * 4, [248 * KIB] * 8)),
        (128 * KIB, ([16 * KIB] * 4, [128 * KIB] * 15 + [64 * KIB])),
        (10, ([8] * (8 * KIB), [8] * (248 * KIB))),
    ],
)
def test_also_a_small_share_has_several_segments(
    segment_bytes: int, lengths: tuple[list[int], ...]
) -> None:
    """64 and 1984 KiB: eight segments, but none below 16 KiB, and none above the bound."""
    layout = SegmentLayout(512 * KIB, 4, 2, segment_bytes, shares=(1, 31))
    found = [[segment.length for segment in layout.chunk(rank)] for rank in (0, 1)]
    assert found == list(lengths)


def test_equal_chunks_have_the_given_segments() -> None:
    layout = SegmentLayout(512 * KIB, 4, 2, 896 * KIB)
    assert [segment.length for segment in layout.segments()] == [896 * KIB, 128 * KIB] * 2
