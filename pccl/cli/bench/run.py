"""From a plan to figures: a master, relays if links are emulated, peers, and what they report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import pccl
from pccl import config
from pccl.cli.bench.crew import Crew, ProcessDied
from pccl.cli.bench.floor import Bandwidths
from pccl.cli.bench.peers.words import (
    Committed,
    Connected,
    Doing,
    Failed,
    Measured,
    Report,
    Task,
    decode,
)
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.state.words import JoinMeasured, Played
from pccl.cli.bench.statistics import BenchResult, result_of
from pccl.cli.processes.children import Ended

HOST = "127.0.0.1"

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Where Gloo's connections run too; otherwise it goes by the host's name."""

BARRIERS = 20
"""Timed at the end, for what a decision costs."""

LOOPBACK_BYTES = 64 << 20
"""What raw sockets exchange at a time."""

WHOLE_BYTES_MIN, WHOLE_BYTES_MAX = 64 << 20, 256 << 20
"""Of tensors that memory is measured with: more than caches hold, and not more than it takes."""

CAUSE_S = 0.5
"""How long the cause of a peer's failure is waited for: what it names may be another's death."""

STATUS_USAGE = 2
"""What commands exit with when they do not understand an argument."""

RELAY_SAYS = "relay listens on "


class Group:
    """The same peers for all sizes, and what they have reported so far.

    Args:
        plan: what is to be measured.
        peers: how many they are.
        lanes: connections per link.
        tell: is told what is being done.
        on_result: is given the figures of each case as soon as all peers have measured it.
        has_master: whether the master runs in this process.
    """

    def __init__(
        self,
        plan: BenchPlan,
        peers: int,
        lanes: int,
        tell: Callable[[str, Doing], None],
        on_result: Callable[[BenchResult], None],
        *,
        has_master: bool = True,
    ) -> None:
        self._has_master = has_master
        self._plan = plan
        self._peers = peers
        self._lanes = lanes
        self._tell = tell
        self._on_result = on_result
        self._connect_bytes = 0
        self._began_cpu_s: dict[int, float] = {}
        self._master_cpu_s: dict[int, float] = {}
        self._measured: dict[tuple[int, int], dict[str, Measured]] = {}
        self._barriers: dict[str, Committed] = {}

    @property
    def names(self) -> list[str]:
        """Of the peers."""
        return [f"peer {peer}" for peer in range(self._peers)]

    @property
    def barriers(self) -> list[float]:
        """Seconds of every barrier, mean over the peers."""
        parts = [report.seconds for report in self._barriers.values()]
        return [statistics.fmean(seconds) for seconds in zip(*parts, strict=True)]

    def run(self, crew: Crew, *, barriers: int) -> None:
        """Measure.

        Args:
            crew: starts the processes.
            barriers: how many are timed at the end.

        Raises:
            click.ClickException: a process failed.
        """
        token = secrets.token_urlsafe(32)
        with contextlib.ExitStack() as stack:
            node = stack.enter_context(pccl.MasterNode(f"{HOST}:0", token=token))
            rendezvous = stack.enter_context(meeting_place()) if self._plan.against else ""
            master, doors = node.address, [("", "")] * self._peers
            if self._plan.emulate:
                master, doors = stack.enter_context(
                    relays(crew, self._plan.emulate, node.address, self._peers)
                )
            environment = {config.TOKEN: token, "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
            for peer, (listen, advertise) in enumerate(doors):
                task = replace(
                    task_of(self._plan, self._peers, self._lanes),
                    peer=peer,
                    master=master,
                    barriers=barriers,
                    rendezvous=rendezvous,
                    listen=listen,
                    advertise=advertise,
                )
                crew.start(
                    self.names[peer], "pccl.cli.bench.peers.peer", [task.to_json()], environment
                )
            self.listen(crew)

    def listen(self, crew: Crew) -> None:
        """Hear the peers until all have ended; ``run`` starts them.

        Raises:
            click.ClickException: a peer failed; this says which one did first, and why.
        """
        listen(crew, self.names, self.add)

    def add(self, name: str, report: Report) -> None:
        """Take in what a peer says."""
        match report:
            case Connected():
                self._connect_bytes = max(self._connect_bytes, report.connect_bytes)
            case Doing():
                if report.part == "rounds":
                    self._began_cpu_s.setdefault(report.bytes, time.process_time())
                if name == self.names[0]:
                    self._tell(f"{self._peers} peers, {self._lanes or 'automatic'} lanes", report)
            case Measured():
                parts = self._measured.setdefault((report.bytes, report.variant), {})
                parts[name] = report
                if len(parts) == self._peers:
                    self._on_result(self._result(parts))
            case Committed():
                self._barriers[name] = report
            case Failed() | Played() | JoinMeasured():
                raise AssertionError("told elsewhere")

    def _result(self, parts: dict[str, Measured]) -> BenchResult:
        """All figures of a case; this process, if the master runs in it, has waited meanwhile."""
        first = parts[self.names[0]]
        if self._has_master and first.bytes not in self._master_cpu_s:
            spent_s = time.process_time() - self._began_cpu_s[first.bytes]
            self._master_cpu_s[first.bytes] = spent_s / len(self._plan.variants)
        return result_of(
            [parts[name] for name in self.names],
            dtype=self._plan.dtype,
            lanes=self._lanes,
            in_place=self._plan.in_place,
            against=self._plan.against,
            master_cpu_s=self._master_cpu_s.get(first.bytes),
            connect_bytes=self._connect_bytes,
            variants=self._plan.variants,
        )


def listen(crew: Crew, names: Sequence[str], add: Callable[[str, Report], None]) -> None:
    """Hear processes until all have ended.

    Args:
        crew: has started them.
        names: theirs.
        add: is given the name and what it says.

    Raises:
        click.ClickException: one failed; this says which one did first, and why.
    """
    try:
        while crew.running(names):
            for name, text in crew.hear():
                report = decode(text)
                if report is None:
                    print(f"{name}: {text}", file=sys.stderr)
                elif isinstance(report, Failed):
                    raise _cause(crew, name, report)
                else:
                    add(name, report)
    except ProcessDied as death:
        raise failure_of(death) from death


def task_of(plan: BenchPlan, peers: int, lanes: int) -> Task:
    """What the first one of so many peers does, as far as the plan knows."""
    return Task(
        peer=0,
        peers=peers,
        master=plan.master,
        sizes=plan.sizes,
        dtype=plan.dtype,
        lanes=lanes,
        in_place=plan.in_place,
        rounds=plan.rounds,
        warmup=plan.warmup,
        barriers=0,
        variants=plan.variants,
        data=plan.data,
    )


@contextlib.contextmanager
def meeting_place() -> Generator[str, None, None]:
    """Path of a file in which Gloo's peers find each other; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pccl-bench-", ignore_cleanup_errors=True) as folder:
        yield str(Path(folder, "gloo"))


@contextlib.contextmanager
def relays(
    crew: Crew, spec: str, master: str, peers: int
) -> Generator[tuple[str, list[tuple[str, str]]], None, None]:
    """Put a relay before the master and before the door of every peer.

    Args:
        crew: starts them.
        spec: the link that they emulate, in their words.
        master: where the master listens.
        peers: how many doors there are.

    Yields:
        Where peers reach the master; for each peer where it listens, and where others reach it.

    Raises:
        click.ClickException: one did not start.
    """
    listens = [f"{HOST}:{port}" for port in asyncio.run(free_ports(peers))]
    gate = "relay before the master"
    doors = {f"relay before peer {peer}": listen for peer, listen in enumerate(listens)}
    start_relay(crew, gate, spec, master)
    for name, target in doors.items():
        start_relay(crew, name, spec, target, "--per-peer")  # each pair has a link of its own
    names = [gate, *doors]
    try:
        said = crew.first_lines(names)
    except ProcessDied as death:
        raise failure_of(death) from death
    addresses = [said[name].removeprefix(RELAY_SAYS) for name in names]
    yield addresses[0], list(zip(listens, addresses[1:], strict=True))
    crew.dismiss(names)


def check_link(crew: Crew, spec: str, option: str = "--emulate") -> None:
    """Ask a relay whether it understands a link.

    Args:
        crew: starts it.
        spec: the link.
        option: where it was given.

    Raises:
        click.BadParameter: it does not; this says why in its words.
        click.ClickException: it did not start.
    """
    name = "relay"
    start_relay(crew, name, spec, f"{HOST}:1")  # which nobody will ask for
    try:
        crew.first_lines([name])
    except ProcessDied as death:
        if death.ended.exit_code != STATUS_USAGE:
            raise failure_of(death) from death
        said = next((line for line in reversed(death.said) if line.strip()), str(death))
        said = said.removeprefix("Error: ").removeprefix("Invalid value for '--link': ")
        raise click.BadParameter(said, param_hint=f"'{option}'") from death
    crew.dismiss([name])


def start_relay(crew: Crew, name: str, spec: str, target: str, *options: str) -> None:
    """Start a relay; its first line tells where it listens."""
    arguments = ["relay", "--to", target, "--link", spec, "--listen", f"{HOST}:0", *options]
    crew.start(name, "pccl.stress", arguments)


async def free_ports(count: int) -> list[int]:
    """Ports that nobody uses: for processes that must be told one before they start."""
    servers = [await asyncio.start_server(_hang_up, HOST, 0) for _ in range(count)]
    try:
        return [server.sockets[0].getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()
            await server.wait_closed()


def measure_bandwidths(crew: Crew, size: int, dtype: str, congestion: str) -> Bandwidths:
    """What the machine gives to plain programs, while nothing else of ours runs.

    Args:
        crew: starts them.
        size: bytes of the largest tensor.
        dtype: of the tensors.
        congestion: the congestion control that the peers had.

    Raises:
        click.ClickException: a process failed.
    """
    try:
        arguments = ["--bytes", str(LOOPBACK_BYTES), "--congestion", congestion]
        crew.start("loopback 0", "pccl.stress.emulator.loopback", arguments)
        address = json.loads(crew.first_lines(["loopback 0"])["loopback 0"])["address"]
        crew.start("loopback 1", "pccl.stress.emulator.loopback", [*arguments, "--to", address])
        raw = last_objects(crew, ["loopback 0", "loopback 1"])
        whole = min(max(size, WHOLE_BYTES_MIN), WHOLE_BYTES_MAX)
        arguments = ["--bytes", str(whole), "--dtype", dtype]
        crew.start("bandwidth", "pccl.cli.bench.peers.bandwidth", arguments)
        [speeds] = last_objects(crew, ["bandwidth"])
    except ProcessDied as death:
        raise failure_of(death) from death
    seconds = statistics.fmean(statistics.median(side["seconds"]) for side in raw)
    return Bandwidths(loopback=LOOPBACK_BYTES / seconds, congestion=raw[0]["congestion"], **speeds)


def failure_of(death: ProcessDied) -> click.ClickException:
    """An error for people: who ended, and its own last words."""
    return click.ClickException("\n".join([str(death), *(f"  {line}" for line in death.said)]))


def _cause(crew: Crew, name: str, report: Failed) -> click.ClickException:
    """What to say of a peer that gave up: if another has just died without a word, that is why."""
    gave_up = {name}
    deadline_s = time.monotonic() + CAUSE_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            heard = crew.hear(left_s)
        except ProcessDied as death:
            if death.name not in gave_up:
                return failure_of(death)
        else:
            gave_up |= {other for other, text in heard if isinstance(decode(text), Failed)}
    return click.ClickException(f"{name}: {report.reason}")


def last_objects(crew: Crew, names: list[str]) -> list[dict[str, Any]]:
    """Wait until programs have ended; the last line of each."""
    last: dict[str, str] = {}
    while crew.running(names):
        last |= dict(crew.hear())
    for name in names:
        if name not in last:
            raise ProcessDied(name, Ended(0), ())
    return [json.loads(last[name]) for name in names]


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
