"""``pccl bench --master``: this process is one peer of a benchmark between hosts.

The peers join a master, as in any run. All peers measure the plan of rank 0 and get the figures,
and rank 0 shows them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import click

import pccl
from pccl.cli.bench.peer import BenchPeer, gather
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.statistics import Figures, variant_of
from pccl.cli.bench.view import BenchView
from pccl.cli.command_line import read_secret
from pccl.cli.processes.join import wait_for_master
from pccl.cli.sizes import format_size
from pccl.errors import DeadlineExceeded, PCCLError


def measure_across(
    plan: BenchPlan, view: BenchView, master: str, token: str | None, timeout_s: float | None
) -> list[Figures]:
    """Measure as one of several peers. All peers return all figures.

    Args:
        plan: the plan to measure, if this peer gets rank 0.
        view: shows the figures, if this peer gets rank 0.
        master: address of the master.
        token: file that holds the run's secret; None: from the environment.
        timeout_s: longest wait for the master, and then for the other peers; None: no limit.

    Raises:
        click.ClickException: no master, too few peers, a lost peer, or different versions of pccl.
        click.UsageError: this machine cannot measure the plan, or an argument is wrong.
    """
    secret = read_secret(token)
    try:
        comm = pccl.Communicator(master, lanes=plan.lanes[0] or None, token=secret)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with comm:
        _meet(comm, plan.peers[0], master, timeout_s)
        try:
            return _measure(comm, plan, view, master)
        except (PCCLError, RuntimeError) as error:
            raise click.ClickException(
                f"the benchmark failed: {error}; start it again on every host"
            ) from error


def _meet(comm: pccl.Communicator, peers: int, master: str, timeout_s: float | None) -> None:
    """Wait for the master, and join with all peers of the benchmark."""
    try:
        asyncio.run(wait_for_master(master, timeout_s, who="pccl bench"))
        say(f"waiting until {peers} peers have joined")
        comm.connect(min_peers=peers, timeout_s=timeout_s)
    except DeadlineExceeded as error:
        raise click.ClickException(
            f"fewer than {peers} peers joined within {timeout_s:g} s; "
            f"`pccl status {master}` shows which peers wait there"
        ) from error
    except PCCLError as error:
        raise click.ClickException(str(error)) from error


def _measure(
    comm: pccl.Communicator, plan: BenchPlan, view: BenchView, master: str
) -> list[Figures]:
    rank, peers = comm.rank, comm.world_size
    plan = replace(gather(comm, plan)[0], peers=(peers,), one_clock=False)
    plan.check(processes=1)
    if rank == 0:
        view.begin(plan, master=master)
    else:
        what = f"the plan of rank 0 at {comm.members()[0].host}, which shows the figures"
        say(f"rank {rank} of {peers}; measuring {what}")
    results: list[Figures] = []
    for figures in BenchPeer(plan, comm, view.doing).measure():
        results.append(figures)
        if rank == 0:
            view.add(figures)
        else:
            say(f"measured {format_size(figures['bytes'])}, {variant_of(figures)}")
    return results


def say(text: str) -> None:
    """Print a message for the user of this host on stderr."""
    click.echo(f"pccl bench: {text}", err=True)
