"""Which peer or link holds up a run, and why: conclusions from evidence.

A stopped process, a held interpreter lock and a dead link look alike from afar, so each conclusion
needs evidence from several places. Where it is missing, a finding names the causes that remain
possible. Everything in ``Clues`` comes from peers, and is checked where it is used.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pccl.protocol.link_messages import LinkPath
from pccl.protocol.status_report import MemberStatus, OperationStatus, RoundStatus, StatusReport
from pccl.protocol.types import PeerId, RoundKind
from pccl.telemetry.link_paths import path_in_words
from pccl.telemetry.words import NARROW_REMEDY

DEAD_ACK_MS = 2000
"""A system that has acknowledged nothing for this long, though data is on the way, is cut off."""

SLOW_RATIO = 4
"""A link is slow if the median of all links carries this many times more."""

NO_ROOM_S = 120
"""How long ago a peer may have run out of room for that to matter now."""

SILENT_MS = 3000
"""A peer from which the master has heard nothing for this long misses several heartbeats."""

STILL_MS = 2000
"""A collective in which no data has moved for this long, though a sender has some, is cut off."""

COMPUTES = 0.5
"""A process that uses this many processors computes."""


class Cause(enum.Enum):
    """Why a member holds up others."""

    STOPPED = "the process is stopped"
    GONE = "the process has ended"
    LOCK_HELD = "C code holds the interpreter lock"
    BLOCKED = "the program waits for a lock of its own"
    NO_CALL = "the program has not made the call"
    CROSSED_CALLS = "members wait in different calls"
    OTHER_GROUP = "a joint call of the whole run waits for another group"
    SLOW_LINK = "a link is slow"
    DEAD_LINK = "a link is dead"
    LARGE_PACKETS_LOST = "large packets vanish on a path"
    NO_ROOM = "a disk or memory is full"
    MASTER_UNREACHABLE = "a member cannot reach the master"
    UNKNOWN = "the evidence does not decide"


@dataclass(frozen=True, slots=True)
class BlameFinding:
    """One conclusion.

    Attributes:
        cause: what is wrong.
        peers: the members that hold up others.
        text: peer, event and place, in words; ids of peers without names.
        remedy: what to do.
    """

    cause: Cause
    peers: tuple[int, ...]
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Clues:
    """What is known of one member beside the status of its run.

    Attributes:
        silent: whether the master asked it, and it did not answer in time.
        refusal: why there is no ``state``; empty if there is.
        state: its answer, as ``EvidenceKind.STATE``; empty if it did not answer.
        threads: its threads, as ``EvidenceKind.STACKS``; empty if it gives none.
        path: the master's connection to it, as the kernel measures it; empty if unknown.
        process: what the system knows of its process (``observe.process``); empty if unknown.
    """

    silent: bool = False
    refusal: str = ""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    threads: Sequence[Any] = ()
    path: Mapping[str, Any] = field(default_factory=dict[str, Any])
    process: Mapping[str, Any] = field(default_factory=dict[str, Any])


def waits_in_words(status: StatusReport) -> Iterator[str]:
    """Yield a line for each call that waits: the waiting peers, the awaited peers, since when.

    A master without a run waits, too.
    """
    if status.waits_for:
        yield f"this master coordinates no run: {status.waits_for}"
    for one in status.rounds:
        whom, waited_s = _peers(one.missing), one.waiting_ms / 1000
        call = f"{one.round.kind.call_name} #{one.round.n}"
        count = one.requested_count
        who = "1 member waits" if count == 1 else f"{count} members wait"
        yield f"{call}: {who} for {whom}, for {waited_s:.1f} s"
    for operation in status.operations:
        whom, still_s = _peers(operation.missing), operation.still_ms / 1000
        what = "results" if operation.started else "calls"
        yield f"{operation.what}: waits for the {what} of {whom}, nothing for {still_s:.1f} s"


def find_blame(status: StatusReport, clues: Mapping[PeerId, Clues]) -> list[BlameFinding]:
    """Return what holds up the run, the most certain conclusion first; empty: nothing does."""
    case = _Situation(status, clues)
    findings = [*case.processes(), *case.cut_off(), *case.silent(), *case.no_room()]
    findings += case.crossed()
    findings += case.calls(known={peer for one in findings for peer in one.peers})
    findings += case.links(known={peer for one in findings for peer in one.peers})
    findings += case.narrow()
    return findings


class _Situation:
    """One situation, while conclusions are drawn from it."""

    def __init__(self, status: StatusReport, clues: Mapping[PeerId, Clues]) -> None:
        self._status = status
        self._clues = clues
        self._members = {member.peer: member for member in status.members}

    def _of(self, peer: PeerId) -> Clues:
        return self._clues.get(peer, Clues())

    @property
    def _call_waits(self) -> list[RoundStatus | OperationStatus]:
        """The calls that some members have not made."""
        started = [one for one in self._status.operations if not one.started]
        return [*self._status.rounds, *started]

    # -- processes -------------------------------------------------------------------------------

    def processes(self) -> Iterator[BlameFinding]:
        """Yield the members whose process is stopped or gone, as its system says."""
        for peer in self._members:
            process = self._of(peer).process
            pid, state = process.get("pid"), process.get("state")
            if state in ("T", "t"):
                how = "stopped (SIGSTOP, or Ctrl-Z)" if state == "T" else "stopped by a debugger"
                text, remedy = f"peer {peer}: its process {pid} is {how}", f"kill -CONT {pid}"
                yield BlameFinding(Cause.STOPPED, (peer,), text, remedy)
            elif state in ("Z", "X", "gone"):
                text = f"peer {peer}: its process {pid} has ended"
                remedy = "wait: the master removes it; its output says why it ended"
                yield BlameFinding(Cause.GONE, (peer,), text, remedy)

    def cut_off(self) -> Iterator[BlameFinding]:
        """Yield the members that cannot reach the master, although their process runs."""
        for peer, member in self._members.items():
            clues = self._of(peer)
            if clues.process.get("state") in ("T", "t", "Z", "X", "gone"):
                continue
            if member.connected and not (clues.silent and _is_cut_off(member, clues)):
                continue
            reached = [other for other in self._members if self._reaches(other, peer)]
            seen = f"; {_peers(reached)} can still reach it" if reached else ""
            since_s = member.silent_ms / 1000
            text = f"peer {peer} has not reached the master for {since_s:.1f} s{seen}"
            remedy = f"check the network and firewalls between {member.host} and the master"
            yield BlameFinding(Cause.MASTER_UNREACHABLE, (peer,), text, remedy)

    def _reaches(self, other: PeerId, peer: PeerId) -> bool:
        """Whether ``other`` has a link to ``peer`` over which the kernel gets acknowledgements."""
        paths = list(_paths(self._of(other).state, peer))
        return bool(paths) and not any(map(_is_dead, paths))

    def silent(self) -> Iterator[BlameFinding]:
        """Yield the members that are connected and do not answer, though their process runs."""
        for peer, member in self._members.items():
            clues = self._of(peer)
            state = clues.process.get("state")
            if not clues.silent or not member.connected or state in ("T", "t", "Z", "X", "gone"):
                continue
            if _is_cut_off(member, clues):
                continue
            if state is None:
                alive = ", though its system acknowledges what it receives" * bool(clues.path)
                text = (
                    f"peer {peer} at {member.host} does not answer{alive}: its process is stopped, "
                    "or C code holds its interpreter lock"
                )
                remedy = (
                    f"on {member.host}, run pccl why (for a peer of pccl join), or look at the "
                    "state of the process (ps -o stat) and its stacks (py-spy dump)"
                )
                yield BlameFinding(Cause.UNKNOWN, (peer,), text, remedy)
                continue
            doing = "computes" if _number(clues.process.get("busy")) >= COMPUTES else "waits"
            where = _place_in_dump(clues.process.get("stacks"))
            text = (
                f"peer {peer}: the interpreter lock of process {clues.process.get('pid')} is held "
                f"by C code that {doing}{where}, so no Python thread of that process runs"
            )
            remedy = "release the lock in that C code (Py_BEGIN_ALLOW_THREADS, ctypes.CDLL)"
            yield BlameFinding(Cause.LOCK_HELD, (peer,), text, remedy)

    # -- calls -----------------------------------------------------------------------------------

    def no_room(self) -> Iterator[BlameFinding]:
        """Yield the members that could not store what they had to fetch."""
        for peer in self._members:
            for happened in _dicts(self._of(peer).state.get("happened")):
                text = str(happened.get("text", ""))
                if text.startswith("no room for") and _number(happened.get("ago_s")) <= NO_ROOM_S:
                    remedy = "free some space there, or set staging_directory or in_place=True"
                    said = f"peer {peer}: {text[:400]}"
                    yield BlameFinding(Cause.NO_ROOM, (peer,), said, remedy)
                    break

    def crossed(self) -> Iterator[BlameFinding]:
        """Yield the pairs of calls in which members wait for each other."""
        waits = self._call_waits
        for place, one in enumerate(waits):
            for other in waits[place + 1 :]:
                here, there = self._inside(one), self._inside(other)
                crossing = here & set(other.missing), there & set(one.missing)
                if not all(crossing):
                    continue
                mine, theirs = (tuple(sorted(peers)) for peers in crossing)
                names = f"{_peers(mine)} in {_call(one)}, {_peers(theirs)} in {_call(other)}"
                if self._are_groups_apart(one, other):
                    cause, what = Cause.OTHER_GROUP, "a joint call of all groups waits for a group"
                    remedy = "call update_topology at the same place in all groups"
                else:
                    cause, what = Cause.CROSSED_CALLS, "they wait for each other in different calls"
                    remedy = "make the same calls, with the same tags, in the same order everywhere"
                peers = (*mine, *theirs)
                yield BlameFinding(cause, peers, f"{what}: {names}", remedy)

    def _are_groups_apart(
        self, one: RoundStatus | OperationStatus, other: RoundStatus | OperationStatus
    ) -> bool:
        """Whether a round waits for members of other groups only."""
        for wait in (one, other):
            if isinstance(wait, RoundStatus):
                waiting = {self._members[peer].group for peer in self._inside(wait)}
                missing = {self._members[p].group for p in wait.missing if p in self._members}
                return not waiting & missing
        return False

    def _inside(self, wait: RoundStatus | OperationStatus) -> set[PeerId]:
        """Return the members that have made a call that others have not."""
        if isinstance(wait, RoundStatus):
            return self._members.keys() - set(wait.missing)
        group = wait.operation.group
        return {p for p, member in self._members.items() if member.group == group} - {*wait.missing}

    def calls(self, known: set[int]) -> Iterator[BlameFinding]:
        """Yield the members that have not made a call, and what they do instead."""
        for wait in self._call_waits:
            for peer in wait.missing:
                member = self._members.get(peer)
                if member is None or peer in known or self._waits_elsewhere(member):
                    continue
                known.add(peer)
                yield self._absent(wait, member)

    def _waits_elsewhere(self, member: MemberStatus) -> bool:
        """Whether a member waits in another call itself, so that others hold up this one, too."""
        return bool(member.calls)

    def _absent(self, wait: RoundStatus | OperationStatus, member: MemberStatus) -> BlameFinding:
        peer, clues = member.peer, self._of(member.peer)
        last = f"; its last call was {member.last_call}, {member.last_call_ms / 1000:.1f} s ago"
        behind = f", at step {member.step}" if member.step else ""
        said = f"peer {peer} has not made the call {_call(wait)}"
        said += f"{last * bool(member.last_call)}{behind}"
        nothing: Mapping[str, Any] = {}
        main = next((one for one in _dicts(clues.threads) if one.get("is_main")), nothing)
        frame = _innermost(main.get("frames"))
        place = f"; its main thread is at {frame}" if frame else ""
        if frame and "futex" in str(main.get("waits_in", "")):
            remedy = "find out who holds the lock at that line"
            text = f"{said}{place}, and waits for a lock"
            return BlameFinding(Cause.BLOCKED, (peer,), text, remedy)
        if isinstance(wait, RoundStatus) and wait.round.kind is RoundKind.UPDATE_TOPOLOGY:
            waiting = {self._members[other].group for other in self._inside(wait)}
            if member.group not in waiting:
                text = f"{said}{place}; it is in group {member.group}, which has not made the call"
                remedy = "call update_topology at the same place in all groups"
                return BlameFinding(Cause.OTHER_GROUP, (peer,), text, remedy)
        remedy = "make the call there, too; or wait if it computes longer than the others"
        return BlameFinding(Cause.NO_CALL, (peer,), f"{said}{place}", remedy)

    # -- links -----------------------------------------------------------------------------------

    def links(self, known: set[int]) -> Iterator[BlameFinding]:
        """Yield links that carry nothing, or little, while a collective waits for data."""
        started = [one for one in self._status.operations if one.started]
        if not started or any(set(one.missing) & known for one in started):
            return
        what, still = started[0].what, min(one.still_ms for one in started) >= STILL_MS
        dead: dict[tuple[int, int], str] = {}
        speeds: dict[tuple[int, int], float] = {}
        for peer in self._members:
            for path in _dicts(self._of(peer).state.get("paths")):
                other = path.get("peer_id")
                if not isinstance(other, int) or other not in self._members:
                    continue
                ago_s = _number(path.get("ack_ago_ms")) / 1000
                waits = _number(path.get("backlog_bytes")) > 0
                if _is_dead(path) or (still and waits):
                    pair = (min(peer, other), max(peer, other))
                    dead[pair] = (
                        f"peer {other} takes nothing from peer {peer} (silent for {ago_s:.1f} s)"
                    )
                speed = _number(path.get("bytes_per_s"))
                if speed > 0:
                    speeds[peer, other] = max(speeds.get((peer, other), 0.0), speed)
        for pair, why in dead.items():
            text = f"the link of {_peers(pair)} is dead: {why}, and {what} waits for data"
            remedy = "check the network between them; they replace their connections soon"
            yield BlameFinding(Cause.DEAD_LINK, pair, text, remedy)
        if not dead and speeds:
            yield from self._slow(speeds, what)

    def narrow(self) -> Iterator[BlameFinding]:
        """Yield the pairs of members between which large packets vanish."""
        found: dict[tuple[int, int], int] = {}
        for peer in self._members:
            for link in _dicts(self._of(peer).state.get("narrow_links")):
                other, segment = link.get("peer_id"), int(_number(link.get("segment_bytes")))
                if isinstance(other, int) and other in self._members:
                    found[min(peer, other), max(peer, other)] = segment
        for (one, other), segment in found.items():
            text = f"large packets vanish between peer {one} and peer {other}"
            said = f"{text}; segments of {segment} bytes pass"
            yield BlameFinding(Cause.LARGE_PACKETS_LOST, (one, other), said, NARROW_REMEDY)

    def _slow(self, speeds: Mapping[tuple[int, int], float], what: str) -> Iterator[BlameFinding]:
        (one, other), slowest = min(speeds.items(), key=lambda item: item[1])
        median = sorted(speeds.values())[len(speeds) // 2]
        if median >= SLOW_RATIO * slowest:
            text = (
                f"the link from peer {one} to peer {other} carries {slowest / 1e6:.2f} MB/s, the "
                f"median of all links is {median / 1e6:.2f} MB/s; {what} waits for its data"
            )
            remedy = "quantize, average less often, or run without one of the two"
            for link in self._status.links:
                if (link.peer, link.other, link.path) == (one, other, LinkPath.RELAYED):
                    path, why, better = path_in_words(link)
                    text, remedy = f"{text}; it is {path}: {why}", f"{better}; or {remedy}"
            yield BlameFinding(Cause.SLOW_LINK, (one, other), text, remedy)


def _is_cut_off(member: MemberStatus, clues: Clues) -> bool:
    """Whether the network keeps a connected member from its master, and not the member itself.

    Then the kernel has no acknowledgements, or the member's I/O thread waits for messages.
    """
    waits_in = [str(thread.get("waits_in")) for thread in _dicts(clues.process.get("threads"))]
    idle = any("poll" in one for one in waits_in)
    return member.silent_ms >= SILENT_MS and (_is_dead(clues.path) or idle)


def _is_dead(path: Mapping[str, Any]) -> bool:
    """Whether the other system has acknowledged no data for a while, or has no room for any."""
    if _number(path.get("probes")) > 1:
        return True
    waits = _number(path.get("unacknowledged")) > 0 or _number(path.get("retransmits")) > 0
    return waits and _number(path.get("ack_ago_ms")) >= DEAD_ACK_MS


def _paths(state: Mapping[str, Any], peer: PeerId) -> Iterator[Mapping[str, Any]]:
    return (path for path in _dicts(state.get("paths")) if path.get("peer_id") == peer)


def _dicts(values: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list that a peer has sent; empty if it is no list."""
    if not isinstance(values, list | tuple):
        return []
    return [one for one in values if isinstance(one, dict)]  # pyright: ignore[reportUnknownVariableType]


def _number(value: object) -> float:
    """Return a number that a peer has sent; 0 if it is none, or beyond all reason."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        return 0.0
    return float(value)


def _innermost(frames: object) -> str:
    """Return the innermost frame of a thread outside of Python's own locks; empty: unknown."""
    known = [one for one in frames if isinstance(one, str)] if isinstance(frames, list) else []  # pyright: ignore[reportUnknownVariableType]
    own = [frame for frame in known if "/threading.py:" not in frame]
    return (own or known or [""])[-1][:300]


def _place_in_dump(stacks: object) -> str:
    """Return where the thread that holds the lock is, from the text of faulthandler."""
    lines = stacks.splitlines() if isinstance(stacks, str) else []
    for number, line in enumerate(lines[:-1]):
        if line.startswith("Current thread"):
            return f" at {lines[number + 1].strip()[:300]}"
    return ""


def _call(wait: RoundStatus | OperationStatus) -> str:
    return wait.round.kind.call_name if isinstance(wait, RoundStatus) else wait.what


def _peers(peers: Iterable[int]) -> str:
    ids = sorted(peers)
    return f"peer{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}" if ids else "no peer"
