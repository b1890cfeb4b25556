"""What ``pccl bench state`` tells its processes to do, and what they report."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

TIMED = ("sync", "copy", "copy_hash", "unchanged", "touched")
"""Kinds of cases whose time is measured."""

MEMORY = ("staged", "spooled", "in_place")
"""Kinds of cases whose memory is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to move a state, or not to have to.

    Attributes:
        kind: ``sync``: whoever joins has other contents, all of which are fetched; ``copy``: a
            plain program copies them from the first source; ``copy_hash``: it hashes what comes;
            ``unchanged``: nobody has other contents; ``touched``: and all know it
            (``track_touched``); ``staged``, ``spooled``, ``in_place``: as ``sync``, for memory.
        sources: how many have the contents.
        joiners: how many fetch them at once.
    """

    kind: str
    sources: int = 1
    joiners: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.sources}:{self.joiners}"


@dataclass(frozen=True, slots=True)
class Gathering:
    """A run of the library: some of the processes, and a master.

    Attributes:
        sources: the first so many of them take part.
        joiners: likewise.
        master: where it is.
        listen: where this process's own port is bound; empty: where the library chooses.
        advertise: where the others reach it; empty: likewise.
    """

    sources: int
    joiners: int
    master: str
    listen: str = ""
    advertise: str = ""


@dataclass(frozen=True, slots=True)
class _Told:
    """What any process is told.

    Attributes:
        joins: whether it is one that joins, with other contents.
        number: which one of its kind, from 0.
        sources: how many processes have the contents.
        joiners: how many join.
        control: address of a master at which all of them meet.
        bytes: of the state.
        rounds: how many are measured.
        gatherings: in which it takes part, or not.
    """

    joins: bool
    number: int
    sources: int
    joiners: int
    control: str
    bytes: int
    rounds: int
    gatherings: tuple[Gathering, ...]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back what ``to_json`` has written."""
        values: dict[str, Any] = json.loads(text)
        values["gatherings"] = tuple(Gathering(**each) for each in values["gatherings"])
        if "cases" in values:
            values["cases"] = tuple(Case(**each) for each in values["cases"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class StateTask(_Told):
    """What one process of ``pccl.cli.bench.state.peer`` does.

    Attributes:
        warmup: rounds before those that are measured.
        cases: which take turns, round by round.
        port: for the plain copy; 0: there is none.
    """

    warmup: int = 0
    cases: tuple[Case, ...] = ()
    port: int = 0


@dataclass(frozen=True, slots=True)
class JoinTask(_Told):
    """What one process of ``pccl.cli.bench.state.join`` does, in its one gathering.

    Attributes:
        compute_s: what a member does between synchronizations takes so long.
        prefetches: whether the joiner fetches in the background.
    """

    compute_s: float = 0.5
    prefetches: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """One process's part of one case. All times are of every round.

    Attributes:
        case: its number.
        seconds: from this process's call to its return.
        cpu_s: user and system time of the whole process, likewise.
        hashing_s: of ``seconds``, until the own contents were known.
        fetching_s: then, until all was there and all had it.
        placing_s: then, until it was in the tensors.
        rx_bytes: that this process fetched in the last round.
        tx_bytes: that others fetched from it.
        extra_bytes: peak of resident memory beyond what was there before, tensors included.
        anonymous_bytes: likewise, but without what lies in files; looked at now and then.
        congestion: the connections' congestion control.
        fault: the first wrong value; empty: there was none.
    """

    case: int
    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    hashing_s: tuple[float, ...]
    fetching_s: tuple[float, ...]
    placing_s: tuple[float, ...]
    rx_bytes: int
    tx_bytes: int
    extra_bytes: int
    anonymous_bytes: int
    congestion: tuple[str, ...]
    fault: str


@dataclass(frozen=True, slots=True)
class JoinMeasured:
    """One process's part of one join.

    Attributes:
        before_s: of a member: what each step kept it from computing while nobody joined.
        during_s: likewise, from when somebody began to join until it had the state.
        connect_s: of the joiner: until it was admitted.
        sync_s: of the joiner: its first synchronization.
        rx_bytes: that the joiner fetched in it.
        fault: the first wrong value; empty: there was none.
    """

    before_s: tuple[float, ...]
    during_s: tuple[float, ...]
    connect_s: float
    sync_s: float
    rx_bytes: int
    fault: str
