"""Events that the processes of a run report to the harness, as JSON lines.

Times are those of ``time.monotonic``, which all processes of a Linux machine share.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

from pccl.cli.processes import reports


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """The process runs, and can handle SIGTERM."""

    at: float


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """The peer is a member (again), with a new id."""

    at: float
    peer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduce gave a result.

    Attributes:
        lineage: names an unbroken series of iterations.
        number: number of the iteration.
        tag: tag of the reduce.
        contributors: contributors that the outcome names.
        attempts: number of operations until the result.
        wrong: the error in the result, in words; empty: the result is right.
    """

    at: float
    lineage: int
    number: int
    tag: int
    contributors: tuple[int, ...]
    attempts: int
    wrong: str


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call raised.

    Attributes:
        call: name of the call.
        error: type of the error.
        text: reason of the error.
        expected: whether faults may cause it.
    """

    at: float
    call: str
    error: str
    text: str
    expected: bool


@dataclass(frozen=True, slots=True)
class DamageFound:
    """A buffer that must not change has changed."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The resources that the process holds. ``ends``: whether it has closed everything."""

    at: float
    descriptors: int
    threads: int
    resident_bytes: int
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Alone:
    """The peer is alone: it waits for other members, and nothing is wrong."""

    at: float


@dataclass(frozen=True, slots=True)
class Announced:
    """The master reports that ``what`` happened to a peer."""

    at: float
    peer: int
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Listens:
    """The master has started to listen."""

    at: float
    address: str


Event: TypeAlias = (
    ProcessReady
    | PeerJoined
    | Reduced
    | CallFailed
    | DamageFound
    | MemorySample
    | Alone
    | Announced
    | Listens
)

KINDS: tuple[type[Event], ...] = get_args(Event)


def tell(event: reports.WorkerReport) -> None:
    """Report an event to the harness; if the harness is gone, end this process."""
    try:
        reports.say(event)
    except BrokenPipeError:
        os._exit(1)


def sample(*, ends: bool = False) -> MemorySample:
    """Return the resources that this process holds now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return MemorySample(
        time.monotonic(),
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # one to list them
        threads=int(status["Threads"]),
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        ends=ends,
    )
