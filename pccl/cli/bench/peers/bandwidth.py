"""How fast one thread of this machine copies, adds and hashes: a program that ``pccl bench`` runs.

Its last line is a JSON object: name of a measurement -> bytes per second, each counted once (of
the result; a copy reads and writes as many). What is worked on is either segments that stay in a
core's cache or whole tensors that do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash

import pccl
from pccl.cli.bench.peers.values import Array

SEGMENT_BYTES = 256 << 10
"""What the ring works on at a time, about."""

WORK_BYTES = 64 << 20
"""At least so much is worked on in one repetition, so that the clock's grain does not show."""

REPEAT_COUNT = 5


def measure(dtype: np.dtype[Any], size: int) -> dict[str, float]:
    """Bytes per second of everything.

    Args:
        dtype: of the tensors.
        size: of the whole ones in bytes, a segment or more.
    """
    count = size // dtype.itemsize
    one, other = np.full(count, 0, dtype), np.full(count, 1, dtype)
    segment = SEGMENT_BYTES // dtype.itemsize
    repeats = max(1, WORK_BYTES // SEGMENT_BYTES)
    cached = [(one[:segment], other[:segment])] * repeats
    whole = list(_segments(one, other, segment)) * max(1, WORK_BYTES // one.nbytes)
    return {
        "copy_cache": speed(copy, cached),
        "copy_memory": speed(copy, whole),
        "add_cache": speed(add, cached),
        "add_memory": speed(add, whole),
        "hash_cache": speed(hash_of, cached),
        "hash_memory": speed(hash_of, whole),
    }


def speed(work: Callable[[Array, Array], object], parts: list[tuple[Array, Array]]) -> float:
    """Bytes per second of the median repetition."""
    seconds: list[float] = []
    for _ in range(REPEAT_COUNT):
        started_s = time.perf_counter()
        for one, other in parts:
            work(one, other)
        seconds.append(time.perf_counter() - started_s)
    return sum(one.nbytes for one, _ in parts) / statistics.median(seconds)


def copy(one: Array, other: Array) -> None:
    """Bytes of one tensor into another."""
    np.copyto(other, one)


def add(one: Array, other: Array) -> None:
    """One tensor, whose values are zeros, to another, in place."""
    np.add(one, other, out=other)


def hash_of(one: Array, other: Array) -> None:
    """The hash that the digest of a result consists of."""
    xxhash.xxh3_64_intdigest(one.view(np.uint8).data)


def _segments(one: Array, other: Array, segment: int) -> Iterator[tuple[Array, Array]]:
    for begin in range(0, len(one), segment):
        yield one[begin : begin + segment], other[begin : begin + segment]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m pccl.cli.bench.peers.bandwidth")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    given = parser.parse_args()
    types = {data_type.label: data_type for data_type in pccl.DataType}
    print(json.dumps(measure(types[given.dtype].to_numpy_dtype(), given.bytes)), flush=True)


if __name__ == "__main__":
    main()
