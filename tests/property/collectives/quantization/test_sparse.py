"""The sparse format, compared with plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.quantization import make_codec
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization, WireFormat
from tests.support import plain_sparse

Array = npt.NDArray[Any]

BLOCKS = st.sampled_from([8, 63, 64, 65, 100, 128, 300, 1000])
KINDS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)


def passed(values: Array, kind: DataType, block: int) -> Array:
    codec = make_codec(Quantization(WireFormat.SPARSE, block), kind, Scratch())
    encoded = np.full(codec.encoded_bytes(len(values)), 0xA5, np.uint8)
    told, out = np.empty_like(values), np.empty_like(values)
    codec.encode(values, encoded, None, told)
    codec.decode(encoded, out)
    assert told.tobytes() == out.tobytes()
    return out


@given(st.integers(0, 7000), st.one_of(BLOCKS, st.just(3200)))
def test_its_length_depends_on_the_count_alone(count: int, block: int) -> None:
    for kind, itemsize in ((DataType.FLOAT, 4), (DataType.DOUBLE, 8)):
        codec = make_codec(Quantization(WireFormat.SPARSE, block), kind, Scratch())
        assert codec.encoded_bytes(count) == plain_sparse.nbytes(count, block, itemsize)


def test_a_block_of_2_percent_takes_a_150th() -> None:
    """64 indices of 5 low bits, 64 + 99 bits of high ones, 64 of sign, 64 of size: 611 bits."""
    codec = make_codec(Quantization(WireFormat.SPARSE, 3200), DataType.FLOAT, Scratch())
    assert codec.encoded_bytes(3200) == 8 + math.ceil(611 / 8) == 85
    assert 4 * 3200 / 85 > 150


@settings(max_examples=60)
@given(st.integers(1, 2500), BLOCKS, st.integers(0, 2**32 - 1))
def test_the_largest_of_each_block_come_back_as_two_means(
    count: int, block: int, seed: int
) -> None:
    values = plain_sparse.distinct(count, seed)
    assert passed(values, DataType.FLOAT, block).tolist() == plain_sparse.sent(
        values.tolist(), block
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    st.lists(
        st.floats(allow_nan=False, width=16) | st.sampled_from([math.nan, 6e4, -6e4, 1e-7]),
        min_size=1,
        max_size=300,
    ),
    BLOCKS,
)
def test_of_every_kind_of_values(kind: DataType, drawn: list[float], block: int) -> None:
    """No dropped value is larger than a kept one, and all that is not finite comes back as NaN."""
    with np.errstate(over="ignore"):
        values = np.array(drawn).astype(kind.to_numpy_dtype())
    out = passed(values, kind, block)
    assert not np.isinf(out.astype(np.float64)).any()
    for first, length, kept in plain_sparse.parts(len(values), block):
        mine = values[first : first + length].astype(np.float64)
        back = out[first : first + length].astype(np.float64)
        special = ~np.isfinite(mine)
        assert np.isnan(back).sum() == min(special.sum(), kept)
        assert not (np.isnan(back) & ~special).any()
        sizes, found = np.abs(mine), back != 0
        assert found.sum() <= kept
        assert len(set(np.abs(back[found & ~special]).tolist())) <= 2
        lost = sizes[~found & ~special]
        if len(lost) and found[~special].any():
            assert lost.max() <= sizes[found & ~special].min()
        assert (np.sign(back[found & ~special]) == np.sign(mine[found & ~special])).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1 / 3, 65504.0, 6.1e-5])
def test_the_same_magnitude_everywhere_is_exact(kind: DataType, size: float) -> None:
    values = np.where(np.arange(50) % 3, size, -size).astype(kind.to_numpy_dtype())
    for count in (1, 5, 50):
        assert passed(values[:count], kind, 50).tolist() == values[:count].tolist()


def test_the_largest_floats_do_not_overflow() -> None:
    for dtype, kind in ((np.float32, DataType.FLOAT), (np.float64, DataType.DOUBLE)):
        values = np.full(64, np.finfo(dtype).max)
        assert passed(values, kind, 64).tolist() == values.tolist()


@settings(max_examples=150)
@given(st.integers(1, 300), BLOCKS, st.data())
def test_any_bytes_are_decoded_as_the_description_says(
    count: int, block: int, data: st.DataObject
) -> None:
    length = plain_sparse.nbytes(count, block, 4)
    seed = data.draw(st.integers(0, 2**32 - 1))
    dense = data.draw(st.sampled_from([0, 0.02, 0.5, 1]))
    bits = np.random.default_rng(seed).random(8 * length) < dense
    encoded = np.packbits(bits)
    out = np.empty(count, np.float32)
    make_codec(Quantization(WireFormat.SPARSE, block), DataType.FLOAT, Scratch()).decode(
        encoded, out
    )
    np.testing.assert_array_equal(out, plain_sparse.decoded(encoded.tobytes(), count, block))
