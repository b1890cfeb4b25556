"""What ``pccl bench`` tells its processes to do, and what they report.

The task is one JSON object among the arguments of a process; a report is one JSON object per line
of its stdout. Nothing is said while a round is measured.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from pccl.cli.bench.state.words import JoinMeasured, Played
from pccl.cli.bench.variants import PLAIN, Variant


@dataclass(frozen=True, slots=True)
class Task:
    """What one peer process does.

    Attributes:
        peer: which one it is, from 0.
        peers: how many there are.
        master: where it finds the master.
        sizes: bytes of the tensors, one case after another.
        dtype: of the tensors.
        lanes: connections per link; 0: chosen by the library.
        in_place: reduce into the input instead of a buffer of its own.
        rounds: how many are measured.
        warmup: how many before that are not.
        barriers: how many are timed at the end.
        rendezvous: path of a file by which processes of Gloo find each other; empty: no Gloo.
        listen: where the peer's own port is bound; empty: where the library chooses.
        advertise: where the others reach it; empty: likewise.
        variants: ways to reduce, which take turns.
        data: kind of the values that are quantized.
    """

    peer: int
    peers: int
    master: str
    sizes: tuple[int, ...]
    dtype: str
    lanes: int
    in_place: bool
    rounds: int
    warmup: int
    barriers: int
    rendezvous: str = ""
    listen: str = ""
    advertise: str = ""
    variants: tuple[Variant, ...] = (PLAIN,)
    data: str = "normal"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read back what ``to_json`` has written."""
        values: dict[str, Any] = json.loads(text)
        values["sizes"] = tuple(values["sizes"])
        values["variants"] = tuple(Variant(**variant) for variant in values["variants"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Connected:
    """All peers have found each other.

    Attributes:
        connect_bytes: by how much resident memory has grown meanwhile, code included.
    """

    connect_bytes: int


@dataclass(frozen=True, slots=True)
class Doing:
    """What the peer is about; said when a part begins, and once in a while.

    Attributes:
        part: ``memory``, ``warm up``, ``rounds`` or ``barriers``.
        bytes: of the tensor.
        round: how many rounds of this part have ended.
    """

    part: str
    bytes: int
    round: int


@dataclass(frozen=True, slots=True)
class Timed:
    """The measured rounds of one side.

    Attributes:
        seconds: of every round, from this peer's call to its return.
        cpu_s: user and system time of the whole process, likewise.
        fault: the first wrong value, in words; empty: all were right, those of rounds that were
            not measured included.
    """

    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    fault: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One peer's part of one case.

    Attributes:
        bytes: of the tensor.
        extra_bytes: peak of resident memory beyond that of the connected process and the buffers.
        lanes: connections to each other peer.
        congestion: names of their congestion controls.
        ours: what the library has done.
        theirs: what the other side has done, if there is one.
        variant: which of the ways, from 0.
        algorithm: by which values have travelled; names with commas, if there were several.
        wire_bytes_per_value: what this peer has sent for each value that it sent.
        error: relative L2 error of the results; 0: they were exact.
        digest: of the bits of all results that were not.
    """

    bytes: int
    extra_bytes: int
    lanes: tuple[int, ...]
    congestion: tuple[str, ...]
    ours: Timed
    theirs: Timed | None
    variant: int = 0
    algorithm: str = "ring"
    wire_bytes_per_value: float = 0.0
    error: float = 0.0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """Seconds of every barrier: what a decision costs when there are no data."""

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer cannot do its task, for a reason that it understands."""

    reason: str


Report: TypeAlias = Connected | Doing | Measured | Committed | Failed | Played | JoinMeasured

_KINDS: dict[str, type[Report]] = {
    kind.__name__.lower(): kind
    for kind in (Connected, Doing, Measured, Committed, Failed, Played, JoinMeasured)
}


def encode(report: Report) -> str:
    """One line of JSON for a report, without the line end."""
    return json.dumps({"report": type(report).__name__.lower(), **dataclasses.asdict(report)})


def decode(line: str) -> Report | None:
    """The report that a line holds, or None for any other output."""
    try:
        values: Any = json.loads(line)
        kind = _KINDS[values.pop("report")]
        for name in values:
            values[name] = tuple(values[name]) if type(values[name]) is list else values[name]
        for side in values.keys() & {"ours", "theirs"}:
            values[side] = _timed(values[side])
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _timed(values: Any) -> Timed | None:
    """A side's times as they were before they became JSON."""
    if values is None:
        return None
    return Timed(tuple(values["seconds"]), tuple(values["cpu_s"]), values["fault"])
