"""``Record``: a record as it came from a peer or a file, checked. Pure.

Records come from other processes. So every type, length and range is checked here, and a record
that breaks a rule is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pccl.protocol.frame import SEGMENT_KINDS
from pccl.protocol.guards.texts import printable, shortened
from pccl.protocol.operation import Phase
from pccl.protocol.types import NAME_BYTES_MAX, NS_PER_S, OperationId
from pccl.telemetry.clocks import SAMPLES_MAX, ClockSample
from pccl.telemetry.recorder import INCARNATIONS_MAX, PHASES_MAX, SCHEMA, SEGMENTS_MAX
from pccl.telemetry.stream import KEPT_MAX

TIME_NS_MAX = 1 << 62
"""The largest time, and the largest difference of two clocks: 146 years."""

TEXT_BYTES_MAX = 256
"""Longer texts are cut."""

FIELDS_MAX = 16
"""Fields of one event that count."""

CALLS_MAX = 1024
"""Open calls of one record."""

_U64 = (1 << 64) - 1
_PHASES = {phase.value: phase for phase in Phase}
_KINDS = frozenset(kind.name for kind in SEGMENT_KINDS)


class RecordedCall(NamedTuple):
    """A call that had not ended."""

    began_ns: int
    name: str
    tag: int | None


class RecordedPhase(NamedTuple):
    """An operation that has reached a phase."""

    at_ns: int
    phase: Phase
    operation: OperationId


class RecordedSegment(NamedTuple):
    """A segment that one peer has sent to or received from another one, ``peer``."""

    began_ns: int
    ended_ns: int
    peer: int
    lane: int
    sent: bool
    length: int
    kind: str
    operation: OperationId
    step: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one peer has recorded; ``recorder`` has the meaning of the fields."""

    name: str
    host: str
    pid: int
    run: str
    peer_ids: tuple[int, ...]
    now_ns: int
    time_s: float
    clock: tuple[ClockSample, ...]
    events: tuple[tuple[int, str, Mapping[str, Any]], ...]
    """Time, kind and fields."""
    open_calls: tuple[RecordedCall, ...]
    requests: Mapping[OperationId, str]
    """What each operation was asked to do, in words."""
    phases: tuple[RecordedPhase, ...]
    segments: tuple[RecordedSegment, ...]
    left_out: int


def check_record(value: object) -> Record:
    """Return the record in ``value``, which :func:`json.loads` has returned.

    Raises:
        ValueError: it is no record, or one of another major version.
    """
    if not isinstance(value, dict):
        raise ValueError("a record is a JSON object")
    fields: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    major = str(fields.get("schema", "")).partition(".")[0]
    if major != str(SCHEMA[0]):
        raise ValueError(f"a record of schema {major[:8] or 'unknown'}; known is {SCHEMA[0]}")
    count = PHASES_MAX + SEGMENTS_MAX
    operations: list[tuple[OperationId, str]] = []
    for *numbers, words in _rows(fields, "operations", 6, count):
        operations.append((OperationId(*(_whole(one, 0, _U64) for one in numbers)), _text(words)))

    def operation(place: object) -> OperationId:
        return operations[_whole(place, 0, len(operations) - 1)][0]

    return Record(
        name=_text(fields.get("name"), NAME_BYTES_MAX),
        host=_text(fields.get("host")),
        pid=_whole(fields.get("pid"), 0, _U64),
        run=_text(fields.get("run"), 64),
        peer_ids=tuple(
            _whole(one, 0, _U64) for one in _list(fields, "peer_ids", INCARNATIONS_MAX + 1)
        ),
        now_ns=_time(fields.get("now_ns")),
        time_s=_seconds(fields.get("time_s")),
        clock=tuple(
            ClockSample(_time(at_ns), _difference(low_ns), _difference(high_ns))
            for at_ns, low_ns, high_ns in _rows(fields, "clock", 3, SAMPLES_MAX)
        ),
        events=tuple(_event(one) for one in _list(fields, "events", KEPT_MAX)),
        open_calls=tuple(
            RecordedCall(_time(at_ns), _text(name), None if tag is None else _whole(tag, 0, _U64))
            for at_ns, name, tag in _rows(fields, "open_calls", 3, CALLS_MAX)
        ),
        requests=dict(operations),
        phases=tuple(
            RecordedPhase(_time(at_ns), _PHASES[_one_of(phase, _PHASES)], operation(place))
            for at_ns, phase, place in _rows(fields, "phases", 3, PHASES_MAX)
        ),
        segments=tuple(
            _segment(row, operation(row[7])) for row in _rows(fields, "segments", 10, SEGMENTS_MAX)
        ),
        left_out=_whole(fields.get("left_out"), 0, _U64),
    )


def _list(fields: Mapping[str, Any], name: str, count_max: int) -> Sequence[Any]:
    found: list[Any] = fields.get(name, ())
    if type(found) is not list or len(found) > count_max:
        raise ValueError(f"{name} is not a list of at most {count_max}")
    return found


def _rows(
    fields: Mapping[str, Any], name: str, width: int, count_max: int
) -> Sequence[Sequence[Any]]:
    rows = _list(fields, name, count_max)
    if any(type(row) is not list or len(row) != width for row in rows):
        raise ValueError(f"the entries of {name} are not lists of {width}")
    return rows


def _segment(row: Sequence[Any], operation: OperationId) -> RecordedSegment:
    began_ns, ended_ns, peer, lane, sent, length, kind, _, step, offset = row
    if not isinstance(sent, bool):
        raise ValueError(f"{str(sent)[:24]!r} is neither true nor false")
    return RecordedSegment(
        began_ns=_time(began_ns),
        ended_ns=_time(ended_ns, began_ns),
        peer=_whole(peer, 0, _U64),
        lane=_whole(lane, 0, _U64),
        sent=sent,
        length=_whole(length, 0, _U64),
        kind=_one_of(kind, _KINDS),
        operation=operation,
        step=_whole(step, 0, _U64),
        offset=_whole(offset, 0, _U64),
    )


def _event(value: object) -> tuple[int, str, Mapping[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError("an event is a JSON object")
    fields: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    told: dict[str, Any] = {}
    for name, content in list(fields.items())[: FIELDS_MAX + 3]:
        if name in ("at_ns", "event", "schema"):
            continue
        if isinstance(content, str):
            told[_text(name)] = _text(content)
        elif content is None or isinstance(content, bool):
            told[_text(name)] = content
        elif isinstance(content, int | float):
            told[_text(name)] = _number(content)
    return _time(fields.get("at_ns")), _text(fields.get("event")), told


def _number(value: float) -> float:
    if not -_U64 <= value <= _U64:
        raise ValueError(f"{str(value)[:24]} is out of range")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("time_s is not a number")
    if not 0 <= value < TIME_NS_MAX / NS_PER_S:  # false for NaN, too
        raise ValueError("time_s is out of range")
    return float(value)


def _whole(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:24]!r} is not a whole number from {least} to {most}")
    return value


def _time(value: object, least: int = 0) -> int:
    return _whole(value, least, TIME_NS_MAX)


def _difference(value: object) -> int:
    return _whole(value, -TIME_NS_MAX, TIME_NS_MAX)


def _text(value: object, bytes_max: int = TEXT_BYTES_MAX) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:24]!r} is not a text")
    return shortened(printable(value[:bytes_max]), bytes_max)


def _one_of(value: object, allowed: Mapping[str, object] | frozenset[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{str(value)[:24]!r} is not one of {', '.join(sorted(allowed))}")
    return value
