"""``python -m pccl.stress recovery``: measures the time from a SIGKILL to the survivors' result.

Survivors take part in all trials. In each trial a victim joins them, and dies in the middle of an
all-reduce. The recovery time is from the victim's last report, just before the signal, until the
last survivor has the result. The same trials measure a join: from ``connect`` until the
newcomer's first reduce with all members has returned. As a program, the module is one of the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import pccl
from pccl.cli.processes.crew import Crew, ProcessDied
from pccl.cli.processes.reports import decode, say
from pccl.cli.sizes import Size, format_size
from pccl.cli.streams import writing
from pccl.stress.emulator.command_line import ending_on_sigterm

SHARE_MIN, SHARE_MAX = 0.1, 0.8
"""First and last time at which the victim may die, as a share of the duration of a reduce."""

SILENCE_S_MAX = 120.0

SMALL = 1024
"""Number of elements in a newcomer's first reduce."""

WARM_COUNT = 2
"""Number of full-size reduces before the measured one: they open the lanes and touch the memory."""

Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class Trials:
    """The measurements of one size, in seconds."""

    size_bytes: int
    recovery_s: list[float] = field(default_factory=list[float])
    join_s: list[float] = field(default_factory=list[float])
    late: int = 0
    """Number of kills after a survivor had the result; such trials do not count."""

    def to_json(self) -> dict[str, Any]:
        """Return a summary as a JSON object."""
        return {
            "bytes": self.size_bytes,
            "tries": len(self.recovery_s),
            "recovery_s": _summary(self.recovery_s),
            "join_s": _summary(self.join_s),
            "late": self.late,
        }


@dataclass(frozen=True, slots=True)
class NewcomerJoined:
    """The newcomer has completed its first reduce with all members.

    ``seconds`` is the time since the call of ``connect``.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class VictimDies:
    """The victim is about to kill itself."""

    at: float


@dataclass(frozen=True, slots=True)
class SurvivorResult:
    """A reduce in which the victim died has returned on a survivor."""

    at: float
    exact: bool


class Measurement:
    """Runs the trials of one size.

    Args:
        size_bytes: size of the float32 tensor.
        peers: number of peers that reduce, including the victim.
        tries: number of kills that count.
        seed: draws when the victims die.
    """

    def __init__(self, size_bytes: int, peers: int, tries: int, seed: int) -> None:
        self._trials = Trials(size_bytes)
        self._peers = peers
        self._tries = tries
        self._random = Random(f"recovery {seed} {size_bytes}")
        self._victim = 0

    def run(self) -> Trials:
        """Run the trials, and return their measurements.

        Raises:
            click.ClickException: a process failed, a value was wrong, or all processes were silent.
        """
        with pccl.MasterNode("127.0.0.1:0") as node, Crew() as crew:
            self._crew, self._master = crew, node.address
            for survivor in range(self._peers - 1):
                self._start(f"survivor {survivor}")
            while len(self._trials.recovery_s) < self._tries:
                self._trial()
        return self._trials

    def _start(self, name: str, *arguments: str) -> None:
        count = str(self._trials.size_bytes // 4)
        common = ["--master", self._master, "--count", count, "--peers", str(self._peers)]
        self._crew.start(name, "pccl.stress.chaos.recovery", [*common, *arguments])

    def _trial(self) -> None:
        self._victim += 1
        victim = f"victim {self._victim}"
        share = self._random.uniform(SHARE_MIN, SHARE_MAX)
        self._start(victim, "--die", f"{share:.3f}")
        died: VictimDies | None = None
        results: list[SurvivorResult] = []
        while died is None or len(results) < self._peers - 1 or self._crew.running([victim]):
            for name, text in self._hear(victim):
                match decode(text, (NewcomerJoined, VictimDies, SurvivorResult)):
                    case NewcomerJoined(seconds) if name == victim:
                        self._trials.join_s.append(seconds)
                    case VictimDies() as died:
                        pass
                    case SurvivorResult() as result:
                        results.append(result)
                    case _:
                        pass
        if not all(result.exact for result in results):
            raise click.ClickException("a survivor got a wrong value")
        if min(result.at for result in results) > died.at:
            self._trials.recovery_s.append(max(result.at for result in results) - died.at)
        else:
            self._trials.late += 1

    def _hear(self, victim: str) -> list[tuple[str, str]]:
        began_s = time.monotonic()
        try:
            heard = self._crew.hear(SILENCE_S_MAX)
        except ProcessDied as death:
            if death.name != victim or death.ended.exit_code != -signal.SIGKILL:
                raise death.to_error() from death
            return []
        if not heard and time.monotonic() - began_s >= SILENCE_S_MAX:
            raise click.ClickException(f"no process reported anything for {SILENCE_S_MAX:.0f} s")
        return heard


def _summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    if not ordered:
        return {}
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }


@click.command()
@click.option("--peers", type=click.IntRange(3, 32), default=4, show_default=True)
@click.option("--tries", type=click.IntRange(1, 1000), default=15, show_default=True)
@click.option(
    "--size", "sizes", type=Size(), multiple=True, default=("4M", "64M"), show_default=True
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def recovery(peers: int, tries: int, sizes: tuple[int, ...], seed: int, as_json: bool) -> None:
    """Measure how soon survivors of a SIGKILL have their result, and how long a join takes.

    Peers run on loopback, without the emulator. The victim dies in the middle of an all-reduce.
    """
    with ending_on_sigterm():
        found = [Measurement(size, peers, tries, seed).run().to_json() for size in sizes]
    with writing():
        if as_json:
            click.echo(json.dumps({"peers": peers, "sizes": found}))
            return
        table = Table("size", "tries", "kill to result, median", "min", "max", "join, median")
        for each in found:
            times = (f"{each['recovery_s'][name]:.3f} s" for name in ("median", "min", "max"))
            join = f"{each['join_s']['median']:.3f} s" if each["join_s"] else "-"
            table.add_row(format_size(each["bytes"]), str(each["tries"]), *times, join)
        Console().print(table)


# -- the peers ---------------------------------------------------------------------------------


class RecoveryValues:
    """Whole numbers that differ from place to place and from peer to peer; their sums are exact."""

    def __init__(self, count: int) -> None:
        self._base = np.arange(count, dtype=np.float32) % 17

    def of(self, peers: Sequence[int]) -> Array:
        """Return the sum of the values of ``peers``."""
        return self._base * np.float32(len(peers)) + np.float32(sum(p % 61 for p in peers))


class RecoveryPeer:
    """A survivor, or the victim that dies in a reduce.

    Args:
        comm: a communicator that is not connected.
        count: number of elements of the tensor.
        peers: number of peers that must be members.
    """

    def __init__(self, comm: pccl.Communicator, count: int, peers: int) -> None:
        self._comm = comm
        self._peers = peers
        self._small = RecoveryValues(SMALL)
        self._values = RecoveryValues(count)

    def join(self) -> None:
        """Connect; if all peers are members then, reduce, and report the time of both."""
        began_s = time.monotonic()
        self._comm.connect()
        if self._comm.world_size == self._peers:
            self._comm.all_reduce(self._small.of([self._comm.peer_id]))
            say(NewcomerJoined(time.monotonic() - began_s))

    def survive(self) -> None:
        """Take part in all trials, until killed."""
        while True:
            self.warm()
            x = self._values.of([self._comm.peer_id])
            info = self._comm.all_reduce(x, retry=True)
            at = time.monotonic()
            exact = bool((x == self._values.of(info.contributors)).all())
            say(SurvivorResult(at, exact))
            while self._comm.world_size == self._peers:  # the victim died after the reduce
                self._comm.update_topology()

    def warm(self) -> float:
        """Wait until all peers are members, and reduce; return the seconds of the last reduce."""
        if self._comm.world_size < self._peers:
            while self._comm.world_size < self._peers:
                self._comm.update_topology()
            self._comm.all_reduce(self._small.of([self._comm.peer_id]))
        seconds = 0.0
        for _ in range(WARM_COUNT):
            x = self._values.of([self._comm.peer_id])
            began_s = time.monotonic()
            self._comm.all_reduce(x)
            seconds = time.monotonic() - began_s
        return seconds

    def die(self, share: float) -> None:
        """Kill this process in a reduce, after ``share`` of the duration of a reduce."""
        wait_s = self.warm() * share
        x = self._values.of([self._comm.peer_id])
        began = threading.Event()

        def kill() -> None:
            began.wait()
            time.sleep(wait_s)
            say(VictimDies(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        began.set()
        self._comm.all_reduce(x)
        threading.Event().wait()


def main() -> None:
    """Read the command line and take part."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.chaos.recovery")
    parser.add_argument("--master", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--die", type=float, metavar="SHARE")
    given = parser.parse_args()
    comm = pccl.Communicator(given.master)
    peer = RecoveryPeer(comm, given.count, given.peers)
    peer.join()
    if given.die is None:
        peer.survive()
    else:
        peer.die(given.die)


if __name__ == "__main__":
    main()
