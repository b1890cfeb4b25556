"""Links of several connections, on real sockets: how many there are, and lanes that are cut."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import Timing
from pccl.protocol.types import PeerId
from pccl.stress.emulator import LinkSpec, ProxyThread
from pccl.transports.link import Lane, Link
from tests.integration.conftest import Array, Run
from tests.support.insides import upkeep_of
from tests.support.ports import free_port

TIMING = Timing(
    heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, redial_min_s=0.002, redial_max_s=0.02
)
LANES = 4
pytestmark = pytest.mark.usefixtures("over_tcp")
NUMBERS = tuple(range(LANES))

Cut = Callable[[Lane], None]
"""Ends a lane from outside."""


class Crew:
    """A run, and members that may differ in how many lanes they want."""

    def __init__(self, run: Run, *wishes: int) -> None:
        self.run = run
        for wish in wishes:
            run.join(lanes=wish)

    @property
    def members(self) -> list[pccl.Communicator]:
        return self.run.members

    def link(self, one: int, other: int) -> Link:
        """From a member to another; to be used on the I/O thread."""
        session = self.members[one]._session  # pyright: ignore[reportPrivateUsage]
        return session.engine.links.to(PeerId(self.members[other].peer_id))

    def on_io_thread(self, work: Callable[[], object]) -> None:
        self.members[0]._session._io.call(work)  # pyright: ignore[reportPrivateUsage]

    def numbers(self, one: int, other: int) -> tuple[int, ...]:
        """Of the lanes from a member to another."""
        (link,) = (
            link
            for link in self.members[one].status().links
            if link.peer_id == self.members[other].peer_id
        )
        return tuple(lane.number for lane in link.lanes)

    def until_whole(self, *expected: int) -> None:
        """Wait until every link has these lanes, on both sides."""
        ranks = range(len(self.members))
        pairs = [(one, other) for one in ranks for other in ranks if one != other]
        found: dict[tuple[int, int], tuple[int, ...]] = {}

        def is_whole() -> bool:
            found.update({pair: self.numbers(*pair) for pair in pairs})
            return all(numbers == expected for numbers in found.values())

        try:
            self.run.until(is_whole)
        except AssertionError:
            decides = [upkeep_of(member) for member in self.members]
            raise AssertionError(f"lanes: {found}; upkeep: {decides}") from None

    def widen(self) -> None:
        """The first collective, after which every link of two or three has all its lanes."""
        self.run.reduce([np.full(10, 1.0) for _ in self.members], algorithm="ring")
        self.until_whole(*NUMBERS)

    def reduce_and_check(
        self, count: int, *, in_place: bool, algorithm: str = "ring"
    ) -> list[pccl.ReduceInfo]:
        """All members reduce once, and everything about it is as if no lane had been lost."""
        size = len(self.members)
        assert count % size == 0
        sends: list[Array] = [
            (np.arange(count) % 1009 * (rank + 1)).astype(np.float32) for rank in range(size)
        ]
        before = [send.copy() for send in sends]
        results = None if in_place else [np.empty(count, np.float32) for _ in sends]
        infos = self.run.reduce(sends, results, algorithm=algorithm)
        expected = (np.arange(count) % 1009 * (size * (size + 1) // 2)).astype(np.float32)
        for result in results or sends:
            np.testing.assert_array_equal(result, expected)
        if not in_place:
            for send, old in zip(sends, before, strict=True):
                np.testing.assert_array_equal(send, old)
        for info in infos:
            assert info.attempts == 1
            assert info.local_world_size == size
            assert info.rx_bytes == received_bytes(count, size)
            assert info.tx_bytes >= received_bytes(count, size)
        return infos


def received_bytes(count: int, size: int) -> int:
    """What each member of a ring or a mesh receives: twice all chunks of float32 but its own."""
    return 2 * (size - 1) * (4 * count // size)


class Trigger:
    """Acts when a member has read so many bytes from its lanes, in the middle of that read."""

    def __init__(self, lanes_of: set[Link], threshold: int, act: Callable[[Lane], None]) -> None:
        self.fired = 0
        self._links = lanes_of
        self._threshold = threshold
        self._act = act
        self._read = 0

    def saw(self, lane: Lane, nbytes: int) -> None:
        """A lane of some member has read."""
        if lane.link not in self._links:
            return
        self._read += nbytes
        if not self.fired and self._read >= self._threshold:
            self.fired += 1
            self._act(lane)


@pytest.fixture
def triggers(monkeypatch: pytest.MonkeyPatch) -> list[Trigger]:
    """Those that are armed."""
    armed: list[Trigger] = []
    read = Lane.buffer_updated

    def buffer_updated(lane: Lane, nbytes: int) -> None:
        read(lane, nbytes)
        for trigger in armed:
            trigger.saw(lane, nbytes)

    monkeypatch.setattr(Lane, "buffer_updated", buffer_updated)
    return armed


@pytest.fixture
def crew_of(new_run: Callable[..., Run]) -> Callable[..., Crew]:
    """Make a run whose members want so many lanes each."""
    return lambda *wishes: Crew(new_run(timing=TIMING), *wishes)


def reset(lane: Lane) -> None:
    """What was not sent is lost, and so is what comes; the other end is told by a reset."""
    lane.connection.abort()


def shut(lane: Lane) -> None:
    """What was sent still arrives; then both ends find the connection ended."""
    connection: Any = lane.connection
    connection._sock.shutdown(socket.SHUT_RDWR)


# -- lanes that are cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "separate"])
@pytest.mark.parametrize(("size", "algorithm"), [(2, "ring"), (3, "ring"), (3, "mesh")])
@pytest.mark.parametrize("cut_lanes", [1, LANES - 1, LANES])
def test_lanes_are_cut_at_every_point(
    crew_of: Callable[..., Crew],
    triggers: list[Trigger],
    cut_lanes: int,
    size: int,
    algorithm: str,
    in_place: bool,
) -> None:
    crew = crew_of(*[LANES] * size)
    count, points = 3 << 18, 12  # 3 MiB, in segments of 256 KiB
    crew.widen()
    for point in range(points):
        cut_at(crew, triggers, point, points, cut_lanes, count)
        crew.reduce_and_check(count, in_place=in_place, algorithm=algorithm)
        assert triggers[0].fired == 1
        crew.until_whole(*NUMBERS)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "separate"])
def test_segments_larger_than_the_kernels_buffers_are_cut(
    crew_of: Callable[..., Crew], triggers: list[Trigger], in_place: bool
) -> None:
    crew = crew_of(LANES, LANES)
    count, points = 6 << 20, 6  # 24 MiB, in segments of 768 KiB
    crew.widen()
    for point in range(points):
        cut_at(crew, triggers, point, points, 2, count)
        crew.reduce_and_check(count, in_place=in_place)
        assert triggers[0].fired == 1
        crew.until_whole(*NUMBERS)


def cut_at(
    crew: Crew, triggers: list[Trigger], point: int, points: int, lanes: int, count: int
) -> None:
    """Arm: at this point of what a member reads, so many lanes of one of its links are cut.

    From point to point it is another member, another way to end, the link to the other neighbour,
    this end or the other, and other lanes.
    """
    size = len(crew.members)
    reader = point % size
    neighbour = (reader + 1 + point // size % (size - 1)) % size
    here, there = crew.link(reader, neighbour), crew.link(neighbour, reader)
    end = there if point % 4 < 2 else here
    cut: Cut = reset if point % 3 else shut

    def act(_: Lane) -> None:
        for offset in range(lanes):
            lane = end.lane((point + offset) % LANES)
            assert lane is not None
            cut(lane)

    links = {crew.link(reader, other) for other in range(size) if other != reader}
    threshold = 1 + point * received_bytes(count, size) // points
    crew.on_io_thread(lambda: triggers.__setitem__(slice(None), [Trigger(links, threshold, act)]))


@pytest.mark.parametrize("size", [2, 3])
def test_lanes_are_cut_again_and_again(
    crew_of: Callable[..., Crew], triggers: list[Trigger], size: int
) -> None:
    crew = crew_of(*[LANES] * size)
    count, cuts = 3 << 18, 10
    crew.widen()
    links = {crew.link(one, other) for one in range(size) for other in range(size) if one != other}
    total = size * received_bytes(count, size)
    triggers[:] = [  # whichever lane reads at that moment
        Trigger(links, 1 + cut * total // cuts, reset if cut % 2 else shut) for cut in range(cuts)
    ]
    for in_place in (True, False, True):
        crew.reduce_and_check(count, in_place=in_place)
        crew.until_whole(*NUMBERS)
    assert [trigger.fired for trigger in triggers] == [1] * cuts


def reset_first(link: Link, number: int) -> None:
    for lane in link.lanes[:number]:
        reset(lane)


def test_lanes_are_cut_between_collectives(crew_of: Callable[..., Crew]) -> None:
    crew = crew_of(LANES, LANES)
    crew.widen()
    for cut_lanes in range(1, LANES + 1):
        link = crew.link(cut_lanes % 2, 1 - cut_lanes % 2)
        crew.on_io_thread(partial(reset_first, link, cut_lanes))
        crew.reduce_and_check(6000, in_place=False)
        crew.until_whole(*NUMBERS)


# -- how many there are ----------------------------------------------------------------------------


def test_traffic_uses_all_lanes(crew_of: Callable[..., Crew]) -> None:
    crew = crew_of(LANES, LANES)
    assert crew.numbers(0, 1) == crew.numbers(1, 0) == (0,)
    crew.widen()
    infos = [crew.reduce_and_check(3 << 18, in_place=False) for _ in range(2)]
    for rank, member in enumerate(crew.members):
        status = member.status()
        assert status.peer_id == member.peer_id
        (link,) = status.links
        assert link.peer_id == crew.members[1 - rank].peer_id
        assert tuple(lane.number for lane in link.lanes) == NUMBERS
        assert all(lane.sent_bytes >= 256 << 10 for lane in link.lanes)
        assert all(lane.received_bytes >= 256 << 10 for lane in link.lanes)
        payload = sum(info[rank].tx_bytes for info in infos)
        sent = sum(lane.sent_bytes for lane in link.lanes)
        assert payload < sent < payload + 10_000  # the headers, and the first collective
        assert len({lane.local for lane in link.lanes} | {lane.remote for lane in link.lanes}) == 5
    here, there = (member.status().links[0].lanes for member in crew.members)
    for mine, yours in zip(here, there, strict=True):
        assert (mine.local, mine.remote) == (yours.remote, yours.local)
        assert mine.sent_bytes == yours.received_bytes
        assert yours.sent_bytes == mine.received_bytes


@pytest.mark.parametrize(
    ("first", "second", "width"), [(0, 3, 3), (3, 0, 3), (2, 4, 4), (4, 2, 4), (1, 2, 2), (0, 0, 1)]
)
def test_the_larger_wish_counts(
    crew_of: Callable[..., Crew], first: int, second: int, width: int
) -> None:
    crew = crew_of(first, second)
    crew.run.check()
    crew.until_whole(*range(width))
    crew.reduce_and_check(60_000, in_place=True)
    crew.until_whole(*range(width))


def test_the_wish_by_another_name_or_from_the_environment(
    crew_of: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crew_of(0)
    second = crew.run.join(p2p_connection_pool_size=2)
    assert second.p2p_connection_pool_size == 2
    crew.run.check()
    crew.until_whole(0, 1)
    monkeypatch.setenv("PCCL_LANES", "3")
    third = crew.run.join()
    assert third.p2p_connection_pool_size == 3
    crew.run.reduce([np.full(10, 1.0) for _ in crew.run.members], algorithm="ring")
    crew.run.until(lambda: crew.numbers(0, 2) == crew.numbers(1, 2) == (0, 1, 2))
    assert crew.numbers(0, 1) == (0, 1)
    with pytest.raises(ValueError, match="are the same setting; give only one"):
        pccl.Communicator(crew.run.master.address, lanes=4, p2p_connection_pool_size=4)
    for lanes in (-1, 257):
        with pytest.raises(ValueError, match=r"lanes must be .* 256"):
            pccl.Communicator(crew.run.master.address, lanes=lanes)


def test_a_link_that_carries_no_collective_keeps_one_lane(crew_of: Callable[..., Crew]) -> None:
    crew = crew_of(*[LANES] * 4)
    for _ in range(2):
        crew.reduce_and_check(120_000, in_place=False)
    rank = {member.peer_id: member.rank for member in crew.members}
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]

    def distance(one: int, other: int) -> int:
        ids = [crew.members[number].peer_id for number in (one, other)]
        return (rank[ids[0]] - rank[ids[1]]) % 4

    near = [pair for pair in pairs if distance(*pair) != 2]
    far = [pair for pair in pairs if distance(*pair) == 2]
    assert (len(near), len(far)) == (8, 4)
    crew.run.until(lambda: all(crew.numbers(*pair) == NUMBERS for pair in near))
    assert [crew.numbers(*pair) for pair in far] == [(0,)] * 4


def congestion_of_system(*, is_local: bool) -> str:
    """What paces a connection: the system's choice, unless that is BBR and both are here."""
    settings = Path("/proc/sys/net/ipv4")
    if not settings.exists():
        return ""
    default = (settings / "tcp_congestion_control").read_text().strip()
    allowed = (settings / "tcp_allowed_congestion_control").read_text().split()
    return "reno" if is_local and default.startswith("bbr") and "reno" in allowed else default


def congestions(crew: Crew) -> set[str]:
    """What paces the lanes of two members."""
    return {lane.congestion for member in crew.members for lane in member.status().links[0].lanes}


def test_local_links_are_not_paced_by_a_clock(crew_of: Callable[..., Crew]) -> None:
    crew = crew_of(LANES, LANES)
    crew.widen()
    assert congestions(crew) == {congestion_of_system(is_local=True)}


if sys.platform == "linux":  # elsewhere a machine has no second loopback address by itself

    def test_a_link_between_addresses_is_as_one_between_machines(
        crew_of: Callable[..., Crew],
    ) -> None:
        crew = crew_of()
        elder, younger = crew.run.join(advertise="127.0.0.2"), crew.run.join()
        crew.run.check()
        crew.until_whole(*range(16))
        assert congestions(crew) == {congestion_of_system(is_local=False)}
        for lane in elder.status().links[0].lanes:
            assert lane.local.startswith("127.0.0.2:")
        for lane in younger.status().links[0].lanes:
            assert lane.remote == f"127.0.0.2:{elder.members()[elder.rank].port}"


# -- behind a proxy --------------------------------------------------------------------------------


def test_bits_that_flip_on_the_way_cost_lanes_and_change_nothing(
    crew_of: Callable[..., Crew], caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy damages one packet in 500: about 30 of the 15,000 that six reduces take."""
    crew, listen = crew_of(), f"127.0.0.1:{free_port()}"
    with ProxyThread(listen, LinkSpec(corrupt=0.002)) as proxy:
        crew.run.join(lanes=LANES, listen=listen, advertise=str(proxy.address))
        crew.run.join(lanes=LANES)
        for number in range(6):
            crew.reduce_and_check(1 << 19, in_place=bool(number % 2))
        proxy.change(LinkSpec())
    damaged = [r.message for r in caplog.records if "damaged on the way" in r.message]
    assert len(damaged) >= 3
    begins = ("closed a", "connection ", "lost the link")
    assert all(line.startswith(begins) for line in damaged)


@pytest.mark.parametrize("from_environment", [False, True], ids=["argument", "environment"])
def test_others_are_told_another_port_than_the_one_that_is_bound(
    crew_of: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    crew, bound = crew_of(), free_port()
    listen = f"127.0.0.1:{bound}"
    with ProxyThread(listen, LinkSpec()) as proxy:
        advertise = str(proxy.address)
        if from_environment:
            monkeypatch.setenv("PCCL_LISTEN", listen)
            monkeypatch.setenv("PCCL_ADVERTISE", advertise)
            crew.run.join(lanes=LANES)
            monkeypatch.delenv("PCCL_LISTEN")
            monkeypatch.delenv("PCCL_ADVERTISE")
        else:
            crew.run.join(lanes=LANES, listen=listen, advertise=advertise)
        crew.run.join()
        crew.widen()
        elder, younger = crew.members
        assert proxy.address.port != bound
        assert (elder.members()[elder.rank].host, elder.members()[elder.rank].port) == (
            "127.0.0.1",
            proxy.address.port,
        )
        assert {lane.local for lane in elder.status().links[0].lanes} == {listen}
        assert {lane.remote for lane in younger.status().links[0].lanes} == {advertise}
        crew.reduce_and_check(60_000, in_place=True)
        assert len(proxy.flows()) == LANES
        proxy.reset()
        crew.reduce_and_check(60_000, in_place=False)
        crew.until_whole(*NUMBERS)
        own = younger.members()[younger.rank]
        for lane in younger.status().links[0].lanes:  # after a loss, either side may be quicker
            assert lane.remote == advertise or lane.local == f"{own.host}:{own.port}"


def test_nobody_was_told_and_a_link_between_machines_gets_sixteen(
    crew_of: Callable[..., Crew],
) -> None:
    """Different addresses, as of different machines."""
    crew = crew_of()
    for host in ("127.0.0.2", "127.0.0.3"):
        door = f"{host}:{free_port()}"
        crew.run.join(listen=door, advertise=door)
    crew.run.check()
    crew.until_whole(*range(16))
    crew.reduce_and_check(60_000, in_place=False)


def test_with_a_range_of_ports_nobody_would_know_which_to_tell() -> None:
    with pytest.raises(ValueError, match="with listen, give one port for other peers to dial"):
        pccl.Communicator("127.0.0.1:1", listen="127.0.0.1:5000", advertise="127.0.0.1:5000-5001")
