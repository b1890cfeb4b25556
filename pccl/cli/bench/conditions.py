"""Under which conditions a benchmark ran: machine, versions, and how it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pccl
from pccl.cli.bench.arguments import format_size
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.state.plan import StatePlan

CPU_INFO = Path("/proc/cpuinfo")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What has to be named beside every figure.

    Attributes:
        versions: name of a package -> its version.
        processor: what it calls itself.
        cores: that this process may use.
        system: name and release.
        congestion_default: the system's congestion control; what our connections had is told by
            each result.
        plan: what was measured.
        load: of the machine when it began, the mean of a minute; None: not told.
    """

    versions: dict[str, str]
    processor: str
    cores: int
    system: str
    congestion_default: str
    plan: BenchPlan
    load: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` adds to every result."""
        plan = self.plan
        found = asdict(self)
        del found["plan"]
        found |= {"rounds": plan.rounds, "warmup": plan.warmup, "emulate": plan.emulate}
        return {**found, "data": plan.data, "master": plan.master}

    def to_lines(self) -> list[str]:
        """For people."""
        plan = self.plan
        inexact = any(not variant.exact for variant in plan.variants)
        where = "in place" if plan.in_place else "into a second buffer"
        against = f" in turn with {plan.against}" if plan.against else ""
        link = f"links emulated ({plan.emulate})" if plan.emulate else "loopback"
        if plan.master:
            link = f"between hosts, master at {plan.master}"
        load = f", load {self.load:.2f}" if self.load is not None else ""
        default = f", {self.congestion_default} by default" if self.congestion_default else ""
        return [
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"{self.processor}, {self.cores} cores, {self.system}{default}{load}",
            f"sum of {plan.dtype} {where}, {link}; one process, one numeric thread per peer",
            f"{plan.rounds} rounds{against} after {plan.warmup} to warm up, every value checked",
            *([f"quantized values: {plan.data}"] if inexact else []),
        ]


@dataclass(frozen=True, slots=True)
class StateConditions:
    """As ``Conditions``, beside every figure of shared state."""

    versions: dict[str, str]
    processor: str
    cores: int
    system: str
    congestion_default: str
    plan: StatePlan
    load: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` adds to every figure."""
        return asdict(self)

    def to_lines(self) -> list[str]:
        """For people."""
        plan = self.plan
        load = f", load {self.load:.2f}" if self.load is not None else ""
        default = f", {self.congestion_default} by default" if self.congestion_default else ""
        return [
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"{self.processor}, {self.cores} cores, {self.system}{default}{load}",
            f"{format_size(plan.size)} of float32 on loopback; uplinks of {plan.uplink} with "
            f"{format_size(plan.uplink_size)}; one process per member",
            f"{plan.rounds} rounds in turn after {plan.warmup} to warm up, every value checked",
        ]


def state_conditions_of(plan: StatePlan) -> StateConditions:
    """Ask this machine."""
    return StateConditions(
        versions={**_versions(), "blake3": importlib.metadata.version("blake3")},
        processor=processor(),
        cores=cores(),
        system=f"{platform.system()} {platform.release()}",
        congestion_default=read(CONGESTION).strip(),
        plan=plan,
        load=load(),
    )


def conditions_of(plan: BenchPlan) -> Conditions:
    """Ask this machine."""
    names = ["torch"] if plan.against else []
    return Conditions(
        versions={
            **_versions(),
            **{name: importlib.metadata.version(name) for name in names},
        },
        processor=processor(),
        cores=cores(),
        system=f"{platform.system()} {platform.release()}",
        congestion_default=read(CONGESTION).strip(),
        plan=plan,
        load=load(),
    )


def _versions() -> dict[str, str]:
    return {
        "pccl": pccl.__version__,
        "Python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
    }


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """Processes that have wanted a core, the mean of a minute; None where nobody counts them."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def processor() -> str:
    """What the processor calls itself."""
    for line in read(CPU_INFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def read(path: Path) -> str:
    """A file's text; nothing where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
