"""Deltas of pieces: what they cost, that they lead where they should, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.state.delta import apply_delta, delta_layout, encode_delta

PIECE_BYTES = 1 << 20


def changed(before: bytes, after: bytes, itemsize: int) -> bytes:
    delta = encode_delta(memoryview(before), memoryview(after), itemsize)
    piece = bytearray(before)
    apply_delta(memoryview(delta), memoryview(piece), itemsize)
    assert piece == after
    return bytes(delta)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.01, 0.3, 1.0])
def test_a_delta_leads_to_the_piece(itemsize: int, share: float) -> None:
    rng = np.random.default_rng(int(itemsize * 1000 * share) + itemsize)
    before = rng.integers(0, 256, PIECE_BYTES, np.uint8)
    items = before.copy().view(f"u{itemsize}")
    items[rng.random(len(items)) < share] ^= 1
    delta = changed(before.tobytes(), items.tobytes(), itemsize)
    assert len(delta) <= PIECE_BYTES
    if share == 0.0:
        assert delta == b""


@pytest.mark.parametrize(("itemsize", "most"), [(2, 0.018), (4, 0.0145)])
def test_one_percent_costs_little(itemsize: int, most: float) -> None:
    rng = np.random.default_rng(1)
    before = rng.integers(0, 256, PIECE_BYTES, np.uint8)
    items = before.copy().view(f"u{itemsize}")
    items[rng.random(len(items)) < 0.01] ^= 1
    assert len(changed(before.tobytes(), items.tobytes(), itemsize)) < most * PIECE_BYTES


@pytest.mark.parametrize(
    "places", [(0,), (PIECE_BYTES - 1,), (0, PIECE_BYTES - 1), (127, 255, 383)]
)
def test_gaps_of_every_length(places: tuple[int, ...]) -> None:
    after = bytearray(PIECE_BYTES)
    for place in places:
        after[place] = 1
    assert len(changed(bytes(PIECE_BYTES), bytes(after), 1)) < 20


def test_a_short_piece_is_its_own_delta() -> None:
    assert changed(bytes(6), b"\x00\x01\x00\x00\x00\x00", 2) == b"\x00\x01\x00\x00\x00\x00"


GOOD = (1).to_bytes(4, "little") + b"\x05" + b"\xff\xff"


@pytest.mark.parametrize(
    "delta",
    [
        b"\x01",
        GOOD[:-1],
        GOOD + b"\x00",
        (2).to_bytes(4, "little") + GOOD[4:],
        (2**31).to_bytes(4, "little") + GOOD[4:],
        (1).to_bytes(4, "little") + b"\x85" + b"\xff\xff",
        (1).to_bytes(4, "little") + b"\x80\x80\x80\x01" + b"\xff\xff",
        (1).to_bytes(4, "little") + b"\x20" + b"\xff\xff",
        (0).to_bytes(4, "little") + b"\x00",
    ],
)
def test_what_does_not_fit_changes_nothing(delta: bytes) -> None:
    piece = bytearray(32)
    with pytest.raises(ValueError, match="does not fit"):
        apply_delta(memoryview(delta), memoryview(piece), 2)
    assert piece == bytes(32)


def test_the_good_one_fits() -> None:
    piece = bytearray(32)
    apply_delta(memoryview(GOOD), memoryview(piece), 2)
    assert piece == bytes(10) + b"\xff\xff" + bytes(20)


def test_the_layout_has_a_tensor_for_each_piece() -> None:
    layout = delta_layout([0, 5, 0, 7])
    assert (layout.piece_count, layout.nbytes, len(layout.entries)) == (2, 12, 4)
    assert [layout.piece(number).entry for number in range(2)] == [1, 3]
