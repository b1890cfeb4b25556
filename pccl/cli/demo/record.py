"""What the demo's processes do and tell, what becomes of it, and the judgement at the end.

Pure. Who was lost is counted from what the survivors tell, never from somebody having been killed:
a process that is killed but still counted as a member is a failure of the demo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

PROGRESS_LINES = 10

ACCURACY_MIN = 0.95
"""Held-out accuracy that the peers together must reach."""


@dataclass(frozen=True, slots=True)
class DemoTask:
    """What one process does: so many steps in all, alone if it has no master.

    Of ``peers`` that begin together each waits at a step for one that comes ``late``.
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
    """All that a process says of itself, each time that anything of it changes.

    ``note`` is what has just happened; ``loss`` the mean of all contributors; ``rate`` bytes per
    second of late, both ways; ``fetch`` how far it has what the others hold; ``digest`` SHA-256 of
    its weights in the end.
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
    """One process of the demo, what it told last, and who took part in its first step."""

    task: DemoTask
    pid: int = 0
    told: Told = field(default_factory=Told)
    first: tuple[int, ...] = ()

    @property
    def alone(self) -> bool:
        """It trains without the others, for comparison."""
        return not self.task.master

    @property
    def name(self) -> str:
        """Of its process."""
        return f"shard {self.task.shard}{' alone' * self.alone}"

    @property
    def label(self) -> str:
        """What to call it: by its id as soon as it has one."""
        return f"peer {self.told.peer_id}" if self.told.peer_id else self.name

    @property
    def lost(self) -> frozenset[int]:
        """Ids of peers that took part in its first step but not in its latest."""
        return frozenset(self.first) - {*self.told.contributors}


class Moment(NamedTuple):
    """A step as the picture shows it."""

    at_s: float
    step: int
    loss: float = 0.0
    world_size: int = 0


@dataclass(slots=True)
class DemoRecord:
    """Everything that is known about one demo, of so many steps for each worker.

    A point is a step, when the first peer told of it; ``killed`` and ``grown`` are when one was
    killed, and the late one took part first. ``resumed_s`` after the kill the others went on.
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
        """The latest step that any peer has taken."""
        return self.points[-1].step if self.points else 0

    def add(self, now: float, worker: Worker, told: Told) -> Iterator[str]:
        """Take in what a worker says; what to tell the user of it."""
        if worker.told.status == "killed":
            return
        known_lost = frozenset[int]().union(*(peer.lost for peer in self.peers))
        worker.told, count = told, len(told.contributors)
        if told.note:
            yield f"{worker.label} {told.note}"
        if count and not worker.first:
            worker.first = told.contributors
            if not self.points:
                yield f"all {count} train together"
            if worker.task.late:
                self.grown = Moment(now, told.step)
                yield f"{worker.label} trains along from step {told.step}"
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
        """Note that a worker was sent SIGKILL; returns what to tell the user."""
        worker.told = replace(worker.told, status="killed")
        self.killed = Moment(now, self.step)
        return f"{worker.label} killed (SIGKILL to pid {worker.pid}) at step {self.step}"


def judge(
    record: DemoRecord, *, seconds: float, lost_expected: int, problem: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """What a demo has shown, as ``--json`` prints it; and what was not as it should be."""
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
        ("the one that trains alone did not finish", alone is None),
        ("the survivors' weights differ", complete and not found["digests_equal"]),
        ("the survivors disagree on who was lost", len(views) > 1),
        *((f"{peer.label} has fetched nothing", not peer.told.fetched_bytes) for peer in late),
        *((f"{label} did not train with all the others", True) for label in apart),
        (f"{lost} peers were lost, not {lost_expected}", lost != lost_expected),
    ]
    return found, [words for words, applies in failures if applies]
