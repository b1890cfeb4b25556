"""The click command ``pccl bench state``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import replace

import click

from pccl.cli import logs
from pccl.cli.bench.machine import check_memory, conditions_of, to_lines
from pccl.cli.bench.plan import ROUNDS_MAX
from pccl.cli.bench.run import play
from pccl.cli.bench.state.figures import PARTS, StateTask, median_of, to_line
from pccl.cli.bench.statistics import Figures
from pccl.cli.bench.view import Screen, end_with
from pccl.cli.processes.crew import Crew, end_on_signals
from pccl.cli.processes.proxies import check_link
from pccl.cli.sizes import ListOf, Size, format_size

SOURCES_MAX = 16
SIZE_MIN = 4 << 10

JOIN_MEMBERS = 2

LEGEND = """\
sync: from call to return of the last joiner, which lacks all contents. extra: peak memory beyond
the state itself. tx_mib: upload of each source and each joiner
join: time that a joining peer added to all steps of a member together"""


@click.command(
    epilog="Example: pccl bench state --only sync,join --size 64MiB --emulate rate=200mbit",
    context_settings={"show_default": True},
)
@click.option("--size", type=Size(), default="256MiB", help="Size of the state.")
@click.option(
    "--only",
    "parts",
    envvar="PCCL_BENCH_STATE_ONLY",
    type=ListOf(click.Choice(PARTS)),
    metavar="PART,...",
    default=",".join(PARTS),
    help="Parts to measure.",
)
@click.option(
    "--sources",
    type=ListOf(click.IntRange(1, SOURCES_MAX)),
    metavar="COUNT,...",
    default="1,2,3",
    help="Numbers of members to download from; 1 is always measured.",
)
@click.option("--rounds", type=click.IntRange(1, ROUNDS_MAX), default=5, help="Measured rounds.")
@click.option(
    "--warmup", type=click.IntRange(0, ROUNDS_MAX), default=1, help="Rounds before measuring."
)
@click.option(
    "--emulate",
    metavar="LINK",
    default="",
    show_default=False,
    callback=check_link,
    help='Put a proxy in front of every process, with this link as its uplink: "rate=200mbit".',
)
@click.option(
    "--compute",
    "compute_s",
    type=click.FloatRange(0.0, 60.0),
    metavar="SECONDS",
    default=0.5,
    help="For join: time that a member computes between two synchronizations.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@logs.verbose_option(logging.ERROR)
def state(
    size: int,
    parts: tuple[str, ...],
    sources: tuple[int, ...],
    rounds: int,
    warmup: int,
    emulate: str,
    compute_s: float,
    as_json: bool,
) -> None:
    """Measure shared state: downloads from several members, and joins.

    Starts masters and peers on this machine, and ends them. The peers check every value of every
    round. The exit code is 1 if any value was wrong.
    """
    if size % 4 or size < SIZE_MIN:
        raise click.UsageError(
            f"--size must be a multiple of 4 bytes (float32), at least {format_size(SIZE_MIN)}"
        )
    check_memory(size, max(sources) + 2)
    end_on_signals()
    screen = Screen(as_json=as_json)
    conditions = conditions_of("numpy", "blake3")
    link = f"uplinks emulated ({emulate})" if emulate else "loopback"
    how = f"{format_size(size)} of float32, {link}; {rounds} rounds after {warmup} to warm up"
    screen.lines(*to_lines(conditions), how, "")
    faults: list[str] = []
    base = StateTask("sync", size, rounds, warmup, emulate, compute_s=compute_s)
    with Crew() as crew:
        for task, found in measure(crew, screen, parts, sources, base):
            told = {**conditions, "plan": dataclasses.asdict(task)}
            screen.figure(to_line(found), {**found, "conditions": told})
            faults += [f"{found['state']}, {found['case']}: {each}" for each in found["faults"]]
    screen.lines("", LEGEND)
    end_with(faults)


def measure(
    crew: Crew, screen: Screen, parts: tuple[str, ...], sources: tuple[int, ...], base: StateTask
) -> Iterator[tuple[StateTask, Figures]]:
    """Measure the parts one after another, with new processes for each task.

    Raises:
        click.ClickException: a process failed.
    """

    def run(task: StateTask) -> list[Figures]:
        tasks = [replace(task, number=at) for at in range(task.sources + task.joiners)]
        module, link = "pccl.cli.bench.state.peer", task.emulate
        return play(crew, module, tasks, first=task.sources, link=link, doing=screen.doing)

    if "sync" in parts:
        tasks = [replace(base, sources=count) for count in sorted({1, *sources})]
        for task in (*tasks, replace(base, joiners=2)):
            yield from ((task, found) for found in run(task))
    if "join" in parts:
        base = replace(base, part="join", sources=JOIN_MEMBERS)
        joins = {replace(base, prefetches=each): list[Figures]() for each in (False, True)}
        for _ in range(base.rounds):
            for task, found in joins.items():
                found += run(task)
        yield from ((task, median_of(found)) for task, found in joins.items())
