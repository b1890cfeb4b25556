"""What the processes of a run tell the harness: one JSON object a line, with the time of it.

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
    """The process runs, and knows what to do when it is told to leave."""

    at: float


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """It is a member (again), with a new id."""

    at: float
    peer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduce gave a result.

    Attributes:
        lineage: names an unbroken series of iterations.
        number: of the iteration.
        tag: of the reduce.
        contributors: as the outcome names them.
        attempts: how many operations it took.
        wrong: empty, or what is wrong with the result.
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
        call: which.
        error: its type.
        text: its words.
        expected: whether faults may cause it.
    """

    at: float
    call: str
    error: str
    text: str
    expected: bool


@dataclass(frozen=True, slots=True)
class DamageFound:
    """A buffer that must not have changed has."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What the process holds. ``ends``: it has closed everything."""

    at: float
    descriptors: int
    threads: int
    resident_bytes: int
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Alone:
    """It waits for company, and is well."""

    at: float


@dataclass(frozen=True, slots=True)
class Announced:
    """The master says that something happened to a peer."""

    at: float
    peer: int
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Listens:
    """The master is there."""

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


def tell(event: Event) -> None:
    """Tell the harness. If it is gone there is nobody to work for: the process ends."""
    try:
        reports.say(event)
    except BrokenPipeError:
        os._exit(1)


def sample(*, ends: bool = False) -> MemorySample:
    """What this process holds now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return MemorySample(
        time.monotonic(),
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # one to list them
        threads=int(status["Threads"]),
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        ends=ends,
    )
