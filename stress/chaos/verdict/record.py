"""``RunRecord``: everything that the harness received from a run; ``judge`` judges it."""

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
"""Number of last output lines that the record keeps of a process."""

FINDINGS_MAX = 50
"""Number of findings of a kind that the record keeps in words; it counts all of them."""

HANDED_OVER = frozenset({"GOODBYE"})
"""Causes of a removal for which the peer itself asked."""


@dataclass(slots=True)
class Life:
    """One process, from its start to its end.

    Attributes:
        index: index of the process, or ``MASTER``, or ``STANDBY``.
        pid: its process id.
        began_s: time of its start.
        ended_s: time at which the harness learned of its end.
        exit_code: its exit code; below zero: number of the signal that killed it.
        killed: whether the harness killed it, so that its end is no crash.
        told_to_leave: whether the harness sent SIGTERM; the process must end with 0.
        comes_back: whether a new process takes its place after a kill.
        progress_s: time of its last result, or of other progress.
        first_result_s: time of its first result.
        result_s: time of its last result.
        joined_s: time at which it first became a member.
        samples: samples of its resources, in order.
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
        """Name of the process for people."""
        names = {MASTER: "master", STANDBY: "standby"}
        return names.get(self.index, f"peer {self.index}")


@dataclass(slots=True)
class Operation:
    """One reduce that committed.

    Attributes:
        at_s: time at which the first member had the result.
        contributors: contributors in the first reported outcome.
    """

    at_s: float
    contributors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RemovalSeen:
    """The removal of a peer from the run, as the master or the peer reports it."""

    at_s: float
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was carried out between these times."""

    fault: TimelineFault
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Findings:
    """Errors of one kind: all are counted, some are kept in words."""

    count: int = 0
    texts: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        """Count an error, and keep its text if there is room."""
        self.count += 1
        if len(self.texts) < FINDINGS_MAX:
            self.texts.append(text)


class RunRecord:
    """Everything that the harness received from a run; all times are those of ``time.monotonic``.

    Args:
        timeline: the plan of the run.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.began_s = 0.0
        """Time at which all peers had joined and reduced; 0: not yet."""
        self.ended_s = 0.0
        """Time at which the harness ended the run."""
        self.lives: list[Life] = []
        self.done: list[Done] = []
        self.skipped: Counter[str] = Counter()
        self.operations: dict[tuple[int, int, int, int], Operation] = {}
        """(group, lineage, number, tag) -> operation."""
        self.world_sizes: dict[int, int] = {}
        """Group -> number of contributors to its newest operation."""
        self.results = 0
        self.retries = 0
        self.failures: Counter[str] = Counter()
        self.removals: list[RemovalSeen] = []
        self.lost_masters: list[RemovalSeen] = []
        """Members that got ``MasterLost``."""
        self.wrong_values = Findings()
        self.damaged_inputs = Findings()
        self.hangs = Findings()
        self.errors = Findings()
        self.indices: dict[int, int] = {}
        """Id of a peer -> index of the process that had it last."""
        self._announced: list[tuple[Announced, int | None]] = []
        """Announced removals, and the index that had the id then: a blank master reuses ids."""

    def group_of(self, index: int) -> int:
        """Return the group of a process."""
        return index % self.timeline.groups

    def add(self, life: Life, event: Event) -> str | None:
        """Add an event of a process; return a line to show, or None."""
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
        """End the record, because the harness will receive nothing more."""
        self.ended_s = self.ended_s or now
        for each, known in self._announced:
            cause = each.text.partition(":")[0]
            index = self.indices.get(each.peer) if known is None else known
            if cause not in HANDED_OVER and index is not None:
                self.removals.append(RemovalSeen(each.at, index, each.text))

    def newest(self, index: int) -> Life | None:
        """Return the last process of an index."""
        return next((life for life in reversed(self.lives) if life.index == index), None)

    def ended_lives(self) -> Iterable[Life]:
        """Return the processes that ended."""
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
        """Return the seconds since a peer's last progress or fault; 0 for a master or standby."""
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
