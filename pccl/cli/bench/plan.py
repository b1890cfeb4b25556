"""The plan of ``pccl bench allreduce``, and a check that this machine can measure it."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import click

import pccl
from pccl.cli.bench.machine import check_memory
from pccl.cli.sizes import format_size

DTYPES = {data_type.label: data_type for data_type in pccl.DataType}
"""Data types by their names on the command line."""

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Types that can be quantized."""

THEIR_DTYPES = (*FLOATS, "int8", "uint8", "int32", "int64")
"""Types that Gloo can sum."""

OTHERS = ("gloo", "ring")
"""What ``--against`` compares this library with: Gloo, and a bare ring without a library."""

ALGORITHMS = ("auto", "ring", "star", "mesh")
"""Algorithms by their names in ``all_reduce``."""

EXACT = pccl.WireFormat.NONE.label
FORMATS = {wire.label: wire for wire in (pccl.WireFormat.NONE, *pccl.WireFormat)}
"""Wire formats by name; the first one means no quantization."""

ROUNDS_MAX = 1000

STAR_BYTES_MAX = 4 << 20
"""Largest tensor that the library reduces with ``star``, in bytes."""


class Variant(NamedTuple):
    """One way to reduce: an algorithm and a wire format."""

    algorithm: str = "auto"
    quantize: str = EXACT

    @property
    def exact(self) -> bool:
        """Whether the variant is not quantized, so that results are exact sums."""
        return self.quantize == EXACT

    def __str__(self) -> str:
        return self.algorithm if self.exact else f"{self.algorithm} {self.quantize}"


PLAIN = Variant()
"""The default variant of ``all_reduce``."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The plan of a benchmark.

    Attributes:
        sizes: sizes of the tensors in bytes.
        peers: numbers of processes, measured one after another.
        lanes: numbers of connections per link, measured in turn; 0: the library chooses.
        dtype: type of the tensors.
        in_place: whether to reduce into the input.
        rounds: number of measured rounds.
        warmup: number of rounds before the measured ones.
        against: names from ``OTHERS``, to compare with.
        emulate: emulated link between any two processes, as proxies parse it; empty: loopback.
        algorithms: algorithms; each is measured with each of ``formats``, in turn.
        formats: wire formats.
        holder: process id of the holder of a network namespace for a second Gloo; 0: none.
        one_clock: whether the clocks of all peers agree, as on one machine.
    """

    sizes: tuple[int, ...]
    peers: tuple[int, ...] = (2,)
    lanes: tuple[int, ...] = (0,)
    dtype: str = "float32"
    in_place: bool = False
    rounds: int = 20
    warmup: int = 3
    against: tuple[str, ...] = ()
    emulate: str = ""
    algorithms: tuple[str, ...] = (PLAIN.algorithm,)
    formats: tuple[str, ...] = (PLAIN.quantize,)
    holder: int = 0
    one_clock: bool = True

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All combinations of algorithms and formats, which are measured in turn."""
        return tuple(itertools.starmap(Variant, itertools.product(self.algorithms, self.formats)))

    def check(self, processes: int) -> None:
        """Refuse a plan that cannot be measured with ``processes`` processes on this machine.

        Raises:
            click.UsageError: the message says why, and what to do.
        """
        largest, item_bytes = max(self.sizes), DTYPES[self.dtype].itemsize
        quantized = [FORMATS[name] for name in self.formats if name != EXACT]
        # In place, the library keeps a copy while the reduce is undecided.
        check_memory(largest, processes * 2)
        gloo = "gloo" in self.against
        faults = {
            "Gloo comes with torch, which is not installed; pip install 'pccl[torch]'": (
                gloo and importlib.util.find_spec("torch") is None
            ),
            "--emulate is for this library alone; leave out --against": (
                self.against and self.emulate
            ),
            f"Gloo does not sum {self.dtype}; take one of {', '.join(THEIR_DTYPES)}": (
                gloo and self.dtype not in THEIR_DTYPES
            ),
            "--against compares exact sums; add 'none' to --quantize": (
                self.against and EXACT not in self.formats
            ),
            f"a --size is not a multiple of {item_bytes} bytes, the size of a {self.dtype}": any(
                size % item_bytes for size in self.sizes
            ),
            f"star is for tensors up to {format_size(STAR_BYTES_MAX)}, and the largest has "
            f"{format_size(largest)}; use a smaller --size, or another --algorithm": (
                "star" in self.algorithms and largest > STAR_BYTES_MAX
            ),
            f"{self.dtype} cannot be quantized; use --dtype with one of {', '.join(FLOATS)}": (
                quantized and self.dtype not in FLOATS
            ),
            "sparse travels from each peer to all others; leave --algorithm out, or use mesh": (
                pccl.WireFormat.SPARSE in quantized and not {"auto", "mesh"} >= {*self.algorithms}
            ),
            f"a format of --quantize is not shorter than {self.dtype}; leave it out": (
                any(wire.bits >= 8 * item_bytes for wire in quantized)
            ),
        }
        for words, applies in faults.items():
            if applies:
                raise click.UsageError(words)
