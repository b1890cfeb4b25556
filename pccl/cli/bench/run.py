"""Runs tasks on this machine: starts a master, workers, and proxies for emulated links."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pccl
from pccl import config
from pccl.cli.bench.namespace import held
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.statistics import CaseDone, Figures, SourcesReady
from pccl.cli.bench.view import BenchView
from pccl.cli.processes.crew import Crew
from pccl.cli.processes.proxies import HOST, free_addresses, proxied
from pccl.cli.processes.reports import Doing, WorkerReport, encode

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"  # or Gloo uses the host's name


def measure(crew: Crew, plan: BenchPlan, view: BenchView) -> list[Figures]:
    """Measure the whole plan, show the figures, and return them.

    Raises:
        click.ClickException: a process failed.
    """
    with contextlib.ExitStack() as stack:
        fault = ""
        if "gloo" in plan.against:
            holder, fault = stack.enter_context(held(crew))
            plan = replace(plan, holder=holder)
        view.begin(plan, no_namespace=fault)
        found: list[Figures] = []
        for peers, lanes in itertools.product(plan.peers, plan.lanes):
            found += play(
                crew,
                "pccl.cli.bench.peer",
                [replace(plan, peers=(peers,), lanes=(lanes,))] * peers,
                link=plan.emulate,
                per_pair=True,
                doing=view.doing,
                add=view.add,
            )
        return found


def play(
    crew: Crew,
    module: str,
    tasks: Sequence[WorkerReport],
    *,
    doing: Callable[[str], None],
    add: Callable[[Figures], None] = lambda figures: None,
    first: int | None = None,
    link: str = "",
    per_pair: bool = False,
) -> list[Figures]:
    """Run a worker for each task as a peer of a new run, and return the figures of all cases.

    Args:
        crew: starts the workers.
        module: program of the workers; its argument is a task.
        tasks: one task per worker.
        doing: called with descriptions of the progress.
        add: called with the figures of each case as soon as all workers have measured it.
        first: number of workers to start first; the rest start when these are ready. None: all.
        link: emulated link in front of each worker, as proxies parse it; empty: none.
        per_pair: whether to emulate a link per pair of workers and to the master, not per worker.

    Raises:
        click.ClickException: a process failed.
    """
    found: list[Figures] = []
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        token = secrets.token_urlsafe(32)
        master = stack.enter_context(pccl.MasterNode(f"{HOST}:0", token=token)).address
        doors: list[dict[str, str]] = [{}] * len(tasks)
        if link:
            if per_pair:
                [master] = stack.enter_context(proxied(crew, link, [master]))
            listens = free_addresses(len(tasks))
            options = ["--per-peer"] if per_pair else []
            addresses = stack.enter_context(proxied(crew, link, listens, *options))
            doors = [
                {config.LISTEN: listen, config.ADVERTISE: address}
                for listen, address in zip(listens, addresses, strict=True)
            ]
        interface = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
        common = {config.MASTER: master, config.TOKEN: token, **interface}

        def start(end: int | None) -> None:
            for number in range(len(names), len(tasks[:end])):
                names.append(f"peer {number}")
                crew.start(names[-1], module, [encode(tasks[number])], {**common, **doors[number]})

        def hear(name: str, report: Doing | SourcesReady | CaseDone) -> None:
            match report:
                case Doing(text):
                    doing(text)
                case SourcesReady():
                    start(None)
                case CaseDone(figures):
                    found.append(figures)
                    add(figures)

        start(first)
        crew.listen(names, (Doing, SourcesReady, CaseDone), hear)
    return found
