"""``pccl demo``: several processes train one network; one is killed, another one joins half-way.

This module starts the processes and an embedded master, listens to what they report, kills one
half-way, lets another one in, and says how it went. It never trains and never imports torch:
learning is the business of :mod:`pccl.cli.demo.peer`, which is the part to copy.

However it ends, by itself, by Ctrl-C, SIGTERM or an error: no process of it is left.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

import pccl
from pccl.cli import logs
from pccl.cli.demo.plot import draw
from pccl.cli.demo.record import DemoRecord, Worker, decode, judge
from pccl.cli.demo.view import DemoJsonView, DemoView, choose_view
from pccl.cli.processes.children import STDOUT, Children, Ended

EXTRAS = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
"""What the demo needs beyond the library: module -> name to install it by."""

REFRESH_S = 0.1
"""How often the table is drawn anew."""

SILENCE_S_MAX = 90.0
"""The demo gives up after this long without a word from anybody; importing torch from a cold disk
is the longest silence of a healthy one."""


JOIN_SHARE = 0.55
"""The newcomer sets out after this share of the steps, when it is plain that one was killed."""

AWAIT_SHARE = 0.75
"""Here the others would wait for it: on most machines it has long come."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What happens half-way.

    Attributes:
        victim: who is killed, if anybody.
        newcomer: who joins, if anybody.
        start: starts the newcomer's process.
    """

    victim: Worker | None
    newcomer: Worker | None
    start: Callable[[Worker], None]


def start(crew: Children[Worker], worker: Worker, arguments: Sequence[str]) -> None:
    """Start a worker's process."""
    command = [sys.executable, sys.executable, "-m", "pccl.cli.demo.peer", *arguments]
    worker.pid = crew.start(worker, command, {**os.environ, "OMP_NUM_THREADS": "1"})


def direct(
    crew: Children[Worker], record: DemoRecord, view: DemoView, plan: DemoPlan, *, started_s: float
) -> str:
    """Listen until all processes have ended; carry out the plan.

    Args:
        crew: the processes, started.
        record: everything heard is added here.
        view: is told what happens.
        plan: what to do when they are half-way.
        started_s: when the demo began, as :func:`time.monotonic` counts.

    Returns:
        Why the demo cannot go on, or nothing if all processes have ended as they should.
    """
    shown_s = heard_s = time.monotonic()
    while crew:
        heard = crew.hear(REFRESH_S)
        if heard:
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s > SILENCE_S_MAX:
            return f"nothing was heard from any process for {SILENCE_S_MAX:.0f} s"
        now = heard_s - started_s
        for worker, what in heard:
            if isinstance(what, Ended):
                if not worker.killed and (what.exit_code != 0 or worker.finished is None):
                    return f"{worker.label} ended unexpectedly at step {record.step}: {what}"
                continue
            text = what.text.decode(errors="replace")
            event = decode(text) if what.stream == STDOUT else None
            if event is None:
                view.complain(f"{worker.label}: {text}")
                continue
            for news in record.add(now, worker, event):
                view.note(now, news)
            for news in carry_out(plan, crew, record, now):
                view.note(now, news)
        if time.monotonic() - shown_s >= REFRESH_S:
            shown_s = time.monotonic()
            view.update(record, shown_s - started_s)
    return ""


def carry_out(plan: DemoPlan, crew: Children[Worker], record: DemoRecord, now: float) -> list[str]:
    """Do what the plan has for the step that was reached; returns what to tell the user."""
    told: list[str] = []
    victim, newcomer = plan.victim, plan.newcomer
    if victim is not None and not victim.killed and record.step >= record.step_count // 2:
        # No goodbye, no clean-up, as when a machine is switched off.
        crew.send(signal.SIGKILL, victim.pid)
        told.append(record.add_kill(now, victim))
    if newcomer is not None and not newcomer.pid and record.points:
        plan.start(newcomer)
        told.append(f"one more process starts (shard {newcomer.shard}, pid {newcomer.pid})")
    may_join = record.step >= JOIN_SHARE * record.step_count
    if newcomer is not None and may_join and newcomer.ready and not newcomer.sent:
        newcomer.sent = True
        crew.send(signal.SIGUSR1, newcomer.pid)
        told.append(f"{newcomer.label} sets out to join at step {record.step}")
    return told


def missing_extras() -> list[str]:
    """Names of the packages that the demo needs and that are not installed."""
    return [name for module, name in EXTRAS.items() if importlib.util.find_spec(module) is None]


def check_out(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Refuse a picture that could not be written, before a minute is spent on it."""
    if value.suffix.lower() != ".png":
        raise click.BadParameter(f"{value} does not end in .png")
    if not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.absolute().parent}")
    return value


def end_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the processes are ended."""
    raise SystemExit(128 + signum)


@click.command()
@click.option(
    "--peers",
    type=click.IntRange(2, 16),
    default=4,
    show_default=True,
    help="Processes that train together, each on its own shard.",
)
@click.option(
    "--steps",
    type=click.IntRange(20, 100_000),
    default=300,
    show_default=True,
    help="Optimizer steps; one peer is killed after half of them.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Chooses weights, shards, batches and who is killed.",
)
@click.option(
    "--kill/--no-kill",
    default=True,
    show_default=True,
    help="Kill one peer half-way, or let all of them finish.",
)
@click.option(
    "--join/--no-join",
    default=True,
    show_default=True,
    help="Let one more peer join half-way, or nobody.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("demo.png"),
    show_default=True,
    callback=check_out,
    help="Where to draw loss and world size over time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but one JSON object.")
@logs.verbose_option(logging.ERROR)
def demo(
    peers: int, steps: int, seed: int, kill: bool, join: bool, out: Path, as_json: bool
) -> None:
    """Train one network with several processes; half-way kill one and let another one join.

    An embedded master and a few peers start as separate processes of this machine. They learn
    handwritten digits, each from its own part of the data, and average their gradients at every
    step. One is killed with SIGKILL; the others carry on. Then one more peer joins, with other
    weights and without data: it fetches data, weights, momentum and step counter from the others
    and trains along. All end with the same weights, bit for bit. For comparison one more process
    learns from one part alone.

    The exit code is 0 only if the accuracy is reached, the weights are equal, the survivors saw
    exactly the one peer leave, and the newcomer has fetched what it lacked and trained with all.
    """
    started_s = time.monotonic()
    if kill and peers < 3:
        raise click.UsageError(
            "--peers must be 3 or more, so that two are left to average when one is killed; "
            "or give --no-kill"
        )
    if missing := missing_extras():
        raise click.ClickException(
            f"the demo needs {', '.join(missing)}; install with: pip install '.[demo]' in a clone, "
            "or pip install 'pccl[demo]'"
        )
    for wanted in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, end_on_signal)

    beginners = [Worker(shard) for shard in range(peers)]
    victim = random.Random(seed).choice(beginners) if kill else None
    newcomer = Worker(peers, late=True) if join else None
    together = beginners if newcomer is None else [*beginners, newcomer]
    record = DemoRecord([*together, Worker(0, alone=True)], steps)
    view: DemoView = DemoJsonView() if as_json else choose_view()
    common = ["--shards", str(len(together)), "--steps", str(steps), "--seed", str(seed)]
    with view, pccl.MasterNode("127.0.0.1:0") as node, Children[Worker]() as crew:

        def begin(worker: Worker) -> None:
            mine = ["--shard", str(worker.shard)]
            if not worker.alone:
                mine += ["--master", node.address, "--peers", str(peers)]
            if worker.late:
                mine += ["--late", "--on-signal"]
            elif join:
                mine += ["--await-at", str(int(AWAIT_SHARE * steps))]
            start(crew, worker, [*mine, *common])

        for worker in record.workers:
            if not worker.late:
                begin(worker)
        plan = DemoPlan(victim, newcomer, begin)
        problem = direct(crew, record, view, plan, started_s=started_s)
        view.update(record, time.monotonic() - started_s)

    if record.points:
        draw(record, out)
    seconds = time.monotonic() - started_s
    verdict = judge(record, seconds=seconds, lost_expected=int(kill), problem=problem)
    view.conclude(record, verdict, out)
    raise SystemExit(1 if verdict.failures else 0)
