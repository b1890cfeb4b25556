"""What ``pccl bench allreduce`` is to measure, and whether that can be."""

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
"""As the command line calls them."""

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""What can be quantized."""

THEIR_DTYPES = (*FLOATS, "int8", "uint8", "int32", "int64")
"""What Gloo adds."""

ALGORITHMS = ("auto", "ring", "star", "mesh")
"""As ``all_reduce`` calls them."""

EXACT = pccl.WireFormat.NONE.label
FORMATS = {wire.label: wire for wire in (pccl.WireFormat.NONE, *pccl.WireFormat)}
"""Wire formats by name; the first one is none."""

ROUNDS_MAX = 1000

STAR_BYTES_MAX = 4 << 20
"""The library takes no larger tensor through a star."""


class Variant(NamedTuple):
    """One way to reduce: how values travel, and the wire format; without one, sums are exact."""

    algorithm: str = "auto"
    quantize: str = EXACT

    @property
    def exact(self) -> bool:
        """Whether results are the exact sums of whole numbers."""
        return self.quantize == EXACT

    def __str__(self) -> str:
        return self.algorithm if self.exact else f"{self.algorithm} {self.quantize}"


PLAIN = Variant()
"""What a program gets that asks for nothing."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """All that is to be measured.

    Attributes:
        sizes: bytes of the tensors.
        peers: how many processes; several are measured one after another.
        lanes: connections per link, 0: chosen by the library; likewise.
        dtype: of the tensors.
        in_place: reduce into the input.
        rounds: how many are measured.
        warmup: how many before that are not.
        against: the other side, or nothing.
        emulate: the links between all processes, as the relays know them; empty: loopback.
        algorithms: how values travel; each combination of these and the formats takes turns.
        formats: on the wire.
        rendezvous: file by which processes of Gloo find each other; empty: no Gloo.
    """

    sizes: tuple[int, ...]
    peers: tuple[int, ...] = (2,)
    lanes: tuple[int, ...] = (0,)
    dtype: str = "float32"
    in_place: bool = False
    rounds: int = 20
    warmup: int = 3
    against: str = ""
    emulate: str = ""
    algorithms: tuple[str, ...] = (PLAIN.algorithm,)
    formats: tuple[str, ...] = (PLAIN.quantize,)
    rendezvous: str = ""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Ways to reduce, which take turns."""
        return tuple(itertools.starmap(Variant, itertools.product(self.algorithms, self.formats)))

    def check(self, processes: int) -> None:
        """Refuse what cannot be measured, with so many processes on this machine at a time.

        Raises:
            click.UsageError: it says what, and what to do.
        """
        largest, item_bytes = max(self.sizes), DTYPES[self.dtype].itemsize
        quantized = [FORMATS[name] for name in self.formats if name != EXACT]
        # In place, the library keeps a copy while the reduce is undecided.
        check_memory(largest, processes * (3 if self.against else 2))
        faults = {
            "Gloo comes with torch, which is not installed; pip install 'pccl[torch]'": (
                self.against and importlib.util.find_spec("torch") is None
            ),
            "--emulate is for our links only; leave out --against": self.against and self.emulate,
            f"Gloo does not add {self.dtype}; take one of {', '.join(THEIR_DTYPES)}": (
                self.against and self.dtype not in THEIR_DTYPES
            ),
            "--against compares exact sums; add none to --quantize": (
                self.against and EXACT not in self.formats
            ),
            f"a --size is no whole number of {self.dtype} elements of {item_bytes} bytes": any(
                size % item_bytes for size in self.sizes
            ),
            f"star is for tensors up to {format_size(STAR_BYTES_MAX)}, and the largest has "
            f"{format_size(largest)}; take a smaller --size, or another --algorithm": (
                "star" in self.algorithms and largest > STAR_BYTES_MAX
            ),
            f"{self.dtype} cannot be quantized; with --quantize take one of {', '.join(FLOATS)}": (
                quantized and self.dtype not in FLOATS
            ),
            f"one of --quantize is not shorter than {self.dtype}": (
                any(wire.bits >= 8 * item_bytes for wire in quantized)
            ),
        }
        for words, applies in faults.items():
            if applies:
                raise click.UsageError(words)
