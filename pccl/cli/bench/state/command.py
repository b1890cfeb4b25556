"""``pccl bench state`` as click knows it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import click

from pccl.cli import logs
from pccl.cli.bench.arguments import ListOf, Size
from pccl.cli.bench.conditions import StateConditions, state_conditions_of
from pccl.cli.bench.crew import Crew
from pccl.cli.bench.run import check_link
from pccl.cli.bench.signals import end_on_signals
from pccl.cli.bench.state.figures import Figure
from pccl.cli.bench.state.plan import ON_LOOPBACK, PARTS, StatePlan, check_state
from pccl.cli.bench.state.run import (
    measure_hashing,
    measure_joins,
    measure_loopback,
    measure_uplinks,
)
from pccl.cli.streams import writing

ROUNDS_MAX = 1000
SOURCES_MAX = 16

EXAMPLES = """\b
Examples:
  pccl bench state
  pccl bench state --size 1GiB --only hashing,sync,unchanged
  pccl bench state --only uplinks,join --uplink rate=200mbit,rtt=20ms
  pccl bench state --json > figures.jsonl"""

LEGEND = """\
hashing: of_all_processors: the time of BLAKE3 with threads of its own by this one. wanted: what we
demand of the number before it, here and below
sync: from the call to the return of the last joiner; all contents differ. of_copy: the time of a
plain copy by this one. tx_mib: what each source and each joiner has sent. cpu: user and system
time, by the GiB that was delivered
memory: peak of resident memory beyond the state itself; anonymous: without what lies in files
join: seconds by which all steps of a member together were longer while somebody joined; longest_s:
of one step, usual_s: of a step while nobody joins"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--size",
    envvar="PCCL_BENCH_STATE_SIZE",
    type=Size(),
    default="256MiB",
    show_default=True,
    help="Of the state, on loopback.",
)
@click.option(
    "--only",
    "parts",
    type=ListOf(click.Choice(PARTS)),
    metavar="PART,...",
    default=",".join(PARTS),
    help=f"What to measure, of {', '.join(PARTS)}.  [default: all]",
)
@click.option(
    "--sources",
    type=ListOf(click.IntRange(1, SOURCES_MAX)),
    metavar="COUNT,...",
    default="1,2,3",
    show_default=True,
    help="From how many members a state is fetched; 1 is measured in any case.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, ROUNDS_MAX),
    default=5,
    show_default=True,
    help="Rounds that are measured.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, ROUNDS_MAX),
    default=1,
    show_default=True,
    help="Rounds before that.",
)
@click.option(
    "--uplink",
    metavar="LINK",
    default="rate=200mbit",
    show_default=True,
    help="What the uplink of each process is like, for uplinks and join.",
)
@click.option(
    "--uplink-size",
    type=Size(),
    default="64MiB",
    show_default=True,
    help="Of the state, for uplinks and join.",
)
@click.option(
    "--compute",
    "compute_s",
    type=click.FloatRange(0.0, 60.0),
    metavar="SECONDS",
    default=0.5,
    show_default=True,
    help="What a member does between two synchronizations, for join.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@logs.verbose_option(logging.ERROR)
def state(
    size: int,
    parts: tuple[str, ...],
    sources: tuple[int, ...],
    rounds: int,
    warmup: int,
    uplink: str,
    uplink_size: int,
    compute_s: float,
    as_json: bool,
) -> None:
    """Measure shared state: hashing, fetching from several members, joins, memory.

    Starts masters and processes of this machine, and ends them. What takes turns is measured round
    by round in the same processes, beside a plain copy of the same bytes. Every value of every
    round is checked.

    The exit code is 1 if any value was wrong.
    """
    plan = StatePlan(
        parts, size, uplink_size, uplink, tuple(sorted({1, *sources})), rounds, warmup, compute_s
    )
    check_state(plan)
    end_on_signals()
    faults: list[str] = []
    with Crew() as crew:
        if {"uplinks", "join"} & set(parts):
            check_link(crew, uplink, "--uplink")
        conditions = state_conditions_of(plan)
        if not as_json:
            _print(*conditions.to_lines(), "")
        for figures in measure(crew, plan):
            for figure in figures:
                show(figure, conditions, as_json=as_json)
                faults += [f"{figure.part}, {figure.case}: {each}" for each in figure.faults]
    if not as_json:
        _print("", LEGEND)
    for fault in faults:
        print(f"WRONG VALUES: {fault}", file=sys.stderr)
    raise SystemExit(1 if faults else 0)


def measure(crew: Crew, plan: StatePlan) -> Iterator[list[Figure]]:
    """Measure one part after another.

    Raises:
        click.ClickException: a process failed.
    """
    if "hashing" in plan.parts:
        yield measure_hashing(crew, plan)
    if set(plan.parts) & set(ON_LOOPBACK):
        yield measure_loopback(crew, plan, tell)
    if "uplinks" in plan.parts:
        yield measure_uplinks(crew, plan, tell)
    if "join" in plan.parts:
        yield measure_joins(crew, plan, tell)


def tell(text: str) -> None:
    """Say on a terminal what is being measured; nothing is kept of it."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}\r", err=True, nl=False)


def show(figure: Figure, conditions: StateConditions, *, as_json: bool) -> None:
    """Print a figure, as a line or as an object."""
    if as_json:
        _print(json.dumps({**figure.to_dict(), "conditions": conditions.to_dict()}))
    else:
        tell("")
        _print(figure.to_line())


@writing()
def _print(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
