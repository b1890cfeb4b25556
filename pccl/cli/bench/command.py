"""The click commands ``pccl bench`` and ``pccl bench allreduce``."""

from __future__ import annotations

import logging
from typing import Any

import click

from pccl.checks import LANES_MAX
from pccl.cli import logs
from pccl.cli.bench.hosts import measure_across
from pccl.cli.bench.plan import ALGORITHMS, DTYPES, FORMATS, OTHERS, ROUNDS_MAX, BenchPlan
from pccl.cli.bench.run import measure
from pccl.cli.bench.state.command import state
from pccl.cli.bench.statistics import faults_of
from pccl.cli.bench.view import BenchView, Screen, end_with
from pccl.cli.command_line import Seconds, check_address, token_option
from pccl.cli.processes.crew import Crew, end_on_signals
from pccl.cli.processes.proxies import check_link
from pccl.cli.sizes import ListOf, SizeList

PEERS_MAX = 64
"""Each peer is a process; a benchmark of more processes would measure the scheduler."""


class Default(click.Group):
    """A click group that runs its first command if the arguments name none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the first command if ``args`` is empty or begins with an option, but not help."""
        helps = self.get_help_option_names(ctx)
        if not args or (args[0].startswith("-") and args[0] not in helps):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


@click.group(cls=Default, no_args_is_help=False)
def bench() -> None:
    """Measure how fast the library is here, with every value checked.

    The default command is allreduce.
    """


@bench.command(
    epilog="Example: pccl bench allreduce --size 64MiB --peers 2,3,4 --against gloo,ring",
    context_settings={"show_default": True},
)
@click.option(
    "--size",
    "sizes",
    envvar="PCCL_BENCH_ALLREDUCE_SIZE",
    type=SizeList(),
    default="4KiB..64MiB",
    help="Sizes of the tensor, such as 1MiB,3MiB; 4KiB..256MiB: also all between, by factors of 4.",
)
@click.option(
    "-n",
    "--peers",
    type=ListOf(click.IntRange(2, PEERS_MAX)),
    metavar="COUNT,...",
    default="2",
    help=f"Number of processes, 2 to {PEERS_MAX}, such as 2 or 2,3,4.",
)
@click.option(
    "--lanes",
    type=ListOf(click.IntRange(0, LANES_MAX)),
    metavar="COUNT,...",
    default="0",
    help="Connections per link, such as 1 or 1,2,4; 0: the library chooses.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32")
@click.option("--in-place", is_flag=True, help="Reduce into the input, not into a second buffer.")
@click.option(
    "--algorithm",
    "algorithms",
    envvar="PCCL_BENCH_ALLREDUCE_ALGORITHM",
    type=ListOf(click.Choice(ALGORITHMS)),
    metavar="NAME,...",
    default="auto",
    help="Algorithms, measured in turn: auto, ring, star (up to 4 MiB), mesh.",
)
@click.option(
    "--quantize",
    "formats",
    envvar="PCCL_BENCH_ALLREDUCE_QUANTIZE",
    type=ListOf(click.Choice(list(FORMATS))),
    metavar="FORMAT,...",
    default="none",
    help=f"Wire formats, measured in turn: {', '.join(FORMATS)}.",
)
@click.option("--rounds", type=click.IntRange(1, ROUNDS_MAX), default=20, help="Measured rounds.")
@click.option(
    "--warmup", type=click.IntRange(0, ROUNDS_MAX), default=3, help="Rounds before measuring."
)
@click.option(
    "--against",
    type=ListOf(click.Choice(OTHERS)),
    metavar="NAME,...",
    help="Also measure these in the same processes, in alternate rounds: gloo (also under the "
    "congestion control of this library, where a network namespace is allowed); ring, a bare ring "
    "of blocking sockets and NumPy.",
)
@click.option(
    "--emulate",
    metavar="LINK",
    default="",
    show_default=False,
    callback=check_link,
    help='Put a proxy with this link in front of master and peers: "rate=200mbit,rtt=80ms".',
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--master",
    metavar="HOST:PORT",
    callback=check_address,
    help="Measure between hosts: run this command on each host, with the same master.",
)
@token_option("With --master: file that holds the run's secret (PCCL_TOKEN_FILE).")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=Seconds(0.0, min_open=True),
    help="With --master: longest wait for the master, and then for the other peers.",
)
@logs.verbose_option(logging.ERROR)
def allreduce(
    *,
    as_json: bool,
    master: str | None,
    token: str | None,
    timeout_s: float | None,
    **given: Any,
) -> None:
    """Measure all-reduce between processes of this machine, or between hosts.

    Starts a master and the peers, which reduce tensors. They check every value of every result, but
    do not time the checks. With quantization, values are random. Then the error must be below the
    format's bound, and all peers must have the same bits.

    With --master, each host runs this command, and each process is one peer. All peers measure what
    the command line of rank 0 asks for, and rank 0 shows the figures.

    The time of a round is the mean over the peers, from call to return (as in nccl-tests). Its span
    is the time from the first call to the last return of all peers, on one machine. The time and
    span of a case are medians over its rounds. Sizes: 4096, 64KiB, 1MiB, 2GiB; KB, MB and GB are
    powers of 1000. The exit code is 1 if any value was wrong.
    """
    given["against"] = given["against"] or ()
    plan = BenchPlan(**given)
    if master is None and (token or timeout_s):
        raise click.UsageError("--token and --timeout are for --master; add --master, or omit them")
    if master is not None and (plan.against or plan.emulate):
        raise click.UsageError("--against and --emulate are for peers of one machine, not --master")
    if master is not None and (len(plan.peers) > 1 or len(plan.lanes) > 1):
        raise click.UsageError("with --master, give one count of --peers and one of --lanes")
    plan.check(processes=max(plan.peers) if master is None else 1)
    end_on_signals()
    view = BenchView(Screen(as_json=as_json))
    if master is not None:
        results = measure_across(plan, view, master, token, timeout_s)
    else:
        with Crew() as crew:
            results = measure(crew, plan, view)
    view.conclude()
    end_with([fault for result in results for fault in faults_of(result)])


bench.add_command(state)
