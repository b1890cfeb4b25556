"""One member's part in a synchronization: what it waits for, and for how long."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pccl.machines.peer.events import ComparisonDone, SyncStarved
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES, Elected
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.frames import QUESTIONS, StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.session import StateNews, StateSession
from pccl.transports.link import Links
from pccl.transports.outgoing import Payload
from tests.support.small_state import Recorder, filled

OWN, FIRST, SECOND = PeerId(1), PeerId(2), PeerId(3)
OPERATION = OperationId(1, 0, 1, 0, 0)
PIECES = 8
MAP_BYTES = PIECES * DIGEST_BYTES
STALL_NS = 10


class Scene:
    """A member that lacks what two others have."""

    def __init__(self, *, in_place: bool = False) -> None:
        self.now_ns = 0
        self.done: list[bytes] = []
        self.starved: list[str] = []
        self.compared: list[str] = []
        self.theirs = filled(2, PIECES)
        memory = filled(1, PIECES)
        self.links = Links(Recorder)
        for peer in (FIRST, SECOND):
            self.links.to(peer)
        self.session = StateSession(
            OPERATION,
            memory,
            FetchedPieces(memory, 1 << 20, in_place=in_place),
            (OWN, FIRST, SECOND),
            OWN,
            self.links,
            lambda: self.now_ns,
            STALL_NS,
            self._hear,
        )
        digest = self.theirs.piece_map.digest
        self.elected = Elected(
            7, bytes(32), digest(may_differ=False), (FIRST, SECOND), (OWN,), (OWN,)
        )
        self.session.begin(self.elected)

    def _hear(self, news: StateNews) -> None:
        if isinstance(news, ComparisonDone):
            self.compared.append(news.difference.text)
            return
        if isinstance(news, SyncStarved):
            self.starved.append(news.reason)
            return
        self.done.append(news.digest)

    def asked(self, peer: PeerId, kind: FrameKind = FrameKind.MAP_ASK) -> int:
        link = self.links.to(peer)
        assert isinstance(link, Recorder)
        return [header.kind for header, _ in link.sent].count(kind)

    def pass_time(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.session.tick()

    def hear_map(self, peer: PeerId, *, every_ns: int, until: int = MAP_BYTES) -> list[int]:
        """It comes in one frame, some bytes at a time; what the master was told meanwhile."""
        digests = self.theirs.piece_map.part(range(PIECES))
        header = FrameHeader(FrameKind.MAP, OPERATION, 0, 0, MAP_BYTES, PIECES)
        sink = self.session.frame_started(peer, header)
        told: list[int] = []
        for received in range(0, until, DIGEST_BYTES // 2):
            memory = sink.memory(received)
            memory[: DIGEST_BYTES // 2] = digests[received : received + DIGEST_BYTES // 2]
            self.pass_time(every_ns)
            told.append(self.session.progress.received_bytes)
        if until == MAP_BYTES:
            sink.complete()
        return told


def test_a_question_shows_no_progress_of_its_lane() -> None:
    """It is sent again and again if no answer comes; an answer does show progress."""
    numbers: dict[FrameKind, int] = {}

    class Numbered(Recorder):
        def send(
            self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
        ) -> None:
            numbers[header.kind] = number

    sender = StateSender(OPERATION, Links(Numbered))
    for kind in (*QUESTIONS, FrameKind.MAP, FrameKind.PIECE):
        sender.send(FIRST, kind)
    assert {kind for kind, number in numbers.items() if number < 0} == set(QUESTIONS)


def test_a_map_that_takes_longer_than_any_patience_is_waited_for() -> None:
    scene = Scene()
    asked_first = scene.asked(FIRST)
    told = scene.hear_map(FIRST if asked_first else SECOND, every_ns=STALL_NS - 1)
    assert scene.now_ns > 10 * STALL_NS
    assert scene.asked(FIRST) + scene.asked(SECOND) == 1
    assert scene.session.download.pieces is not None
    assert scene.session.download.missing == PIECES
    assert all(before < after for before, after in pairwise(told[1:]))
    assert scene.session.progress.received_bytes == MAP_BYTES


def test_a_source_that_sends_nothing_more_is_passed_over() -> None:
    scene = Scene()
    silent, other = (FIRST, SECOND) if scene.asked(FIRST) else (SECOND, FIRST)
    scene.hear_map(silent, every_ns=1, until=MAP_BYTES // 2)
    assert scene.asked(other) == 0
    scene.pass_time(STALL_NS)
    assert scene.asked(other) == 1


def test_whoever_was_passed_over_counts_when_its_map_is_here_after_all() -> None:
    scene = Scene()
    slow = FIRST if scene.asked(FIRST) else SECOND
    scene.hear_map(slow, every_ns=3 * STALL_NS)
    assert scene.session.download.pieces is not None
    assert scene.asked(slow) == 1  # what has begun need not be asked for again


def test_who_says_nothing_at_all_is_asked_again() -> None:
    """It may not have had anything to do with this operation when the question came."""
    scene = Scene()
    for _ in range(10 * STALL_NS):
        scene.pass_time(1)
    assert scene.asked(FIRST) == 10 + (scene.asked(FIRST) > scene.asked(SECOND))
    assert scene.asked(SECOND) in (9, 10, 11)
    scene.hear_map(FIRST, every_ns=1)
    assert scene.session.download.pieces is not None


def test_what_comes_a_second_time_is_no_progress() -> None:
    """A link that breaks again and again in the middle of the map brings nothing."""
    scene = Scene()
    source = FIRST if scene.asked(FIRST) else SECOND
    told = scene.hear_map(source, every_ns=1, until=MAP_BYTES // 2)
    assert told[-1] > 0
    scene.session.lane_lost(source)
    assert scene.hear_map(source, every_ns=1, until=MAP_BYTES // 2)[-1] == told[-1]


def test_what_another_election_brings_is_progress() -> None:
    scene = Scene()
    source = FIRST if scene.asked(FIRST) else SECOND
    told = scene.hear_map(source, every_ns=1, until=MAP_BYTES // 2)
    assert told[-1] > 0
    scene.session.begin(scene.elected)
    assert scene.hear_map(source, every_ns=1, until=MAP_BYTES // 2)[-1] == 2 * told[-1]


@pytest.mark.parametrize("in_place", [False, True])
def test_in_place_another_election_needs_another_attempt(*, in_place: bool) -> None:
    """Even if it elects what this member had: pieces of the first may be in its tensors."""
    scene = Scene(in_place=in_place)
    scene.hear_map(FIRST if scene.asked(FIRST) else SECOND, every_ns=1)
    assert scene.session.download.wanted == tuple(range(PIECES))
    own = scene.session.memory.piece_map.digest(may_differ=False)
    scene.session.begin(Elected(7, bytes(32), own, (OWN,), (FIRST, SECOND), ()))
    assert scene.done == ([] if in_place else [own])
    overwritten = "the election changed after this peer had overwritten its state in place"
    assert scene.starved == ([overwritten] if in_place else [])


def test_a_map_that_says_it_is_larger_than_the_state_is_not_more_progress() -> None:
    scene = Scene()
    source = FIRST if scene.asked(FIRST) else SECOND
    header = FrameHeader(FrameKind.MAP, OPERATION, 0, 1 << 60, DIGEST_BYTES, PIECES)
    sink = scene.session.frame_started(source, header)
    sink.memory(0)
    sink.memory(1)
    assert scene.session.progress.received_bytes == MAP_BYTES


def test_a_comparison_without_a_link_fails_once() -> None:
    scene, stranger = Scene(), PeerId(9)
    scene.session.compare(stranger)
    scene.session.link_changed(stranger, up=False)
    assert scene.compared == ["peer 9 could not be compared: there is no link to it"]
