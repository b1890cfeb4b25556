"""What ``pccl bench state`` is to measure, and whether that can be."""

from __future__ import annotations

from dataclasses import dataclass

import click

from pccl.cli.bench.arguments import available_bytes, format_size
from pccl.cli.bench.plan import GIB
from pccl.cli.bench.state.words import Case

PARTS = ("hashing", "sync", "unchanged", "memory", "uplinks", "join")
"""What can be measured, in this order."""

ON_LOOPBACK = ("sync", "unchanged", "memory")
"""Parts that the same processes play."""

SIZE_MIN = 4 << 10

JOIN_MEMBERS = 2
"""How many members somebody joins."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """All that is to be measured.

    Attributes:
        parts: of ``PARTS``.
        size: bytes of the state on loopback.
        uplink_size: bytes of the state behind emulated uplinks.
        uplink: what each source's is like, as the relays know it.
        sources: how many, one after another; 1 is among them.
        rounds: how many are measured.
        warmup: how many before that are not.
        compute_s: what a member does between synchronizations while somebody joins.
    """

    parts: tuple[str, ...]
    size: int
    uplink_size: int
    uplink: str
    sources: tuple[int, ...]
    rounds: int
    warmup: int
    compute_s: float

    @property
    def loopback_cases(self) -> tuple[Case, ...]:
        """What takes turns on loopback."""
        cases: list[Case] = []
        if "sync" in self.parts:
            cases += [Case("copy"), Case("copy_hash")]
            cases += [Case("sync", count) for count in self.sources]
        if "unchanged" in self.parts:
            cases += [Case("unchanged"), Case("touched")]
        if "memory" in self.parts:
            cases += [Case("staged"), Case("spooled"), Case("in_place")]
        return tuple(cases)

    @property
    def uplink_cases(self) -> tuple[Case, ...]:
        """What takes turns behind emulated uplinks."""
        if "uplinks" not in self.parts:
            return ()
        return *(Case("sync", count) for count in self.sources), Case("sync", 1, 2)


def check_state(plan: StatePlan) -> None:
    """Refuse what cannot be measured.

    Raises:
        click.UsageError: it says what, and what to do.
    """
    for name, size in (("--size", plan.size), ("--uplink-size", plan.uplink_size)):
        if size % 4 or size < SIZE_MIN:
            raise click.UsageError(
                f"{name} must be a multiple of 4 bytes (float32), at least {format_size(SIZE_MIN)}"
            )
    states = max(plan.sources) + 2 if set(plan.parts) & set(ON_LOOPBACK) else 1
    needed, available = states * plan.size, available_bytes()
    if available is not None and needed > available:
        raise click.UsageError(
            f"{states} states of {format_size(plan.size)} need {needed / GIB:.1f} GiB of memory, "
            f"and {available / GIB:.1f} GiB are available; take a smaller --size or fewer --sources"
        )
