"""``pccl bench`` as click knows it: reads the command line, says what was found."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pccl.checks import LANES_MAX
from pccl.cli import logs
from pccl.cli.bench.arguments import ListOf, Size, format_size, sweep
from pccl.cli.bench.conditions import conditions_of, cores
from pccl.cli.bench.crew import Crew
from pccl.cli.bench.floor import Floor, costs_of
from pccl.cli.bench.hosts import HostPlace, measure_across
from pccl.cli.bench.options import (
    Default,
    check_place,
    host_options,
    place_from,
    variant_options,
    variants_from,
)
from pccl.cli.bench.peers.words import Doing
from pccl.cli.bench.plan import DTYPES, BenchPlan, check
from pccl.cli.bench.plot import draw
from pccl.cli.bench.run import BARRIERS, Group, check_link, measure_bandwidths
from pccl.cli.bench.signals import end_on_signals
from pccl.cli.bench.state.command import state
from pccl.cli.bench.statistics import BenchResult
from pccl.cli.bench.variants import PLAIN
from pccl.cli.bench.view import BenchJsonView, BenchView, choose_view

PEERS_MAX = 64
"""Each is a process; more of them would measure the scheduler."""

ROUNDS_MAX = 1000
FACTOR_MAX = 1 << 20

EXAMPLE = "pccl bench allreduce --size 64MiB --peers 2,3,4 --against gloo"


@click.group(cls=Default, no_args_is_help=False)
def bench() -> None:
    """Measure how fast the library is here, with every value checked.

    Without a command it is allreduce.
    """


def check_plot(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a picture that could not be made, before minutes are spent on it."""
    if value is None:
        return None
    if value.suffix.lower() != ".png":
        raise click.BadParameter(f"{value} does not end in .png")
    if not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("matplotlib is not installed; pip install matplotlib")
    try:
        try_to_write(value.resolve())
    except OSError as error:
        raise click.BadParameter(f"cannot write {value}: {error.strerror or error}") from error
    return value


def try_to_write(path: Path) -> None:
    """Open a file for writing and leave all as it was.

    Raises:
        OSError: it cannot be written.
    """
    is_new = not path.exists()
    with path.open("ab"):
        pass
    if is_new:
        path.unlink()


def check_against(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """Refuse what is not installed."""
    if value is not None and importlib.util.find_spec("torch") is None:
        raise click.BadParameter(
            "Gloo comes with torch, which is not installed; pip install 'pccl[torch]'"
        )
    return value or ""


@bench.command(epilog=f"Example: {EXAMPLE}")
@click.option(
    "--size",
    "sizes",
    envvar="PCCL_BENCH_ALLREDUCE_SIZE",
    type=ListOf(Size()),
    help="Sizes of the tensor, such as 4KiB,64MiB, instead of the sweep that follows.",
)
@click.option(
    "--min",
    "smallest",
    envvar="PCCL_BENCH_ALLREDUCE_MIN",
    type=Size(),
    default="4KiB",
    show_default=True,
    help="The smallest size.",
)
@click.option(
    "--max",
    "largest",
    envvar="PCCL_BENCH_ALLREDUCE_MAX",
    type=Size(),
    default="64MiB",
    show_default=True,
    help="No size is larger.",
)
@click.option(
    "--factor",
    type=click.IntRange(2, FACTOR_MAX),
    default=4,
    show_default=True,
    help="Each size is so many times the one before.",
)
@click.option(
    "--peers",
    type=ListOf(click.IntRange(2, PEERS_MAX)),
    metavar="COUNT,...",
    default="2",
    show_default=True,
    help=f"How many processes, 2 to {PEERS_MAX}, such as 2 or 2,3,4.",
)
@click.option(
    "--lanes",
    type=ListOf(click.IntRange(0, LANES_MAX)),
    metavar="COUNT,...",
    default="0",
    show_default=True,
    help="Connections per link, such as 1 or 1,2,4; 0: left to the library.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--in-place", is_flag=True, help="Reduce into the input, not into a second buffer.")
@click.option(
    "--rounds",
    type=click.IntRange(1, ROUNDS_MAX),
    default=20,
    show_default=True,
    help="Rounds that are measured.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, ROUNDS_MAX),
    default=3,
    show_default=True,
    help="Rounds before that.",
)
@click.option(
    "--against",
    type=click.Choice(["gloo"]),
    callback=check_against,
    help="Measure this in the same processes too, round by round in turn.",
)
@click.option(
    "--emulate",
    metavar="LINK",
    default="",
    help='Put a relay with this link before every peer and the master: "rate=200mbit,rtt=80ms".',
)
@click.option(
    "--floor/--no-floor",
    default=None,
    help="Measure what plain programs get on this machine.  [default: unless --emulate]",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=check_plot,
    metavar="FILE.png",
    help="Draw bandwidth over size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@variant_options
@host_options
@logs.verbose_option(logging.ERROR)
@click.pass_context
def allreduce(
    ctx: click.Context,
    /,
    sizes: tuple[int, ...] | None,
    smallest: int,
    largest: int,
    factor: int,
    floor: bool | None,
    plot: Path | None,
    as_json: bool,
    master: str | None,
    **given: Any,
) -> None:
    """Measure all-reduce between processes of this machine, or between hosts.

    Starts a master and the peers, lets them reduce tensors whose values depend on peer, element
    and round, and checks every value of every result, outside of what is timed. What is quantized
    has random values; its error is told, must be below the format's bound, and all peers must have
    the same bits.

    With --master, each host runs this command and is one peer; what that of rank 0 was asked for
    is measured, and it shows the figures.

    The time of a round is the mean over the peers, each from its call to its return (as in
    nccl-tests), and the time of a case the median over its rounds. Sizes: 4096, 64KiB, 1MiB, 2GiB;
    KB, MB and GB are powers of 1000.

    The exit code is 1 if any value was wrong.
    """
    if sizes is not None and any(chosen(ctx, name) for name in ("smallest", "largest", "factor")):
        raise click.UsageError("give --size, or --min, --max and --factor, not both")
    variants, data = variants_from(given)
    place = place_from(given)
    plan = BenchPlan(
        sizes=sizes or sweep(smallest, largest, factor),
        variants=variants,
        data=data,
        master=master or "",
        **given,
    )
    check_place(plan, place, floor)
    check(plan)
    end_on_signals()
    view: BenchView = (
        BenchJsonView() if as_json else choose_view(plan.against, by_variant=plan.compares_variants)
    )
    if master:
        with view:
            results = measure_between(plan, place, view)
    else:
        with Crew() as crew:
            if plan.emulate:
                check_link(crew, plan.emulate)
            with view:
                results = measure(
                    crew, plan, view, floor=not plan.emulate if floor is None else floor
                )
    any_wrong = complain(results)
    if plot is not None:
        try:
            draw(results, plot)
        except OSError as error:
            raise click.ClickException(
                f"cannot draw {plot}: {error.strerror or error}; the figures above are complete"
            ) from error
    raise SystemExit(1 if any_wrong else 0)


bench.add_command(state)


def chosen(ctx: click.Context, name: str) -> bool:
    """Whether somebody chose the value of an option."""
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def measure_between(plan: BenchPlan, place: HostPlace, view: BenchView) -> list[BenchResult]:
    """Measure as one of several hosts.

    Raises:
        click.ClickException: no master, too few peers, or one was lost.
    """

    def tell(who: str, doing: Doing) -> None:
        view.doing(f"{who}: {describe(doing, plan.rounds)}")

    def say(text: str) -> None:
        click.echo(f"pccl bench: {text}", err=True)

    return measure_across(plan, place, view, tell, say)


def measure(crew: Crew, plan: BenchPlan, view: BenchView, *, floor: bool) -> list[BenchResult]:
    """Measure all that is planned, and show it.

    Args:
        crew: starts the processes.
        plan: what is to be measured.
        view: is told.
        floor: whether to measure the machine as well.

    Raises:
        click.ClickException: a process failed.
    """
    results: list[BenchResult] = []
    barriers: list[list[float]] = []

    def on_result(result: BenchResult) -> None:
        results.append(result)
        view.add(result)

    def tell(who: str, doing: Doing) -> None:
        view.doing(f"{who}: {describe(doing, plan.rounds)}")

    view.begin(conditions_of(plan))
    for peers in plan.peers:
        for lanes in plan.lanes:
            group = Group(plan, peers, lanes, tell, on_result)
            group.run(crew, barriers=BARRIERS if floor else 0)
            barriers += [group.barriers] * (len(plan.sizes) * len(plan.variants))
    found: Floor | None = None
    if floor:
        view.doing("what plain programs get on this machine")
        congestion = results[-1].congestion.partition(",")[0]
        speeds = measure_bandwidths(crew, max(plan.sizes), plan.dtype, congestion)
        costs = [
            costs_of(result, speeds, seconds, cores())
            for result, seconds in zip(results, barriers, strict=True)
            if result.variant.exact  # what a ring costs that moves plain values
        ]
        found = Floor(speeds, costs)
    view.conclude(found)
    return results


def describe(doing: Doing, rounds: int) -> str:
    """What a peer is about, in words."""
    match doing.part:
        case "memory":
            return f"memory for {format_size(doing.bytes)}"
        case "rounds":
            return f"{format_size(doing.bytes)}, round {doing.round} of {rounds}"
        case "warm up":
            return f"{format_size(doing.bytes)}, warming up"
        case _:
            return doing.part


def complain(results: list[BenchResult]) -> bool:
    """Say on stderr which values were wrong; returns whether any was."""
    faults = [fault for result in results for fault in all_faults(result)]
    for fault in faults:
        print(f"WRONG VALUES: {fault}", file=sys.stderr)
    return bool(faults)


def all_faults(result: BenchResult) -> list[str]:
    """Of both sides, with whose they are and in which case."""
    theirs = result.theirs.faults if result.theirs is not None else ()
    sides = [("pccl", result.ours.faults), (result.against, theirs)]
    way = f", {result.variant}" if result.variant != PLAIN else ""
    return [
        f"{name}, {result.peers} peers{way}, {fault}" for name, faults in sides for fault in faults
    ]
