"""What the processes of a run tell the harness: one JSON object a line, with the time of it.

Times are those of ``time.monotonic``, which all processes of a Linux machine share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, get_args


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """The process runs, and knows what to do when it is told to leave."""

    name: ClassVar[str] = "ready"
    at: float


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """It is a member (again), with a new id."""

    name: ClassVar[str] = "joined"
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

    name: ClassVar[str] = "reduced"
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

    name: ClassVar[str] = "failed"
    at: float
    call: str
    error: str
    text: str
    expected: bool


@dataclass(frozen=True, slots=True)
class DamageFound:
    """A buffer that must not have changed has."""

    name: ClassVar[str] = "damaged"
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What the process holds. ``ends``: it has closed everything."""

    name: ClassVar[str] = "sample"
    at: float
    descriptors: int
    threads: int
    resident_bytes: int
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Alone:
    """It waits for company, and is well."""

    name: ClassVar[str] = "alone"
    at: float


@dataclass(frozen=True, slots=True)
class Announced:
    """The master says that something happened to a peer."""

    name: ClassVar[str] = "announced"
    at: float
    peer: int
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Listens:
    """The master is there."""

    name: ClassVar[str] = "listens"
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

_KINDS: dict[str, type[Event]] = {kind.name: kind for kind in get_args(Event)}

_writing = threading.Lock()


def tell(event: Event) -> None:
    """Tell the harness. If it is gone there is nobody to work for: the process ends."""
    line = json.dumps({"event": event.name, **asdict(event)}, separators=(",", ":")) + "\n"
    try:
        with _writing:
            sys.stdout.write(line)
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


def decode(line: str) -> Event | None:
    """An event of a line that ``tell`` wrote; None: it is something else."""
    try:
        given: Any = json.loads(line)
        kind = _KINDS[given.pop("event")]
        if "contributors" in given:
            given["contributors"] = tuple(given["contributors"])
        return kind(**{each.name: given[each.name] for each in fields(kind)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


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
