"""``pccl demo``: several processes train one network, one of them is killed, the others carry on.

This module starts the processes and an embedded master, listens to what they report, kills one
half-way, and says how it went. It never trains and never imports torch: learning is the business
of :mod:`pccl.cli.demo_peer`, which is the part to copy.

However it ends, by itself, by Ctrl-C, SIGTERM or an error: no process of it is left.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, TypeAlias

import click

import pccl
from pccl.cli import logs
from pccl.cli.demo_plot import draw
from pccl.cli.demo_record import Event, Record, Worker, decode, judge
from pccl.cli.demo_view import JsonView, View, choose_view

EXTRAS = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
"""What the demo needs beyond the library: module -> name to install it by."""

REFRESH_S = 0.1
"""How often the table is drawn anew."""

SILENCE_S_MAX = 90.0
"""The demo gives up after this long without a word from anybody; importing torch from a cold disk
is the longest silence of a healthy one."""

CLOSE_S_MAX = 5.0
"""What a killed process gets to be gone; only one stuck in the kernel takes longer."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """A line that a worker wrote and that is no event: what it has on stderr, mostly."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process has ended; everything it wrote has been heard before this."""

    exit_code: int

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"signal {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"signal {-self.exit_code}"


Heard: TypeAlias = tuple[Worker, Event | Complaint | Ended]


class Crew:
    """The processes of one demo, and one queue of all that is heard from them."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._listeners: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, worker: Worker, arguments: Sequence[str]) -> None:
        """Start a worker's process and listen to it."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pccl.cli.demo_peer", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C is for us; we end the workers
        )
        worker.pid = process.pid
        self._processes[process.pid] = process
        listener = threading.Thread(target=self._listen, args=(worker, process), daemon=True)
        self._listeners.append(listener)
        listener.start()

    def kill(self, worker: Worker) -> None:
        """Send SIGKILL: no goodbye, no clean-up, as when a machine is switched off."""
        self._processes[worker.pid].kill()

    def close(self) -> None:
        """End every process that is still there and wait until they are gone."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(CLOSE_S_MAX)
        for listener in self._listeners:
            listener.join(CLOSE_S_MAX)

    def _listen(self, worker: Worker, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        other = threading.Thread(target=self._relay, args=(worker, process.stderr), daemon=True)
        other.start()
        with process.stdout as lines:
            for line in lines:
                self.heard.put((worker, decode(line) or Complaint(line.rstrip())))
        other.join()
        self.heard.put((worker, Ended(process.wait())))

    def _relay(self, worker: Worker, stream: IO[str]) -> None:
        with stream as lines:
            for line in lines:
                self.heard.put((worker, Complaint(line.rstrip())))


def direct(
    crew: Crew, record: Record, view: View, *, victim: Worker | None, started_s: float
) -> str:
    """Listen until all processes have ended; kill one half-way.

    Args:
        crew: the processes, started.
        record: everything heard is added here.
        view: is told what happens.
        victim: who is killed, if anybody.
        started_s: when the demo began, as :func:`time.monotonic` counts.

    Returns:
        Why the demo cannot go on, or nothing if all processes have ended as they should.
    """
    running = len(record.workers)
    shown_s = heard_s = time.monotonic()
    while running:
        try:
            worker, what = crew.heard.get(timeout=REFRESH_S)
        except queue.Empty:
            if time.monotonic() - heard_s > SILENCE_S_MAX:
                return f"nothing was heard from any process for {SILENCE_S_MAX:.0f} s"
        else:
            heard_s = time.monotonic()
            now = heard_s - started_s
            match what:
                case Complaint(text):
                    view.complain(f"{worker.label}: {text}")
                case Ended(exit_code):
                    running -= 1
                    if not worker.killed and (exit_code != 0 or worker.finished is None):
                        return f"{worker.label} ended unexpectedly at step {record.step}: {what}"
                case event:
                    for text in record.add(now, worker, event):
                        view.note(now, text)
            half_way = record.step >= record.step_count // 2
            if victim is not None and half_way and not victim.killed:
                crew.kill(victim)
                view.note(now, record.add_kill(now, victim))
        if time.monotonic() - shown_s >= REFRESH_S:
            shown_s = time.monotonic()
            view.update(record, shown_s - started_s)
    return ""


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
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("demo.png"),
    show_default=True,
    callback=check_out,
    help="Where to draw loss and world size over time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but one JSON object.")
@logs.verbose_option(logging.ERROR)
def demo(peers: int, steps: int, seed: int, kill: bool, out: Path, as_json: bool) -> None:
    """Train one network with several processes and kill one of them half-way.

    An embedded master and a few peers start as separate processes of this machine. They learn
    handwritten digits, each from its own part of the data, and average their gradients at every
    step. One is killed with SIGKILL; the others carry on and end with the same weights, bit for
    bit. For comparison one more process learns from one part alone.

    The exit code is 0 only if the accuracy is reached, the weights are equal, and the survivors
    saw exactly the one peer leave.
    """
    started_s = time.monotonic()
    if kill and peers < 3:
        raise click.UsageError(
            "--peers must be 3 or more, so that two are left to average when one is killed; "
            "or give --no-kill"
        )
    if missing := missing_extras():
        raise click.ClickException(
            f"the demo needs {' and '.join(missing)}; install with: pip install 'pccl[demo]'"
        )
    for wanted in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, end_on_signal)

    workers = [Worker(shard) for shard in range(peers)]
    victim = random.Random(seed).choice(workers) if kill else None
    record = Record([*workers, Worker(0, alone=True)], steps)
    view: View = JsonView() if as_json else choose_view()
    common = ["--shards", str(peers), "--steps", str(steps), "--seed", str(seed)]
    with view, pccl.MasterNode("127.0.0.1:0") as node, Crew() as crew:
        for worker in record.workers:
            with_whom = [] if worker.alone else ["--master", node.address]
            crew.start(worker, [*with_whom, "--shard", str(worker.shard), *common])
        problem = direct(crew, record, view, victim=victim, started_s=started_s)
        view.update(record, time.monotonic() - started_s)

    if record.points:
        draw(record, out)
    seconds = time.monotonic() - started_s
    verdict = judge(record, seconds=seconds, lost_expected=int(kill), problem=problem)
    view.conclude(record, verdict, out)
    raise SystemExit(1 if verdict.failures else 0)
