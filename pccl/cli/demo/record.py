"""What the demo's processes report, what becomes of it, and the judgement at the end.

Pure bookkeeping: no process, no clock, no terminal. A worker writes one JSON object per line
(:func:`encode`); the orchestrator reads them back (:func:`decode`), feeds them to a
:class:`DemoRecord` together with the time, and asks :func:`judge` for the verdict.

Who was lost is counted from what the survivors report, never from the orchestrator having killed
somebody: a process that is killed but still counted as a member is a failure of the demo.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pccl.progress import SyncProgress, describe, size

ACCURACY_MIN = 0.95
"""Held-out accuracy that the peers together must reach."""

RATE_WINDOW_S = 2.0
"""Bandwidth is shown as the mean over this long: short enough to see a change."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded all it needs, and waits for the word to join."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The master admitted the worker."""

    peer_id: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The worker has taken over what the others hold.

    Attributes:
        fetched_bytes: in all.
        joint_bytes: of these, fetched while all waited, at its admission.
        seconds: how long that took.
    """

    fetched_bytes: int
    joint_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """The worker took one optimizer step.

    Attributes:
        step: counted from 1.
        loss: mean training loss over everybody who took part, so the same for all.
        contributors: ids of the peers whose gradients were averaged; empty when training alone.
        tx_bytes: sent since the beginning.
        rx_bytes: received since the beginning.
    """

    step: int
    loss: float
    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker took all its steps.

    Attributes:
        accuracy: share of the held-out digits that its weights get right.
        digest: SHA-256 of its weights, in hexadecimal.
    """

    accuracy: float
    digest: str


Event: TypeAlias = Ready | SyncProgress | Joined | Synced | Stepped | Finished

_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Ready, SyncProgress, Joined, Synced, Stepped, Finished)
}


def encode(event: Event) -> str:
    """One line of JSON for an event, without the line end."""
    return json.dumps({"event": type(event).__name__.lower(), **dataclasses.asdict(event)})


def decode(line: str) -> Event | None:
    """The event that a line holds, or None for any other output."""
    try:
        values: Any = json.loads(line)
        kind = _KINDS[values.pop("event")]
        if "contributors" in values:
            values["contributors"] = tuple(values["contributors"])
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(slots=True)
class Worker:
    """One process of the demo and what it has reported so far.

    Attributes:
        shard: index of the part of the data that it trains on.
        alone: it is the one that trains without the others, for comparison.
        late: it joins when the others are half-way.
        ready: it has loaded all it needs, and joins on word.
        sent: it has got the word.
        fetch: how far its fetch of the others' state is; None: nothing was fetched yet.
        synced: what it has taken over.
        killed: the orchestrator has sent it SIGKILL.
        lost: ids of peers that took part in its first step but not in its latest.
    """

    shard: int
    alone: bool = False
    late: bool = False
    pid: int = 0
    ready: bool = False
    sent: bool = False
    fetch: SyncProgress | None = None
    synced: Synced | None = None
    peer_id: int | None = None
    latest: Stepped | None = None
    finished: Finished | None = None
    killed: bool = False
    first_contributors: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    moved: collections.deque[tuple[float, int]] = field(
        default_factory=collections.deque[tuple[float, int]]
    )

    @property
    def label(self) -> str:
        """What to call it: by its id as soon as it has one."""
        if self.alone:
            return f"shard {self.shard} alone"
        return f"peer on shard {self.shard}" if self.peer_id is None else f"peer {self.peer_id}"

    @property
    def status(self) -> str:
        """What it is doing, in a word."""
        if self.killed:
            return "killed"
        if self.finished is not None:
            return "finished"
        if self.latest is not None:
            return "training"
        if self.peer_id is not None:
            return "waiting"
        if self.fetch is not None:
            return "fetching"
        return "ready" if self.ready else "starting"

    @property
    def last_contributors(self) -> tuple[int, ...]:
        """Ids of those that took part in its latest step; none before the first."""
        return self.latest.contributors if self.latest is not None else ()

    @property
    def world_size(self) -> int:
        """How many these are."""
        return len(self.last_contributors)

    def rate(self, now: float) -> float:
        """Bytes per second, sent and received together, over the last moments."""
        recent = [moved for moved in self.moved if now - moved[0] <= RATE_WINDOW_S]
        if self.status != "training" or len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])


@dataclass(frozen=True, slots=True)
class Point:
    """One step as the picture shows it."""

    at_s: float
    step: int
    loss: float
    world_size: int


@dataclass(slots=True)
class DemoRecord:
    """Everything that is known about one demo.

    Attributes:
        workers: in the order in which they were started.
        step_count: how many steps each takes.
        points: one for each step, when the first peer reported it.
        killed_at: when and after which step one was killed.
        grown_at: when and at which step the one that came late took part first.
        resumed_s: how long after that a survivor first reported a step without the killed one.
    """

    workers: list[Worker]
    step_count: int
    points: list[Point] = field(default_factory=list[Point])
    killed_at: tuple[float, int] | None = None
    grown_at: tuple[float, int] | None = None
    resumed_s: float | None = None

    @property
    def peers(self) -> list[Worker]:
        """The workers that train together."""
        return [worker for worker in self.workers if not worker.alone]

    @property
    def survivors(self) -> list[Worker]:
        """The peers that nobody has killed."""
        return [worker for worker in self.peers if not worker.killed]

    @property
    def step(self) -> int:
        """The latest step that any peer has taken."""
        return self.points[-1].step if self.points else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that all peers have sent, the killed one up to its last report."""
        return sum(worker.latest.tx_bytes for worker in self.peers if worker.latest is not None)

    def add(self, now: float, worker: Worker, event: Event) -> list[str]:
        """Take one event in.

        Args:
            now: seconds since the demo began.
            worker: who reported it.
            event: what was reported.

        Returns:
            What is worth telling the user, in words.
        """
        match event:
            case Ready():
                worker.ready = True
                return []
            case SyncProgress():
                return _add_fetch(worker, event)
            case Synced(fetched_bytes, joint_bytes, seconds):
                worker.synced = event
                return [
                    f"{worker.label} took over {size(fetched_bytes)}, {size(joint_bytes)} of it "
                    f"while all waited {1000 * seconds:.0f} ms"
                ]
            case Joined(peer_id):
                worker.peer_id = peer_id
                return [f"{worker.label} joined (shard {worker.shard}, pid {worker.pid})"]
            case Stepped():
                return self._add_step(now, worker, event)
            case Finished(accuracy):
                worker.finished = event
                return [f"{worker.label} finished, held-out accuracy {accuracy:.3f}"]

    def add_kill(self, now: float, worker: Worker) -> str:
        """Note that a worker was sent SIGKILL; returns what to tell the user."""
        worker.killed = True
        self.killed_at = (now, self.step)
        return f"{worker.label} killed (SIGKILL to pid {worker.pid}) at step {self.step}"

    def _add_step(self, now: float, worker: Worker, event: Stepped) -> list[str]:
        first = worker.latest is None
        worker.latest = event
        if worker.alone:
            return []
        worker.moved.append((now, event.tx_bytes + event.rx_bytes))
        while now - worker.moved[0][0] > RATE_WINDOW_S:
            worker.moved.popleft()

        told: list[str] = []
        contributors = frozenset(event.contributors)
        if first:
            worker.first_contributors = contributors
            if not self.points:
                told.append(f"all {len(contributors)} train together")
            if worker.late:
                self.grown_at = now, event.step
                told.append(f"{worker.label} trains along from step {event.step}")
        known_lost = frozenset[int]().union(*(peer.lost for peer in self.peers))
        worker.lost = worker.first_contributors - contributors
        if news := sorted(worker.lost - known_lost):
            told.append(f"{name_peers(news)} lost, continuing with {len(contributors)}")
            if self.killed_at is not None:
                self.resumed_s = now - self.killed_at[0]
        if event.step > self.step:
            self.points.append(Point(now, event.step, event.loss, len(contributors)))
        return told


def _add_fetch(worker: Worker, progress: SyncProgress) -> list[str]:
    """Tells of each quarter that is reached."""
    if not progress.total_bytes:
        return []
    before, worker.fetch = worker.fetch, progress
    if before is not None and _quarter(before) == _quarter(progress):
        return []
    return [f"{worker.label} fetches: {describe(progress)}"]


def _quarter(progress: SyncProgress) -> int:
    return 4 * progress.done_bytes // progress.total_bytes


def name_peers(peer_ids: Sequence[int]) -> str:
    """``peer 3`` or ``peers 2, 3``."""
    return f"peer{'s' if len(peer_ids) > 1 else ''} {', '.join(map(str, peer_ids))}"


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """How the demo went; ``failures`` is empty if all is well.

    Attributes:
        accuracy: held-out accuracy of the peers' common weights; None if they did not finish.
        single_shard_accuracy: the same for the one that trained alone; None if it did not finish.
        digests_equal: all survivors finished with the same weights, bit for bit.
        lost_peers: how many the survivors saw leave.
        joined_peers: how many were admitted, the late one among them.
        fetched_bytes: what the late one has taken over.
        seconds: from start to judgement.
        failures: what was not as it should be, in words.
    """

    accuracy: float | None
    single_shard_accuracy: float | None
    digests_equal: bool
    lost_peers: int
    joined_peers: int
    fetched_bytes: int
    seconds: float
    failures: tuple[str, ...]

    def to_json(self) -> str:
        """The one object that ``--json`` prints."""
        values = dataclasses.asdict(self)
        del values["failures"]
        return json.dumps(values)


def judge(
    record: DemoRecord, *, seconds: float, lost_expected: int, problem: str = ""
) -> DemoVerdict:
    """Say whether a demo did what it set out to show.

    Args:
        record: what happened.
        seconds: how long it took.
        lost_expected: how many peers the survivors must have seen leave.
        problem: why the demo was broken off, if it was.
    """
    finished = [peer.finished for peer in record.survivors if peer.finished is not None]
    complete = bool(finished) and len(finished) == len(record.survivors)
    digests_equal = complete and len({end.digest for end in finished}) == 1
    accuracy = min(end.accuracy for end in finished) if complete else None
    alone = [one.finished.accuracy for one in record.workers if one.alone and one.finished]
    views = {peer.lost for peer in record.survivors if peer.latest is not None and not peer.late}
    lost_peers = len(frozenset[int]().union(*views))
    joined_peers = len({peer.peer_id for peer in record.peers} - {None})
    late = [peer for peer in record.survivors if peer.late]
    fetched_bytes = sum(peer.synced.fetched_bytes for peer in late if peer.synced is not None)

    failures = [problem] if problem else []
    if joined_peers != len(record.peers):
        failures.append(f"{joined_peers} of {len(record.peers)} peers joined")
    if accuracy is None:
        failures.append(f"{len(finished)} of {len(record.survivors)} survivors finished")
    elif accuracy < ACCURACY_MIN:
        failures.append(f"held-out accuracy {accuracy:.3f} is below {ACCURACY_MIN}")
    if not alone:
        failures.append("the one that trains alone did not finish")
    if complete and not digests_equal:
        failures.append("the survivors' weights differ")
    if len(views) > 1:
        failures.append("the survivors disagree on who was lost")
    for peer in late:
        if peer.synced is None or not peer.synced.fetched_bytes:
            failures.append(f"{peer.label} has fetched nothing")
        if not all(peer.peer_id in other.last_contributors for other in record.survivors):
            failures.append(f"{peer.label} did not train with all the others")
    if lost_peers != lost_expected:
        failures.append(f"{lost_peers} peers were lost, not {lost_expected}")
    return DemoVerdict(
        accuracy=accuracy,
        single_shard_accuracy=alone[0] if alone else None,
        digests_equal=digests_equal,
        lost_peers=lost_peers,
        joined_peers=joined_peers,
        fetched_bytes=fetched_bytes,
        seconds=round(seconds, 3),
        failures=tuple(failures),
    )
