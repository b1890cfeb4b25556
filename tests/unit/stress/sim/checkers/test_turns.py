"""The judge of late processes: who is late again needs a reason."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pccl.protocol.types import Quorum
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.checkers.turns import Departures, Turns
from pccl.stress.sim.faults.base import MS


class Judged:
    """A process of a run with a latency of 1 ms; a step lasts 10 ms."""

    def __init__(self, grace_ms: int | None = None) -> None:
        self.now_ns, self.is_touched = 0, False
        self.done: Counter[str] = Counter()
        checkers = SimpleNamespace(done=self.done, may_be_late=self.may_be_late)
        scenario = SimpleNamespace(latency_ns=MS, quorum=Quorum(2, grace_ms=grace_ms))
        loop = SimpleNamespace(now_ns=lambda: self.now_ns)
        parts: Any = SimpleNamespace(scenario=scenario, checkers=checkers, loop=loop)
        process: Any = SimpleNamespace(name="p0")
        self.turns = Turns(parts, process)
        self.number = 0
        self.turns.enters()
        self.round(waits_ms=5)

    def may_be_late(self, host: str) -> bool:
        assert host == "p0"
        return self.is_touched

    def step(self, *, is_awaited: bool = False) -> None:
        self.now_ns += 10 * MS
        self.turns.stepped(is_awaited=is_awaited, is_idle=True)

    def round(self, *, waits_ms: int = 0, took_part: bool = True) -> None:
        called_ns = self.now_ns
        self.now_ns += waits_ms * MS
        self.turns.updated(called_ns)
        self.turns.saw(self.number, took_part=took_part)
        self.number += 1

    def misses(self, count: int) -> None:
        for _ in range(count):
            self.step(is_awaited=True)
            self.round(took_part=False)


def test_a_process_that_is_there_takes_part() -> None:
    judged = Judged()
    with pytest.raises(Violation, match="round 1 went on without it, although it was there"):
        judged.round(waits_ms=1, took_part=False)


@pytest.mark.parametrize(("grace_ms", "is_enough"), [(0, False), (15, False), (16, True)])
def test_a_grace_may_be_too_short_for_the_network(grace_ms: int, *, is_enough: bool) -> None:
    judged = Judged(grace_ms)
    if is_enough:
        with pytest.raises(Violation):
            judged.round(waits_ms=1, took_part=False)
    else:
        judged.round(waits_ms=1, took_part=False)


def test_a_fault_may_delay_it() -> None:
    judged = Judged()
    judged.is_touched = True
    judged.round(waits_ms=1, took_part=False)


def test_it_is_late_again_if_the_others_call_within_each_of_its_steps() -> None:
    judged = Judged()
    judged.misses(5)
    assert judged.done["round without this replica"] == 5
    assert judged.done["twice without this replica"] == 1
    assert judged.done["more often without this replica"] == 3


def test_after_two_it_begins_the_next_one_after_its_step() -> None:
    judged = Judged()
    judged.misses(2)
    judged.step()
    judged.round(waits_ms=5)
    judged.misses(2)
    judged.step()  # nobody waits for it, so it could be early
    judged.step(is_awaited=True)
    with pytest.raises(Violation, match="late for round 6 for no reason, again"):
        judged.round(took_part=False)


def test_a_nap_excuses_it_until_it_takes_part() -> None:
    judged = Judged()
    judged.turns.naps()
    for _ in range(2):
        judged.misses(2)
        judged.step()
        judged.step(is_awaited=True)
        judged.round(took_part=False)
    judged.step()
    judged.round(waits_ms=5)
    judged.misses(2)
    judged.step()
    judged.step(is_awaited=True)
    with pytest.raises(Violation):
        judged.round(took_part=False)


# -- for a process that leaves ---------------------------------------------------------------------

LEAVING: Any = SimpleNamespace(run=b"run", peer=1, name="p0")
MEMBER: Any = SimpleNamespace(run=b"run", peer=2, name="p1")
ELSEWHERE: Any = SimpleNamespace(run=b"another", peer=2, name="p2")


def judge(*late: str) -> Departures:
    """A judge of a run with a latency of 1 ms, in which a process waits from the beginning."""
    checkers: Any = SimpleNamespace(done=Counter[str](), may_be_late=late.__contains__)
    departures = Departures(checkers, MS)
    departures.waits(LEAVING, 0)
    return departures


def test_a_member_that_does_not_know_after_a_while_is_accused() -> None:
    departures = judge()
    departures.stepped(MEMBER, 8 * MS, is_awaited=False)
    departures.stepped(MEMBER, 9 * MS, is_awaited=True)
    with pytest.raises(Violation, match="p1: it does not know that p0 leaves, and waits"):
        departures.stepped(MEMBER, 9 * MS, is_awaited=False)
    departures.goes_on(LEAVING)
    departures.stepped(MEMBER, 9 * MS, is_awaited=False)


def test_members_of_another_run_and_faults_are_excused() -> None:
    judge().stepped(ELSEWHERE, 99 * MS, is_awaited=False)
    judge("p0").stepped(MEMBER, 99 * MS, is_awaited=False)
    judge("p1").stepped(MEMBER, 99 * MS, is_awaited=False)
