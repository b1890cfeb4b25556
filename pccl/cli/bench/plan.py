"""What is to be measured, and whether that can be."""

from __future__ import annotations

from dataclasses import dataclass

import click

import pccl
from pccl.cli.bench.arguments import available_bytes, format_size
from pccl.cli.bench.variants import FORMATS, PLAIN, Variant

DTYPES = {data_type.label: data_type for data_type in pccl.DataType}
"""As the command line calls them."""

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""What can be quantized."""

THEIR_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""What Gloo adds."""

SWEEP_MAX = 64
"""Sizes in one run."""

STAR_BYTES_MAX = 4 << 20
"""The library takes no larger tensor through a star."""

GIB = 1 << 30


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
        variants: ways to reduce, which take turns.
        data: kind of the values that are quantized.
        master: where the master of peers on other hosts is; empty: all are of this machine.
    """

    sizes: tuple[int, ...]
    peers: tuple[int, ...]
    lanes: tuple[int, ...]
    dtype: str
    in_place: bool
    rounds: int
    warmup: int
    against: str
    emulate: str
    variants: tuple[Variant, ...] = (PLAIN,)
    data: str = "normal"
    master: str = ""

    @property
    def compares_variants(self) -> bool:
        """Whether there is more to say of a case than size, peers and lanes."""
        return self.variants != (PLAIN,)

    @property
    def buffers(self) -> int:
        """Tensors of one size that a process has at a time.

        In place, the library keeps a copy while the reduce is undecided.
        """
        return 2 + (1 if self.against else 0)


def check(plan: BenchPlan) -> None:
    """Refuse what cannot be measured.

    Raises:
        click.UsageError: it says what, and what to do.
    """
    if not 0 < len(plan.sizes) <= SWEEP_MAX:
        raise click.UsageError(
            f"--min, --max and --factor make {len(plan.sizes)} sizes; 1 to {SWEEP_MAX} can be "
            "measured in one run"
        )
    if plan.against and plan.emulate:
        raise click.UsageError("--emulate is for our links only; leave out --against")
    if plan.against and plan.dtype not in THEIR_DTYPES:
        raise click.UsageError(
            f"Gloo does not add {plan.dtype}; with --against take one of {', '.join(THEIR_DTYPES)}"
        )
    check_sizes(plan)
    for variant in plan.variants:
        check_variant(plan, variant)
    if plan.against and not any(variant.exact for variant in plan.variants):
        raise click.UsageError("--against compares exact sums; add none to --quantize")
    check_memory(plan, available_bytes())


def check_sizes(plan: BenchPlan) -> None:
    """Refuse sizes that are no whole number of elements.

    Raises:
        click.UsageError: it says which.
    """
    item_bytes = DTYPES[plan.dtype].itemsize
    for size in plan.sizes:
        if size % item_bytes:
            raise click.UsageError(
                f"{format_size(size)} is no whole number of {plan.dtype} elements; "
                f"give a multiple of {item_bytes} bytes"
            )


def check_variant(plan: BenchPlan, variant: Variant) -> None:
    """Refuse a way by which some of the sizes cannot be reduced.

    Raises:
        click.UsageError: it says why.
    """
    data_type = DTYPES[plan.dtype]
    smallest, largest = min(plan.sizes), max(plan.sizes)
    if smallest // data_type.itemsize < variant.tensors:
        raise click.UsageError(
            f"{format_size(smallest)} are fewer elements than {variant.tensors} tensors; "
            f"take a larger size or fewer {'--many' if variant.many else '--tensors'}"
        )
    each = -(-largest // data_type.itemsize // variant.tensors) * variant.joint * data_type.itemsize
    if variant.algorithm == "star" and each > STAR_BYTES_MAX:
        raise click.UsageError(
            f"star is for tensors up to {format_size(STAR_BYTES_MAX)}, and these have "
            f"{format_size(each)}; take less (--size, --max), or another --algorithm"
        )
    if variant.exact:
        return
    if plan.dtype not in FLOATS:
        raise click.UsageError(
            f"{plan.dtype} cannot be quantized; with --quantize take one of {', '.join(FLOATS)}"
        )
    if FORMATS[variant.quantize].bits >= 8 * data_type.itemsize:
        raise click.UsageError(f"--quantize {variant.quantize} is not shorter than {plan.dtype}")


def check_memory(plan: BenchPlan, available: int | None) -> None:
    """Refuse what this machine has no memory for.

    Args:
        plan: what is to be measured.
        available: bytes; None: nobody knows.

    Raises:
        click.UsageError: it says what is needed and what there is.
    """
    size, peers = max(plan.sizes), 1 if plan.master else max(plan.peers)
    needed = size * peers * plan.buffers
    who = f"{peers} peers" if peers > 1 else "a peer"
    if available is not None and needed > available:
        raise click.UsageError(
            f"{who} with {plan.buffers} tensors of {format_size(size)} each need "
            f"{needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are available; "
            "take a smaller size or fewer peers"
        )
