"""Who is stuck, against the definition spelt out; and when the watch may say so."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.master.lockstep import (
    AskBlocked,
    LockstepWatch,
    LongWait,
    Stuck,
    Wait,
    stuck_members,
)
from pccl.protocol.limits import Timing
from pccl.protocol.types import OperationId, PeerId, RoundId, RoundKind

SECOND = 1_000_000_000
SEEDS = st.integers(0, (1 << 32) - 1)
PEERS = tuple(PeerId(n) for n in range(1, 7))
SUBJECTS: tuple[RoundId | OperationId, ...] = (
    RoundId(RoundKind.UPDATE_TOPOLOGY, 0),
    RoundId(RoundKind.PEERS_PENDING, 3),
    *(OperationId(1, tag % 2, 1, tag, 0) for tag in range(4)),
)


def random_wait(rng: random.Random, subject: RoundId | OperationId) -> Wait:
    """Everybody has called, or hasn't, or has nothing to do with it."""
    parts = [rng.choice(["called", "missing", "missing", "stranger"]) for _ in PEERS]
    requested = tuple(p for p, part in zip(PEERS, parts, strict=True) if part == "called")
    missing = tuple(p for p, part in zip(PEERS, parts, strict=True) if part == "missing")
    return Wait(subject, f"{subject}", requested, missing if rng.random() < 0.9 else ())


def stuck_by_definition(blocked: list[PeerId], waits: list[Wait]) -> set[PeerId]:
    """The union of all sets of blocked members none of which can be released without the set."""
    union: set[PeerId] = set()
    for size in range(1, len(blocked) + 1):
        for some in combinations(blocked, size):
            own = {peer: [w for w in waits if peer in w.requested] for peer in some}
            if all(
                own[peer] and all(set(w.missing) & set(some) for w in own[peer]) for peer in some
            ):
                union |= set(some)
    return union


@settings(max_examples=1000)
@given(SEEDS)
def test_the_stuck_are_the_largest_set_that_cannot_be_released(seed: int) -> None:
    rng = random.Random(seed)
    waits = [random_wait(rng, s) for s in SUBJECTS if rng.random() < 0.6]
    blocked = [peer for peer in PEERS if rng.random() < 0.8]
    stuck = stuck_members(blocked, waits)
    assert set(stuck) == stuck_by_definition(blocked, waits)
    assert len(stuck) == len(set(stuck))
    assert list(stuck) == [peer for peer in blocked if peer in stuck]


class Judge:
    """Holds everything that a watch says against what it was told, all of which is kept."""

    def __init__(self) -> None:
        self.watch = LockstepWatch(Timing())
        self.now_ns = 0
        self.waits: list[Wait] = []
        self.blocked = list(PEERS)
        self.stuck: tuple[PeerId, ...] = ()
        self.involved: tuple[Wait, ...] = ()
        self.since_ns = 0
        """Since when exactly these are stuck in exactly this."""
        self.query: int | None = None
        """What they were asked since then."""
        self.confirmed: set[PeerId] = set()
        self.free: dict[PeerId, tuple[int, list[RoundId | OperationId]]] = {}
        """Who has said that it is free -> when, and what it waited for."""
        self.verdicts = 0

    def reply(self, peer: PeerId, query: int, *, blocked: bool) -> None:
        self.watch.answered(peer, query, self.now_ns, blocked=blocked)
        if query == self.query and peer in self.stuck:
            if blocked:
                self.confirmed.add(peer)
            else:
                self.free[peer] = self.now_ns, self._waits_of(peer, self.involved)

    def look(self) -> None:
        findings = self.watch.look(self.waits, self.blocked, self.now_ns)
        self.free = {
            peer: (since_ns, own)
            for peer, (since_ns, own) in self.free.items()
            if self.now_ns - since_ns < 2 * SECOND and own == self._waits_of(peer, self.waits)
        }
        blocked = [peer for peer in self.blocked if peer not in self.free]
        stuck = stuck_members(blocked, self.waits)
        involved = tuple(w for w in self.waits if set(w.requested) & set(stuck))
        if (stuck, involved) != (self.stuck, self.involved):
            fewer = set(stuck) <= set(self.stuck) and set(involved) <= set(self.involved)
            self.stuck, self.involved = stuck, involved
            if not (stuck and fewer):  # else these were stuck as long
                self._start_anew()
        for finding in findings:
            match finding:
                case AskBlocked(query, silent):
                    assert self.now_ns - self.since_ns >= SECOND
                    assert query == (self.query or query)
                    assert set(silent) == set(stuck) - self.confirmed
                    self.query = query
                case Stuck(subjects, reason):
                    assert self.confirmed >= set(stuck)
                    ended = {wait.subject for wait in involved}
                    operations = {s for s in ended if isinstance(s, OperationId)}
                    assert set(subjects) == (operations or ended)
                    assert all(f"peer {peer} in " in reason for peer in stuck)
                    self.verdicts += 1
                    self.stuck = ()
                case LongWait(wait):
                    assert wait in self.waits
                    assert wait.missing

    @staticmethod
    def _waits_of(peer: PeerId, waits: Iterable[Wait]) -> list[RoundId | OperationId]:
        return [wait.subject for wait in waits if peer in wait.requested]

    def _start_anew(self) -> None:
        self.since_ns = self.now_ns
        self.query = None
        self.confirmed.clear()


@settings(max_examples=300)
@given(SEEDS)
def test_a_verdict_is_just(seed: int) -> None:
    """It comes when the same was stuck for a second and all have confirmed it after that.

    A member that has said that it is free is left out for two seconds, or until it calls again.
    """
    rng = random.Random(seed)
    judge = Judge()
    for _ in range(200):
        judge.now_ns += rng.choice([0, SECOND // 4])
        match rng.choice(["look"] * 8 + ["reply"] * 8 + ["change"]):
            case "look":
                judge.look()
            case "reply":
                query = rng.randint(0, 9) if rng.random() < 0.2 else judge.query or 0
                judge.reply(rng.choice(PEERS), query, blocked=rng.random() < 0.97)
            case _:
                judge.blocked = [peer for peer in PEERS if rng.random() < 0.9]
                if rng.random() < 0.6:
                    judge.waits = [random_wait(rng, s) for s in SUBJECTS if rng.random() < 0.5]


@settings(max_examples=200)
@given(SEEDS)
def test_a_circle_that_stays_is_always_told(seed: int) -> None:
    """Whatever was before, and however many answers are lost: in the end there is a verdict."""
    rng = random.Random(seed)
    watch = LockstepWatch(Timing())
    now_ns = 0
    for _ in range(rng.randint(0, 30)):
        now_ns += SECOND // 4
        watch.look([random_wait(rng, s) for s in SUBJECTS[:2]], PEERS, now_ns)
        watch.answered(rng.choice(PEERS), rng.randint(0, 3), now_ns, blocked=rng.random() < 0.5)
    waits = [
        Wait(SUBJECTS[0], "update_topology", PEERS[:3], PEERS[3:]),
        Wait(SUBJECTS[2], "tag 0", PEERS[3:], PEERS[:3]),
    ]
    for _ in range(4000):
        now_ns += SECOND // 4
        for finding in watch.look(waits, PEERS, now_ns):
            if isinstance(finding, Stuck):
                assert finding.subjects == (SUBJECTS[2],)
                return
            if isinstance(finding, AskBlocked):
                for peer in finding.peers:
                    if rng.random() < 0.5:
                        watch.answered(peer, finding.query, now_ns, blocked=rng.random() < 0.95)
    raise AssertionError("they wait for ever")
