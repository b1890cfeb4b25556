"""Nobody is removed for being slow: peers with default deadlines on a machine that is overloaded.

Each peer computes for seconds between its calls. Some of that time it holds the interpreter's lock
in one C call, so that its I/O thread can neither send heartbeats nor answer. Beside the peers run
processes that do nothing but keep the cores busy. Every peer is alive all the time, so every
removal is a false one, and so is every reduce that did not come about.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import click
import numpy as np
from rich.console import Console

import pccl
from pccl.cli.processes.children import STDOUT, Children, Ended, OutputLine
from pccl.cli.streams import writing
from pccl.inquiry import RemovalCause, master_status

HOLD_S = (1.0, 6.0)
"""How long the lock is held at a time: seconds, and less than the default deadline of ten."""

COMPUTE_S = (0.5, 8.0)
ELEMENT_COUNT = 200_000
LOOK_S = 1.0
ENDING_S = 120.0
"""After the last reduce was due; who has not ended by then is a hang."""

BUSY = "while True: sum(range(10000))"


@dataclass
class PatienceFindings:
    """What a run has shown."""

    minutes: float
    peers: int
    busy_processes: int
    seed: int
    removals: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    wrong_values: int = 0
    hangs: int = 0
    reduces: int = 0
    locked_s: float = 0.0
    longest_lock_s: float = 0.0
    longest_awaited_silence_s: float = 0.0
    """The closest that anybody came to being removed."""
    status_reports: int = 0

    def verdict(self) -> dict[str, Any]:
        """All of it, with whether the promise was kept."""
        broken = self.removals or self.errors or self.wrong_values or self.hangs
        done = self.reduces > 0
        return {"verdict": "ok" if done and not broken else "failed", **asdict(self)}


# -- a peer ----------------------------------------------------------------------------------------


def be_a_peer(address: str, peers: int, seed: int, duration_s: float) -> None:
    """Reduce between long pauses until the time is over; print one JSON line."""
    draw = random.Random(seed)
    end_s = time.monotonic() + duration_s
    reduces = wrong = 0
    holds_s: list[float] = []
    with pccl.Communicator(address) as comm:
        comm.connect(min_peers=peers)
        while True:
            if draw.random() < 0.5:
                holds_s.append(draw.uniform(*HOLD_S))
                _hold_the_lock(holds_s[-1])
            else:
                _compute(draw.uniform(*COMPUTE_S))
            x = np.full(ELEMENT_COUNT, float(comm.rank + 1))
            x[0] = time.monotonic() >= end_s
            comm.all_reduce(x)
            reduces += 1
            wrong += int(np.count_nonzero(x[1:] != peers * (peers + 1) / 2))
            if x[0]:  # for somebody the time is over, and all see it at the same reduce
                break
    told = {"reduces": reduces, "wrong": wrong, "locked_s": sum(holds_s)}
    print(json.dumps({**told, "longest_lock_s": max(holds_s, default=0.0)}), flush=True)


def _hold_the_lock(duration_s: float) -> None:
    ctypes.PyDLL(None).usleep(round(duration_s * 1e6))  # unlike CDLL it keeps the lock


def _compute(duration_s: float) -> None:
    end_s = time.monotonic() + duration_s
    matrix = np.ones((200, 200))
    while time.monotonic() < end_s:
        matrix = matrix @ matrix / 200.0


# -- the run ---------------------------------------------------------------------------------------


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(0.0, min_open=True), default=10.0, show_default=True
)
@click.option("--peers", type=click.IntRange(2, 64), default=4, show_default=True)
@click.option("--busy", type=click.IntRange(0, 64), default=4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def patience(minutes: float, peers: int, busy: int, seed: int, as_json: bool) -> None:
    """Run slow peers beside busy processes; exit code 1 if anybody was removed.

    The peers hold the interpreter's lock for seconds at a time. Deadlines are the defaults.
    """
    signal.signal(signal.SIGTERM, _end)
    findings = PatienceFindings(minutes, peers, busy, seed)
    with pccl.MasterNode("127.0.0.1:0") as master, Children[int]() as children:
        _run(master.address, children, findings)
    verdict = findings.verdict()
    with writing():
        if as_json:
            click.echo(json.dumps(verdict))
        else:
            console = Console()
            for name, value in verdict.items():
                console.print(f"{name}: {value}", highlight=False, soft_wrap=True, markup=False)
    sys.exit(0 if verdict["verdict"] == "ok" else 1)


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def _run(address: str, children: Children[int], findings: PatienceFindings) -> None:
    environment = _environment()
    python = [sys.executable, sys.executable]
    for number in range(findings.busy_processes):
        children.start(-1 - number, [*python, "-c", BUSY], environment)
    duration_s = findings.minutes * 60
    for peer in range(findings.peers):
        seed = str(findings.seed * 1000 + peer)
        told = [address, str(findings.peers), seed, str(duration_s)]
        children.start(peer, [*python, "-m", "pccl.stress.studies.patience", *told], environment)
    deadline_s = time.monotonic() + duration_s + ENDING_S
    running = set(range(findings.peers))
    while running and time.monotonic() < deadline_s:
        for peer, heard in children.hear(LOOK_S):
            match heard:
                case OutputLine(stream=stream, text=text) if stream == STDOUT:
                    _add(findings, json.loads(text))
                case OutputLine(text=text) if peer >= 0:
                    findings.errors.append(f"peer {peer}: {text.decode(errors='replace')}")
                case Ended() if peer >= 0:
                    running.discard(peer)
                    if heard.exit_code:
                        findings.errors.append(f"peer {peer}: {heard}")
                case _:
                    pass
        _look(address, findings)
    findings.hangs = len(running)


def _environment() -> Mapping[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads}


def _add(findings: PatienceFindings, told: dict[str, float]) -> None:
    findings.reduces = max(findings.reduces, int(told["reduces"]))
    findings.wrong_values += int(told["wrong"])
    findings.locked_s += told["locked_s"]
    findings.longest_lock_s = max(findings.longest_lock_s, told["longest_lock_s"])


def _look(address: str, findings: PatienceFindings) -> None:
    """Ask the master as anybody else would, which also shows that it answers under load."""
    seen = master_status(address, timeout_s=ENDING_S)
    findings.status_reports += 1
    for removal in seen.removals:
        what = f"peer {removal.peer}: {removal.cause.name}, {removal.reason}"
        if removal.cause is not RemovalCause.GOODBYE and what not in findings.removals:
            findings.removals.append(what)
    for member in seen.members:
        if member.awaited_ms is not None:
            silence_s = min(member.awaited_ms, member.silent_ms) / 1000
            longest_s = max(findings.longest_awaited_silence_s, silence_s)
            findings.longest_awaited_silence_s = longest_s


if __name__ == "__main__":
    be_a_peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
