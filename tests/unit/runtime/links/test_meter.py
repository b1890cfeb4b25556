"""What a peer makes of what its lanes know of their paths."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.runtime.links.meter import PERIOD_NS, LinkMeter
from pccl.transports.base import PathMeasure
from pccl.transports.link import Link

OWN = PeerId(9)
S = NS_PER_S


class Lane:
    """A lane, which is its own connection."""

    def __init__(self) -> None:
        self.connection = self
        self.path: PathMeasure | None = None

    def measure(self) -> PathMeasure | None:
        return self.path


class Stub:
    """A link with such lanes."""

    def __init__(self, peer: PeerId, lanes: list[Lane], near: bool) -> None:
        self.peer, self.lanes, self.near = peer, lanes, near
        self.up = bool(lanes)


class Bench:
    """A meter, its clock, and links whose lanes know what a test says."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.paths: dict[int, list[PathMeasure | None]] = {}
        self.lanes: dict[tuple[int, int], Lane] = defaultdict(Lane)
        clock = SimpleNamespace(now_ns=lambda: self.time_ns)
        self.meter = LinkMeter(cast("Any", clock), cast("Any", self))

    def all(self) -> list[Any]:
        return [self.link(peer) for peer in self.paths]

    def link(self, peer: int, *, near: bool = False) -> Link:
        lanes = [self.lanes[peer, number] for number in range(len(self.paths[peer]))]
        for lane, path in zip(lanes, self.paths[peer], strict=True):
            lane.path = path
        return cast("Link", Stub(PeerId(peer), lanes, near))

    def look_at(self, *paths: PathMeasure | None) -> LinkMeasure | None:
        self.paths[1] = list(paths)
        found = self.meter.look_at(self.link(1))
        return found[0].measure if found else None

    def speed_of(self, *paths: PathMeasure) -> int:
        """What the next look says of one link with a lane for each path."""
        self.time_ns += PERIOD_NS
        self.paths = {1: list(paths)}
        return {one.peer: one.measure.bytes_per_s for one in self.meter.look(OWN)}[PeerId(1)]

    def uplink(self, *paths: PathMeasure) -> int:
        """What the next look says of the uplink, with a link for each path."""
        self.time_ns += PERIOD_NS
        self.paths = {peer: [path] for peer, path in enumerate(paths, 1)}
        return {one.peer: one.measure.bytes_per_s for one in self.meter.look(OWN)}[OWN]


def path(rtt_ns: int, speed: int, *, at_least: bool = False, limit: int = 0) -> PathMeasure:
    return PathMeasure(rtt_ns, speed, at_least, limit_bytes_per_s=limit)


def test_the_lanes_of_a_link_add_up_and_the_shortest_way_counts() -> None:
    bench = Bench()
    assert bench.look_at(path(900, 10), path(700, 20), None, path(0, 5)) == LinkMeasure(700, 35)
    assert bench.look_at() is None
    assert bench.look_at(None) is None


def test_a_link_inside_one_machine_has_no_speed_of_its_own() -> None:
    bench = Bench()
    bench.paths[1] = [path(700, 1000)]
    assert bench.meter.look_at(bench.link(1, near=True))[0].measure == LinkMeasure(700, 0)


def test_who_had_little_to_send_does_not_make_a_link_slower() -> None:
    bench = Bench()
    assert bench.look_at(path(700, 1000)) == LinkMeasure(700, 1000)
    assert bench.look_at(path(700, 10, at_least=True)) == LinkMeasure(700, 1000)
    assert bench.look_at(path(700, 3000, at_least=True)) == LinkMeasure(700, 3000)


def test_a_link_that_has_become_slower_is_believed_by_and_by() -> None:
    bench = Bench()
    speeds = [bench.look_at(path(700, speed)) for speed in (1000, 200, 200, 900)]
    assert speeds == [LinkMeasure(700, speed) for speed in (1000, 600, 400, 900)]


def test_it_looks_from_time_to_time_at_all_links_in_order() -> None:
    bench = Bench()
    bench.paths = {4: [path(7, 1)], 3: [path(8, 2)], 5: []}
    assert bench.meter.look(OWN) == ()
    bench.time_ns = PERIOD_NS
    assert bench.meter.look(OWN) == (
        MeasuredLink(PeerId(3), LinkMeasure(8, 2)),
        MeasuredLink(PeerId(4), LinkMeasure(7, 1)),
    )
    assert bench.meter.look(OWN) == ()


def test_a_short_transfer_counts_when_it_has_ended() -> None:
    """Otherwise what is on its way at one look would count as fast at the next one."""

    def carrying(nbytes: int, busy_ns: int, *, ended: bool) -> PathMeasure:
        on_the_way = 0 if ended else 70
        return replace(path(S // 10, 0), acked_bytes=nbytes, busy_ns=busy_ns,
                       unacknowledged=on_the_way)  # fmt: skip

    bench = Bench()
    assert bench.speed_of(carrying(0, S // 20, ended=False)) == 0
    assert bench.speed_of(carrying(10**6, S // 4, ended=True)) == 4 * 10**6
    # A slow one counts as soon as it has carried 64 KiB.
    bench = Bench()
    assert bench.speed_of(carrying(40_000, 2 * S, ended=False)) == 0
    assert bench.speed_of(carrying(80_000, 4 * S, ended=False)) == 20_000
    # One that takes long counts at each look: 8 round trips.
    bench = Bench()
    assert bench.speed_of(carrying(800_000, 8 * S // 10, ended=False)) == 10**6


def test_a_link_that_was_down_is_measured_anew() -> None:
    bench = Bench()
    assert bench.look_at(path(700, 1000)) == LinkMeasure(700, 1000)
    bench.paths[1] = []
    bench.time_ns = PERIOD_NS
    assert bench.meter.look(OWN) == ()
    assert bench.look_at(path(700, 10, at_least=True)) == LinkMeasure(700, 10)


def test_a_link_is_as_fast_as_the_upload_limit_however_many_lanes_it_has() -> None:
    bench = Bench()
    idle, busy = (path(700, speed, at_least=True, limit=1000) for speed in (10, 1000))
    for paths in ([idle], [idle] * 16, [busy] * 16, [busy]):
        assert bench.look_at(*paths) == LinkMeasure(700, 1000)


def test_a_path_that_is_slower_than_the_limit() -> None:
    bench = Bench()
    slow, idle = (path(700, 200, at_least=at_least, limit=1000) for at_least in (False, True))
    speeds = [bench.look_at(one) for one in (idle, slow, slow, idle)]
    assert speeds == [LinkMeasure(700, speed) for speed in (1000, 600, 400, 400)]


# -- the uplink --------------------------------------------------------------------------------


def test_the_uplink_is_what_the_busy_links_carry_at_once() -> None:
    bench = Bench()
    assert bench.uplink(busy(10**6, 500), busy(3 * 10**6, 1000)) == 4 * 10**6
    # A link that carried next to nothing does not count; the known speed falls slowly.
    falls_to = 4 * 10**6 - 4 * 10**6 // 256
    assert bench.uplink(busy(3 * 10**6, 1500), busy(3_000_100, 2000)) == falls_to
    assert bench.uplink(busy(3 * 10**6, 1500), busy(3_000_100, 2000)) == falls_to


@pytest.mark.parametrize(
    ("first", "second", "busy_ms"),
    [
        # Two seconds, in milliseconds ago: busy from, to.
        ((2000, 1100), (1000, 200), 1700),
        ((2000, 1000), (1200, 200), 1800),
        ((1000, 0), (750, 250), 1000),
        ((2000, 0), (2000, 0), 2000),
        ((3000, 2000), (1500, 500), 1500),  # at the latest, the first began with the period
    ],
)
def test_links_that_work_one_after_another_are_no_fast_uplink(
    first: tuple[int, int], second: tuple[int, int], busy_ms: int
) -> None:
    paths = [busy(9 * 10**6, since - until, ago_ms=until) for since, until in (first, second)]
    assert Bench().uplink(*paths) == 18 * 10**9 // busy_ms


def test_links_inside_a_building_do_not_use_its_line() -> None:
    inside, across = busy(10**9, 1000, rtt_ms=1), busy(10**6, 1000, rtt_ms=2)
    assert Bench().uplink(inside, across, across) == 2 * 10**6
    assert Bench().uplink(inside, inside) == 2 * 10**9


def test_a_limit_is_the_speed_of_the_uplink_until_the_line_is_slower() -> None:
    bench = Bench()
    limited = [replace(busy(0, 0), limit_bytes_per_s=10**7)] * 2
    assert bench.uplink(*limited) == 10**7
    slow = [replace(busy(10**6, 500), limit_bytes_per_s=10**7)] * 2
    assert bench.uplink(*slow) == 4 * 10**6
    fast = [replace(busy(10**6 + 10**8, 600), limit_bytes_per_s=10**7)] * 2
    assert bench.uplink(*fast) == 10**7


# -- speeds from busy time -----------------------------------------------------------------------


def busy(acked: int, busy_ms: int, rtt_ms: int = 10, ago_ms: int = 0) -> PathMeasure:
    """The kernel's own rate is that of a moment, and much higher."""
    return PathMeasure(
        rtt_ms * S // 1000,
        10**9,
        False,
        acked_bytes=acked,
        busy_ns=busy_ms * S // 1000,
        ack_ago_ms=ago_ms,
    )


def test_lanes_that_take_turns_are_not_faster_together() -> None:
    # Each of four carries 1 MB in one second, all in the same one.
    bench = Bench()
    assert bench.speed_of(*[busy(10**6, 1000)] * 4) == 4 * 10**6
    # Then the same in two seconds: 4 MB and 3/4 of 4 MB, in 2 s and 3/4 of 1 s.
    assert bench.speed_of(*[busy(2 * 10**6, 3000)] * 4) == 7_000_000 * 100 // 275


def test_a_short_transfer_shows_a_lower_bound() -> None:
    bench = Bench()
    assert bench.speed_of(busy(10**6, 1000)) == 10**6
    assert bench.speed_of(busy(1_100_000, 2000, rtt_ms=200)) == 10**6  # five round trips
    faster = bench.speed_of(busy(4_100_000, 3000, rtt_ms=200))
    assert faster == 3_750_000 * 100 // 175


def test_a_few_messages_show_nothing() -> None:
    bench = Bench()
    assert bench.speed_of(busy(1000, 1000)) == 0
    assert bench.speed_of(busy(10**6, 2000)) == 999_000
    assert bench.speed_of(busy(10**6 + 1000, 3000)) == 999_000
    assert bench.speed_of(busy(10**6 + 1000, 3000)) == 999_000
