"""Two processes agree on pulling: the four frames, lies, and losses of lanes."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import NO_OPERATION, FrameHeader, FrameKind
from pccl.protocol.limits import ANNOUNCED_PARTS_MAX
from pccl.protocol.types import PeerId
from pccl.runtime.links.pulls import Pulls
from pccl.topology.tracer import ANYONE
from pccl.transports.announcement import ASK_BYTES_MAX, AT_BYTES
from pccl.transports.link import Link
from pccl.transports.sinks import Drain

PEER = PeerId(7)
ASK, AT = FrameKind.PULL_ASK, FrameKind.PULL_AT
READY, FAILED = FrameKind.PULL_READY, FrameKind.PULL_FAILED


class Shown:
    def __init__(self, memory: FakeMemory, proof: bytes) -> None:
        self.place = (memory.ancestry[0], 1 << 12 | len(memory.shown))
        memory.shown[self.place[1]] = proof


class FakeMemory:
    """Memory of process ``pid``, and of those in ``others``."""

    pull_bytes_min = 1

    def __init__(self, pid: int) -> None:
        self.ancestry = (pid, 40, 1)
        self.shown: dict[int, bytes] = {}
        self.others: dict[int, FakeMemory] = {pid: self}
        self.near = True
        self.at_other_end = {100, 200}
        self.scope: int | None = None
        self.named: int | None = None
        self.asked: list[tuple[int, int]] = []

    def reaches(self, connection: object) -> bool:
        return self.near

    def holds(self, pid: int, connection: object) -> bool:
        return pid in self.at_other_end

    def show(self, proof: bytes) -> Shown:
        return Shown(self, proof)

    def name(self, pid: int) -> None:
        self.named = pid

    def prove(self, pid: int, address: int, proof: bytes) -> bool:
        self.asked.append((pid, address))
        other = self.others.get(pid)
        return other is not None and other.shown.get(address) == proof


class FakeLane:
    """Passes frames on to ``other``, or records them."""

    connection: Any = None
    number = 0

    def __init__(self, side: Side) -> None:
        self.link = side.link
        self.said: list[tuple[FrameKind, bytes]] = []

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        assert header == FrameHeader(header.kind, NO_OPERATION, 0, 0, len(payload))
        self.said.append((header.kind, payload))


class Side:
    """One process with a link to ``PEER``."""

    def __init__(self, pid: int = 100, *, anyone: bool = False) -> None:
        self.memory = FakeMemory(pid)
        self.failed: list[PeerId] = []
        self.link = Link(PEER)
        self._count = 0
        self.pulls = Pulls(self._memory(), self._random, self.failed.append, anyone=anyone)

    def _memory(self) -> Any:
        return self.memory

    def _random(self, count: int) -> bytes:
        self._count += 1
        return bytes([self._count]) * count

    def lane(self) -> Any:
        """One more lane is up."""
        lane: Any = FakeLane(self)
        self.link._lanes.append(lane)  # pyright: ignore[reportPrivateUsage]
        self.pulls.lane_up(lane)
        return lane

    def lose(self, lane: Any) -> None:
        assert self.link.remove(lane)
        self.pulls.lane_lost(lane)

    def hear(self, lane: Any, kind: FrameKind, payload: bytes = b"") -> None:
        """A frame arrives."""
        header = FrameHeader(kind, NO_OPERATION, 0, 0, len(payload))
        sink = self.pulls.frame_started(lane, header)
        if payload:
            sink.memory(0)[:] = payload
        sink.complete()


def ask(*ancestry: int, proof: bytes = bytes(16)) -> bytes:
    return proof + struct.pack(f"<{len(ancestry)}I", *ancestry)


def at(pid: int, address: int) -> bytes:
    return struct.pack("<IQ", pid, address)


def pair() -> tuple[Side, Side, Any, Any]:
    """Two processes that can read each other's memory, and a lane of each."""
    here, there = Side(100), Side(200)
    for memory in (here.memory, there.memory):
        memory.others = {100: here.memory, 200: there.memory}
    return here, there, here.lane(), there.lane()


def talk(here: Side, there: Side, ours: Any, theirs: Any) -> list[FrameKind]:
    """Exchange frames until nobody says anything; return the kinds, in order."""
    kinds: list[FrameKind] = []
    while ours.said or theirs.said:
        for lane, side, other in ((ours, there, theirs), (theirs, here, ours)):
            frames, lane.said[:] = list(lane.said), []
            for kind, payload in frames:
                kinds.append(kind)
                side.hear(other, kind, payload)
    return kinds


def test_both_ask_and_both_pull() -> None:
    here, there, ours, theirs = pair()
    assert ours.said == [(ASK, ask(100, 40, 1, proof=b"\1" * 16))]
    kinds = talk(here, there, ours, theirs)
    assert sorted(kinds) == [ASK, ASK, AT, AT, READY, READY]
    assert (here.link.process, there.link.process) == (200, 100)
    assert here.link.pulls
    assert there.link.pulls
    assert (here.memory.named, there.memory.named) == (None, None)  # the system does not ask


def test_one_may_read_and_the_other_may_not() -> None:
    here, there, ours, theirs = pair()
    there.memory.others = {}
    talk(here, there, ours, theirs)
    assert (here.link.process, there.link.process) == (200, None)
    assert (here.link.pulls, there.link.pulls) == (False, True)


def test_who_does_not_reach_is_not_asked() -> None:
    side = Side()
    side.memory.near = False
    lane = side.lane()
    assert lane.said == []
    side.hear(lane, ASK, ask(200))  # and gets no answer
    assert lane.said == []
    assert side.memory.shown == {}


def test_without_memory_nothing_is_said_and_nothing_is_heard() -> None:
    side = Side()
    side.pulls = Pulls(None, bytes, side.failed.append)
    lane = side.lane()
    for kind, payload in ((ASK, b"malformed"), (AT, b""), (READY, b""), (FAILED, b"")):
        side.hear(lane, kind, payload)
    assert lane.said == []
    assert not side.link.pulls
    assert side.failed == []


def test_a_link_is_asked_once() -> None:
    side = Side()
    assert [len(side.lane().said) for _ in range(3)] == [1, 0, 0]


def test_an_answer_that_nobody_asked_for() -> None:
    side = Side()
    side.memory.near = False
    lane = side.lane()
    with pytest.raises(RemoteProtocolError, match="was not asked"):
        side.hear(lane, AT, at(100, 1 << 12))
    assert side.memory.asked == []


def test_an_answer_on_another_lane() -> None:
    side = Side()
    side.lane()
    with pytest.raises(RemoteProtocolError, match="was not asked"):
        side.hear(side.lane(), AT, at(100, 1 << 12))
    assert side.memory.asked == []


@pytest.mark.parametrize("right", [True, False])
def test_one_answer_only(right: bool) -> None:
    """No process tries many addresses."""
    here, there, ours, theirs = pair()
    there.hear(theirs, *ours.said.pop())
    (answer,) = (payload for kind, payload in theirs.said if kind is AT)
    here.hear(ours, AT, answer if right else at(200, 99))
    assert (here.link.process == 200) is right
    assert ours.said == ([(READY, b"")] if right else [])
    for again in (answer, at(200, 98)):
        with pytest.raises(RemoteProtocolError, match="was not asked"):
            here.hear(ours, AT, again)
    assert len(here.memory.asked) == 1
    assert (here.link.process == 200) is right


def test_the_memory_of_another_process_is_refused() -> None:
    """The owner chooses neither the bytes nor when they are looked for."""
    here, there, ours, _ = pair()
    third = here.memory.others[300] = FakeMemory(300)
    address = third.show(bytes(16)).place[1]
    here.hear(ours, AT, at(300, address))
    assert here.link.process is None
    assert READY not in dict(ours.said)
    assert not there.link.pulls


def test_an_answer_that_is_passed_on_is_refused() -> None:
    """The owner lets a third process store the bytes, and names it: it does not hold the link."""
    here, _, ours, _ = pair()
    third = here.memory.others[300] = FakeMemory(300)
    (_, question) = ours.said.pop()
    place = third.show(question[:16]).place
    here.hear(ours, AT, at(*place))
    assert here.memory.asked == []  # it is not even read
    assert here.link.process is None
    assert ours.said == []


@pytest.mark.parametrize(
    "payload", [b"", bytes(15), bytes(20), ask(1 << 31), ask(200) + b"\1", ask((1 << 32) - 1)]
)
def test_malformed_questions(payload: bytes) -> None:
    side = Side()
    with pytest.raises(RemoteProtocolError):
        side.hear(side.lane(), ASK, payload)
    assert (side.memory.named, side.memory.shown) == (None, {})


@pytest.mark.parametrize(
    ("kind", "length"), [(ASK, ASK_BYTES_MAX), (AT, AT_BYTES), (READY, 0), (FAILED, 0)]
)
def test_payloads_that_are_too_long(kind: FrameKind, length: int) -> None:
    side = Side()
    lane = side.lane()
    side.pulls.frame_started(lane, FrameHeader(kind, NO_OPERATION, 0, 0, length))
    with pytest.raises(RemoteProtocolError, match=f"a {kind.name} has {length + 1} bytes"):
        side.pulls.frame_started(lane, FrameHeader(kind, NO_OPERATION, 0, 0, length + 1))
    without = Pulls(None, bytes, side.failed.append)
    assert isinstance(
        without.frame_started(lane, FrameHeader(kind, NO_OPERATION, 0, 0, length)), Drain
    )


def test_ready_without_an_answer_counts_nothing() -> None:
    side = Side()
    lane = side.lane()
    side.hear(lane, READY)
    assert not side.link.pulls
    side.hear(lane, ASK, ask(200))
    side.hear(lane, READY)
    assert side.link.pulls


def test_a_flood_of_questions_keeps_one_answer() -> None:
    side = Side()
    lane = side.lane()
    for number in range(1000):
        side.hear(lane, ASK, ask(200, proof=struct.pack("<QQ", number, 0)))
    assert len(side.pulls._shown) == 1  # pyright: ignore[reportPrivateUsage]


def test_after_failed_the_other_side_sends() -> None:
    here, there, ours, theirs = pair()
    talk(here, there, ours, theirs)
    there.hear(theirs, FAILED)
    assert not there.link.pulls
    assert there.failed == [PEER]
    there.hear(theirs, FAILED)  # for what was announced in between
    assert there.failed == [PEER, PEER]
    there.hear(theirs, READY)  # it has not been asked again
    assert not there.link.pulls


def test_failed_counts_though_the_link_was_down() -> None:
    """What had been announced before waited, and the other side does not pull it any more."""
    here, there, ours, theirs = pair()
    talk(here, there, ours, theirs)
    there.lose(theirs)
    assert not there.link.pulls
    there.hear(there.lane(), FAILED)
    assert there.failed == [PEER]


def test_a_link_that_is_down_is_forgotten_and_asked_again() -> None:
    here, there, ours, theirs = pair()
    talk(here, there, ours, theirs)
    here.lose(ours)
    there.lose(theirs)
    assert (here.link.process, here.link.pulls) == (None, False)
    ours, theirs = here.lane(), there.lane()
    assert ours.said == [(ASK, ask(100, 40, 1, proof=b"\2" * 16))]  # other bytes
    talk(here, there, ours, theirs)
    assert here.link.process == 200
    assert here.link.pulls


def test_an_answer_to_a_link_that_is_down_is_not_kept() -> None:
    side = Side()
    lane = side.lane()
    side.hear(lane, ASK, ask(200))
    side.lose(lane)
    side.hear(side.lane(), READY)
    assert not side.link.pulls


def test_a_question_lost_with_its_lane_is_asked_on_another() -> None:
    side = Side()
    first, second, third = (side.lane() for _ in range(3))
    side.lose(second)
    assert third.said == []
    side.lose(first)
    assert third.said == [(ASK, ask(100, 40, 1, proof=b"\2" * 16))]
    side.lose(third)
    assert len(side.lane().said) == 1


def test_an_agreement_lost_with_its_lane_is_made_again() -> None:
    """READY may not have arrived."""
    here, there, ours, theirs = pair()
    while ours.said or theirs.said:
        for lane, side, other in ((ours, there, theirs), (theirs, here, ours)):
            frames, lane.said[:] = list(lane.said), []
            for kind, payload in frames:
                if kind is not READY:
                    side.hear(other, kind, payload)
    assert (here.link.process, here.link.pulls) == (200, False)
    second, other = here.lane(), there.lane()
    here.lose(ours)
    there.lose(theirs)
    talk(here, there, second, other)
    assert here.link.pulls
    assert there.link.pulls
    assert (here.link.process, there.link.process) == (200, 100)


@pytest.mark.parametrize(
    ("ancestry", "anyone", "named"),
    [
        ((200, 40, 1), False, 40),
        ((200, 1), False, 200),
        ((200, 1), True, ANYONE),
        ((100, 40, 1), False, None),
        ((200,) * ANNOUNCED_PARTS_MAX, False, 200),
    ],
)
def test_where_the_system_asks_a_reader_is_named(
    ancestry: tuple[int, ...], anyone: bool, named: int | None
) -> None:
    side = Side(anyone=anyone)
    side.memory.scope = 1
    side.hear(side.lane(), ASK, ask(*ancestry))
    assert side.memory.named == named


def test_the_second_reader_is_answered_and_cannot_read() -> None:
    side = Side()
    side.memory.scope = 1
    lane = side.lane()
    side.hear(lane, ASK, ask(200, 1))
    side.hear(lane, ASK, ask(300, 1))
    assert side.memory.named == 200
