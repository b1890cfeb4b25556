"""``pccl bench --master``: this process is one peer of a benchmark across hosts.

The peers meet at a master as those of any run do. What they measure is what the peer of rank 0 was
asked for; it shows the figures, which all of them know in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click

import pccl
from pccl import config
from pccl.cli.bench.arguments import available_bytes, format_size
from pccl.cli.bench.conditions import conditions_of
from pccl.cli.bench.peers import memory
from pccl.cli.bench.peers.agreement import gather, share
from pccl.cli.bench.peers.peer import BenchPeer
from pccl.cli.bench.peers.words import Connected, Doing, Task, decode, encode
from pccl.cli.bench.plan import BenchPlan, check_memory
from pccl.cli.bench.run import Group, task_of
from pccl.cli.bench.statistics import BenchResult
from pccl.cli.bench.view import BenchView
from pccl.cli.processes.join import NoMaster, wait_for_master
from pccl.errors import DeadlineExceeded, PCCLError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HostPlace:
    """How this host takes part; None: what the environment says, as for any peer.

    Attributes:
        group: peer group.
        advertise: where the others reach this peer.
        listen: where its port is bound.
        token: file that holds the run's secret.
        timeout_s: how long a master, and then the others, are waited for; None: for ever.
    """

    group: int | None
    advertise: str | None
    listen: str | None
    token: Path | None
    timeout_s: float | None

    def connect(self, plan: BenchPlan) -> pccl.Communicator:
        """Make a communicator; it is not connected yet.

        Raises:
            click.UsageError: an argument, or a variable in its place, is not one.
        """
        try:
            return pccl.Communicator(
                plan.master,
                self.group,
                lanes=plan.lanes[0] or None,
                token=None if self.token is None else config.read_token_file(self.token),
                advertise=self.advertise,
                listen=self.listen,
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error


def measure_across(
    plan: BenchPlan, place: HostPlace, view: BenchView, tell: Callable[[str, Doing], None], say: Say
) -> list[BenchResult]:
    """Measure as one of several peers; all figures, on all of them.

    Args:
        plan: what is to be measured, if this turns out to be rank 0.
        place: how this host takes part.
        view: is told, on rank 0.
        tell: is told what rank 0 is about.
        say: is told what this peer is about, if it is another.

    Raises:
        click.ClickException: no master, too few peers, or one was lost.
        click.UsageError: not with this machine.
    """
    before_bytes = memory.resident_bytes()
    with place.connect(plan) as comm:
        try:
            asyncio.run(wait_for_master(plan.master, place.timeout_s, who="pccl bench"))
        except NoMaster as error:
            raise click.ClickException(
                f"no master answered at {plan.master} within {place.timeout_s:g} s ({error}); "
                "is `pccl master` running there, and may this machine reach that port?"
            ) from None
        _gather_peers(comm, plan, place.timeout_s, say)
        connect_bytes = memory.resident_bytes() - before_bytes
        try:
            return _measure(comm, plan, Connected(connect_bytes), view, tell, say)
        except PCCLError as error:
            raise click.ClickException(
                f"the benchmark ends here: {error}; start it again on every host"
            ) from error


def _gather_peers(
    comm: pccl.Communicator, plan: BenchPlan, timeout_s: float | None, say: Say
) -> None:
    wanted = plan.peers[0]
    say(f"waiting until {wanted} peers are there")
    try:
        comm.connect(min_peers=wanted, timeout_s=timeout_s)
    except DeadlineExceeded as error:
        raise click.ClickException(
            f"there were not {wanted} peers within {timeout_s:g} s; "
            f"`pccl status {plan.master}` shows who waits there"
        ) from error
    except PCCLError as error:
        raise click.ClickException(str(error)) from error


def _measure(
    comm: pccl.Communicator,
    plan: BenchPlan,
    connected: Connected,
    view: BenchView,
    tell: Callable[[str, Doing], None],
    say: Say,
) -> list[BenchResult]:
    rank, peers = comm.rank, comm.world_size
    task = replace(task_of(plan, peers, plan.lanes[0]), master="", peer=rank)
    task = replace(Task.from_json(share(comm, task.to_json())), peer=rank)
    plan = replace(
        plan,
        sizes=task.sizes,
        peers=(peers,),
        lanes=(task.lanes,),
        dtype=task.dtype,
        in_place=task.in_place,
        rounds=task.rounds,
        warmup=task.warmup,
        variants=task.variants,
        data=task.data,
    )
    check_memory(plan, available_bytes())
    shows = rank == 0
    if shows:
        view.begin(conditions_of(plan))
    else:
        first = comm.members()[0]
        say(
            f"rank {rank} of {peers}; measuring what rank 0 at {first.host} was asked for, "
            "which shows the figures"
        )
    results: list[BenchResult] = []

    def on_result(result: BenchResult) -> None:
        results.append(result)
        if shows:
            view.add(result)
        else:
            say(f"measured {format_size(result.bytes)}, {result.variant}")

    group = Group(plan, peers, task.lanes, tell, on_result, has_master=False)

    def on_doing(doing: Doing) -> None:
        if shows:
            group.add(group.names[0], doing)

    def exchange(text: str) -> None:
        for name, said in zip(group.names, gather(comm, text), strict=True):
            report = decode(said)
            assert report is not None
            group.add(name, report)

    exchange(encode(connected))
    peer = BenchPeer(task, comm, on_doing)
    peer.measure_memory()
    for size in task.sizes:
        for measured in peer.measure_time(size):
            exchange(encode(measured))
    if shows:
        view.conclude(None)
    return results
