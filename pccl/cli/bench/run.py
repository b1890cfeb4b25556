"""From tasks to figures on this machine: a master, relays if links are emulated, and workers."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pccl
from pccl import config
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.statistics import CaseDone, Figures, SourcesReady
from pccl.cli.bench.view import BenchView
from pccl.cli.processes.crew import Crew
from pccl.cli.processes.relays import HOST, free_addresses, relayed
from pccl.cli.processes.reports import Doing, WorkerReport, encode

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"  # Gloo goes by the host's name


def measure(crew: Crew, plan: BenchPlan, view: BenchView) -> list[Figures]:
    """Measure all that is planned, and show it.

    Raises:
        click.ClickException: a process failed.
    """
    view.begin(plan)
    found: list[Figures] = []
    for peers, lanes in itertools.product(plan.peers, plan.lanes):
        with contextlib.ExitStack() as stack:
            rendezvous = ""
            if plan.against:
                folder = tempfile.TemporaryDirectory("pccl-bench", ignore_cleanup_errors=True)
                rendezvous = str(Path(stack.enter_context(folder), "gloo"))
            found += play(
                crew,
                "pccl.cli.bench.peer",
                [replace(plan, peers=(peers,), lanes=(lanes,), rendezvous=rendezvous)] * peers,
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
    """Let workers do their tasks as members of a run of their own.

    Args:
        crew: starts them.
        module: their program, the argument of which is one of the tasks.
        tasks: of each worker.
        doing: is told what they are about.
        add: is given the figures of each case as soon as all have measured it.
        first: so many start at once, the others when they are ready; None: all.
        link: before the door of each, as relays know it; empty: there is none.
        per_pair: each pair has such a link, and the master one too; otherwise each door, for all.

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
                [master] = stack.enter_context(relayed(crew, link, [master]))
            listens = free_addresses(len(tasks))
            options = ["--per-peer"] if per_pair else []
            addresses = stack.enter_context(relayed(crew, link, listens, *options))
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
