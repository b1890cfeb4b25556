"""Every wire format: error bounds from first principles, specials, and a decoder in plain Python.

Bounds are checked in exact arithmetic. The plain decoder knows the layout and IEEE 754, nothing
else; a float32 sum is the float64 one rounded once more, which is the same because
53 >= 2 * 24 + 2 bits (Figueroa, "When is double rounding innocuous?", 1995).
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.quantization import make_codec, noise_source
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import OperationId, Quantization, WireFormat

Array = npt.NDArray[Any]

DENSE = [wire for wire in WireFormat if wire not in (WireFormat.NONE, WireFormat.SPARSE)]
"""The formats that send every value; ``collectives/test_sparse`` has the other one."""
AFFINE = {WireFormat.UINT8: 255, WireFormat.UINT16: 65535, WireFormat.INT4: 15, WireFormat.INT2: 3}
KINDS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
CASES = [(wire, kind) for wire in DENSE for kind in KINDS if wire.bits < 8 * kind.itemsize]
ALL_CASES = CASES + [(WireFormat.SPARSE, kind) for kind in KINDS]
BLOCKS = st.sampled_from([8, 9, 24, 32, 96, 100, 300])

# dtype: bits of the significand, least positive power of two, largest finite number
SHAPES = {
    DataType.FLOAT16: (11, -24, Fraction(65504)),
    DataType.BFLOAT16: (8, -133, Fraction(255 * 2**120)),
    DataType.FLOAT: (24, -149, Fraction((2**24 - 1) * 2**104)),
    DataType.DOUBLE: (53, -1074, Fraction((2**53 - 1) * 2**971)),
}
OPERATION = OperationId(1, 0, 3, 4, 5)


def some_values(kind: DataType, character: str, count: int, seed: int) -> Array:
    """Values of a kind that is hard in some way."""
    random = np.random.default_rng(seed)
    dtype = kind.to_numpy_dtype()
    normal = random.standard_normal(count)
    _, least, largest = SHAPES[kind]
    with np.errstate(over="ignore"):
        match character:
            case "constant":
                values = np.full(count, normal[0])
            case "negative":
                values = -np.abs(normal) - 3
            case "denormal":
                values = np.ldexp(np.trunc(normal * 100), least)
            case "huge":
                values = random.choice([-1.0, 1.0, 0.25], count) * float(largest)
            case "scales":
                values = normal * 10.0 ** random.integers(-7, 5, count)
            case "far":
                values = normal + 1000
            case _:
                values = normal
    return values.astype(dtype)


CHARACTERS = ["constant", "negative", "denormal", "huge", "scales", "far", "normal"]
ARRAYS = st.tuples(
    st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=3),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
)


def drawn(kind: DataType, drawing: tuple[list[str], int, int], specials: int = 0) -> Array:
    characters, count, seed = drawing
    values = np.concatenate(
        [some_values(kind, character, count, seed + i) for i, character in enumerate(characters)]
    )
    random = np.random.default_rng(seed)
    for where in random.integers(0, len(values), specials):
        values[where] = random.choice([np.nan, np.inf, -np.inf])
    return values


def passed_through(
    wire: WireFormat, kind: DataType, block: int, values: Array, stochastic: bool = False
) -> Array:
    codec = make_codec(Quantization(wire, block, stochastic), kind, Scratch())
    before = values.copy()
    encoded = np.full(codec.encoded_bytes(len(values)), 0xA5, np.uint8)
    noise = noise_source(OPERATION, 1, 2) if stochastic else None
    told = np.empty_like(values)
    error = codec.encode(values, encoded, noise, told)
    assert values.tobytes() == before.tobytes()
    out = np.empty_like(values)
    codec.decode(encoded, out)
    assert told.tobytes() == out.tobytes(), "the encoder adopts something else than is decoded"
    check_error(error, values, out)
    again = np.zeros_like(encoded)
    noise = noise_source(OPERATION, 1, 2) if stochastic else None
    assert codec.encode(values, again, noise) == error, "it depends on whether it is told"
    assert again.tobytes() == encoded.tobytes()
    return out


def check_error(error: tuple[float, float], values: Array, out: Array) -> None:
    """The sums of squares, against exact ones."""
    pairs = [
        (Fraction(float(x)), Fraction(float(y)))
        for x, y in zip(values, out, strict=True)
        if math.isfinite(x)
    ]
    exact = sum((y - x) ** 2 for x, y in pairs), sum(x * x for x, _ in pairs)
    for found, wanted in zip(error, exact, strict=True):
        try:
            assert found == pytest.approx(float(wanted), rel=1e-4, abs=1e-300)
        except OverflowError:
            assert found == math.inf


Extremes = tuple[Fraction, Fraction]
"""The lowest and the highest value."""


def bound(
    wire: WireFormat, kind: DataType, x: Fraction, extremes: Extremes, marked: bool
) -> Fraction:
    """How far from ``x`` a value may come back, rounded to nearest; ``extremes``: of its block."""
    lowest, highest = extremes
    work = DataType.DOUBLE if kind is DataType.DOUBLE else DataType.FLOAT
    digits, least, _ = SHAPES[work]
    unit = Fraction(1, 2 ** (digits - 1))
    largest = max(-lowest, highest)
    normal = Fraction(2) ** (least + digits - 1)

    def step_of(reach: Fraction, levels: int) -> Fraction:
        step = reach / levels
        if step >= normal:
            up = Fraction(1, 2**20 if kind is DataType.DOUBLE else 2**7)
            return step * (1 + up) * (1 + unit)
        return max(2 * step, Fraction(2) ** least) if step else step

    if wire in AFFINE:
        levels = AFFINE[wire] - (1 if wire is WireFormat.INT2 else 3) * marked
        step = step_of(highest - lowest, levels)
        allowed = step * (Fraction(1, 2) + 2 * levels * unit) + unit * (largest + step)
    elif wire is WireFormat.INT8:
        step = step_of(largest, 127 - marked)
        allowed = step * (Fraction(1, 2) + 256 * unit)
    elif wire is WireFormat.COMPANDED8:
        step = step_of(largest, (127 - marked) ** 2)
        root = Fraction(math.isqrt(int(abs(x) * step * 2**3000)) + 1, 2**1500)
        allowed = (root + step / 4) * (1 + 512 * unit)
    elif wire is WireFormat.E3M0:
        allowed = max(abs(x) / 3, largest / 2 ** (7 - marked)) * (1 + 4 * unit)
        allowed += Fraction(2) ** least
    else:
        precision = 11 if wire is WireFormat.FLOAT16 else 8
        allowed = abs(x) / 2**precision * (1 + unit) + largest / 2**38
        if kind is DataType.DOUBLE:
            allowed += Fraction(1, 2**1048)
    own_digits, own_least, _ = SHAPES[kind]
    allowed += (abs(x) + allowed) / 2**own_digits + Fraction(2) ** (own_least - 1) * (kind != work)
    return Fraction(allowed)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("wire", "kind"), CASES)
@settings(max_examples=8)
@given(drawing=ARRAYS, block=BLOCKS, specials=st.integers(0, 3))
def test_error_bound_of_each_value(
    wire: WireFormat,
    kind: DataType,
    stochastic: bool,
    drawing: tuple[list[str], int, int],
    block: int,
    specials: int,
) -> None:
    """Stochastic rounding takes a neighbour, so it may be a whole step off, not half of one.

    Companded, that is 2 * code + 1 of it, not code + 1/4; of e3m0, the value and not a third of it.
    """
    factors = {WireFormat.COMPANDED8: 4, WireFormat.E3M0: 3}
    factor = factors.get(wire, 2) if stochastic else 1
    values = drawn(kind, drawing, specials)
    out = passed_through(wire, kind, block, values, stochastic)
    for start in range(0, len(values), block):
        part, back = values[start : start + block], out[start : start + block]
        finite = [float(v) for v in part if math.isfinite(v)]
        marked = len(finite) < len(part)
        extremes = (Fraction(min(finite, default=0)), Fraction(max(finite, default=0)))
        for x, y in zip(part.tolist(), back.tolist(), strict=True):
            if not math.isfinite(x):
                assert str(y) == ("nan" if wire is WireFormat.INT2 else str(x))
                continue
            assert math.isfinite(y)
            allowed = factor * bound(wire, kind, Fraction(x), extremes, marked)
            assert abs(Fraction(y) - Fraction(x)) <= allowed


@pytest.mark.parametrize(("wire", "kind"), ALL_CASES)
@settings(max_examples=20)
@given(drawing=ARRAYS, block=BLOCKS)
def test_a_segment_does_not_depend_on_what_was_before(
    wire: WireFormat, kind: DataType, drawing: tuple[list[str], int, int], block: int
) -> None:
    values = drawn(kind, drawing)
    codec = make_codec(Quantization(wire, block), kind, Scratch())
    first = np.zeros(codec.encoded_bytes(len(values)), np.uint8)
    second = np.full_like(first, 255)
    codec.encode(values, first)
    codec.encode(np.concatenate([values, values])[::-1].copy(), np.zeros(9999, np.uint8))
    in_place = values.copy()
    codec.encode(in_place, second, None, in_place)
    assert first.tobytes() == second.tobytes()
    out = np.empty_like(values)
    codec.decode(first, out)
    assert in_place.tobytes() == out.tobytes()


# -- constants -----------------------------------------------------------------------------------


def finite_numbers(kind: DataType) -> st.SearchStrategy[float]:
    """Any finite number of a dtype, denormal and huge ones too."""
    dtype = kind.to_numpy_dtype()
    bits = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    numbers = bits.map(lambda drawn: drawn.to_bytes(dtype.itemsize, "little"))
    floats = numbers.map(lambda raw: float(np.frombuffer(raw, dtype)[0]))
    return floats.filter(math.isfinite) | st.sampled_from([0.0, 42.0, -43.0, 1.5])


@pytest.mark.parametrize(("wire", "kind"), CASES)
@settings(max_examples=20)
@given(data=st.data(), count=st.integers(1, 70), block=BLOCKS, stochastic=st.booleans())
def test_a_constant_comes_back_exactly(
    wire: WireFormat, kind: DataType, data: st.DataObject, count: int, block: int, stochastic: bool
) -> None:
    values = np.full(count, data.draw(finite_numbers(kind)), kind.to_numpy_dtype())
    out = passed_through(wire, kind, block, values, stochastic)
    assert (out == values).all()


@pytest.mark.parametrize(("wire", "kind"), CASES)
@settings(max_examples=15)
@given(data=st.data(), drawing=ARRAYS, block=BLOCKS, specials=st.integers(0, 3))
def test_a_constant_block_among_others_comes_back_exactly(
    wire: WireFormat,
    kind: DataType,
    data: st.DataObject,
    drawing: tuple[list[str], int, int],
    block: int,
    specials: int,
) -> None:
    """It changes nothing in the blocks beside it."""
    others = drawn(kind, drawing, specials)
    whole = len(others) // block * block
    before, after = others[:whole], others[whole:]
    constant = np.full(block, data.draw(finite_numbers(kind)), kind.to_numpy_dtype())
    out = passed_through(wire, kind, block, np.concatenate([before, constant, after]))
    assert (out[whole : whole + block] == constant).all()
    assert out[:whole].tobytes() == passed_through(wire, kind, block, before).tobytes()
    assert out[whole + block :].tobytes() == passed_through(wire, kind, block, after).tobytes()


@pytest.mark.parametrize("wire", DENSE)
@given(count=st.integers(0, 5000), block=BLOCKS)
def test_length_depends_on_the_count_alone(wire: WireFormat, count: int, block: int) -> None:
    codec = make_codec(Quantization(wire, block), DataType.FLOAT, Scratch())
    metadata = 6 if wire in AFFINE else 4 if wire is WireFormat.E3M0 else 2
    expected = math.ceil(count / block) * metadata + math.ceil(count * wire.bits / 8)
    if metadata == 2 and count:  # there is room for a float32 in the last block
        expected += max(0, 4 - ((count - 1) % block + 1) * wire.bits // 8)
    assert codec.encoded_bytes(count) == expected
    assert codec.block == block


# -- the decoder in plain Python ---------------------------------------------------------------


def single(value: float) -> float:
    """Rounded to float32; what would be infinite is the largest number."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.inf
    if math.isinf(rounded):
        return math.copysign(float(SHAPES[DataType.FLOAT][2]), value)
    return rounded


def step_of(upper: int) -> tuple[float, bool]:
    marked, upper = bool(upper >> 15), upper & 0x7FFF
    if upper & 0x7F80 == 0 and upper:
        return math.ldexp(1.0, upper - 150), marked
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0], marked


def plain_decoded(wire: WireFormat, block: int, count: int, encoded: bytes) -> list[float]:
    number = math.ceil(count / block)
    decoded: list[float] = []
    if wire in AFFINE:
        lows = struct.unpack_from(f"<{number}f", encoded)
        uppers = struct.unpack_from(f"<{number}H", encoded, 4 * number)
        rest = encoded[6 * number :]
        if wire.bits < 8:
            shifts, mask = range(0, 8, wire.bits), 2**wire.bits - 1
            codes = [byte >> shift & mask for shift in shifts for byte in rest]
        else:
            codes = list(struct.unpack_from(f"<{count}{'H' if wire.bits == 16 else 'B'}", rest))
        top = AFFINE[wire]
        special = {top: math.nan, top - 1: -math.inf, top - 2: math.inf}
        special = {top: math.nan} if wire is WireFormat.INT2 else special
        for i, code in enumerate(codes[:count]):
            step, marked = step_of(uppers[i // block])
            value = single(lows[i // block] + code * step)
            decoded.append(special.get(code, value) if marked else value)
        return decoded
    if wire is WireFormat.E3M0:
        words, rest = struct.unpack_from(f"<{number}I", encoded), encoded[4 * number :]
        codes = [byte >> shift & 15 for shift in (0, 4) for byte in rest]
        special = {8: math.nan, 15: -math.inf, 7: math.inf}
        for i, code in enumerate(codes[:count]):
            marked, word = bool(words[i // block] >> 31), words[i // block] & 0x7FFFFFFF
            (largest,) = struct.unpack("<f", struct.pack("<I", word))
            size = single(math.ldexp(largest, (code & 7) - 7 + marked)) if code & 7 else 0.0
            value = -size if code & 8 and size else size
            decoded.append(special.get(code, value) if marked else value)
        return decoded
    uppers = struct.unpack_from(f"<{number}H", encoded)
    special = {-128: math.nan, 127: math.inf, -127: -math.inf}
    for i, code in enumerate(struct.unpack_from(f"<{count}b", encoded, 2 * number)):
        step, marked = step_of(uppers[i // block])
        steps = code if wire is WireFormat.INT8 else code * abs(code)
        value = single(steps * step)
        if step == 0 and not marked:
            (value,) = struct.unpack_from("<f", encoded, 2 * number + i // block * block)
        decoded.append(special.get(code, value) if marked else value)
    return decoded


@pytest.mark.parametrize("wire", [*AFFINE, WireFormat.INT8, WireFormat.COMPANDED8, WireFormat.E3M0])
@settings(max_examples=150)
@given(count=st.integers(1, 60), block=st.sampled_from([8, 9, 32]), data=st.data())
def test_any_bytes_are_decoded_as_the_layout_says(
    wire: WireFormat, count: int, block: int, data: st.DataObject
) -> None:
    codec = make_codec(Quantization(wire, block), DataType.FLOAT, Scratch())
    number = math.ceil(count / block)
    lows = steps = b""
    if wire in AFFINE or wire is WireFormat.E3M0:
        finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
        drawn_lows = data.draw(st.lists(finite, min_size=number, max_size=number))
        lows = struct.pack(f"<{number}f", *drawn_lows)
    if wire is not WireFormat.E3M0:
        upper = st.integers(0, 127) | st.integers(0x80, 0x7F7F)
        signed = st.tuples(upper, st.booleans()).map(lambda pair: pair[0] | pair[1] << 15)
        steps = struct.pack(
            f"<{number}H", *data.draw(st.lists(signed, min_size=number, max_size=number))
        )
    left = codec.encoded_bytes(count) - len(lows) - len(steps)
    encoded = lows + steps + data.draw(st.binary(min_size=left, max_size=left))
    out = np.empty(count, np.float32)
    codec.decode(np.frombuffer(encoded, np.uint8), out)
    expected = plain_decoded(wire, block, count, encoded)
    for found, wanted in zip(out.tolist(), expected, strict=True):
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


@pytest.mark.parametrize(("wire", "kind"), ALL_CASES)
@settings(max_examples=30)
@given(count=st.integers(1, 60), data=st.data())
def test_no_bytes_do_harm(
    wire: WireFormat, kind: DataType, count: int, data: st.DataObject
) -> None:
    codec = make_codec(Quantization(wire, 8), kind, Scratch())
    length = codec.encoded_bytes(count)
    encoded = np.frombuffer(data.draw(st.binary(min_size=length, max_size=length)), np.uint8)
    out, again = np.empty((2, count), kind.to_numpy_dtype())
    codec.decode(encoded, out)
    make_codec(Quantization(wire, 8), kind, Scratch()).decode(encoded, again)
    assert out.tobytes() == again.tobytes()
