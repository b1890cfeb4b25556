"""The tape: what the replicas of a storm report, in both forms, as JSON lines.

Times are seconds of one clock: virtual time, or ``time.monotonic`` of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

from pccl.cli.processes.reports import decode, encode
from pccl.stress.timeline import MASTER, FaultKind, TimelineFault

AWAY = (FaultKind.FREEZE, FaultKind.CLOCK_PAUSE, FaultKind.PARTITION, FaultKind.NAP)
"""Faults during which a replica cannot take part."""
ENDING = (FaultKind.KILL, FaultKind.RESTART, FaultKind.LEAVE)
"""Faults that end the process of a replica."""
COMPUTES = (FaultKind.PARTITION,)
"""Those during which its program continues."""


@dataclass(frozen=True, slots=True)
class StormBegan:
    """All replicas train; the first fault may strike."""

    at: float


@dataclass(frozen=True, slots=True)
class ReplicaStarted:
    """A process of a replica was started."""

    at: float
    index: int


@dataclass(frozen=True, slots=True)
class ReplicaKilled:
    """The process of a replica was killed, or its program ended by itself with an error."""

    at: float
    index: int
    by_itself: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaAway:
    """A replica cannot train with the others for a while.

    Attributes:
        why: kind of the fault.
        computes: whether its program runs, as it does in a partition.
    """

    at: float
    index: int
    until: float
    why: str
    computes: bool


@dataclass(frozen=True, slots=True)
class ReplicaTrains:
    """A replica has entered the run (again), as ``peer``, and makes inner steps from now on."""

    at: float
    index: int
    peer: int


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A replica knows the average of a round.

    Attributes:
        run: names the run; a round of a run has one outcome.
        number: number of the round.
        contributors: ids of the replicas whose work is in the average.
        weight: inner steps in the average.
        own_weight: those of this replica; 0 if it came too late.
        tx_bytes: bytes that this replica sent for it.
    """

    at: float
    index: int
    run: str
    number: int
    contributors: tuple[int, ...]
    weight: float
    own_weight: float
    tx_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaSynced:
    """A replica has synchronized its outer parameters, as after each round.

    Attributes:
        run: names the run.
        revision: revision of the shared state; each one of a run has one content.
        digest: digest of the outer parameters, and of all else that the members share.
    """

    at: float
    index: int
    run: str
    revision: int
    digest: str


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The outer parameters after a round have this loss on held-out text, in nats per byte.

    A real replica measures its own model when it has merged the round. That equals the outer
    parameters, unless merges keep local work or preview the next outer step (``eager``).
    """

    at: float
    number: int
    loss: float


@dataclass(frozen=True, slots=True)
class ReplicaDone:
    """A replica has finished.

    Attributes:
        number: number of rounds that its model contains.
        digest: digest of its parameters, the same on all replicas that end after the same round.
    """

    at: float
    index: int
    number: int
    digest: str


def of_fault(
    fault: TimelineFault, peers: int, begins: float, ends: float
) -> Iterator[ReplicaKilled | ReplicaAway]:
    """Return what a fault does to the replicas.

    Args:
        fault: the fault.
        peers: number of replicas.
        begins: when it began.
        ends: when it ended.
    """
    if fault.kind in ENDING:
        yield ReplicaKilled(begins, fault.peer)
    # A replica that cannot reach one other replica may still take part.
    is_of_two = fault.other is not None and MASTER not in (fault.peer, fault.other)
    if fault.kind in AWAY and not is_of_two:
        for index in filter(fault.concerns, range(peers)):
            yield ReplicaAway(begins, index, ends, fault.kind, fault.kind in COMPUTES)


TapeEvent: TypeAlias = (
    StormBegan
    | ReplicaStarted
    | ReplicaKilled
    | ReplicaAway
    | ReplicaTrains
    | RoundDone
    | ReplicaSynced
    | HeldOutLoss
    | ReplicaDone
)

TAPE_KINDS: tuple[type[TapeEvent], ...] = get_args(TapeEvent)


def write_tape(events: list[TapeEvent], path: Path) -> None:
    """Write a tape in the order of time.

    Raises:
        OSError: the file cannot be written.
    """
    lines = (encode(event) for event in sorted(events, key=lambda event: event.at))
    path.write_text("".join(f"{line}\n" for line in lines))


def read_tape(path: Path) -> list[TapeEvent]:
    """Read a tape.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line holds no event.
    """
    events: list[TapeEvent] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        event = decode(line, TAPE_KINDS)
        if event is None:
            raise ValueError(f"{path}, line {number}: no event of a storm; write the tape again")
        events.append(event)
    return events
