"""``Recorder``: what one peer did last, in bounded rings; and its form in JSON, the record.

A record has these fields. Times are in ns of the peer's clock, unless their name says otherwise.

| field | content |
| --- | --- |
| ``schema`` | major and minor version of this form |
| ``name``, ``host``, ``pid``, ``run`` | the peer, and the run as hexadecimal digits |
| ``peer_ids`` | ids of the peer, its last incarnation last |
| ``now_ns``, ``time_s`` | time of the record, also in seconds since 1970 |
| ``clock`` | exchanges with the master: time, lowest and highest difference of the clocks |
| ``events`` | events as ``events.to_json`` gives them, with ``at_ns`` |
| ``open_calls`` | calls that have not ended: begin, name, tag |
| ``operations`` | term, group, view, tag, n, and the request in words |
| ``phases`` | time, phase as ``protocol.operation`` names it, index in ``operations`` |
| ``segments`` | begin, end, other peer, lane, whether it was sent, bytes, kind of frame, index in
  ``operations``, step, offset |
| ``left_out`` | how many of the oldest entries were left out to make the record shorter |
| ``stacks``, ``why`` | stacks of all threads after SIGQUIT; why the record was written |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pccl.protocol.frame import Moved
from pccl.protocol.limits import EVIDENCE_BYTES_MAX
from pccl.protocol.operation import Phase
from pccl.protocol.types import Descriptor, OperationId, PeerId
from pccl.telemetry.clocks import ClockSample
from pccl.telemetry.events import to_json
from pccl.telemetry.evidence import pack_evidence
from pccl.telemetry.stream import Stamped

SCHEMA = (1, 0)
"""Major and minor version of the form."""

SEGMENTS_MAX = 6144
"""Segments that a recorder keeps, the last ones. Each takes about 370 bytes."""

PHASES_MAX = 4096
"""Phases that a recorder keeps, the last ones: those of about 1000 operations."""

INCARNATIONS_MAX = 16

PhaseNote: TypeAlias = tuple[int, Phase, OperationId, Descriptor | None]
"""Time, phase, operation, and with ``REQUESTED`` the request; None for shared state."""


class Recorder:
    """The rings of one peer that only the record needs. They outlive its memberships."""

    def __init__(self) -> None:
        self.segments: deque[Moved] = deque(maxlen=SEGMENTS_MAX)
        self.phases: deque[PhaseNote] = deque(maxlen=PHASES_MAX)
        self.former: deque[PeerId] = deque(maxlen=INCARNATIONS_MAX)
        """Ids that this peer had before it rejoined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a record is made of: copies, so that another thread can make it."""

    name: str
    host: str
    pid: int
    run: str
    peer_ids: tuple[PeerId, ...]
    now_ns: int
    time_s: float
    clock: Sequence[ClockSample]
    events: Sequence[Stamped]
    open_calls: Sequence[tuple[int, str, int | None]]
    phases: Sequence[PhaseNote]
    segments: Sequence[Moved]


def record_of(snapshot: Snapshot, share: float = 1.0) -> dict[str, Any]:
    """Return the record, for ``json.dumps``.

    Args:
        snapshot: what the record tells.
        share: share of events, phases and segments that it tells, the newest ones.
    """
    events = _newest(snapshot.events, share)
    phases = _newest(snapshot.phases, share)
    segments = _newest(snapshot.segments, share)
    told = len(events) + len(phases) + len(segments)
    whole = len(snapshot.events) + len(snapshot.phases) + len(snapshot.segments)
    words: dict[OperationId, str] = {}
    for _, _, operation, descriptor in phases:
        words[operation] = str(descriptor) if descriptor is not None else words.get(operation, "")
    for moved in segments:
        words.setdefault(moved[6].operation, "")
    places = {operation: place for place, operation in enumerate(words)}
    return {
        "schema": ".".join(map(str, SCHEMA)),
        "name": snapshot.name,
        "host": snapshot.host,
        "pid": snapshot.pid,
        "run": snapshot.run,
        "peer_ids": list(snapshot.peer_ids),
        "now_ns": snapshot.now_ns,
        "time_s": snapshot.time_s,
        "clock": [list(sample) for sample in snapshot.clock],
        "events": [{"at_ns": one.at_ns, **to_json(one.event)} for one in events],
        "open_calls": [list(call) for call in snapshot.open_calls],
        "operations": [
            [one.term, one.group, one.view, one.tag, one.n, text] for one, text in words.items()
        ],
        "phases": [[at_ns, phase.value, places[one]] for at_ns, phase, one, _ in phases],
        "segments": [
            [*numbers, header.kind.name, places[header.operation], header.step, header.offset]
            for *numbers, header in segments
        ],
        "left_out": whole - told,
    }


def pack_record(snapshot: Snapshot) -> bytes:
    """Return the record in the form of evidence; leave out what is oldest until it fits."""
    share = 1.0
    while True:
        data = pack_evidence(record_of(snapshot, share))
        if len(data) <= EVIDENCE_BYTES_MAX or share < 1e-6:
            return data
        share *= min(0.9, 0.9 * EVIDENCE_BYTES_MAX / len(data))


def _newest(kept: Sequence[Any], share: float) -> Sequence[Any]:
    return kept[len(kept) - int(len(kept) * share) :]
