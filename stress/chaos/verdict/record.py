"""Everything that was heard in a run, in order. Whether it was well is said by ``judge``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pccl.stress.chaos.events import (
    Alone,
    Announced,
    CallFailed,
    DamageFound,
    Event,
    Listens,
    MemorySample,
    PeerJoined,
    ProcessReady,
    Reduced,
)
from pccl.stress.timeline import MASTER, STANDBY, Timeline, TimelineFault

SAID_LINES_MAX = 200
"""Last lines of a process's complaints that are kept."""

FINDINGS_MAX = 50
"""Of a kind that are kept in words; all are counted."""

HANDED_OVER = frozenset({"GOODBYE"})
"""Causes of a removal that the peer itself asked for."""


@dataclass(slots=True)
class Life:
    """One process, from its start to its end.

    Attributes:
        index: of the process; ``MASTER`` or ``STANDBY``.
        pid: its process id.
        began_s: when it was started.
        ended_s: when it was heard to have ended.
        exit_code: how; a signal's number below zero.
        killed: by us; its end says nothing.
        told_to_leave: by us; it has to end well.
        comes_back: after it was killed, somebody takes its place.
        progress_s: when it last had a result, or any other sign that all is well.
        first_result_s: when it had its first result.
        result_s: when it had its last one.
        joined_s: when it became a member first.
        samples: the first, and the newest ones.
    """

    index: int
    pid: int
    began_s: float
    ended_s: float | None = None
    exit_code: int | None = None
    killed: bool = False
    told_to_leave: bool = False
    comes_back: bool = False
    ready: bool = False
    hung: bool = False
    progress_s: float = 0.0
    first_result_s: float | None = None
    result_s: float = 0.0
    joined_s: float | None = None
    samples: list[MemorySample] = field(default_factory=list[MemorySample])
    said: deque[str] = field(default_factory=lambda: deque[str](maxlen=SAID_LINES_MAX))

    @property
    def label(self) -> str:
        """What people read."""
        names = {MASTER: "master", STANDBY: "standby"}
        return names.get(self.index, f"peer {self.index}")


@dataclass(slots=True)
class Operation:
    """One reduce that committed.

    Attributes:
        at_s: when the first member had the result.
        contributors: as that one was told.
    """

    at_s: float
    contributors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RemovalSeen:
    """Somebody was removed from the run, by what the master or he himself says."""

    at_s: float
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was carried out, between these times."""

    fault: TimelineFault
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Findings:
    """Things that are wrong, of one kind: all are counted, some kept in words."""

    count: int = 0
    texts: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        """One more."""
        self.count += 1
        if len(self.texts) < FINDINGS_MAX:
            self.texts.append(text)


class RunRecord:
    """Everything that was heard in a run; all times are those of ``time.monotonic``.

    Args:
        timeline: what was planned.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.began_s = 0.0
        """When all members were there."""
        self.ended_s = 0.0
        """When the run was told to end."""
        self.lives: list[Life] = []
        self.done: list[Done] = []
        self.skipped: Counter[str] = Counter()
        self.operations: dict[tuple[int, int, int, int], Operation] = {}
        """(group, lineage, number, tag) -> operation."""
        self.world_sizes: dict[int, int] = {}
        """Group -> contributors of its newest operation."""
        self.results = 0
        self.retries = 0
        self.failures: Counter[str] = Counter()
        self.removals: list[RemovalSeen] = []
        self.lost_masters: list[RemovalSeen] = []
        """Members that were told that their master is gone for good."""
        self.wrong_values = Findings()
        self.damaged_inputs = Findings()
        self.hangs = Findings()
        self.errors = Findings()
        self.indices: dict[int, int] = {}
        """Id of a peer -> index of the process that had it last."""
        self._announced: list[tuple[Announced, int | None]] = []
        """Removals, and who had the id then: a master without state gives ids anew."""

    def group_of(self, index: int) -> int:
        """The group of a process."""
        return index % self.timeline.groups

    def add(self, life: Life, event: Event) -> str | None:
        """Add what a process has told; returns what is worth a line, if anything is."""
        match event:
            case Reduced():
                return self._add_result(life, event)
            case PeerJoined(at, peer, _):
                self.indices[peer] = life.index
                life.progress_s = at
                life.joined_s = life.joined_s or at
            case CallFailed():
                return self._add_failure(life, event)
            case DamageFound(_, text):
                self.damaged_inputs.add(f"{life.label} (pid {life.pid}): {text}")
                return f"DAMAGED: {life.label}: {text}"
            case MemorySample():
                life.samples.append(event)
            case Alone(at):
                life.progress_s = at
            case ProcessReady():
                life.ready = True
            case Listens(at):
                life.ready = True
                life.progress_s = at
            case Announced(_, peer, what, text):
                if what == "removed":
                    self._announced.append((event, self.indices.get(peer)))
                    return f"the master removed {self._who(peer)}: {text}"
        return None

    def finish(self, now: float) -> None:
        """Nothing more will be heard."""
        self.ended_s = self.ended_s or now
        for each, known in self._announced:
            cause = each.text.partition(":")[0]
            index = self.indices.get(each.peer) if known is None else known
            if cause not in HANDED_OVER and index is not None:
                self.removals.append(RemovalSeen(each.at, index, each.text))

    def newest(self, index: int) -> Life | None:
        """The last process of an index."""
        return next((life for life in reversed(self.lives) if life.index == index), None)

    def ended_lives(self) -> Iterable[Life]:
        """Those that ended."""
        return (life for life in self.lives if life.exit_code is not None)

    def without_result(self, living: Iterable[Life], since_s: float) -> list[Life]:
        """Return the living peers without a result since ``since_s``.

        For a peer alone in its group, any progress counts.

        Args:
            living: all processes that run.
            since_s: when the last fault ended.
        """
        peers = [life for life in living if life.index >= 0]
        sizes = Counter(self.group_of(life.index) for life in peers)
        return [
            life
            for life in peers
            if (life.result_s if sizes[self.group_of(life.index)] > 1 else life.progress_s)
            < since_s
        ]

    def quiet_s(self, life: Life, now_s: float) -> float:
        """How long a peer has been without progress although nothing was wrong with itself."""
        if life.index < 0:
            return 0.0
        ends = (done.ended_s for done in self.done if done.fault.concerns(life.index))
        return now_s - max(life.progress_s, *ends, 0.0)

    def _add_result(self, life: Life, event: Reduced) -> str | None:
        life.progress_s = life.result_s = event.at
        life.first_result_s = life.first_result_s or event.at
        self.results += 1
        self.retries += event.attempts > 1
        wrong = event.wrong
        key = (self.group_of(life.index), event.lineage, event.number, event.tag)
        self.world_sizes[key[0]] = len(event.contributors)
        known = self.operations.setdefault(key, Operation(event.at, event.contributors))
        known.at_s = min(known.at_s, event.at)
        if known.contributors != event.contributors:
            wrong = wrong or (
                f"two outcomes of one reduce, with contributors {known.contributors} and "
                f"{event.contributors}"
            )
        if not wrong:
            return None
        where = f"{life.label}, iteration {event.number}, tag {event.tag}"
        self.wrong_values.add(f"{where}: {wrong}")
        return f"WRONG: {where}: {wrong}"

    def _add_failure(self, life: Life, event: CallFailed) -> str | None:
        self.failures[event.error] += 1
        if event.error == "Evicted":
            self.removals.append(RemovalSeen(event.at, life.index, event.text))
        if event.error == "MasterLost" and event.call != "connect":
            self.lost_masters.append(RemovalSeen(event.at, life.index, event.text))
        if event.expected:
            return None
        text = f"{life.label}: {event.call}: {event.error}: {event.text}"
        self.errors.add(text)
        return f"ERROR: {text}"

    def _who(self, peer: int) -> str:
        index = self.indices.get(peer)
        return f"peer id {peer}" if index is None else f"peer {index} (id {peer})"
