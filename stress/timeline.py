"""A scenario file: the processes of a run, and its faults with their times.

One JSON object drives both the simulator and the harness on real processes::

    {"seed": 7, "peers": 6, "duration_s": 300.0, "lanes": 2, "groups": 1, "deadline_s": 10.0,
     "link": "rate=200mbit,rtt=20ms",
     "faults": [{"at_s": 1.5, "kind": "freeze", "peer": 2, "duration_s": 4.0}]}

Processes are numbered from 0; -1 is the master. Newcomers (``joiners``) get the next numbers, in
the order of time. A fault of a process that has ended does nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from pccl.stress.emulator.spec import LinkSpec

Parsed = TypeVar("Parsed")

MASTER = -1
"""Index of the master."""

STANDBY = -2
"""Index of the standby master, which no fault names."""

PEERS_MAX = 128
"""Largest number of processes at the start, and of newcomers in one fault: one machine runs all."""

PROCESSES_MAX = 4096
"""Largest number of processes in a whole run."""

FAULTS_MAX = 100_000
DURATION_S_MAX = 7 * 24 * 3600.0
LANES_MAX = 64
GROUPS_MAX = 16


class FaultKind(StrEnum):
    """The kind of a fault."""

    KILL = "kill"
    """SIGKILL of ``peer``, without a replacement."""
    RESTART = "restart"
    """SIGKILL of ``peer``; a new process replaces it after ``duration_s``."""
    FREEZE = "freeze"
    """SIGSTOP of ``peer`` for ``duration_s``."""
    SLOW = "slow"
    """``peer`` gets the share ``amount`` of a CPU, above 0 and below 1, for ``duration_s``."""
    NAP = "nap"
    """The program of ``peer`` makes no call for ``duration_s``; its I/O thread continues."""
    CLOCK_PAUSE = "clock_pause"
    """The machine of ``peer`` sleeps for ``duration_s``: process and network pause."""
    RESET = "reset"
    """Resets the connections between ``peer`` and ``other``; new connections work at once."""
    HALF_OPEN = "half_open"
    """Connections of ``peer`` and ``other`` end for ``other``, but ``peer`` does not notice."""
    PARTITION = "partition"
    """No data passes between ``peer`` and ``other`` for ``duration_s``, and no new connections."""
    PARTITION_ONE_WAY = "partition_one_way"
    """No data passes from ``peer`` to ``other`` for ``duration_s``; the way back works."""
    STALL = "stall"
    """Existing connections of ``peer`` and ``other`` pause for ``duration_s``; new ones work."""
    BANDWIDTH = "bandwidth"
    """``amount`` bytes per second between ``peer`` and ``other`` for ``duration_s``."""
    DELAY = "delay"
    """``amount`` seconds more delay each way between ``peer`` and ``other``, for ``duration_s``."""
    CORRUPT = "corrupt"
    """Flips a bit in a share ``amount`` of packets of ``peer`` and ``other`` for ``duration_s``."""
    MASTER_RESTART = "master_restart"
    """SIGKILL of the master; ``duration_s`` later a new master starts with its state directory."""
    MASTER_RESTART_BLANK = "master_restart_blank"
    """SIGKILL of the master; ``duration_s`` later a new master starts without the state."""
    STANDBY = "standby"
    """SIGKILL of the master; the standby takes over its run."""
    JOINERS = "joiners"
    """``amount`` newcomers join at the same time."""
    GARBAGE = "garbage"
    """Hostile bytes on the port of ``peer`` or the master, over ``amount`` connections."""
    LEAVE = "leave"
    """``close()`` of ``peer``, at any point of its work."""


OF_MASTER = frozenset({FaultKind.MASTER_RESTART, FaultKind.MASTER_RESTART_BLANK, FaultKind.STANDBY})
"""Kinds that affect a master; ``peer`` must be -1, the default."""

OF_PAIR = frozenset(
    {
        FaultKind.RESET,
        FaultKind.HALF_OPEN,
        FaultKind.PARTITION,
        FaultKind.PARTITION_ONE_WAY,
        FaultKind.STALL,
        FaultKind.BANDWIDTH,
        FaultKind.DELAY,
        FaultKind.CORRUPT,
    }
)
"""Kinds between ``peer`` and ``other``; without ``other``: between ``peer`` and all processes."""

LASTING = OF_PAIR - {FaultKind.RESET, FaultKind.HALF_OPEN} | {
    FaultKind.RESTART,
    FaultKind.FREEZE,
    FaultKind.SLOW,
    FaultKind.NAP,
    FaultKind.CLOCK_PAUSE,
    FaultKind.MASTER_RESTART,
    FaultKind.MASTER_RESTART_BLANK,
}
"""Kinds with ``duration_s``; all other kinds have no duration."""

WITH_AMOUNT: Mapping[FaultKind, tuple[float, float, str]] = {
    FaultKind.SLOW: (0.01, 0.99, "a share of a CPU"),
    FaultKind.BANDWIDTH: (1000.0, 1e11, "bytes per second"),
    FaultKind.DELAY: (0.0001, 30.0, "seconds"),
    FaultKind.CORRUPT: (1e-7, 1.0, "a share of packets"),
    FaultKind.JOINERS: (1, PEERS_MAX, "a count"),
    FaultKind.GARBAGE: (1, 1000, "a count"),
}
"""Kind -> smallest and largest ``amount``, and its unit."""


class TimelineError(ValueError):
    """The scenario is invalid; the message names the field and says what to write."""


@dataclass(frozen=True, slots=True)
class TimelineFault:
    """One fault of a timeline.

    Attributes:
        at_s: time of the fault, in seconds since all members had joined.
        kind: kind of the fault.
        peer: index of a process; -1: the master.
        other: index of the other end, -1: the master, None: all processes (see ``OF_PAIR``).
        duration_s: duration, for kinds in ``LASTING``; otherwise 0.
        amount: size of the fault, for kinds in ``WITH_AMOUNT``; otherwise 0.

    Raises:
        TimelineError: a value does not fit the kind.
    """

    at_s: float
    kind: FaultKind
    peer: int = MASTER
    other: int | None = None
    duration_s: float = 0.0
    amount: float = 0.0

    def __post_init__(self) -> None:
        _check_number("at_s", self.at_s, 0.0, DURATION_S_MAX)
        _check_count("peer", self.peer, MASTER, PROCESSES_MAX - 1)
        if self.kind in OF_MASTER | {FaultKind.JOINERS} and self.peer != MASTER:
            raise TimelineError(f"peer: {self.kind} has no peer; leave it out")
        self._check_pair()
        if self.kind in LASTING:
            _check_number("duration_s", self.duration_s, 0.001, DURATION_S_MAX)
        elif self.duration_s != 0:
            raise TimelineError(f"duration_s: {self.kind} has no duration; leave it out")
        if self.kind in WITH_AMOUNT:
            self._check_amount()
        elif self.amount != 0:
            raise TimelineError(f"amount: {self.kind} has no amount; leave it out")

    @property
    def end_s(self) -> float:
        """The end of the fault, in seconds since all members had joined."""
        return self.at_s + self.duration_s

    def concerns(self, index: int) -> bool:
        """Whether the fault names the process ``index``, or affects all links of the master."""
        if self.kind not in OF_PAIR:
            return index == self.peer
        return index in (self.peer, self.other) or (self.other is None and self.peer == MASTER)

    def _check_pair(self) -> None:
        if self.kind in OF_PAIR:
            if self.other is not None:
                _check_count("other", self.other, MASTER, PROCESSES_MAX - 1)
            if self.other == self.peer:
                raise TimelineError("other: must differ from peer; name another, or leave it out")
            return
        if self.other is not None:
            raise TimelineError(f"other: {self.kind} affects one process; leave it out")
        may_be_master = OF_MASTER | {FaultKind.JOINERS, FaultKind.GARBAGE}
        if self.peer == MASTER and self.kind not in may_be_master:
            raise TimelineError(
                f"peer: {self.kind} needs the index of a peer, from 0; for the master, use "
                f"{FaultKind.MASTER_RESTART}"
            )

    def _check_amount(self) -> None:
        least, most, what = WITH_AMOUNT[self.kind]
        if what == "a count":
            _check_count("amount", self.amount, round(least), round(most))
        else:
            _check_number(f"amount ({what})", self.amount, least, most)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run and its faults.

    Attributes:
        seed: seed of all other draws (inputs, sizes); also of a drawn timeline.
        peers: number of processes at the start.
        duration_s: duration of the run.
        faults: the faults in the order of time.
        lanes: connections of each link.
        groups: process i belongs to peer group i modulo this.
        deadline_s: silence after which the master evicts a peer that members wait for.
        link: link between any two processes, for ``LinkSpec.parse``; empty: no limits.
        local: whether peers dial each other directly, and so share the memory of the machine. Then
            ``link`` and the faults of pairs affect only the connections to the masters.

    Raises:
        TimelineError: a value is out of range, or a fault names a process that never exists.
    """

    seed: int
    peers: int
    duration_s: float
    faults: tuple[TimelineFault, ...] = ()
    lanes: int = 2
    groups: int = 1
    deadline_s: float = 10.0
    link: str = ""
    local: bool = False

    def __post_init__(self) -> None:
        _check_count("seed", self.seed, 0, 2**63 - 1)
        _check_count("peers", self.peers, 2, PEERS_MAX)
        _check_number("duration_s", self.duration_s, 0.1, DURATION_S_MAX)
        _check_count("lanes", self.lanes, 1, LANES_MAX)
        _check_count("groups", self.groups, 1, GROUPS_MAX)
        _check_number("deadline_s", self.deadline_s, 0.1, 3600.0)
        try:
            LinkSpec.parse(self.link)
        except ValueError as error:
            raise TimelineError(f"link: {error}") from error
        if len(self.faults) > FAULTS_MAX:
            raise TimelineError(f"faults: must be at most {FAULTS_MAX}, not {len(self.faults)}")
        object.__setattr__(self, "faults", tuple(sorted(self.faults, key=lambda each: each.at_s)))
        self._check_faults()

    def _check_faults(self) -> None:
        known = self.peers
        for number, fault in enumerate(self.faults):
            where = f"faults[{number}]"
            if fault.at_s > self.duration_s:
                raise TimelineError(
                    f"{where}.at_s: {fault.at_s:g} is after the end of the run, "
                    f"duration_s={self.duration_s:g}"
                )
            if fault.kind is FaultKind.JOINERS:
                known += round(fault.amount)
                if known > PROCESSES_MAX:
                    raise TimelineError(
                        f"{where}.amount: {known} processes are more than {PROCESSES_MAX}"
                    )
            if self.local and fault.kind in OF_PAIR and fault.other != MASTER:
                raise TimelineError(
                    f"{where}.other: local peers have no emulated link; write {MASTER}"
                )
            for name, index in (("peer", fault.peer), ("other", fault.other)):
                if index is not None and index >= known:
                    raise TimelineError(
                        f"{where}.{name}: no process {index} exists at {fault.at_s:g} s; "
                        f"write 0 to {known - 1}"
                    )

    @property
    def link_spec(self) -> LinkSpec:
        """The parsed link."""
        return LinkSpec.parse(self.link)

    @property
    def has_standby(self) -> bool:
        """Whether the run needs a standby master."""
        return any(fault.kind is FaultKind.STANDBY for fault in self.faults)

    @property
    def processes(self) -> int:
        """The number of peers in the whole run: at the start and as newcomers."""
        joiners = (each for each in self.faults if each.kind is FaultKind.JOINERS)
        return self.peers + sum(round(each.amount) for each in joiners)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``from_json`` accepts, without default values of faults."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["faults"] = [_fault_to_json(fault) for fault in self.faults]
        return found

    @staticmethod
    def from_json(given: object) -> Timeline:
        """Check an object strictly, and return its timeline.

        Raises:
            TimelineError: a field is missing, unknown, of the wrong type or out of range.
        """
        values = _object("scenario", given, Timeline)
        faults = values.get("faults", [])
        if not isinstance(faults, list):
            raise TimelineError("faults: must be a list of objects")
        listed = cast("list[object]", faults)
        values["faults"] = tuple(_fault_from_json(n, each) for n, each in enumerate(listed))
        return Timeline(**values)

    @staticmethod
    def load(path: Path) -> Timeline:
        """Read a scenario file.

        Raises:
            TimelineError: the file cannot be read, or is not a valid scenario.
        """
        return read_file(path, Timeline.from_json)

    def dump(self, path: Path) -> None:
        """Write a scenario file, with one fault per line.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(self.to_text())

    def to_text(self) -> str:
        """Return the text of the scenario file."""
        head = {name: value for name, value in self.to_json().items() if name != "faults"}
        lines = ",\n  ".join(json.dumps(_fault_to_json(fault)) for fault in self.faults)
        return f'{json.dumps(head)[:-1]},\n "faults": [\n  {lines}\n]}}\n'


def read_file(path: Path, parse: Callable[[object], Parsed]) -> Parsed:
    """Read a JSON file, and return what ``parse`` makes of its object.

    Raises:
        TimelineError: the file cannot be read, or ``parse`` raised a TimelineError.
    """
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise TimelineError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TimelineError(f"{path}: is not JSON: {error}") from error
    try:
        return parse(given)
    except TimelineError as error:
        raise TimelineError(f"{path}: {error}") from error


def _fault_to_json(fault: TimelineFault) -> dict[str, Any]:
    return {
        each.name: value
        for each in fields(fault)
        if (value := getattr(fault, each.name)) != each.default
    }


def _fault_from_json(number: int, given: object) -> TimelineFault:
    where = f"faults[{number}]"
    values = _object(where, given, TimelineFault)
    kinds = [kind.value for kind in FaultKind]
    if values["kind"] not in kinds:
        raise TimelineError(f"{where}.kind: {values['kind']!r} is none of {', '.join(kinds)}")
    values["kind"] = FaultKind(values["kind"])
    try:
        return TimelineFault(**values)
    except TimelineError as error:
        raise TimelineError(f"{where}.{error}") from error


def _object(where: str, given: object, kind: type[TimelineFault | Timeline]) -> dict[str, Any]:
    """Return the fields of an object; refuse unknown fields, and missing fields without default."""
    if not isinstance(given, dict):
        raise TimelineError(f"{where}: must be an object, not {type(given).__name__}")
    values = cast("dict[str, Any]", given)
    names = [each.name for each in fields(kind)]
    for name in values:
        if name not in names:
            raise TimelineError(f"{where}.{name}: no such field; known are {', '.join(names)}")
    needed = ("at_s", "kind") if kind is TimelineFault else ("seed", "peers", "duration_s")
    for name in needed:
        if name not in values:
            raise TimelineError(f"{where}.{name}: is missing")
    if not isinstance(values.get("link", ""), str):
        raise TimelineError(f"{where}.link: must be text such as 'rate=200mbit,rtt=20ms'")
    if not isinstance(values.get("local", False), bool):
        raise TimelineError(f"{where}.local: must be true or false")
    return dict(values)


def _check_number(name: str, value: object, least: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(cast("float", value)) and least <= cast("float", value) <= most:
        return
    raise TimelineError(f"{name}: must be a number from {least:g} to {most:g}, not {value!r}")


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TimelineError(f"{name}: must be a whole number from {least} to {most}, not {value!r}")
