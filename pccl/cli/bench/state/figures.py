"""Computes figures from the measurements of all processes of ``pccl bench state``. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pccl.cli.bench.machine import GIB, MIB
from pccl.cli.bench.statistics import Figures

PARTS = ("sync", "join")
"""Parts of the benchmark: a synchronization in which the joiner lacks all contents, and the time
that members lose while a peer joins."""

NEWCOMER = ("connect_s", "first_sync_s", "first_sync_mib")


@dataclass(frozen=True, slots=True)
class StateTask:
    """The task of one process.

    Attributes:
        part: one of ``PARTS``.
        bytes: size of the state.
        rounds: number of measured rounds.
        warmup: number of rounds before the measured ones.
        emulate: emulated uplink of each process, as proxies parse it; empty: loopback.
        sources: number of processes that begin with the contents.
        joiners: number of processes that download the contents.
        compute_s: for a join: seconds that a member computes between synchronizations.
        prefetches: for a join: whether the joiner downloads in the background.
        number: number of this process, from 0; joiners come after the sources.
    """

    part: str
    bytes: int
    rounds: int
    warmup: int
    emulate: str = ""
    sources: int = 1
    joiners: int = 1
    compute_s: float = 0.0
    prefetches: bool = False
    number: int = 0

    @property
    def joins(self) -> bool:
        """Whether this process is a joiner, which begins with other contents."""
        return self.number >= self.sources


@dataclass(slots=True)
class Played:
    """The measurements of one process. Times are those of each measured round.

    Attributes:
        joins: whether the process is a joiner.
        seconds: time from this process's call to its return.
        cpu_s: user and system time of the whole process from call to return.
        phases: parts of ``seconds``: until the digests of its own contents were known; then until
            all members had all pieces; then until the pieces were in the tensors.
        tx_bytes: upload of the process in the last round.
        extra_bytes: largest growth of resident memory in a call, from its beginning to the peak.
        fault: description of the first wrong value; empty: none.
    """

    joins: bool
    seconds: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    phases: tuple[tuple[float, float, float], ...] = ()
    tx_bytes: int = 0
    extra_bytes: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class JoinPart:
    """The measurements of one process in one join.

    Attributes:
        steps: for a member: end of each step, on the machine's clock, and the seconds of the step
            in which the member did not compute.
        began_s: for the joiner: when it began to connect, on the same clock.
        connect_s: seconds until the joiner was admitted.
        sync_s: seconds of the joiner's first synchronization.
        rx_bytes: bytes downloaded in the first synchronization.
        fault: description of the first wrong value; empty: none.
    """

    steps: tuple[tuple[float, float], ...] = ()
    began_s: float = 0.0
    connect_s: float = 0.0
    sync_s: float = 0.0
    rx_bytes: int = 0
    fault: str = ""


def sync_figures(task: StateTask, parts: Sequence[Played]) -> Figures:
    """Return the figures of all rounds. The time of a round is that of its slowest joiner."""
    sources = [each for each in parts if not each.joins]
    joiners = [each for each in parts if each.joins]
    seconds = [max(each) for each in zip(*(one.seconds for one in joiners), strict=True)]
    delivered = task.bytes * len(joiners) / GIB
    values: Figures = {
        "gib_per_s": delivered / statistics.median(seconds),
        "source_cpu_s_per_gib": _cpu_s(sources) / delivered,
        "joiner_cpu_s_per_gib": _cpu_s(joiners) / delivered,
        "source_extra_mib": max(each.extra_bytes for each in sources) / MIB,
        "joiner_extra_mib": max(each.extra_bytes for each in joiners) / MIB,
        "tx_mib": [round(each.tx_bytes / MIB, 1) for each in (*sources, *joiners)],
    }
    for at, name in enumerate(("hashing_s", "fetching_s", "placing_s")):
        values[name] = statistics.median(each[at] for one in joiners for each in one.phases)
    case = f"{task.sources} source{'s' * (task.sources > 1)}"
    case += f", {task.joiners} joiners" * (task.joiners > 1)
    return _figures(task, case, seconds, values, [each.fault for each in parts])


def join_figures(task: StateTask, parts: Sequence[JoinPart]) -> Figures:
    """Return the figures of one join; its time is the extra time of the worst member's steps."""
    [joiner] = [each for each in parts if not each.steps]
    values: Figures = dict.fromkeys(("longest_s", "usual_s", "steps"), 0)
    lost_s = 0.0
    for steps in (each.steps for each in parts if each.steps):
        usual_s = statistics.median(step for ended, step in steps if ended <= joiner.began_s)
        during = [step for ended, step in steps if ended > joiner.began_s]
        lost_s = max(lost_s, sum(during) - usual_s * len(during))
        own = {"longest_s": max(during), "usual_s": usual_s, "steps": len(during)}
        values = {name: max(values[name], each) for name, each in own.items()}
    newcomer = joiner.connect_s, joiner.sync_s, joiner.rx_bytes / MIB
    values |= dict(zip(NEWCOMER, newcomer, strict=True))
    case = "fetched in the background" if task.prefetches else "fetched when admitted"
    return _figures(task, case, [lost_s], values, [each.fault for each in parts])


def median_of(joins: Sequence[Figures]) -> Figures:
    """Return the medians of the figures of several joins of one kind."""
    found = dict(joins[0])
    for name in ("seconds_median", "longest_s", "usual_s", "steps", *NEWCOMER):
        found[name] = statistics.median(each[name] for each in joins)
    found["seconds"] = [second for each in joins for second in each["seconds"]]
    found["faults"] = [fault for each in joins for fault in each["faults"]]
    spread = {"seconds_min": min(found["seconds"]), "seconds_max": max(found["seconds"])}
    return found | spread | {"values_ok": not found["faults"]}


def _figures(
    task: StateTask, case: str, seconds: Sequence[float], values: Figures, faults: Sequence[str]
) -> Figures:
    """Return the figures of one case as an object of ``--json``."""
    found = [fault for fault in faults if fault]
    return {
        "state": task.part,
        "case": case,
        "bytes": task.bytes,
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        **values,
        "values_ok": not found,
        "faults": found,
        "seconds": list(seconds),
    }


def to_line(found: Figures) -> str:
    """Return figures as a line for people."""
    median, low, high = (found[f"seconds_{name}"] for name in ("median", "min", "max"))
    line = f"{found['state']:<10}{found['case']:<26}{_seconds(median):>9}"
    line += f"  ({_seconds(low)} to {_seconds(high)})" if high > low else ""
    names = list(found)
    values = names[names.index("seconds_max") + 1 : names.index("values_ok")]
    return f"{line:<62} {', '.join(f'{name} {_number(found[name])}' for name in values)}".rstrip()


def _cpu_s(processes: Sequence[Played]) -> float:
    """Return the mean over the rounds of the CPU seconds of all ``processes`` together."""
    return statistics.fmean(map(sum, zip(*(each.cpu_s for each in processes), strict=True)))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
