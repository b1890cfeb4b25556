"""Wire formats byte by byte, what stochastic rounding keeps, and what a mesh makes of it all."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.collectives.quantization import Codec, make_codec, noise_source
from pccl.collectives.reductions import Scratch
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.types import OperationId, Quantization, WireFormat

Array = npt.NDArray[Any]

OPERATION = OperationId(1, 0, 3, 4, 5)
NAN, INF = np.nan, np.inf


def codec_of(wire: WireFormat, block: int = 8, kind: DataType = DataType.FLOAT) -> Codec:
    return make_codec(Quantization(wire, block), kind, Scratch())


def encoded(codec: Codec, values: list[float], kind: DataType = DataType.FLOAT) -> bytes:
    out = np.zeros(codec.encoded_bytes(len(values)), np.uint8)
    codec.encode(np.array(values, kind.to_numpy_dtype()), out)
    return out.tobytes()


# -- layouts -----------------------------------------------------------------------------------


def test_uint8_byte_by_byte() -> None:
    # Two blocks: from -1 in steps of 1, and a constant one of a single value.
    values = [-1.0, 254.0, 0.0, 0.4, 0.6, 1.5, 2.5, 100.0, 7.0]
    wire = struct.pack("<2f", -1.0, 7.0) + struct.pack("<2H", 0x3F80, 0)
    assert encoded(codec_of(WireFormat.UINT8), values) == wire + bytes(
        [0, 255, 1, 1, 2, 2, 4, 101, 0]
    )


def test_uint16_byte_by_byte() -> None:
    values = [0.0, 65535.0, 1.0, 258.0]
    wire = struct.pack("<fH", 0.0, 0x3F80) + struct.pack("<4H", 0, 65535, 1, 258)
    assert encoded(codec_of(WireFormat.UINT16), values) == wire


def test_int4_byte_by_byte() -> None:
    # Five values: the first three in the low halves of the bytes, the others in the high ones.
    values = [0.0, 15.0, 1.0, 2.0, 3.0]
    wire = struct.pack("<fH", 0.0, 0x3F80) + bytes([0x20, 0x3F, 0x01])
    assert encoded(codec_of(WireFormat.INT4), values) == wire


def test_int2_byte_by_byte() -> None:
    # Five values in two bytes: the first two in the lowest bits, the last one in bits 4 and 5.
    values = [0.0, 3.0, 1.0, 2.0, 3.0]
    wire = struct.pack("<fH", 0.0, 0x3F80) + bytes([0b110100, 0b1011])
    assert encoded(codec_of(WireFormat.INT2), values) == wire


def test_e3m0_byte_by_byte() -> None:
    # Codes 7 and 6 for 8 and 4, with a sign 13 for -2; 0.0625 is half of the least, 0.125.
    values = [8.0, 4.0, -2.0, 0.0624, 0.0625, -0.0, 3.1]
    wire = struct.pack("<f", 8.0) + bytes([0x17, 0x06, 0x6D, 0x00])
    assert encoded(codec_of(WireFormat.E3M0), values) == wire


def test_int8_byte_by_byte() -> None:
    values = [127.0, -127.0, 0.0, -1.4, 2.6]
    wire = struct.pack("<H", 0x3F80) + struct.pack("<5b", 127, -127, 0, -1, 3)
    assert encoded(codec_of(WireFormat.INT8), values) == wire


def test_companded8_byte_by_byte() -> None:
    values = [127.0**2, -4.0, 0.0, 9.0, -0.2]
    wire = struct.pack("<H", 0x3F80) + struct.pack("<5b", 127, -2, 0, 3, 0)
    assert encoded(codec_of(WireFormat.COMPANDED8), values) == wire


def test_float16_byte_by_byte() -> None:
    # The largest, 2.0 = 0.5 * 2**2, is scaled to 2**14.
    wire = struct.pack("<h", 13) + struct.pack("<3e", 2.0**14, -(2.0**13), 0.0)
    assert encoded(codec_of(WireFormat.FLOAT16), [2.0, -1.0, 0.0]) == wire


def test_bfloat16_byte_by_byte() -> None:
    wire = struct.pack("<h", 13) + struct.pack("<3H", 0x4680, 0xC600, 0)
    assert encoded(codec_of(WireFormat.BFLOAT16), [2.0, -1.0, 0.0]) == wire


def test_float64_has_longer_metadata() -> None:
    wire = struct.pack("<dI", -1.0, 0x3FF00000) + bytes([0, 255, 3])
    assert encoded(codec_of(WireFormat.UINT8, 8, DataType.DOUBLE), [-1.0, 254.0, 2.0],
                   DataType.DOUBLE) == wire  # fmt: skip


def test_specials_byte_by_byte() -> None:
    values = [NAN, INF, -INF, -1.0, 251.0]
    wire = struct.pack("<fH", -1.0, 0x8000 | 0x3F80) + bytes([255, 253, 254, 0, 252])
    assert encoded(codec_of(WireFormat.UINT8), values) == wire
    values = [NAN, INF, -INF, -1.0, 126.0]
    wire = struct.pack("<H", 0x8000 | 0x3F80) + struct.pack("<5b", -128, 127, -127, -1, 126)
    assert encoded(codec_of(WireFormat.INT8), values) == wire
    values = [NAN, INF, -INF, -1.0, 8.0]
    wire = struct.pack("<f", -8.0) + bytes([0xB8, 0x67, 0x0F])
    assert encoded(codec_of(WireFormat.E3M0), values) == wire
    values = [INF, 2.0, -1.0, 0.6, NAN]
    wire = struct.pack("<fH", -1.0, 0x8000 | 0x3FC0) + bytes([0b110011, 0b0110])
    assert encoded(codec_of(WireFormat.INT2), values) == wire


def test_nothing_is_encoded_to_nothing() -> None:
    codec = codec_of(WireFormat.UINT8)
    empty = np.zeros(0, np.float32)
    assert codec.encoded_bytes(0) == 0
    assert codec.encode(empty, np.zeros(0, np.uint8)) == (0.0, 0.0)
    codec.decode(np.zeros(0, np.uint8), empty)


EIGHT_BIT = [WireFormat.UINT8, WireFormat.INT8, WireFormat.COMPANDED8]


@pytest.mark.parametrize("wire", [*EIGHT_BIT, WireFormat.FLOAT16, WireFormat.BFLOAT16])
@pytest.mark.parametrize("kind", [DataType.FLOAT, DataType.DOUBLE])
def test_the_largest_numbers_stay_finite(wire: WireFormat, kind: DataType) -> None:
    largest = float(np.finfo(kind.to_numpy_dtype()).max)
    values = np.array([largest, -largest, 0.9 * largest, 0.0], kind.to_numpy_dtype())
    codec = codec_of(wire, 8, kind)
    out = np.zeros(codec.encoded_bytes(4), np.uint8)
    codec.encode(values, out)
    back = np.empty_like(values)
    codec.decode(out, back)
    assert np.isfinite(back).all()
    assert np.abs(back / largest - values / largest).max() <= 0.02


def test_denormals_keep_their_values() -> None:
    least = 2.0**-149
    values = np.array([least, 3 * least, 200 * least, 0], np.float32)
    for wire in (WireFormat.UINT8, WireFormat.UINT16, WireFormat.FLOAT16):
        codec = codec_of(wire)
        out, back = np.zeros(codec.encoded_bytes(4), np.uint8), np.empty_like(values)
        codec.encode(values, out)
        codec.decode(out, back)
        assert back.tolist() == values.tolist()


# -- stochastic rounding -----------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 as its authors define it (Salmon et al. 2011)."""
    mask = (1 << 64) - 1
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ key[0], second & mask,
            (first >> 64) ^ counter[3] ^ key[1], first & mask,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_noise_is_the_same_everywhere() -> None:
    operation = OperationId(term=2, group=7, view=1 << 60, tag=(1 << 64) - 1, n=5)
    words = philox([1, 1 << 60, 2 << 32 | 7, 3 << 48 | 9], [(1 << 64) - 1, 5])
    sixteens = struct.unpack("<16H", struct.pack("<4Q", *words))
    drawn = noise_source(operation, rank=3, position=9)(14)
    assert drawn.dtype == np.float32
    assert drawn.tolist() == [(number + 0.5) / 65536 for number in sixteens[:14]]


def test_noise_differs_by_everything() -> None:
    changes = [
        noise_source(OperationId(*fields), rank, position)(4).tolist()
        for fields, rank, position in [
            ((1, 0, 3, 4, 5), 0, 0), ((2, 0, 3, 4, 5), 0, 0), ((1, 1, 3, 4, 5), 0, 0),
            ((1, 0, 4, 4, 5), 0, 0), ((1, 0, 3, 5, 5), 0, 0), ((1, 0, 3, 4, 6), 0, 0),
            ((1, 0, 3, 4, 5), 1, 0), ((1, 0, 3, 4, 5), 0, 1),
        ]
    ]  # fmt: skip
    assert len({tuple(drawn) for drawn in changes}) == len(changes)


ROUNDED = [w for w in WireFormat if w not in (WireFormat.NONE, WireFormat.SPARSE)]


@pytest.mark.parametrize("wire", ROUNDED)
def test_stochastic_rounding_keeps_the_mean(wire: WireFormat) -> None:
    """Hoeffding: the mean of n draws is off by t gaps with probability 2 exp(-2 n t**2) at most.

    Each value lies between two neighbours that the nearest rounding does not take in equal parts.
    With t = 0.05 that is 2e-9 for n = 4000; the 16 bits of a draw add 2**-17.
    """
    draws = 4000
    is_symmetric = wire in (WireFormat.INT8, WireFormat.COMPANDED8, WireFormat.E3M0)
    ends = [1.0, -1.0] if is_symmetric else [1.0, 0.0]
    values = np.array([*ends, 0.3, 0.7001, 0.1234, 0.0312, 0.5003, 0.9], np.float32)
    many = np.tile(values, draws)
    codec = codec_of(wire)
    out, back = np.zeros(codec.encoded_bytes(many.size), np.uint8), np.empty_like(many)
    codec.encode(many, out, noise_source(OPERATION, 0, 0))
    codec.decode(out, back)
    taken = back.reshape(draws, 8).astype(np.float64)
    for i in range(2, 8):
        neighbours = np.unique(taken[:, i])
        assert len(neighbours) == 2
        gap = neighbours[1] - neighbours[0]
        assert neighbours[0] < values[i] < neighbours[1]
        assert abs(taken[:, i].mean() - float(values[i])) <= 0.051 * gap


# -- a mesh: contributions quantized once, the result once -------------------------------------


def mesh_average(data: Array, codec: Codec) -> Array:
    """Row i is what peer i has; the owner of a chunk adds its own as it is."""
    peers, count = data.shape
    result = np.empty(count, np.float32)
    for owner in range(peers):
        chunk = slice(owner * count // peers, (owner + 1) * count // peers)
        total = data[owner, chunk].copy()
        arrived, wire = np.empty_like(total), np.empty(codec.encoded_bytes(len(total)), np.uint8)
        for peer in range(peers):
            if peer != owner:
                codec.encode(data[peer, chunk], wire)
                codec.decode(wire, arrived)
                total += arrived
        total /= np.float32(peers)
        codec.encode(total, wire, None, total)
        result[chunk] = total
    return result


def relative_error(found: Array, exact: Array) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def independent(peers: int, *, heavy: bool) -> Array:
    random = np.random.default_rng(20261122)
    data = random.standard_normal((peers, 1 << 15)).astype(np.float32)
    if heavy:
        far = random.random(data.shape) < 0.01
        data[far] = random.choice([-20.0, 20.0], int(far.sum()))
    return data


@pytest.mark.parametrize("wire", EIGHT_BIT)
def test_eight_bits_through_a_mesh(wire: WireFormat) -> None:
    codec = codec_of(wire, wire.default_block)
    assert codec.encoded_bytes(96 * 1000) <= 1.07 * 96 * 1000
    errors: list[float] = []
    for peers in (4, 16):
        normal = independent(peers, heavy=False)
        error = relative_error(mesh_average(normal, codec), normal.mean(0, np.float64))
        assert error <= 0.009
        errors.append(error)
        heavy = independent(peers, heavy=True)
        error = relative_error(mesh_average(heavy, codec), heavy.mean(0, np.float64))
        assert error <= (0.009 if wire is WireFormat.COMPANDED8 else 0.017)
    # (N - 1) / N of the contributions are quantized, and the result: sqrt(3/4 + 1), sqrt(15/16 + 1)
    assert errors[1] / errors[0] == pytest.approx((31 / 28) ** 0.5, rel=0.03)


# -- error feedback ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "once"), [(WireFormat.INT4, 0.09), (WireFormat.E3M0, 0.15), (WireFormat.INT2, 0.5)]
)
def test_few_bits_with_error_feedback_converge(wire: WireFormat, once: float) -> None:
    """What is left out of 50 rounds is never more than the residuals of the last one."""
    peers, rounds, codec = 4, 50, codec_of(wire, 32)
    data = independent(peers, heavy=False)[:, : 1 << 13]
    count = data.shape[1]
    exact = data.mean(0, np.float64)
    feedback = [ErrorFeedback() for _ in range(peers)]
    mean = np.zeros(count)
    errors: list[float] = []
    for turn in range(1, rounds + 1):
        residuals = [f.begin("x", count, DataType.FLOAT) for f in feedback]
        wanted = [
            row if residual.current is None else row + residual.current
            for row, residual in zip(data, residuals, strict=True)
        ]
        for owner in range(peers):
            chunk = slice(owner * count // peers, (owner + 1) * count // peers)
            total = wanted[owner][chunk].copy()
            coded, back = np.empty(codec.encoded_bytes(len(total)), np.uint8), np.empty_like(total)
            for peer in range(peers):
                if peer != owner:
                    codec.encode(wanted[peer][chunk], coded, None, back)
                    residuals[peer].staged[chunk] = wanted[peer][chunk] - back
                    total += back
            total /= np.float32(peers)
            codec.encode(total, coded, None, back)
            residuals[owner].staged[chunk] = np.float32(peers) * (total - back)
            mean[chunk] += back
        for residual in residuals:
            residual.commit()
        errors.append(relative_error(mean / turn, exact))
    assert errors[0] > once
    assert errors[24] < 1.5 * errors[0] / 25 + 0.002
    assert errors[49] < 1.5 * errors[0] / 50 + 0.002
    without = relative_error(mesh_average(data, codec), exact)
    assert without == pytest.approx(errors[0])
