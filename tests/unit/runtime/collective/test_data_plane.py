"""The data plane with hand-made frames: placement, fencing, exactly once, early frames, the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from pccl.collectives.digest import ResultDigest
from pccl.machines.peer.eager import fingerprint
from pccl.protocol.checksum import payload_hash
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.operation import Eager
from pccl.protocol.types import Algorithm, Descriptor, OperationId, PeerId, ReduceOp
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import borrow
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload

ME, OTHER, STRANGER = PeerId(1), PeerId(2), PeerId(9)
OPERATION = OperationId(term=1, group=0, view=3, tag=5, n=0)
NEXT = OperationId(term=1, group=0, view=3, tag=5, n=1)
STALE = OperationId(term=1, group=0, view=2, tag=5, n=0)


class FakeLane:
    """What the data plane sees of a lane, and a sender's way to push frames through it."""

    def __init__(self, *numbers: int, operation: OperationId = OPERATION) -> None:
        self.link: Any = None
        self.sink: Any = None
        self.carried = {operation: list(numbers)} if numbers else {}
        self.said: list[tuple[FrameHeader, bytes]] = []

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        self.said.append((header, payload))


class FakeLink(Link):
    """Remembers what was sent, as bytes at the moment of sending."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.sent: list[tuple[FrameHeader, bytes]] = []
        self.numbers: list[int] = []
        self.asked: list[FrameHeader] = []
        self.is_up = True
        self.revoked: list[OperationId] = []
        self.detached: list[OperationId] = []
        self.closed = False
        self.alive: list[Any] = []

    @property
    def lanes(self) -> tuple[Any, ...]:
        return tuple(self.alive)

    @property
    def up(self) -> bool:
        return self.is_up

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        made = payload() if callable(payload) else payload
        content = b"".join(made if isinstance(made, list) else [made])
        assert check in (None, payload_hash(content))
        self.sent.append((replace(header, check=payload_hash(content)), content))
        self.numbers.append(number)

    def ask(self, header: FrameHeader) -> None:
        if self.is_up:
            self.asked.append(header)

    def revoke(self, operation: OperationId) -> None:
        self.revoked.append(operation)

    def detach(self, operation: OperationId, payload_of: Callable[[FrameHeader], Payload]) -> None:
        self.detached.append(operation)

    def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """A data plane of peer 1 in a ring with peer 2: 8 int32, segments of 2 elements."""

    coming: set[OperationId] = field(default_factory=set[OperationId])
    done: list[tuple[OperationId, bytes]] = field(default_factory=list[tuple[OperationId, bytes]])

    def __post_init__(self) -> None:
        self.links = {peer: FakeLink(peer) for peer in (OTHER, STRANGER)}
        self.link = self.links[OTHER]
        self.plane = DataPlane(
            self.link_to,
            lambda operation: operation in self.coming,
            lambda operation, digest: self.done.append((operation, digest)),
            segment_bytes=8,
        )
        for peer in self.links:
            self.plane.expect_peer(peer)

    def link_to(self, peer: PeerId) -> Link:
        return self.links[peer]

    def post(self, operation: OperationId, send: Any, recv: Any = None) -> None:
        operand = borrow(send, recv)
        descriptor = Descriptor(DataType.INT32, ReduceOp.SUM, operand.send.size)
        self.plane.post(operation, descriptor, operand, (ME, OTHER), ME)

    def go_ahead(self, operation: OperationId, send: Any, op: ReduceOp = ReduceOp.SUM) -> None:
        """Post, and move data at once; separate buffers."""
        operand = borrow(send, np.zeros_like(send))
        descriptor = Descriptor(DataType.INT32, op, operand.send.size)
        self.plane.post(operation, descriptor, operand, (ME, OTHER), ME)
        self.plane.begin(operation, eager=Eager.SEGMENTS)

    def broadcast(self, buffer: Any, root: int) -> None:
        descriptor = Descriptor.broadcast(DataType.INT32, len(buffer), root)
        self.plane.post(OPERATION, descriptor, borrow(buffer), RING_OF_THREE, ME)

    def start(self, lane: Any, header: FrameHeader, peer: PeerId = OTHER) -> None:
        lane.link = self.links[peer]
        lane.sink = self.plane.frame_started(lane, header)

    def read(self, lane: Any, payload: bytes, received: int) -> int:
        """One read; returns how many bytes there are now."""
        memory = lane.sink.memory(received)
        take = min(len(memory), len(payload) - received)
        memory[:take] = payload[received : received + take]
        return received + take

    def lose(self, *numbers: int, peer: PeerId = OTHER) -> None:
        """A lane is gone that had been given these segments."""
        lane: Any = FakeLane(*numbers)
        lane.link = self.links[peer]
        self.plane.lane_lost(lane)

    def answer(self, lane: Any, question: int, bitmap: int, peer: PeerId = OTHER) -> None:
        """The downstream peer says what it has."""
        header = FrameHeader(FrameKind.HAVE, OPERATION, 0, question, 1)
        self.frame(lane, header, bytes([bitmap]), peer)

    def frame(self, lane: Any, header: FrameHeader, payload: bytes, peer: PeerId = OTHER) -> None:
        """A whole frame."""
        self.start(lane, replace(header, check=payload_hash(payload)), peer)
        received = 0
        while received < len(payload):
            received = self.read(lane, payload, received)
        lane.sink.complete()


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def lane() -> FakeLane:
    return FakeLane()


RING_OF_THREE = (OTHER, ME, STRANGER)
"""Segments come from OTHER and go to STRANGER."""


def data(
    step: int, offset: int, length: int = 8, operation: OperationId = OPERATION
) -> FrameHeader:
    return FrameHeader(FrameKind.DATA, operation, step, offset, length)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


# Rank 0 of 2 with 8 elements: chunk 0 is elements 0..3, chunk 1 is 4..7. It sends chunk 0 first,
# receives partials of chunk 1 at step 0 (and owns it), and takes the final chunk 0 at step 1.


def test_a_reduce_of_two(bench: Bench, lane: Any) -> None:
    send, recv = np.arange(8, dtype=np.int32), np.full(8, -1, np.int32)
    bench.post(OPERATION, send, recv)
    bench.plane.begin(OPERATION)
    assert bench.link.sent == [(data(0, 0), ints(0, 1)), (data(0, 8), ints(2, 3))]
    bench.frame(lane, data(0, 24), ints(600, 700))  # any order
    bench.frame(lane, data(0, 16), ints(400, 500))
    assert bench.link.sent[2:] == [(data(1, 24), ints(606, 707)), (data(1, 16), ints(404, 505))]
    bench.frame(lane, data(1, 0), ints(1000, 1001))
    assert bench.done == []
    bench.frame(lane, data(1, 8), ints(1002, 1003))
    assert [operation for operation, _ in bench.done] == [OPERATION]
    transfer = bench.plane.end(OPERATION, committed=True)
    assert recv.tolist() == [1000, 1001, 1002, 1003, 404, 505, 606, 707]
    assert send.tolist() == list(range(8))
    assert (transfer.tx_bytes, transfer.rx_bytes) == (32, 32)


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.STAR, Algorithm.MESH])
@pytest.mark.parametrize("committed", [True, False])
def test_an_operation_that_is_over_holds_nothing(
    bench: Bench, algorithm: Algorithm, committed: bool
) -> None:
    """Memory that is lent is large: it must not wait for the collector of reference cycles."""
    send, recv = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    lent = [weakref.ref(send), weakref.ref(recv)]
    descriptor = Descriptor(DataType.INT32, ReduceOp.SUM, 8, algorithm=algorithm)
    gc.disable()
    try:
        bench.plane.post(OPERATION, descriptor, borrow(send, recv), (ME, OTHER), ME)
        bench.plane.begin(OPERATION)
        bench.frame(FakeLane(), data(0, 0 if algorithm is not Algorithm.RING else 16), ints(1, 2))
        bench.plane.end(OPERATION, committed=committed)
        del send, recv
        assert [ref() for ref in lent] == [None, None]
    finally:
        gc.enable()


def test_payload_is_read_into_the_result_itself(bench: Bench, lane: Any) -> None:
    recv = np.zeros(8, np.int32)
    bench.post(OPERATION, np.ones(8, np.int32), recv)
    bench.start(lane, data(0, 16))
    memory = lane.sink.memory(3)
    assert len(memory) == 5
    assert np.frombuffer(memory, np.uint8).ctypes.data == recv.ctypes.data + 16 + 3


def test_second_copies_count_once(bench: Bench, lane: Any) -> None:
    recv = np.zeros(8, np.int32)
    bench.post(OPERATION, np.ones(8, np.int32), recv)
    bench.plane.begin(OPERATION)
    before = len(bench.link.sent)
    for _ in range(2):
        bench.frame(lane, data(0, 16), ints(10, 20))
    assert recv.tolist() == [0, 0, 0, 0, 11, 21, 0, 0]
    assert len(bench.link.sent) == before + 1


def test_of_two_lanes_with_the_same_segment_the_newest_has_the_place(bench: Bench) -> None:
    old: Any = FakeLane()
    new: Any = FakeLane()
    recv = np.zeros(8, np.int32)
    bench.post(OPERATION, np.ones(8, np.int32), recv)
    header, payload = data(0, 16), ints(10, 20)
    bench.start(old, header)
    bench.read(old, payload[:3], 0)
    bench.frame(new, header, payload)
    bench.read(old, b"\xff" * 8, 3)  # what the old lane still brings counts no more
    old.sink.complete()
    assert recv.tolist() == [0, 0, 0, 0, 11, 21, 0, 0]


@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_is_written_after_the_end_and_the_input_is_restored(
    bench: Bench, lane: Any, in_place: bool
) -> None:
    send = np.arange(8, dtype=np.int32)
    recv = send if in_place else np.zeros(8, np.int32)
    bench.post(OPERATION, send, recv)
    bench.plane.begin(OPERATION)
    bench.frame(lane, data(0, 24), ints(600, 700))
    header, payload = data(0, 16), ints(400, 500)
    bench.start(lane, header)
    received = bench.read(lane, payload[:5], 0)
    bench.plane.end(OPERATION, committed=False)
    assert send.tolist() == list(range(8))
    assert bench.link.revoked == [OPERATION]
    after = recv.copy()
    bench.read(lane, payload, received)
    lane.sink.complete()
    assert recv.tolist() == after.tolist()
    assert bench.done == []


def test_restored_also_after_the_own_part_was_complete(bench: Bench, lane: Any) -> None:
    buffer = np.arange(8, dtype=np.int32)
    bench.post(OPERATION, buffer)
    bench.plane.begin(OPERATION)
    for header in (data(0, 16), data(0, 24), data(1, 0), data(1, 8)):
        bench.frame(lane, header, ints(7, 7))
    assert len(bench.done) == 1
    assert buffer.tolist() != list(range(8))
    bench.plane.end(OPERATION, committed=False)
    assert buffer.tolist() == list(range(8))


@pytest.mark.parametrize("operation", [STALE, NEXT])
def test_frames_of_another_attempt_are_drained(
    bench: Bench, lane: Any, operation: OperationId
) -> None:
    recv = np.zeros(8, np.int32)
    bench.post(OPERATION, np.ones(8, np.int32), recv)
    bench.frame(lane, data(0, 16, operation=operation), ints(9, 9))
    assert recv.tolist() == [0] * 8


@pytest.mark.parametrize(
    ("header", "peer"),
    [
        (data(0, 16), STRANGER),
        (data(0, 0), OTHER),  # chunk 0 is not received at step 0
        (data(0, 17), OTHER),
        (data(0, 16, length=4), OTHER),
        (data(0, 24, length=16), OTHER),
        (data(2, 0), OTHER),
        (data(0, 1 << 60), OTHER),
        (data(0, 16, length=0), OTHER),
        (FrameHeader(FrameKind.HAVE, OPERATION, 0, 0, 2 << 20), OTHER),
    ],
)
def test_frames_that_nobody_may_send(
    bench: Bench, lane: Any, header: FrameHeader, peer: PeerId
) -> None:
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    with pytest.raises(RemoteProtocolError):
        bench.start(lane, header, peer)


def test_early_frames_wait_for_their_operation(bench: Bench, lane: Any) -> None:
    bench.coming.add(OPERATION)
    bench.frame(lane, data(0, 16), ints(400, 500))
    half = data(0, 24)
    bench.start(lane, half)
    received = bench.read(lane, ints(600, 700)[:3], 0)
    send, recv = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    bench.post(OPERATION, send, recv)
    assert recv.tolist() == [0, 0, 0, 0, 404, 505, 0, 0]
    bench.read(lane, ints(600, 700), received)  # it had begun before the post
    lane.sink.complete()
    assert recv.tolist() == [0, 0, 0, 0, 404, 505, 606, 707]


def test_early_frames_are_bounded(bench: Bench, lane: Any) -> None:
    bench.coming.add(OPERATION)
    chunk = 64 << 10
    for number in range(3):
        bench.frame(lane, data(0, number * chunk, chunk), bytes(chunk))
    with pytest.raises(RemoteProtocolError, match="of frames before this peer"):
        bench.start(lane, data(0, 3 * chunk, chunk))


def test_early_frames_of_closed_views_are_forgotten(bench: Bench, lane: Any) -> None:
    bench.coming.add(OPERATION)
    chunk = 200 << 10
    bench.frame(lane, data(0, 0, chunk), bytes(chunk))
    bench.coming = {NEXT}
    bench.plane.forget_early()
    bench.frame(lane, data(0, 0, chunk, NEXT), bytes(chunk))


def test_an_early_frame_cut_off_gives_its_memory_back(bench: Bench) -> None:
    bench.coming.add(OPERATION)
    chunk = 200 << 10
    for _ in range(3):
        lane: Any = FakeLane()
        bench.start(lane, data(0, 0, chunk))
        lane.sink.lost()


def test_early_frames_that_make_no_sense_close_the_link(bench: Bench, lane: Any) -> None:
    bench.coming.add(OPERATION)
    bench.frame(lane, data(0, 17), ints(1, 2))
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    assert bench.link.closed


# -- ahead of the start ------------------------------------------------------------------------


def test_what_goes_ahead_says_what_was_asked_for(bench: Bench, lane: Any) -> None:
    bench.go_ahead(OPERATION, np.arange(8, dtype=np.int32))
    what = fingerprint(Descriptor(DataType.INT32, ReduceOp.SUM, 8), ())
    assert [header for header, _ in bench.link.sent] == [
        replace(data(0, 0), what=what),
        replace(data(0, 8), what=what),
    ]
    for header in (data(0, 16), data(0, 24), data(1, 0), data(1, 8)):
        bench.frame(lane, replace(header, what=what), ints(7, 7))
    assert [operation for operation, _ in bench.done] == [OPERATION]
    assert len(bench.link.sent) == 4


def test_of_another_descriptor_nothing_is_taken(bench: Bench, lane: Any) -> None:
    """Else one could be done with a result of two different things."""
    bench.go_ahead(OPERATION, np.arange(8, dtype=np.int32))
    other = fingerprint(Descriptor(DataType.INT32, ReduceOp.MAX, 8), ())
    for header in (data(0, 16), data(0, 24), data(1, 0), data(1, 8)):
        bench.frame(lane, replace(header, what=other), ints(7, 7))
    assert bench.done == []
    assert bench.plane.progress() == ()  # it is not known to have started
    bench.plane.begin(OPERATION)
    assert bench.plane.progress() == (Progress(OPERATION, 0, 2, 0),)
    assert not bench.link.closed  # the master tells everybody who has asked for what


def test_of_another_descriptor_nothing_is_a_fault_before_the_start(bench: Bench, lane: Any) -> None:
    bench.coming.add(OPERATION)
    what = fingerprint(Descriptor(DataType.INT32, ReduceOp.SUM, 1 << 20), ())
    larger = replace(data(0, 1 << 20, 4), what=what)
    bench.frame(lane, larger, ints(7))  # before it is posted here
    bench.frame(lane, replace(query(1), what=what), b"")
    bench.link.alive.append(lane)
    bench.go_ahead(OPERATION, np.arange(8, dtype=np.int32))
    bench.frame(lane, larger, ints(7))
    bench.frame(lane, larger, ints(7), STRANGER)
    bench.frame(lane, replace(query(2), what=what), b"")
    bench.start(lane, replace(FrameHeader(FrameKind.HAVE, OPERATION, 0, 1, 77), what=what))
    assert lane.said == []
    assert not any(link.closed for link in bench.links.values())
    bench.plane.begin(OPERATION)  # so all have asked for the same
    with pytest.raises(RemoteProtocolError, match="unexpected segment"):
        bench.start(lane, larger)


def test_who_waits_for_the_start_sends_nothing_on_before_it(bench: Bench, lane: Any) -> None:
    """Otherwise it would send ahead what it has no account of."""
    bench.coming.add(OPERATION)
    bench.frame(lane, data(0, 16), ints(10, 20))
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    bench.frame(lane, data(0, 24), ints(30, 40))
    assert bench.link.sent == []
    bench.plane.begin(OPERATION)
    assert sorted(bench.link.sent, key=lambda sent: sent[0].offset)[2:] == [
        (data(1, 16), ints(11, 21)),
        (data(1, 24), ints(31, 41)),
    ]
    assert len(bench.link.sent) == 4


def test_a_lane_is_not_suspect_before_the_start(bench: Bench) -> None:
    bench.go_ahead(OPERATION, np.arange(8, dtype=np.int32))
    assert not bench.plane.uses(OTHER)  # it may not have made the call
    bench.plane.begin(OPERATION)
    assert bench.plane.uses(OTHER)
    assert len(bench.link.sent) == 2  # it had begun


def test_a_question_that_comes_early_is_answered_when_the_operation_is_posted(
    bench: Bench, lane: Any
) -> None:
    bench.coming.add(OPERATION)
    bench.frame(lane, data(0, 16), ints(10, 20))
    for number in (1, 2):
        bench.frame(lane, query(number), b"")
    assert lane.said == []
    bench.link.alive.append(lane)
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    assert lane.said == [(FrameHeader(FrameKind.HAVE, OPERATION, 0, 2, 1), b"\x01")]


def test_early_questions_are_bounded(bench: Bench, lane: Any) -> None:
    bench.coming.update(replace(OPERATION, n=n) for n in range(6000))
    for n in range((256 << 10) // HEADER_BYTES):
        bench.frame(lane, replace(query(1), operation=replace(OPERATION, n=n)), b"")
        bench.frame(lane, replace(query(2), operation=replace(OPERATION, n=n)), b"")
    with pytest.raises(RemoteProtocolError, match="of frames before this peer"):
        bench.frame(lane, replace(query(1), operation=replace(OPERATION, n=5999)), b"")
    bench.coming.clear()
    bench.plane.forget_early()
    bench.coming.add(OPERATION)
    chunk = (256 << 10) - HEADER_BYTES
    bench.frame(lane, data(0, 0, chunk), bytes(chunk))


# -- lost lanes --------------------------------------------------------------------------------


def query(question: int) -> FrameHeader:
    return FrameHeader(FrameKind.QUERY, OPERATION, 0, question, 0)


def sending() -> Bench:
    """Numbers 0 and 1 have been sent (of 0 to 3: two of step 0, two of step 1)."""
    bench = Bench()
    bench.post(OPERATION, np.arange(8, dtype=np.int32), np.zeros(8, np.int32))
    bench.plane.begin(OPERATION)
    assert bench.link.numbers == [0, 1]
    bench.link.sent.clear()
    return bench


def test_after_a_lost_link_only_what_is_lacking_is_sent_again(lane: Any) -> None:
    bench = sending()
    bench.link.is_up = False
    bench.lose(0, 1)
    bench.frame(lane, data(0, 16), ints(400, 500))  # ready for step 1: waits in the link
    assert bench.link.sent == [(data(1, 16), ints(404, 505))]
    assert bench.link.asked == []
    bench.link.is_up = True
    bench.plane.lane_up(OTHER)
    assert bench.link.asked == [query(1)]
    # the other side lacks number 1 (step 0, second segment), 2 and 3 (step 1); 3 is not ready yet
    bench.answer(lane, 1, 0b0001)
    assert bench.link.sent[1:] == [(data(0, 8), ints(2, 3))]
    bench.frame(lane, data(0, 24), ints(600, 700))
    assert bench.link.sent[2:] == [(data(1, 24), ints(606, 707))]
    assert bench.link.numbers == [0, 1, 2, 1, 3]


def test_of_several_lanes_one_is_lost(lane: Any) -> None:
    """Asked at once: only what was on it, and is lacking, is sent again, and once."""
    bench = sending()
    bench.lose(1)
    assert bench.link.asked == [query(1)]
    assert bench.link.sent == []  # it may have arrived
    bench.answer(lane, 1, 0b0000)  # 0 is lacking, too: it is on its way on another lane
    assert bench.link.sent == [(data(0, 8), ints(2, 3))]
    for _ in range(2):  # the question went out on every lane: there are more answers
        bench.answer(lane, 1, 0b0000)
    assert len(bench.link.sent) == 1
    bench.plane.lane_up(OTHER)  # nothing is in doubt
    assert bench.link.asked == [query(1)]


def test_a_lost_lane_whose_segments_have_arrived(lane: Any) -> None:
    bench = sending()
    bench.lose(0, 1)
    bench.answer(lane, 1, 0b0011)
    assert bench.link.sent == []
    bench.answer(lane, 1, 0b0000)
    assert bench.link.sent == []


def test_a_lane_that_carried_nothing_of_it() -> None:
    bench = sending()
    bench.lose()
    other: Any = FakeLane(0, 1, operation=NEXT)
    other.link = bench.link
    bench.plane.lane_lost(other)
    bench.plane.lane_up(OTHER)
    assert bench.link.asked == []


def test_a_link_that_was_never_up_has_nothing_doubtful(bench: Bench) -> None:
    bench.link.is_up = False
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    bench.plane.begin(OPERATION)
    bench.link.is_up = True
    bench.plane.lane_up(OTHER)
    assert bench.link.asked == []
    assert bench.link.numbers == [0, 1]


def test_two_losses_are_settled_by_the_newest_answer(lane: Any) -> None:
    bench = sending()
    bench.lose(0)
    bench.lose(1)
    assert bench.link.asked == [query(1), query(2)]
    bench.answer(lane, 2, 0b0000)
    assert bench.link.sent == [(data(0, 0), ints(0, 1)), (data(0, 8), ints(2, 3))]
    bench.answer(lane, 1, 0b0000)  # late
    assert len(bench.link.sent) == 2


def test_an_answer_says_nothing_about_what_was_lost_after_the_question(lane: Any) -> None:
    """Number 1 was on its way on the second lane when the answer to the first loss was given."""
    bench = sending()
    bench.lose(0)
    bench.lose(1)
    bench.answer(lane, 1, 0b0000)
    assert bench.link.sent == [(data(0, 0), ints(0, 1))]
    bench.answer(lane, 2, 0b0010)  # meanwhile it has arrived
    assert len(bench.link.sent) == 1


def test_a_repeated_segment_that_is_lost_again(lane: Any) -> None:
    bench = sending()
    bench.lose(0, 1)
    bench.answer(lane, 1, 0b0010)
    bench.lose(0)
    assert bench.link.asked == [query(1), query(2)]
    bench.answer(lane, 1, 0b0010)  # another lane's answer to the first question: too old
    assert len(bench.link.sent) == 1
    bench.answer(lane, 2, 0b0010)
    assert bench.link.sent == [(data(0, 0), ints(0, 1))] * 2
    transfer = bench.plane.end(OPERATION, committed=True)
    assert transfer.tx_bytes == 32


def test_the_same_segment_in_doubt_twice_is_sent_again_once(lane: Any) -> None:
    """Two copies were under way on two lanes, and both lanes are lost."""
    bench = sending()
    bench.lose(0)
    bench.lose(0)
    bench.answer(lane, 1, 0b0000)
    assert bench.link.sent == []  # the second lane's copy may have come since
    bench.answer(lane, 2, 0b0000)
    assert len(bench.link.sent) == 1


def test_every_lane_that_comes_up_is_asked() -> None:
    """All those that were asked before may be lost, or dead, before they answer."""
    bench = sending()
    bench.lose(0)
    for _ in range(3):
        bench.plane.lane_up(OTHER)
    assert bench.link.asked == [query(1)] * 4
    bench.plane.lane_up(STRANGER)
    assert bench.links[STRANGER].asked == []


@pytest.mark.parametrize(("losses", "question"), [(0, 0), (0, 1), (2, 0), (2, 3)])
def test_an_answer_to_a_question_that_nobody_asked(lane: Any, losses: int, question: int) -> None:
    bench = sending()
    for number in range(losses):
        bench.lose(number)
    with pytest.raises(RemoteProtocolError, match=f"{question}, not one from 1 to {losses}"):
        bench.answer(lane, question, 0b0000)
    assert bench.link.sent == []
    if losses:
        bench.answer(lane, losses, 0b0000)
    assert len(bench.link.sent) == losses


def test_answers_of_anybody_else_say_nothing(lane: Any) -> None:
    bench = sending()
    bench.lose(0, 1)
    bench.answer(lane, 1, 0b0000, peer=STRANGER)
    other = FrameHeader(FrameKind.HAVE, NEXT, 0, 1, 1)
    bench.frame(lane, other, bytes(1))
    assert bench.link.sent == []


@pytest.mark.parametrize("length", [0, 2, 100])
def test_an_answer_of_the_wrong_length(lane: Any, length: int) -> None:
    bench = sending()
    bench.lose(0, 1)
    with pytest.raises(RemoteProtocolError, match=f"a bitmap of {length} bytes does not fit "):
        bench.frame(lane, FrameHeader(FrameKind.HAVE, OPERATION, 0, 1, length), bytes(length))
    bench.answer(lane, 1, 0b0011)
    assert bench.link.sent == []


def test_a_query_is_answered_on_its_lane_with_what_is_here(bench: Bench, lane: Any) -> None:
    another: Any = FakeLane()
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    bench.frame(another, data(0, 24), ints(1, 1))
    bench.frame(lane, query(7), b"")
    assert lane.said == [(FrameHeader(FrameKind.HAVE, OPERATION, 0, 7, 1), bytes([0b0010]))]
    assert another.said == []


@pytest.mark.parametrize("operation", [STALE, NEXT])
def test_a_query_of_another_attempt_is_not_answered(
    bench: Bench, lane: Any, operation: OperationId
) -> None:
    bench.post(OPERATION, np.ones(8, np.int32), np.zeros(8, np.int32))
    bench.frame(lane, FrameHeader(FrameKind.QUERY, operation, 0, 1, 0), b"")
    bench.frame(lane, query(1), b"", peer=STRANGER)  # not upstream
    assert lane.said == []


def test_a_link_is_used_while_anything_may_be_under_way_on_it(bench: Bench, lane: Any) -> None:
    bench.post(OPERATION, np.arange(8, dtype=np.int32), np.zeros(8, np.int32))
    assert not bench.plane.uses(OTHER)  # somebody has not asked yet, which may take hours
    bench.plane.begin(OPERATION)
    assert bench.plane.uses(OTHER)
    assert not bench.plane.uses(STRANGER)
    for header in (data(0, 16), data(0, 24), data(1, 0), data(1, 8)):
        bench.frame(lane, header, ints(7, 7))
    assert len(bench.done) == 1
    assert bench.plane.uses(OTHER)  # what was sent may be stuck in a lane that is dead
    bench.plane.end(OPERATION, committed=True)
    assert not bench.plane.uses(OTHER)


# -- broadcast ---------------------------------------------------------------------------------


def digest_of(*segments: bytes) -> bytes:
    digest = ResultDigest(len(segments))
    for position, segment in enumerate(segments):
        digest.add(position, memoryview(segment))
    return digest.value()


def test_the_root_of_a_broadcast_is_done_as_soon_as_it_begins(bench: Bench) -> None:
    buffer = np.arange(5, dtype=np.int32)
    bench.broadcast(buffer, root=1)
    assert (bench.links[STRANGER].sent, bench.done) == ([], [])
    bench.plane.begin(OPERATION)
    assert bench.links[STRANGER].sent == [
        (data(0, 0), ints(0, 1)),
        (data(0, 8), ints(2, 3)),
        (data(0, 16, length=4), ints(4)),
    ]
    assert bench.done == [(OPERATION, digest_of(ints(0, 1), ints(2, 3), ints(4)))]
    assert bench.plane.progress() == (Progress(OPERATION, 0, 3, 0),)
    assert bench.plane.uses(STRANGER)
    assert not bench.plane.uses(OTHER)
    transfer = bench.plane.end(OPERATION, committed=True)
    assert (transfer.tx_bytes, transfer.rx_bytes) == (20, 0)
    assert buffer.tolist() == [0, 1, 2, 3, 4]


def test_the_engine_may_look_and_end_from_within_on_done() -> None:
    """``on_done`` comes from within ``begin`` where nothing is to be received."""
    seen: list[tuple[bool, int, tuple[Progress, ...]]] = []
    link = FakeLink(STRANGER)

    def on_done(operation: OperationId, digest: bytes) -> None:
        transfer = plane.transfers[operation]
        seen.append((transfer.begun, transfer.lacking, plane.progress()))
        plane.end(operation, committed=True)

    plane = DataPlane(lambda peer: link, lambda operation: False, on_done, segment_bytes=8)
    descriptor = Descriptor.broadcast(DataType.INT32, 2, root=1)
    plane.post(OPERATION, descriptor, borrow(np.ones(2, np.int32)), RING_OF_THREE, ME)
    plane.begin(OPERATION)
    assert seen == [(True, 0, (Progress(OPERATION, 0, 1, 0),))]
    assert len(link.sent) == 1
    assert plane.transfers == {}


@pytest.mark.parametrize("header", [data(0, 0), data(1, 0), data(2, 0), data(65535, 0)])
def test_the_root_of_a_broadcast_is_sent_nothing(bench: Bench, header: FrameHeader) -> None:
    bench.broadcast(np.ones(4, np.int32), root=1)
    with pytest.raises(RemoteProtocolError, match="not upstream"):
        bench.start(FakeLane(), header)


def test_a_rank_in_the_middle_forwards_what_arrives(bench: Bench, lane: Any) -> None:
    buffer = np.zeros(4, np.int32)
    bench.broadcast(buffer, root=0)
    bench.plane.begin(OPERATION)
    assert bench.links[STRANGER].sent == []
    assert bench.plane.uses(OTHER)
    bench.frame(lane, data(0, 8), ints(7, 8))
    bench.frame(lane, data(0, 8), ints(9, 9))  # a second copy
    assert bench.links[STRANGER].sent == [(data(1, 8), ints(7, 8))]
    assert bench.done == []
    bench.frame(lane, data(0, 0), ints(5, 6))
    assert bench.links[STRANGER].sent[1:] == [(data(1, 0), ints(5, 6))]
    assert bench.done == [(OPERATION, digest_of(ints(5, 6), ints(7, 8)))]
    assert not bench.plane.uses(OTHER)  # it has everything, and sends there nothing
    assert bench.plane.uses(STRANGER)
    bench.plane.end(OPERATION, committed=True)
    assert buffer.tolist() == [5, 6, 7, 8]


def test_nobody_is_done_before_it_has_begun(bench: Bench, lane: Any) -> None:
    """The news that all have asked may come later than all the data."""
    bench.broadcast(np.zeros(2, np.int32), root=0)
    bench.frame(lane, data(0, 0), ints(5, 6))
    assert bench.done == []
    bench.plane.begin(OPERATION)
    assert bench.links[STRANGER].sent == [(data(1, 0), ints(5, 6))]
    assert bench.done == [(OPERATION, digest_of(ints(5, 6)))]


def test_an_aborted_broadcast_leaves_the_buffer_as_it_was(bench: Bench, lane: Any) -> None:
    buffer = np.arange(6, dtype=np.int32)
    bench.broadcast(buffer, root=0)
    bench.plane.begin(OPERATION)
    bench.frame(lane, data(0, 8), ints(7, 8))
    header, payload = data(0, 0), ints(5, 6)
    bench.start(lane, header)
    received = bench.read(lane, payload[:3], 0)
    assert buffer.tolist() != list(range(6))
    bench.plane.end(OPERATION, committed=False)
    bench.read(lane, payload, received)
    lane.sink.complete()
    assert buffer.tolist() == list(range(6))
    assert bench.done == []


def test_after_a_lost_link_the_root_repeats_what_is_lacking(bench: Bench, lane: Any) -> None:
    link = bench.links[STRANGER]
    bench.broadcast(np.arange(6, dtype=np.int32), root=1)
    bench.plane.begin(OPERATION)
    link.sent.clear()
    bench.lose(0, 1, 2, peer=STRANGER)
    assert link.asked == [query(1)]
    bench.answer(lane, 1, 0b101, peer=STRANGER)
    assert link.sent == [(data(0, 8), ints(2, 3))]


def test_the_last_rank_of_a_broadcast_asks_nothing_and_answers(bench: Bench, lane: Any) -> None:
    bench.broadcast(np.zeros(4, np.int32), root=2)  # STRANGER, OTHER, ME
    bench.links[STRANGER].is_up = False
    bench.plane.begin(OPERATION)
    bench.links[STRANGER].is_up = True
    bench.plane.lane_up(STRANGER)
    assert not bench.plane.uses(STRANGER)
    bench.frame(lane, data(1, 8), ints(7, 8))
    bench.frame(lane, query(3), b"")
    assert lane.said == [(FrameHeader(FrameKind.HAVE, OPERATION, 0, 3, 1), bytes([0b10]))]
    assert bench.links[STRANGER].sent == []
    assert bench.links[STRANGER].asked == []


def test_who_left_after_he_was_done_repeats_from_a_copy(bench: Bench, lane: Any) -> None:
    link = bench.links[STRANGER]
    buffer = np.arange(6, dtype=np.int32)
    bench.broadcast(buffer, root=1)
    bench.plane.begin(OPERATION)
    bench.plane.detach(OPERATION)
    assert link.detached == [OPERATION]
    buffer[:] = 9
    link.sent.clear()
    bench.lose(0, 1, 2, peer=STRANGER)
    bench.answer(lane, 1, 0b101, peer=STRANGER)
    assert link.sent == [(data(0, 8), ints(2, 3))]
    bench.plane.end(OPERATION, committed=False)
    assert buffer.tolist() == [9] * 6


@pytest.mark.parametrize("in_place", [False, True])
def test_who_leaves_after_he_was_done_has_his_input(
    bench: Bench, lane: Any, in_place: bool
) -> None:
    send = np.arange(8, dtype=np.int32)
    recv = send if in_place else np.zeros(8, np.int32)
    bench.post(OPERATION, send, recv)
    bench.plane.begin(OPERATION)
    for header in (data(0, 16), data(0, 24), data(1, 0), data(1, 8)):
        bench.frame(lane, header, ints(70, 70))
    bench.plane.detach(OPERATION)
    assert send.tolist() == list(range(8))
    send[:], recv[:] = -1, -1
    bench.link.sent.clear()
    bench.lose(0, 1, 2, 3)
    bench.answer(lane, 1, 0b0011)
    assert bench.link.sent == [(data(1, 16), ints(74, 75)), (data(1, 24), ints(76, 77))]
    bench.frame(lane, data(0, 16), ints(1, 1))  # a second copy
    bench.plane.end(OPERATION, committed=True)
    assert (send == -1).all()
    assert (recv == -1).all()


# -- barrier -----------------------------------------------------------------------------------


def test_a_barrier_moves_nothing_and_is_done_as_it_begins(bench: Bench) -> None:
    bench.plane.post(OPERATION, Descriptor.barrier(), None, RING_OF_THREE, ME)
    assert bench.done == []
    bench.plane.begin(OPERATION)
    assert bench.done == [(OPERATION, digest_of())]
    bench.plane.lane_up(STRANGER)
    assert not bench.plane.uses(OTHER)
    assert not bench.plane.uses(STRANGER)
    assert bench.plane.progress() == (Progress(OPERATION, 0, 0, 0),)
    for header in (data(0, 0, length=0), data(0, 0), data(1, 0)):
        with pytest.raises(RemoteProtocolError, match="not upstream"):
            bench.start(FakeLane(), header)
    transfer = bench.plane.end(OPERATION, committed=True)
    assert (transfer.tx_bytes, transfer.rx_bytes) == (0, 0)
    assert [link.sent for link in bench.links.values()] == [[], []]
    assert [link.asked for link in bench.links.values()] == [[], []]


# -- gaps ------------------------------------------------------------------------------------------


def test_behind_a_gap_segments_come_from_the_one_before_it_and_from_nobody_else(
    bench: Bench, lane: Any
) -> None:
    """The chain was STRANGER, OTHER, ME; then OTHER is lost."""
    buffer = np.zeros(4, np.int32)
    bench.broadcast(buffer, root=2)
    bench.plane.begin(OPERATION)
    first: Any = FakeLane()
    bench.frame(first, data(1, 0), ints(1, 2))
    half: Any = FakeLane()
    bench.start(half, data(1, 8))
    bench.read(half, ints(9, 9)[:3], 0)
    with pytest.raises(RemoteProtocolError, match="not upstream"):
        bench.start(lane, data(1, 8), STRANGER)
    assert bench.plane.close_gap(OPERATION, STRANGER, 1)
    assert bench.plane.uses(STRANGER)
    with pytest.raises(RemoteProtocolError, match="not upstream"):
        bench.start(lane, data(1, 8), OTHER)
    bench.start(lane, FrameHeader(FrameKind.QUERY, OPERATION, 0, 1, 0), STRANGER)
    lane.sink.complete()
    assert lane.said == [(FrameHeader(FrameKind.HAVE, OPERATION, 0, 1, 1), b"\x01")]
    bench.frame(lane, data(1, 8), ints(3, 4), STRANGER)
    bench.read(half, ints(9, 9), 3)  # what the lost one still had on its way
    half.sink.complete()
    assert buffer.tolist() == [1, 2, 3, 4]
    assert len(bench.done) == 1


def test_a_gap_is_not_closed_without_what_only_the_lost_ones_have_or_without_a_link(
    lane: Any,
) -> None:
    bench = Bench()
    bench.broadcast(np.zeros(4, np.int32), root=0)  # OTHER is the root
    bench.plane.begin(OPERATION)
    bench.frame(lane, data(0, 0), ints(1, 2))
    assert not bench.plane.close_gap(OPERATION, STRANGER, 1)
    bench.frame(lane, data(0, 8), ints(3, 4))
    bench.links[STRANGER].is_up = False
    assert bench.plane.close_gap(OPERATION, STRANGER, 1)  # nothing is missing at all
    bench = Bench()
    bench.broadcast(np.zeros(4, np.int32), root=2)
    bench.links[STRANGER].is_up = False
    assert not bench.plane.close_gap(OPERATION, STRANGER, 1)
    assert not bench.plane.uses(STRANGER)


def test_across_a_gap_goes_what_is_missing_behind_it(bench: Bench, lane: Any) -> None:
    """The chain is ME, STRANGER, OTHER; then STRANGER is lost, with all that was sent to it."""
    bench.broadcast(np.array([1, 2, 3, 4], np.int32), root=1)
    bench.plane.begin(OPERATION)
    assert len(bench.links[STRANGER].sent) == 2
    bench.plane.send_across(OPERATION, OTHER, 1)
    assert bench.links[STRANGER].revoked == [OPERATION]
    assert bench.plane.uses(OTHER)
    assert not bench.plane.uses(STRANGER)
    question = FrameHeader(FrameKind.QUERY, OPERATION, 0, 1, 0)
    assert bench.link.asked == [question]
    bench.plane.send_across(OPERATION, OTHER, 1)  # told twice
    bench.lose(0, 1, peer=STRANGER)  # the lane to the lost one ends
    assert bench.link.asked == [question]
    bench.answer(lane, 1, 0b01)
    assert bench.link.sent == [(data(1, 8), ints(3, 4))]
    bench.lose(1)  # the lane that it was given
    assert bench.link.asked[1:] == [FrameHeader(FrameKind.QUERY, OPERATION, 0, 2, 0)]
    bench.answer(lane, 2, 0b01)
    assert bench.link.sent[1:] == [(data(1, 8), ints(3, 4))]
    bench.plane.end(OPERATION, committed=True)
    assert bench.link.revoked == [OPERATION]


def test_what_becomes_final_later_goes_across_at_once(bench: Bench, lane: Any) -> None:
    """The chain is OTHER, ME, STRANGER in a ring; everything behind the gap is there already."""
    bench.broadcast(np.zeros(4, np.int32), root=0)
    bench.plane.begin(OPERATION)
    bench.frame(lane, data(0, 0), ints(1, 2))
    bench.plane.send_across(OPERATION, OTHER, 1)  # the root: it needs nothing
    bench.frame(lane, data(0, 8), ints(3, 4))
    assert bench.link.asked == []
    assert bench.link.sent == []
    assert len(bench.done) == 1
