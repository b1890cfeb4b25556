"""The tasks and reports of the demo's processes, the record of a demo, and its verdict.

Pure. Lost peers are counted from the reports of the survivors, not from the kill. So the demo fails
if the survivors still count a killed process as a member.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

PROGRESS_LINES = 10

ACCURACY_MIN = 0.95
"""Held-out accuracy that the peers must reach."""


@dataclass(frozen=True, slots=True)
class DemoTask:
    """The task of one process: to take ``steps`` steps, alone if ``master`` is empty.

    The ``peers`` that begin together wait at step ``await_at`` for the newcomer, a ``late`` task.
    """

    shard: int
    shards: int
    steps: int
    seed: int
    master: str = ""
    peers: int = 1
    await_at: int | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """The report of a process about itself, sent at each change.

    ``note`` describes the latest event. ``loss`` is the mean over all contributors. ``rate`` is the
    recent traffic both ways, in bytes per second. ``fetch`` describes the progress of a download.
    ``digest`` is the SHA-256 of the final weights.
    """

    status: str = "starting"
    note: str = ""
    peer_id: int = 0
    step: int = 0
    loss: float = 0.0
    contributors: tuple[int, ...] = ()
    tx_bytes: int = 0
    rate: float = 0.0
    fetched_bytes: int = 0
    fetch: str = ""
    accuracy: float | None = None
    digest: str = ""


@dataclass(slots=True)
class Worker:
    """One process of the demo: its latest report, and the contributors of its first step."""

    task: DemoTask
    pid: int = 0
    told: Told = field(default_factory=Told)
    first: tuple[int, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether the process trains without other peers, for comparison."""
        return not self.task.master

    @property
    def name(self) -> str:
        """The name of the process."""
        return f"shard {self.task.shard}{' alone' * self.alone}"

    @property
    def label(self) -> str:
        """The name for the user: the peer's id, or ``name`` while the peer has none."""
        return f"peer {self.told.peer_id}" if self.told.peer_id else self.name

    @property
    def lost(self) -> frozenset[int]:
        """The ids of peers that contributed to its first step, but not to its latest one."""
        return frozenset(self.first) - {*self.told.contributors}


class Moment(NamedTuple):
    """A step of the run, as a point of the picture."""

    at_s: float
    step: int
    loss: float = 0.0
    world_size: int = 0


@dataclass(slots=True)
class DemoRecord:
    """The record of one demo, in which each worker takes ``step_count`` steps.

    ``points`` holds each step at its first report. ``killed`` is the moment of the kill, ``grown``
    that of the newcomer's first step. The survivors continued ``resumed_s`` seconds after the kill.
    """

    workers: list[Worker]
    step_count: int
    began_s: float = 0.0
    points: list[Moment] = field(default_factory=list[Moment])
    killed: Moment | None = None
    grown: Moment | None = None
    resumed_s: float | None = None

    @property
    def peers(self) -> list[Worker]:
        """The workers that train together."""
        return [worker for worker in self.workers if not worker.alone]

    @property
    def step(self) -> int:
        """The latest step that a peer has reported."""
        return self.points[-1].step if self.points else 0

    def add(self, now: float, worker: Worker, told: Told) -> Iterator[str]:
        """Record a report of a worker, and yield lines for the user."""
        if worker.told.status == "killed":
            return
        known_lost = frozenset[int]().union(*(peer.lost for peer in self.peers))
        worker.told, count = told, len(told.contributors)
        if told.note:
            yield f"{worker.label} {told.note}"
        if count and not worker.first:
            worker.first = told.contributors
            if not self.points:
                yield f"all {count} peers train together"
            if worker.task.late:
                self.grown = Moment(now, told.step)
                yield f"{worker.label} joins training at step {told.step}"
        if count and (news := sorted(worker.lost - known_lost)):
            names = f"peer{'s' * (len(news) > 1)} {', '.join(map(str, news))}"
            yield f"{names} lost, continuing with {count}"
            self.resumed_s = now - self.killed.at_s if self.killed is not None else None
        if count and told.step > self.step:
            self.points.append(Moment(now, told.step, told.loss, count))
            if told.step % max(1, self.step_count // PROGRESS_LINES) == 1:
                together = [each.told for each in self.peers if each.told.status == "training"]
                where = f"step {told.step}/{self.step_count}  loss {told.loss:.4f}"
                rate = sum(each.rate for each in together) / 1e6
                yield f"{where}  world size {count}  {rate:.1f} MB/s"

    def add_kill(self, now: float, worker: Worker) -> str:
        """Record that the command killed a worker, and return a line for the user."""
        worker.told = replace(worker.told, status="killed")
        self.killed = Moment(now, self.step)
        return f"{worker.label} killed (SIGKILL to pid {worker.pid}) at step {self.step}"


def judge(
    record: DemoRecord, *, seconds: float, lost_expected: int, problem: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the results of a demo, as ``--json`` prints them, and its failures."""
    survivors = [peer for peer in record.peers if peer.told.status != "killed"]
    late, ended = ([p for p in survivors if p.task.late], [p for p in survivors if p.told.digest])
    complete = bool(ended) and len(ended) == len(survivors)
    accuracy = min(peer.told.accuracy or 0.0 for peer in ended) if complete else None
    [alone] = [worker.told.accuracy for worker in record.workers if worker.alone]
    views = {peer.lost for peer in survivors if peer.first and not peer.task.late}
    lost = len(frozenset[int]().union(*views))
    joined, peers = len({peer.told.peer_id for peer in record.peers} - {0}), len(record.peers)
    found: dict[str, Any] = {
        "accuracy": accuracy,
        "single_shard_accuracy": alone,
        "digests_equal": complete and len({peer.told.digest for peer in ended}) == 1,
        "lost_peers": lost,
        "joined_peers": joined,
        "fetched_bytes": sum(peer.told.fetched_bytes for peer in late),
        "seconds": round(seconds, 3),
    }
    is_low = (accuracy or 1) < ACCURACY_MIN
    seen = [peer.told.contributors for peer in survivors]
    apart = [new.label for new in late if not all(new.told.peer_id in ids for ids in seen)]
    failures = [
        (problem, bool(problem)),
        (f"{joined} of {peers} peers joined", joined != peers),
        (f"{len(ended)} of {len(survivors)} survivors finished", not complete),
        (f"held-out accuracy {accuracy or 0:.3f} is below {ACCURACY_MIN}", is_low),
        ("the process that trains alone did not finish", alone is None),
        ("the survivors' weights differ", complete and not found["digests_equal"]),
        ("the survivors disagree on which peers were lost", len(views) > 1),
        *((f"{peer.label} downloaded nothing", not peer.told.fetched_bytes) for peer in late),
        *((f"{label} did not train with all other peers", True) for label in apart),
        (f"{lost} peers were lost, not {lost_expected}", lost != lost_expected),
    ]
    return found, [words for words, applies in failures if applies]
