"""``merge``: one trace of all peers, in Chrome's trace event format, which Perfetto opens. Pure.

Peers are processes. Calls, collectives with their phases, and each direction of each lane are
threads. Arrows lead from the sending of a segment to its receipt. All times are on the master's
clock, in whole microseconds: fractions would make slices overlap in viewers that round them.

Slices of one thread must lie apart or inside each other. So calls and collectives that overlap get
further threads, at most ``TRACKS_MAX`` of each kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pccl.protocol.operation import Phase
from pccl.protocol.types import NS_PER_S, SYNC_TAG, OperationId
from pccl.protocol.vocabulary.tags import shown_tag
from pccl.telemetry.clocks import Alignment, order_shifts
from pccl.telemetry.names import with_name
from pccl.telemetry.records import TIME_NS_MAX, Record, RecordedSegment

THREAD = 10_000
"""Id of the first thread of each process. Perfetto takes the thread with the id of its process for
the main thread."""

TRACKS_MAX = 32
"""Threads for overlapping slices of one kind. Slices beyond them are left out, and counted."""

NS_PER_US = 1000

_PHASE_WORDS = {
    Phase.REQUESTED: "wait for members",
    Phase.STARTED: "move data",
    Phase.DONE: "wait for the outcome",
}
"""What an operation does from one phase to the next."""

Entry: TypeAlias = dict[str, Any]


class _Clock:
    """Maps the times of one record to the master's clock."""

    def __init__(self, record: Record, guess_ns: int) -> None:
        self.known = bool(record.clock)
        self.shift_ns = 0
        self.error_ns = 0
        """The largest error of any time that was mapped."""
        self.least_error_ns = TIME_NS_MAX
        self._alignment = Alignment(record.clock)
        self._guess_ns = guess_ns

    def at(self, at_ns: int) -> int:
        if not self.known:
            return at_ns + self._guess_ns
        offset_ns, error_ns = self._alignment.at(at_ns)
        self.error_ns = max(self.error_ns, error_ns)
        self.least_error_ns = min(self.least_error_ns, error_ns)
        return at_ns + offset_ns


class _Slice(NamedTuple):
    """A slice of one thread, with the slices inside it; times on the master's clock, in ns."""

    began_ns: int
    ended_ns: int
    name: str
    details: Mapping[str, Any]
    inside: tuple[tuple[int, int, str], ...] = ()
    segment: RecordedSegment | None = None


_Key: TypeAlias = tuple[str, OperationId, str, int, int, int, int]
"""Run, operation, kind, step, offset, sender and receiver (indices of the records)."""


class _Peer:
    """One record, and its slices by thread."""

    def __init__(
        self, place: int, record: Record, guess_ns: int, names: Mapping[tuple[str, int], str]
    ) -> None:
        self.place, self.record = place, record
        self.clock = clock = _Clock(record, guess_ns)
        self.instants = [(clock.at(at), kind, told) for at, kind, told in record.events]
        self.slices: dict[tuple[int, int, int, str], list[_Slice]] = {
            (1, 0, 0, "calls"): list(_calls(record, clock)),
            (2, 0, 0, "collectives"): list(_operations(record, clock)),
        }
        """Slices by thread: its place among the threads, and its name."""
        for segment in record.segments:
            to, rank = ("to", 3) if segment.sent else ("from", 4)
            words = "send" if segment.sent else "receive"
            found = _Slice(
                clock.at(segment.began_ns),
                clock.at(segment.ended_ns),
                {"ANNOUNCE": "announce" if segment.sent else "pull"}.get(segment.kind, words),
                {
                    "operation": str(segment.operation),
                    "step": segment.step,
                    "offset": segment.offset,
                    "bytes": segment.length,
                },
                segment=segment,
            )
            name = names.get((record.run, segment.peer), "")
            other = f"peer {with_name(segment.peer, name)}"
            thread = f"{to} {other}, lane {segment.lane}"
            key = rank, segment.peer, segment.lane, thread
            self.slices.setdefault(key, []).append(found)

    @property
    def segments(self) -> Iterable[_Slice]:
        for slices in self.slices.values():
            yield from (one for one in slices if one.segment is not None)


def _calls(record: Record, clock: _Clock) -> Iterable[_Slice]:
    for at_ns, kind, told in record.events:
        seconds = told.get("seconds")
        if kind == "CallEnded" and isinstance(seconds, int | float):
            began_ns = max(0, at_ns - round(max(0.0, seconds) * NS_PER_S))
            name = _call_name(str(told.get("call")), told.get("tag"))
            yield _Slice(clock.at(began_ns), clock.at(at_ns), name, told)
    for began_ns, name, tag in record.open_calls:
        ended_ns = max(began_ns, record.now_ns)
        words = _call_name(name, tag)
        yield _Slice(clock.at(began_ns), clock.at(ended_ns), words, {"outcome": "open"})


def _call_name(name: str, tag: object) -> str:
    return name if tag is None or tag == SYNC_TAG else f"{name} tag {tag}"


def _operations(record: Record, clock: _Clock) -> Iterable[_Slice]:
    reached: defaultdict[OperationId, dict[Phase, int]] = defaultdict(dict)
    for at_ns, phase, operation in record.phases:
        reached[operation].setdefault(phase, at_ns)
    for operation, phases in reached.items():
        times = sorted((at_ns, phase.value, phase) for phase, at_ns in phases.items())
        began_ns, (last_ns, _, last) = times[0][0], times[-1]
        if not last.ended:
            last_ns = max(last_ns, record.now_ns)
        ends = [at_ns for at_ns, _, _ in times[1:]] + [last_ns]
        inside = tuple(
            (clock.at(at_ns), clock.at(end_ns), _PHASE_WORDS[phase])
            for (at_ns, _, phase), end_ns in zip(times, ends, strict=True)
            if phase in _PHASE_WORDS
        )
        details = {"operation": str(operation), "phase": last.value}
        tag = "" if operation.tag == SYNC_TAG else f" tag {shown_tag(operation.tag)}"
        name = (record.requests.get(operation) or "shared state") + tag
        yield _Slice(clock.at(began_ns), clock.at(last_ns), name, details, inside)


def merge(records: Sequence[Record], unanswered: Mapping[str, str]) -> dict[str, Any]:
    """Return one trace of all records, for ``json.dumps``.

    ``otherData`` says for each peer by how much its times may be wrong, in microseconds; None: it
    has not exchanged heartbeats yet, so its wall clock has placed it.

    Args:
        records: records of different peers.
        unanswered: the peers that gave no record, and why.
    """
    names = {(each.run, number): each.name for each in records for number in each.peer_ids}
    peers = [
        _Peer(place, record, guess_ns, names)
        for place, (record, guess_ns) in enumerate(zip(records, _guesses(records), strict=True))
    ]
    arrows = _arrows(peers)
    _put_in_order(peers, arrows)
    entries: list[Entry] = []
    timed: list[tuple[int, int, int, Entry]] = []
    at: dict[int, tuple[int, int, int, int]] = {}
    slices_left_out = arrows_left_out = 0
    for peer in peers:
        slices_left_out += _draw(peer, entries, timed, at)
    for number, (sent, received) in enumerate(arrows, 1):
        here, there = at.get(id(sent)), at.get(id(received))
        if here is None or there is None or here[2] >= there[3]:
            arrows_left_out += 1  # no room for a slice, or clocks that contradict each other
            continue
        marks = {"cat": "segment", "id": number}
        sent_us, arrived_us = here[2], max(here[2], there[2])
        start = _entry("s", "segment", *here[:2], sent_us) | marks
        end = _entry("f", "segment", *there[:2], arrived_us) | marks | {"bp": "e"}
        timed += [(sent_us, 2, 0, start), (arrived_us, 3, 0, end)]
    timed.sort(key=lambda one: one[:3])
    entries.extend(entry for *_, entry in timed)
    about = [_about(peer) for peer in peers]
    errors = [one["clock_error_us"] for one in about if one["clock_error_us"] is not None]
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "the master's",
            "clock_error_us": max(errors, default=None),
            "peers": about,
            "unanswered": dict(unanswered),
            "slices_left_out": slices_left_out,
            "arrows_left_out": arrows_left_out,
        },
    }


def _guesses(records: Sequence[Record]) -> list[int]:
    """Return offsets by wall clock, for records without samples."""
    walls = [round(record.time_s * NS_PER_S) - record.now_ns for record in records]
    ahead_ns = 0  # the master's clock less the time of day
    for record, wall_ns in zip(records, walls, strict=True):
        if record.clock:
            ahead_ns = Alignment(record.clock).at(record.now_ns)[0] - wall_ns
            break
    return [wall_ns + ahead_ns for wall_ns in walls]


def _arrows(peers: Sequence[_Peer]) -> list[tuple[_Slice, _Slice]]:
    """Return sent segments with their receipts. A segment may be sent again on another lane."""
    places: dict[tuple[str, int], int] = {}
    for peer in peers:
        for number in peer.record.peer_ids:
            places.setdefault((peer.record.run, number), peer.place)
    sent: defaultdict[_Key, list[_Slice]] = defaultdict(list)
    received: defaultdict[_Key, list[_Slice]] = defaultdict(list)
    for peer in peers:
        run = peer.record.run
        for one in peer.segments:
            segment = one.segment
            assert segment is not None
            other = places.get((run, segment.peer))
            if other is None:
                continue
            way = (peer.place, other) if segment.sent else (other, peer.place)
            what = (segment.kind, segment.step, segment.offset)
            (sent if segment.sent else received)[(run, segment.operation, *what, *way)].append(one)
    found: list[tuple[_Slice, _Slice]] = []
    for key, receipts in received.items():
        if sendings := sent.get(key):
            # The last receipt belongs to the last sending, and so on back.
            found += zip(reversed(sendings), reversed(receipts), strict=False)
    return found


def _put_in_order(peers: Sequence[_Peer], arrows: Iterable[tuple[_Slice, _Slice]]) -> None:
    """Shift clocks within their errors, so that segments are sent before they are received."""
    least: dict[tuple[int, int], int] = {}
    place_of = {id(one): peer.place for peer in peers for one in peer.segments}
    for sent, received in arrows:
        way = place_of[id(sent)], place_of[id(received)]
        lack_ns = sent.began_ns - received.began_ns
        least[way] = max(lack_ns, least.get(way, lack_ns))
    limits = [peer.clock.least_error_ns for peer in peers]
    for peer, shift_ns in zip(peers, order_shifts(limits, least), strict=True):
        peer.clock.shift_ns = shift_ns
        peer.clock.error_ns += abs(shift_ns)


def _draw(
    peer: _Peer,
    entries: list[Entry],
    timed: list[tuple[int, int, int, Entry]],
    at: dict[int, tuple[int, int, int, int]],
) -> int:
    """Add what one peer did; return the number of slices without room.

    Args:
        peer: the peer.
        entries: takes the names of process and threads.
        timed: takes slices and instants, with what they are sorted by.
        at: takes process, thread, begin and end of each slice of a segment, by ``id``.
    """
    pid, shift_ns, left_out = peer.place + 1, peer.clock.shift_ns, 0
    record = peer.record
    number = f" (peer {record.peer_ids[-1]})" if record.peer_ids else ""
    entries.append(_name("process_name", pid, 0, f"{record.name}{number} on {record.host}"))
    entries.append(_name("process_labels", pid, 0, _error_words(peer.clock)))
    entries.append(_name("thread_name", pid, THREAD, "events"))
    for at_ns, kind, told in peer.instants:
        if kind != "CallEnded":
            at_us = (at_ns + shift_ns) // NS_PER_US
            entry = _entry("i", kind, pid, THREAD, at_us) | {"s": "p", "args": dict(told)}
            timed.append((at_us, 1, 0, entry))
    tid = THREAD
    for (*_, thread), slices in sorted(peer.slices.items(), key=lambda item: item[0]):
        free_us: list[int] = []
        """When each thread of this kind is free again."""
        first = tid + 1
        for one in sorted(slices, key=lambda one: (one.began_ns, -one.ended_ns)):
            began_us = (one.began_ns + shift_ns) // NS_PER_US
            ended_us = max((one.ended_ns + shift_ns) // NS_PER_US, began_us + 1)
            track = next((n for n, free in enumerate(free_us) if free <= began_us), len(free_us))
            if track == TRACKS_MAX:
                left_out += 1
                continue
            free_us[track : track + 1] = [ended_us]
            where = pid, first + track
            timed.append(_bar(*where, began_us, ended_us, one.name, one.details))
            for inner_ns, end_ns, name in one.inside:
                inner_us = (inner_ns + shift_ns) // NS_PER_US
                end_us = min((end_ns + shift_ns) // NS_PER_US, ended_us)
                if inner_us < end_us:
                    timed.append(_bar(*where, inner_us, end_us, name, {}))
            if one.segment is not None:
                at[id(one)] = (*where, began_us, ended_us)
        for track in range(len(free_us)):
            words = f"{thread} ({track + 1})" if track else thread
            entries.append(_name("thread_name", pid, first + track, words))
        tid += len(free_us)
    entries += [
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": t, "args": {"sort_index": t}}
        for t in range(THREAD, tid + 1)
    ]
    return left_out


def _bar(
    pid: int, tid: int, began_us: int, ended_us: int, name: str, details: Mapping[str, Any]
) -> tuple[int, int, int, Entry]:
    length_us = ended_us - began_us
    entry = _entry("X", name, pid, tid, began_us) | {"dur": length_us, "args": dict(details)}
    return began_us, 0, -length_us, entry


def _entry(phase: str, name: str, pid: int, tid: int, at_us: int) -> Entry:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": at_us}


def _name(what: str, pid: int, tid: int, text: str) -> Entry:
    key = "labels" if what == "process_labels" else "name"
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: text}}


def _error_us(clock: _Clock) -> int | None:
    return -(-clock.error_ns // NS_PER_US) if clock.known else None


def _error_words(clock: _Clock) -> str:
    error_us = _error_us(clock)
    return "clock unknown" if error_us is None else f"clock ±{error_us / 1000:.3f} ms"


def _about(peer: _Peer) -> dict[str, Any]:
    record = peer.record
    return {
        "pid": peer.place + 1,
        "name": record.name,
        "peer_ids": list(record.peer_ids),
        "host": record.host,
        "os_pid": record.pid,
        "clock_error_us": _error_us(peer.clock),
        "left_out": record.left_out,
    }
