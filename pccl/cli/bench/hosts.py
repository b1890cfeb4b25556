"""``pccl bench --master``: this process is one peer of a benchmark across hosts.

The peers meet at a master as those of any run do. What they measure is what the peer of rank 0 was
asked for; it shows the figures, which all of them know in the end.
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
    """Measure as one of several peers; all figures, on all of them.

    Args:
        plan: what is to be measured, if this turns out to be rank 0.
        view: shows it, then.
        master: its address.
        token: file that holds the run's secret; None: as for any peer.
        timeout_s: how long the master, and then the other peers, are waited for; None: for ever.

    Raises:
        click.ClickException: no master, too few peers, or one was lost.
        click.UsageError: not with this machine, or an argument is not one.
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
                f"the benchmark ends here: {error}; start it again on every host"
            ) from error


def _meet(comm: pccl.Communicator, peers: int, master: str, timeout_s: float | None) -> None:
    """Find the master, and wait until all peers are there."""
    try:
        asyncio.run(wait_for_master(master, timeout_s, who="pccl bench"))
        say(f"waiting until {peers} peers are there")
        comm.connect(min_peers=peers, timeout_s=timeout_s)
    except DeadlineExceeded as error:
        raise click.ClickException(
            f"there were not {peers} peers within {timeout_s:g} s; "
            f"`pccl status {master}` shows who waits there"
        ) from error
    except PCCLError as error:
        raise click.ClickException(str(error)) from error


def _measure(
    comm: pccl.Communicator, plan: BenchPlan, view: BenchView, master: str
) -> list[Figures]:
    rank, peers = comm.rank, comm.world_size
    plan = replace(gather(comm, plan)[0], peers=(peers,), rendezvous="")
    plan.check(processes=1)
    if rank == 0:
        view.begin(plan, master)
    else:
        what = f"what rank 0 at {comm.members()[0].host} was asked for, which shows the figures"
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
    """Tell whoever waits at this host."""
    click.echo(f"pccl bench: {text}", err=True)
