"""A process that slept excuses the others; one that was busy does not."""

from __future__ import annotations

import pytest

from pccl.machines.peer.contact import MasterLiveness
from pccl.machines.ticks import Ticks, Wakefulness
from pccl.protocol.limits import Timing

TICK = 250
AWAKE = Wakefulness(0, may_judge=True)


@pytest.mark.parametrize(
    ("gap", "busy", "finds"),
    [
        (250, 10, AWAKE),
        (499, 0, AWAKE),
        (500, 0, Wakefulness(500, may_judge=False)),
        (60_000, 3, Wakefulness(59_997, may_judge=False)),  # stopped, or starved
        (60_000, 59_900, Wakefulness(0, may_judge=False)),  # computed all the time
        (3_000, 2_501, Wakefulness(0, may_judge=False)),
        (3_000, 2_500, Wakefulness(500, may_judge=False)),  # both
        (700, 9_000, Wakefulness(0, may_judge=False)),  # a clock that stood still meanwhile
    ],
)
def test_sleep_is_what_was_not_computed(gap: int, busy: int, finds: Wakefulness) -> None:
    ticks = Ticks(TICK, 0)
    assert ticks.note(250, 1) == AWAKE
    assert ticks.note(250 + gap, busy) == finds


def test_a_load_that_makes_every_tick_late_puts_off_one_judgement_only() -> None:
    ticks, found = Ticks(TICK, 0), list[Wakefulness]()
    for n in range(1, 20):
        found.append(ticks.note(n * 2_000, 1_990))
    assert found == [Wakefulness(0, may_judge=False), *[AWAKE] * 18]


def test_a_starved_process_judges_too_and_counts_only_the_time_that_it_ran() -> None:
    ticks, slept = Ticks(TICK, 0), 0
    judged: list[bool] = []
    for n in range(1, 20):
        finds = ticks.note(n * 2_000, 100)
        slept += finds.slept_ns
        judged.append(finds.may_judge)
    assert slept == 19 * 1_900
    assert judged == [False, *[True] * 18]


@pytest.mark.parametrize(("busy_s", "silent"), [(0, False), (2, True)])
def test_a_busy_peer_finds_that_its_master_is_silent(busy_s: int, silent: bool) -> None:
    second = 10**9
    contact = MasterLiveness(Timing(), 0)
    contact.opened(0)
    contact.served(0)
    found = [
        contact.tick(n * 2 * second, busy_s * second)
        and contact.is_silent(n * 2 * second, known=True)
        for n in range(1, 8)
    ]
    assert any(found) is silent
    assert found.index(True) == 2 if silent else True  # 6 s
