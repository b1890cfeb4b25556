"""When a link on which frames are damaged counts as down."""

from __future__ import annotations

from pccl.topology.link_damage import LinkDamage

S = 1_000_000_000


def test_one_damaged_frame_says_nothing_about_the_line() -> None:
    damage = LinkDamage(10 * S)
    assert not damage.is_down(0)
    damage.struck(1000, 1 * S)
    assert not damage.is_down(1 * S)


def test_a_second_one_does_until_as_much_has_come_intact() -> None:
    damage = LinkDamage(10 * S)
    damage.struck(1000, 1 * S)
    damage.struck(1000, 2 * S)
    assert damage.is_down(2 * S)
    damage.passed(999)
    assert damage.is_down(3 * S)
    damage.passed(1000)
    assert not damage.is_down(3 * S)
    damage.struck(1000, 4 * S)  # the first in a row again
    assert not damage.is_down(4 * S)


def test_a_header_is_proven_by_any_payload() -> None:
    damage = LinkDamage(10 * S)
    damage.struck(0, 0)
    damage.struck(0, 0)
    damage.passed(0)
    assert damage.is_down(1)
    damage.passed(1)
    assert not damage.is_down(1)


def test_after_a_quiet_while_it_has_another_chance_and_each_time_later() -> None:
    damage, now_ns = LinkDamage(10 * S), 0
    damage.struck(500, now_ns)
    waits: list[int] = []
    for _ in range(8):
        damage.struck(500, now_ns)
        waited = 0
        while damage.is_down(now_ns):
            now_ns += 10 * S
            waited += 10
        waits.append(waited)
    assert waits == [10, 20, 40, 80, 160, 320, 320, 320]
