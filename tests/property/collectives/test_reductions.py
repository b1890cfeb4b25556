"""Every dtype and operation against a definition in plain Python.

Integers are exact there and cut to their width; floats are rounded one by one. The definition knows
neither NumPy nor ml_dtypes. float64 is what a Python float is; a float32 operation is the float64
one rounded once more, which is the same because 53 >= 2 * 24 + 2 bits (Figueroa, "When is double
rounding innocuous?", 1995).
"""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.reductions import Reduction, Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import ReduceOp
from pccl.stress.sim.fold import differences, fold

Array = npt.NDArray[Any]

NAMES: dict[DataType, str] = {
    DataType.UINT8: "uint8",
    DataType.INT8: "int8",
    DataType.INT16: "int16",
    DataType.UINT16: "uint16",
    DataType.UINT32: "uint32",
    DataType.INT32: "int32",
    DataType.UINT64: "uint64",
    DataType.INT64: "int64",
    DataType.FLOAT16: "float16",
    DataType.BFLOAT16: "bfloat16",
    DataType.FLOAT: "float32",
    DataType.DOUBLE: "float64",
}
FLOATS = {"float16": "<e", "float32": "<f", "float64": "<d"}
PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
"""In bits, the implicit one included."""
EXPONENT_MAX = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


# -- the definition ----------------------------------------------------------------------------


def packed(form: str, value: float) -> bytes:
    """Rounded to nearest, ties to even; what does not fit is infinite."""
    try:
        return struct.pack(form, value)
    except OverflowError:
        return struct.pack(form, math.copysign(math.inf, value))


def encode(name: str, value: float) -> bytes:
    if name != "bfloat16":
        return packed(FLOATS[name], value)
    bits = int.from_bytes(packed("<f", value), "little")
    if not math.isnan(value):
        bits += 0x7FFF + (bits >> 16 & 1)
    return (bits >> 16).to_bytes(2, "little")


def decode(name: str, raw: bytes) -> float:
    value: float
    if name == "bfloat16":
        (value,) = struct.unpack("<f", b"\0\0" + raw)
    else:
        (value,) = struct.unpack(FLOATS[name], raw)
    return value


def combined(a: Any, b: Any, op: ReduceOp) -> Any:
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return a + b
    if op is ReduceOp.PROD:
        return a * b
    if a != a or b != b:
        return math.nan
    return max(a, b) if op is ReduceOp.MAX else min(a, b)


def integer_result(values: list[int], bits: int, signed: bool, op: ReduceOp) -> int:
    total = values[0]
    for value in values[1:]:
        total = combined(total, value, op) & ((1 << bits) - 1)
        if signed and total >> (bits - 1):
            total -= 1 << bits
    if op is ReduceOp.AVG:
        total = abs(total) // len(values) * (1 if total >= 0 else -1)
    return total


def float_result(name: str, values: list[float], op: ReduceOp) -> bytes:
    """Halves are combined in float32 and rounded once per hop."""
    arithmetic = "<d" if name == "float64" else "<f"
    total = values[0]
    for number, value in enumerate(values[1:], 2):
        (exact,) = struct.unpack(arithmetic, packed(arithmetic, combined(total, value, op)))
        if op is ReduceOp.AVG and number == len(values):
            (exact,) = struct.unpack(arithmetic, packed(arithmetic, exact / len(values)))
        total = decode(name, encode(name, exact))
    return encode(name, total)


def is_right(name: str, result: bytes, column: list[bytes], op: ReduceOp) -> bool:
    """Whether ``result`` is what the contributions of one element, in ring order, must give."""
    if "int" in name:
        signed = not name.startswith("u")
        values = [int.from_bytes(raw, "little", signed=signed) for raw in column]
        expected = integer_result(values, 8 * len(result), signed, op)
        return int.from_bytes(result, "little", signed=signed) == expected
    wanted = float_result(name, [decode(name, raw) for raw in column], op)
    a, b = decode(name, result), decode(name, wanted)
    zeros = a == b == 0 and op in (ReduceOp.MIN, ReduceOp.MAX)
    return result == wanted or (math.isnan(a) and math.isnan(b)) or zeros


def elements(array: Array) -> list[bytes]:
    raw, size = array.tobytes(), array.dtype.itemsize
    return [raw[start : start + size] for start in range(0, len(raw), size)]


# -- contributions -----------------------------------------------------------------------------

SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 3.0)


def pool(name: str) -> list[bytes]:
    """Encoded values at the edges of the dtype."""
    if "int" in name:
        info = np.iinfo(name)
        low, high = int(info.min), int(info.max)
        near = {low, low + 1, low // 2, -3, -1, 0, 1, 2, 3, high // 2, high - 1, high}
        fitting = [value for value in sorted(near) if low <= value <= high]
        return [value.to_bytes(info.bits // 8, "little", signed=low < 0) for value in fitting]
    eps, least = 2.0 ** (1 - PRECISION[name]), 2.0 ** (1 - EXPONENT_MAX[name])
    sizes = ((2 - eps) * 2.0 ** EXPONENT_MAX[name], least, least * eps, eps)
    edges = [sign * size * part for size in sizes for sign in (1, -1) for part in (1, 0.75, 0.5)]
    return [encode(name, value) for value in (*SPECIAL, *edges)]


def draw_columns(name: str, rng: np.random.Generator, world_size: int, count: int) -> list[Array]:
    """One contribution per rank: edges, random bits, and ordinary numbers of one size."""
    dtype = numpy_dtype(name)
    edges = pool(name)
    contributions: list[Array] = []
    for _ in range(world_size):
        ordinary = rng.integers(1, 8, count)
        values: Array = ordinary.astype(dtype) * np.array(1 + ordinary % 3).astype(dtype)
        if "int" not in name:
            values = (rng.standard_normal(count) * 8).astype(dtype)
        raw = [
            edges[rng.integers(len(edges))]
            if kind == 0
            else (rng.bytes(dtype.itemsize) if kind == 1 else ordinary)
            for kind, ordinary in zip(rng.integers(0, 4, count), elements(values), strict=True)
        ]
        contributions.append(np.frombuffer(b"".join(raw), dtype))
    return contributions


def folded_by_hops(data_type: DataType, op: ReduceOp, contributions: list[Array]) -> Array:
    """What travels: the first contribution, into which every further rank folds its own."""
    total = contributions[0].copy()
    reduction = Reduction(data_type, op, len(contributions), Scratch())
    for number, own in enumerate(contributions[1:], 2):
        before = own.tobytes()
        reduction.combine(total, own, finish=number == len(contributions))
        assert own.tobytes() == before
    return total


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("data_type", DataType)
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32), world_size=st.integers(2, 9), count=st.integers(1, 70))
def test_every_dtype_and_operation(
    data_type: DataType, op: ReduceOp, seed: int, world_size: int, count: int
) -> None:
    name = NAMES[data_type]
    rng = np.random.default_rng(seed)
    contributions = draw_columns(name, rng, world_size, count)
    result = folded_by_hops(data_type, op, contributions)
    columns = list(zip(*(elements(own) for own in contributions), strict=True))
    for index, (element, column) in enumerate(zip(elements(result), columns, strict=True)):
        assert is_right(name, element, list(column), op), (index, column, element)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("data_type", DataType)
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 32), world_size=st.integers(2, 9), count=st.integers(1, 30))
def test_the_fold_of_the_simulator_is_the_definition_too(
    data_type: DataType, op: ReduceOp, seed: int, world_size: int, count: int
) -> None:
    name = NAMES[data_type]
    contributions = draw_columns(name, np.random.default_rng(seed), world_size, count)
    columns = list(zip(*(elements(own) for own in contributions), strict=True))
    chunks = np.array_split(np.arange(count), world_size)  # the first ones are one longer
    starts = {int(element): rank for rank, chunk in enumerate(chunks) for element in chunk}
    for index, element in enumerate(elements(fold(contributions, op))):
        column = list(columns[index])
        first = starts[index]
        assert is_right(name, element, column[first:] + column[:first], op), (index, column)


def test_differences_are_found_and_only_open_questions_forgiven() -> None:
    values = np.array([1, math.nan, 0.0, math.inf], np.float32)
    other_nan = np.array([0x3F800000, 0xFFC00001, 0, 0x7F800000], np.uint32).view(np.float32)
    assert differences(values, other_nan, ReduceOp.SUM) == []
    signed = np.array([1, math.nan, -0.0, math.inf], np.float32)
    assert differences(values, signed, ReduceOp.SUM) == [2]
    assert differences(values, signed, ReduceOp.MIN) == []
    wrong = np.array([math.nan, 1, 1, -math.inf], np.float32)
    assert differences(values, wrong, ReduceOp.MIN) == [0, 1, 2, 3]
    assert differences(np.array([1, -2]), np.array([1, 2]), ReduceOp.MAX) == [1]


# -- averages of integers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES.values() if "int" in name])
@settings(max_examples=60)
@given(st.lists(st.integers(), min_size=1, max_size=20), st.integers(2, 4096))
def test_integer_averages_are_exact_and_truncate(name: str, sums: list[int], n: int) -> None:
    """Also where the number of ranks does not fit the dtype."""
    dtype = np.dtype(name)
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    edges = [low, low + 1, -n, -n - 1, 1 - n, -1, 0, 1, n - 1, n, n + 1, high - 1, high]
    sums = [(value - low) % (high - low + 1) + low for value in sums] + [
        value for value in edges if low <= value <= high
    ]
    values = np.array(sums, dtype)
    data_type = next(kind for kind, known in NAMES.items() if known == name)
    reduction = Reduction(data_type, ReduceOp.AVG, n, Scratch())
    reduction.combine(values, np.zeros_like(values), finish=True)
    assert values.dtype == dtype
    assert values.tolist() == [abs(value) // n * (1 if value >= 0 else -1) for value in sums]


@pytest.mark.parametrize(
    ("data_type", "world_size", "contribution", "expected"),
    [
        (DataType.INT8, 200, 1, 0),  # 200 wraps to -56
        (DataType.INT8, 128, -1, -1),  # -128 / 128, and 128 is no int8
        (DataType.INT8, 128, 1, -1),  # wraps to -128
        (DataType.INT8, 3, 127, 41),  # 381 wraps to 125
        (DataType.INT8, 3, -100, -14),  # -300 wraps to -44
        (DataType.UINT8, 300, 1, 0),  # 300 wraps to 44
        (DataType.UINT8, 255, 1, 1),
        (DataType.UINT64, 3, (1 << 64) - 1, ((1 << 64) - 3) // 3),
        (DataType.INT64, 3, -(1 << 63), -((1 << 63) // 3)),  # three times the least wraps to it
        (DataType.INT32, 2, (1 << 31) - 1, -1),  # wraps to -2
    ],
)
def test_an_average_divides_the_wrapped_sum(
    data_type: DataType, world_size: int, contribution: int, expected: int
) -> None:
    own = np.array([contribution], NAMES[data_type])
    assert folded_by_hops(data_type, ReduceOp.AVG, [own] * world_size).tolist() == [expected]


def test_sums_and_products_wrap() -> None:
    for op, expected in ((ReduceOp.SUM, [-(2**31), 2**31 - 1]), (ReduceOp.PROD, [-2, -(2**31)])):
        a = np.array([2**31 - 1, -(2**31)], np.int32)
        b = np.array([1, -1] if op is ReduceOp.SUM else [2, -1], np.int32)
        assert folded_by_hops(DataType.INT32, op, [a, b]).tolist() == expected
    big = np.array([200], np.uint8)
    assert folded_by_hops(DataType.UINT8, ReduceOp.SUM, [big, big]).tolist() == [144]
    assert folded_by_hops(DataType.UINT8, ReduceOp.PROD, [big, big]).tolist() == [64]


# -- floats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_type", "even"), [(DataType.FLOAT16, 2048), (DataType.BFLOAT16, 260)]
)
def test_the_average_of_halves_is_rounded_once(data_type: DataType, even: int) -> None:
    """The last sum, even + 1, is no half: rounded before the division it would lose the one."""
    parts = [np.array([value]).astype(numpy_dtype(NAMES[data_type])) for value in (even, 0, 1)]
    assert (parts[0] + parts[2]).astype(float).tolist() == [even]
    result = folded_by_hops(data_type, ReduceOp.AVG, parts)
    assert result.astype(float).tolist() == [(even + 1) / 3]


@pytest.mark.parametrize("data_type", [DataType.FLOAT16, DataType.BFLOAT16])
def test_halves_are_rounded_at_every_hop(data_type: DataType) -> None:
    """1 is half a unit of the sum: two of them together would count, one by one they do not."""
    dtype = numpy_dtype(NAMES[data_type])
    start = 2.0 ** PRECISION[NAMES[data_type]]
    parts = [np.array([value], dtype) for value in (start, 1, 1)]
    assert folded_by_hops(data_type, ReduceOp.SUM, parts).astype(float).tolist() == [start]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_nan_wins_over_everything(name: str, op: ReduceOp) -> None:
    data_type = next(kind for kind, known in NAMES.items() if known == name)
    a = np.array([math.nan, 1.0, math.inf, -math.inf, math.nan] * 20).astype(numpy_dtype(name))
    b = np.array([1.0, math.nan, 2.0, 2.0, math.inf] * 20).astype(numpy_dtype(name))
    result = folded_by_hops(data_type, op, [a, b]).astype(float).tolist()[:5]
    rest = [2.0, -math.inf] if op is ReduceOp.MIN else [math.inf, 2.0]
    assert result[2:4] == rest
    assert all(math.isnan(value) for value in (*result[:2], result[4]))


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("data_type", DataType)
def test_no_hidden_copies(data_type: DataType, op: ReduceOp) -> None:
    """Beyond the scratch, which is reused, at most NumPy's own small buffers."""
    dtype = numpy_dtype(NAMES[data_type])
    arrived, own = np.ones(1 << 19, dtype), np.ones(1 << 19, dtype)
    scratch = Scratch()
    reduction = Reduction(data_type, op, 3, scratch)
    reduction.combine(arrived, own, finish=True)
    tracemalloc.start()
    try:
        reduction.combine(arrived, own, finish=False)
        reduction.combine(arrived, own, finish=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 << 10


def test_scratch_is_as_large_as_the_largest_wanted() -> None:
    scratch = Scratch()
    first = scratch.array(10, np.float32)
    assert first.shape == (10,)
    assert first.dtype == np.float32
    assert np.shares_memory(first, scratch.array(5, np.int64))
    assert scratch.array(11, np.float32).shape == (11,)
