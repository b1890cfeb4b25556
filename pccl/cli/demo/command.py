"""The command ``pccl demo``: starts the processes, kills one, and lets another one join half-way.

The demo ends all its processes, also on Ctrl-C, SIGTERM or an error.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

import pccl
from pccl.cli import logs
from pccl.cli.command_line import check_file
from pccl.cli.demo.record import DemoRecord, DemoTask, Told, Worker, judge
from pccl.cli.demo.view import board, draw, show, summary
from pccl.cli.processes.crew import Crew, end_on_signals
from pccl.cli.processes.reports import encode

EXTRAS = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
"""Packages that the demo needs beyond the library: module -> name for pip."""

PEER = "pccl.cli.demo.peer"

SILENCE_S_MAX = 90.0
"""Seconds without a report after which the demo fails. The import of torch may take long."""

JOIN_SHARE, AWAIT_SHARE = 0.55, 0.75
"""Shares of the steps. At the first share, well after the kill, the newcomer begins to join. At the
second one the other peers wait for the newcomer, which has usually joined by then."""


def direct(crew: Crew, record: DemoRecord, victim: Worker | None, *, quiet: bool) -> str:
    """Run the workers until all have ended; return why the demo failed, or an empty string."""
    names = {worker.name: worker for worker in record.workers}
    for worker in record.workers:
        if not worker.task.late:
            worker.pid = crew.start(worker.name, PEER, [encode(worker.task)])
    with board(record.workers, quiet=quiet) as rows:

        def add(name: str, told: Told) -> None:
            now_s = time.monotonic() - record.began_s
            news = [*record.add(now_s, names[name], told), *carry_out(crew, record, victim, now_s)]
            for words in news if not quiet else []:
                print(f"{now_s:6.1f} s  {words}", flush=True)
            show(rows, record.workers)

        try:
            crew.listen(names, (Told,), add, SILENCE_S_MAX)
        except click.ClickException as error:
            return error.message
    return ""


def carry_out(crew: Crew, record: DemoRecord, victim: Worker | None, now: float) -> Iterator[str]:
    """Kill and start workers as planned for the current step; yield lines for the user."""
    if victim is not None and record.killed is None and record.step >= record.step_count // 2:
        crew.kill(victim.name)  # without a goodbye, as when a machine is switched off
        yield record.add_kill(now, victim)
    for worker in record.peers:
        if worker.task.late and not worker.pid and record.points:
            worker.pid = crew.start(worker.name, PEER, [encode(worker.task)])
            yield f"one more process starts (shard {worker.task.shard}, pid {worker.pid})"
        if worker.told.status == "ready" and record.step >= JOIN_SHARE * record.step_count:
            worker.told = replace(worker.told, status="joining")
            crew.send(signal.SIGUSR1, worker.name)
            yield f"{worker.label} begins to join at step {record.step}"


@click.command(context_settings={"show_default": True})
@click.option("--peers", type=click.IntRange(2, 16), default=4, help="Peers that begin together.")
@click.option("--steps", type=click.IntRange(20, 100_000), default=300, help="Optimizer steps.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of weights, shards and kill."
)
@click.option("--kill/--no-kill", default=True, help="Kill one peer half-way, or none.")
@click.option("--join/--no-join", default=True, help="Let one more peer join half-way, or none.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("demo.png"),
    callback=check_file,
    help="File for a picture of loss and world size over time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only one JSON object.")
@logs.verbose_option(logging.ERROR)
def demo(
    peers: int, steps: int, seed: int, kill: bool, join: bool, out: Path, as_json: bool
) -> None:
    """Train one network with several processes; half-way, kill one process and add another.

    Starts a master and a few peers on this machine. The peers learn handwritten digits, each from
    its own shard of the data, and average their gradients at every step. The demo kills one peer
    with SIGKILL, and the other peers continue. Then one more peer joins, with other weights and
    without data. It downloads data, weights, momentum and step counter, and trains with them. All
    peers end with the same weights, bit for bit. For comparison, one more process trains alone.

    The exit code is 0 only if all of this happens, and the peers reach the
    required accuracy.
    """
    started_s = time.monotonic()
    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out} does not end in .png", param_hint="'--out'")
    if kill and peers < 3:
        raise click.UsageError("--peers must be 3 or more, so that two survive; or use --no-kill")
    missing = [name for module, name in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(
            f"the demo needs {', '.join(missing)}; run pip install '.[demo]' in a clone, "
            "or pip install 'pccl[demo]'"
        )
    end_on_signals()
    await_at = int(AWAIT_SHARE * steps) if join else None
    with pccl.MasterNode("127.0.0.1:0") as node, Crew() as crew:
        common = peers + join, steps, seed
        together = node.address, peers, await_at
        workers = [Worker(DemoTask(shard, *common, *together)) for shard in range(peers)]
        victim = random.Random(seed).choice(workers) if kill else None
        late = [Worker(DemoTask(peers, *common, node.address, late=True))] * join
        record = DemoRecord([*workers, *late, Worker(DemoTask(0, *common))], steps, started_s)
        problem = direct(crew, record, victim, quiet=as_json)
    if record.points:
        draw(record, out)
    seconds = time.monotonic() - started_s
    found, failures = judge(record, seconds=seconds, lost_expected=int(kill), problem=problem)
    failed = [f"FAILED: {failure}" for failure in failures]
    if as_json:
        print(*failed, sep="\n", end="\n" * bool(failed), file=sys.stderr)
        print(json.dumps(found))
    else:
        for name, value in summary(record, found, out).items():
            print(f"{name:24} {value}")
        print(*(failed or ["OK: the run survived, and all its peers have the same weights"]))
    raise SystemExit(1 if failures else 0)
