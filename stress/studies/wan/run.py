"""Runs the network, the master and the peers, and gathers what they report."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

import pccl
from pccl import config
from pccl.cli.bench.statistics import CaseDone, Figures
from pccl.cli.processes.crew import Crew, ProcessDied
from pccl.cli.processes.reports import Doing, Failed, decode, encode
from pccl.protocol.status_report import StatusReport
from pccl.stress.emulator.sites.matrix import SiteMatrix
from pccl.stress.emulator.sites.tunnels import enter_site
from pccl.stress.emulator.verify import cpu_s_of
from pccl.stress.studies.wan.bounds import WanRates, mesh_bound
from pccl.stress.studies.wan.measures import MeasuredRatios, compare_measures
from pccl.stress.studies.wan.peer import GLOO_INTERFACE, TURN, PhaseDone, WanTask

ROUTER = "router"

TURN_CHECK_S = 0.01
"""Time between two looks at whether a peer has joined."""

SILENCE_S = 300.0
"""Time without a line after which a process counts as stuck."""

PROCESSORS = Path("/proc/stat")
_IDLE, _WAITING = 3, 4
"""Fields of the first line of ``PROCESSORS``, after its name."""


@dataclass(frozen=True, slots=True)
class WanLoad:
    """The load of this machine during a phase.

    Attributes:
        after: name of the phase.
        router: processors that the router used.
        busy: share of all processors that was busy, with whatever else runs here.
    """

    after: str
    router: float
    busy: float


@dataclass(frozen=True, slots=True)
class WanShares:
    """The shares of a mesh that ``auto`` had in a phase.

    Attributes:
        after: name of the phase.
        shares: share of each site; empty: equal ones.
        s_per_byte: what the matrix allows with these shares.
    """

    after: str
    shares: tuple[float, ...]
    s_per_byte: float


@dataclass(slots=True)
class WanResults:
    """What a run has measured.

    Attributes:
        figures: one object for each phase and variant.
        plans: shares of the mesh in each phase.
        measures: the master's knowledge of links after each phase, compared with the matrix.
        loads: load of this machine in each phase.
        router: what the router has carried and dropped, in words.
    """

    figures: list[Figures] = field(default_factory=list[Figures])
    plans: list[WanShares] = field(default_factory=list[WanShares])
    measures: list[MeasuredRatios] = field(default_factory=list[MeasuredRatios])
    loads: list[WanLoad] = field(default_factory=list[WanLoad])
    router: str = ""


class WanRun:
    """One run over an emulated network. It moves this process's main thread into a namespace.

    Args:
        crew: starts the processes.
        matrix: the sites, with the rates that they have.
        task: the task of each peer; its ``namespace``, ``master`` and ``store`` are replaced.
        doing: called with descriptions of the progress.
    """

    def __init__(
        self, crew: Crew, matrix: SiteMatrix, task: WanTask, doing: Callable[[str], None]
    ) -> None:
        self._crew = crew
        self._matrix = matrix
        self._task = task
        self._doing = doing
        self.results = WanResults()

    def play(self, router_arguments: list[str]) -> WanResults:
        """Start all processes, and return what they have measured.

        Args:
            router_arguments: arguments of the command ``sites``.

        Raises:
            click.ClickException: a process failed.
        """
        with contextlib.ExitStack() as stack:
            router = self._crew.start(ROUTER, "pccl.stress", ["sites", *router_arguments])
            hosts, namespaces = self._places()
            enter_site(namespaces[-1])
            token = secrets.token_urlsafe(32)
            node = stack.enter_context(pccl.MasterNode(f"{hosts[-1]}:0", token=token))
            common = {
                **GLOO_INTERFACE, config.TOKEN: token, config.MAP_PORT: "0", config.LOCAL: "tcp"
            }  # fmt: skip
            task = replace(self._task, master=node.address)
            if task.store:
                task = replace(task, store=hosts[0])
            names = list(self._matrix.sites)
            for name, namespace in zip(names, namespaces, strict=False):
                arguments = [encode(replace(task, namespace=namespace))]
                environment = {**common, config.NAME: name}
                self._crew.start(name, "pccl.stress.studies.wan.peer", arguments, environment)
            self._join(node, names)
            self._listen(node, names, router)
            self._crew.send(signal.SIGTERM, ROUTER)
            while self._crew.running([ROUTER]):
                for _, text in self._crew.hear():
                    self.results.router = text
        return self.results

    def _places(self) -> tuple[list[str], list[str]]:
        """Return the addresses and the namespaces of the sites and of the outside."""
        lines: list[str] = []
        try:
            while len(lines) < len(self._matrix.sites) + 1:
                lines += [text for _, text in self._crew.hear()]
        except ProcessDied as death:
            raise death.to_error() from death
        places = [line.split("\t") for line in lines]
        return [place[1] for place in places], [place[2] for place in places]

    def _join(self, node: pccl.MasterNode, names: list[str]) -> None:
        """Let the peers join in the order of their sites."""
        try:
            said = list(self._crew.first_lines(names).items())
            for number, name in enumerate(names, 1):
                self._crew.send(TURN, name)
                while (status := node.status()).member_count + status.newcomer_count < number:
                    said += self._crew.hear(TURN_CHECK_S)
        except ProcessDied as death:
            raise death.to_error() from death
        failures = [(name, decode(line, (Failed,))) for name, line in said]
        for name, failed in failures:
            if failed is not None:
                raise click.ClickException(f"{name}: {failed.reason}")

    def _listen(self, node: pccl.MasterNode, names: list[str], router: int) -> None:
        at = {name: number for number, name in enumerate(names)}
        load = _Load(router)

        def add(name: str, report: Doing | CaseDone | PhaseDone) -> None:
            match report:
                case Doing(text):
                    self._doing(text)
                case CaseDone(figures):
                    self.results.figures.append(figures)
                case PhaseDone(_, phase):
                    self.results.loads.append(load.during(phase))
                    status = node.status()
                    sites = {int(each.peer): at[each.name] for each in status.members}
                    self.results.plans.append(self._shares(phase, status))
                    if self._task.measures:
                        found = compare_measures(phase, self._matrix, sites, status.links)
                        self.results.measures += found
                    for each in names:
                        self._crew.send(TURN, each)

        self._crew.listen(names, (Doing, CaseDone, PhaseDone), add, SILENCE_S)

    def _shares(self, phase: str, status: StatusReport) -> WanShares:
        """Return the shares of the newest view, whose ring has the order of the sites."""
        plan = status.groups[0].plan
        size = len(self._matrix.sites)
        units = plan.mesh.shares if plan is not None and plan.mesh.shares else (1,) * size
        shares = [unit / sum(units) for unit in units]
        s_per_byte = mesh_bound(WanRates.of(self._matrix, max(1, self._task.lanes)), shares)
        is_equal = len(set(units)) == 1
        return WanShares(phase, () if is_equal else tuple(shares), s_per_byte)


class _Load:
    """Measures the load of this machine between two calls."""

    def __init__(self, router: int) -> None:
        self._router = router
        self._before = self._now()

    def during(self, phase: str) -> WanLoad:
        """Return the load since the last call."""
        before, self._before = self._before, self._now()
        wall_s, cpu_s, busy_s = (now - then for now, then in zip(self._before, before, strict=True))
        processors = os.cpu_count() or 1
        return WanLoad(phase, round(cpu_s / wall_s, 3), round(busy_s / wall_s / processors, 3))

    def _now(self) -> tuple[float, float, float]:
        fields = PROCESSORS.read_text("ascii").split("\n")[0].split()[1:9]
        idle_ticks = int(fields[_IDLE]) + int(fields[_WAITING])
        busy_ticks = sum(map(int, fields)) - idle_ticks
        return time.monotonic(), cpu_s_of(self._router), busy_ticks / os.sysconf("SC_CLK_TCK")
