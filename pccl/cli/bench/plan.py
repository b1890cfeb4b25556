"""What is to be measured, and whether that can be."""

from __future__ import annotations

from dataclasses import dataclass

import click

import pccl
from pccl.cli.bench.arguments import available_bytes, format_size

DTYPES = {data_type.label: data_type for data_type in pccl.DataType}
"""As the command line calls them."""

THEIR_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""What Gloo adds."""

SWEEP_MAX = 64
"""Sizes in one run."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
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

    @property
    def buffers(self) -> int:
        """Tensors of one size that a process has at a time.

        In place, the library keeps a copy while the reduce is undecided.
        """
        return 2 + (1 if self.against else 0)


def check(plan: Plan) -> None:
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
    check_memory(plan, available_bytes())


def check_sizes(plan: Plan) -> None:
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


def check_memory(plan: Plan, available: int | None) -> None:
    """Refuse what this machine has no memory for.

    Args:
        plan: what is to be measured.
        available: bytes; None: nobody knows.

    Raises:
        click.UsageError: it says what is needed and what there is.
    """
    size, peers = max(plan.sizes), max(plan.peers)
    needed = size * peers * plan.buffers
    if available is not None and needed > available:
        raise click.UsageError(
            f"{peers} peers with {plan.buffers} tensors of {format_size(size)} each need "
            f"{needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are available; "
            "take a smaller size or fewer peers"
        )
