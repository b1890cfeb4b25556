"""Lanes and links over connections that take as many bytes as a test allows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain
from itertools import count as counting
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pccl.protocol.checksum import DamagedData
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import (
    HEADER_BYTES,
    NO_OPERATION,
    FrameHeader,
    FrameKind,
    Moved,
    decode_header,
    encode_header,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.transports.base import Address, PathMeasure, Receiver
from pccl.transports.link import LONG_FRAME_NS, Lane, Link
from pccl.transports.outgoing import Frame
from pccl.transports.sinks import Sink
from tests.support.frames import encode_frame

OPERATION = OperationId(term=1, group=0, view=3, tag=5, n=0)
ANOTHER = OperationId(term=1, group=0, view=3, tag=6, n=0)
PING = FrameHeader(FrameKind.PING, NO_OPERATION, 0, 0, 0)
PONG = FrameHeader(FrameKind.PONG, NO_OPERATION, 0, 0, 0)
PLENTY = 1 << 30


class FakeConnection:
    """Takes ``room`` bytes; more when a test grants it more."""

    def __init__(self, room: int = 0) -> None:
        self.remote, self.local, self.congestion = Address("there", 1), Address("here", 1), ""
        self.room = room
        self.sent = bytearray()
        self.wants_room = False
        self.ended = ""
        self.receiver: Receiver | None = None

    def measure(self) -> PathMeasure | None:
        return None

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        data = b"".join(buffers)
        taken = 0 if self.ended else min(self.room, len(data))
        self.sent += data[:taken]
        self.room -= taken
        return taken

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def notify_writable(self) -> None:
        self.wants_room = True

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    # -- what a test does ------------------------------------------------------------------------

    def grant(self, nbytes: int) -> None:
        """The network takes so many bytes more."""
        assert self.receiver is not None
        self.room += nbytes
        if self.wants_room:
            self.wants_room = False
            self.receiver.writable()

    def deliver(self, data: bytes, portion: int = PLENTY) -> None:
        """Bytes arrive, in portions."""
        assert self.receiver is not None
        view = memoryview(data)
        while view:
            buffer = self.receiver.get_buffer()
            nbytes = min(len(buffer), len(view), portion)
            buffer[:nbytes] = view[:nbytes]
            view = view[nbytes:]
            self.receiver.buffer_updated(nbytes)

    def lose(self) -> None:
        """The network ends it."""
        assert self.receiver is not None
        self.ended = "lost"
        self.receiver.connection_lost(None)

    @property
    def frames(self) -> list[tuple[FrameHeader, bytes]]:
        """What was sent, frame by frame, but for one that is not complete."""
        return split(self.sent)[0]

    @property
    def offsets(self) -> list[int]:
        """Of the segments that were sent completely."""
        return [header.offset for header, _ in self.frames if header.kind is FrameKind.DATA]


def split(data: bytes | bytearray) -> tuple[list[tuple[FrameHeader, bytes]], bytes]:
    """The complete frames of a stream, and what follows them."""
    frames: list[tuple[FrameHeader, bytes]] = []
    data = bytes(data)
    while len(data) >= HEADER_BYTES:
        header = decode_header(data[:HEADER_BYTES])
        end = HEADER_BYTES + header.length
        if len(data) < end:
            break
        frames.append((header, data[HEADER_BYTES:end]))
        data = data[end:]
    return frames, data


class Collected:
    """A sink that keeps its payload."""

    def __init__(self, header: FrameHeader) -> None:
        self.header = header
        self.payload = bytearray(header.length)
        self.ended = ""
        self.wanted = True

    def memory(self, received: int) -> memoryview:
        assert received < len(self.payload)
        return memoryview(self.payload)[received:]

    def counts(self) -> bool:
        return self.wanted

    def complete(self) -> None:
        self.ended += "complete"

    def lost(self) -> None:
        self.ended += "lost"


class Handler:
    """Keeps what lanes tell it."""

    def __init__(self) -> None:
        self.sinks: list[Collected] = []
        self.lost: list[Lane] = []
        self.refuses = False
        self.wants = True

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        if self.refuses:
            raise RemoteProtocolError(func="lane", reason="not wanted")
        self.sinks.append(Collected(header))
        self.sinks[-1].wanted = self.wants
        return self.sinks[-1]

    def lane_lost(self, lane: Lane, error: Exception | None) -> None:
        link: Any = lane.link
        link.remove(lane)
        self.lost.append(lane)


class Bench:
    """A link, and lanes with so much room."""

    def __init__(self, *rooms: int, near: bool = False) -> None:
        self.link = Link(PeerId(2))
        self.near = near
        self.handler = Handler()
        self.connections: list[FakeConnection] = []
        self.lanes: list[Lane] = []
        for room in rooms:
            self.add(room)

    def add(self, room: int = 0) -> FakeConnection:
        connection = FakeConnection(room)
        if self.near:
            connection.remote = connection.local
        number = len(self.lanes)
        self.lanes.append(Lane(connection, number, self.link, self.handler))
        self.connections.append(connection)
        self.link.add(self.lanes[-1])
        return connection

    def send(
        self, number: int, length: int = 44, operation: OperationId = OPERATION, step: int = 0
    ) -> None:
        """A segment whose bytes are its number, and its offset, too; 100 bytes altogether."""
        self.link.send(
            segment(number, length, operation, step), memoryview(bytes([number] * length)), number
        )

    @property
    def offsets(self) -> list[list[int]]:
        return [connection.offsets for connection in self.connections]


def segment(
    number: int, length: int = 44, operation: OperationId = OPERATION, step: int = 0
) -> FrameHeader:
    return FrameHeader(FrameKind.DATA, operation, step, number, length)


def question(number: int, operation: OperationId = OPERATION) -> FrameHeader:
    return FrameHeader(FrameKind.QUERY, operation, 0, number, 0)


# -- recording -----------------------------------------------------------------------------------


def test_each_segment_is_recorded_when_its_last_byte_has_moved() -> None:
    """Every look at the clock shows one more. A segment is taken, and goes out later."""
    bench, moved, times = Bench(), deque[Moved](maxlen=3), counting(1)
    connection = FakeConnection(30)
    lane = Lane(connection, 7, bench.link, bench.handler, moved, times.__next__)
    bench.link.add(lane)
    bench.send(5)
    assert not moved
    connection.grant(PLENTY)
    sent = segment(5)
    assert list(moved) == [(1, 2, PeerId(2), 7, True, 44, sent)]
    lane.ping()  # is no segment
    received = segment(6)
    connection.deliver(encode_frame(received, bytes(44)), portion=20)
    (began_ns, ended_ns, *what) = moved[-1]
    assert (what, ended_ns - began_ns) == ([PeerId(2), 7, False, 44, received], 1)
    connection.deliver(encode_frame(question(1), b""))
    assert len(moved) == 2
    for number in range(9):
        bench.send(number)
    assert [header.offset for *_, header in moved] == [6, 7, 8]


def test_a_pulled_segment_is_recorded_with_its_own_length() -> None:
    bench, moved = Bench(), deque[Moved]()
    connection = FakeConnection(PLENTY)
    lane = Lane(connection, 0, bench.link, bench.handler, moved, counting(1).__next__)
    announced = FrameHeader(FrameKind.ANNOUNCE, OPERATION, 0, 0, 10)

    def pull(_: Collected) -> None:
        lane.pulled(5000)

    with patch.object(Collected, "complete", pull):
        connection.deliver(encode_frame(announced, bytes(10)))
    assert [(length, header) for *_, length, header in moved] == [(5000, announced)]


# -- striping ------------------------------------------------------------------------------------


def test_each_segment_goes_to_the_next_lane_that_is_ready() -> None:
    bench = Bench(PLENTY, PLENTY, PLENTY)
    for number in range(7):
        bench.send(number)
    assert bench.offsets == [[0, 3, 6], [1, 4], [2, 5]]
    assert [lane.carried for lane in bench.lanes] == [
        {OPERATION: [0, 3, 6]},
        {OPERATION: [1, 4]},
        {OPERATION: [2, 5]},
    ]
    assert [lane.sent_bytes for lane in bench.lanes] == [300, 200, 200]
    assert bench.link.backlog_bytes == 0


def test_a_lane_that_is_full_holds_up_nobody() -> None:
    bench = Bench(PLENTY, 30, PLENTY)
    for number in range(8):
        bench.send(number)
    assert bench.offsets == [[0, 3, 5, 7], [], [2, 4, 6]]
    assert bench.lanes[1].carried == {OPERATION: [1]}
    assert bench.link.backlog_bytes == bench.lanes[1].backlog_bytes == 70
    bench.connections[1].grant(70)
    assert bench.offsets[1] == [1]
    bench.connections[1].grant(PLENTY)
    bench.send(8)
    bench.send(9)
    bench.send(10)
    assert sorted(chain(*bench.offsets)) == list(range(11))


def test_a_lane_that_worked_long_on_a_segment_sends_the_next_in_another_turn() -> None:
    """A sparse segment takes long to encode, and the network takes many of them at once."""
    now_ns, bench = [0], Bench()
    lane = Lane(FakeConnection(PLENTY), 0, bench.link, bench.handler, None, lambda: now_ns[0])
    bench.link.add(lane)

    def encode() -> memoryview:
        now_ns[0] += LONG_FRAME_NS
        return memoryview(bytes(44))

    connection = lane.connection
    assert isinstance(connection, FakeConnection)
    for number in range(3):
        bench.link.send(segment(number), encode, number)
    assert (connection.offsets, connection.wants_room) == ([0], True)
    lane.ping()
    assert len(connection.frames) == 1
    connection.grant(0)  # the next turn
    assert [header.kind for header, _ in connection.frames[1:]] == [FrameKind.PING, FrameKind.DATA]
    connection.grant(0)
    assert connection.offsets == [0, 1, 2]


def test_a_slow_lane_gets_fewer() -> None:
    """All wait in one queue: nobody decides beforehand who gets what."""
    bench = Bench(0, 0)
    for number in range(40):
        bench.send(number)
    slow, fast = bench.connections
    for _ in range(50):
        slow.grant(20)
        fast.grant(80)
    assert (len(slow.offsets), len(fast.offsets)) == (8, 32)  # one in five, as the bytes
    assert sorted(slow.offsets + fast.offsets) == list(range(40))
    assert bench.link.backlog_bytes == 0


def test_without_a_lane_they_wait_for_one() -> None:
    bench = Bench()
    assert not bench.link.up
    for number in range(3):
        bench.send(number)
    assert bench.link.backlog_bytes == 300
    connection = bench.add(PLENTY)
    assert bench.link.up
    assert connection.offsets == [0, 1, 2]


@pytest.mark.parametrize(("near", "order"), [(True, [0, 3, 2, 1, 4]), (False, [0, 1, 4, 2, 3])])
def test_the_order_inside_a_machine_and_between_two(near: bool, order: list[int]) -> None:
    """The newest of what was computed here, or the lowest step; the first one is on its way."""
    bench = Bench(0, near=near)
    for number, step in ((0, 0), (1, 0), (2, 1), (3, 2), (4, 0)):
        bench.send(number, step=step)
    bench.connections[0].grant(PLENTY)
    assert bench.offsets == [order]


def test_any_split_of_the_bytes_gives_the_same_stream() -> None:
    streams = [b"".join(encode_frame(segment(n), bytes([n] * 44)) for n in range(5))]
    for portion in (1, 7, 55, 56, 57, 99, 100, 101, 1000):
        bench = Bench(portion)
        for number in range(5):
            bench.send(number)
        while bench.link.backlog_bytes:
            bench.connections[0].grant(portion)
        streams.append(bytes(bench.connections[0].sent))
    assert len(set(streams)) == 1


def test_segments_without_payload() -> None:
    bench = Bench(56)
    bench.send(0, length=0)
    bench.send(1, length=0)
    bench.connections[0].grant(56)
    assert bench.connections[0].frames == [(segment(0, 0), b""), (segment(1, 0), b"")]


# -- frames of a lane's own ----------------------------------------------------------------------


def test_what_a_lane_says_itself_comes_before_segments() -> None:
    bench = Bench(10)
    for number in range(3):
        bench.send(number)
    bench.lanes[0].ping()
    bench.link.ask(question(1))
    bench.connections[0].grant(PLENTY)
    headers = [header for header, _ in bench.connections[0].frames]
    assert headers == [segment(0), PING, question(1), segment(1), segment(2)]
    assert bench.lanes[0].carried == {OPERATION: [0, 1, 2]}
    assert bench.lanes[0].sent_bytes == 300 + 2 * 56
    assert bench.lanes[0].moved_bytes == 300  # of segments


def test_a_question_goes_out_on_every_lane() -> None:
    bench = Bench(PLENTY, 0, PLENTY)
    bench.link.ask(question(1))
    bench.connections[1].grant(PLENTY)
    for connection in bench.connections:
        assert connection.frames == [(question(1), b"")]


def test_that_pulls_fail_is_said_on_every_lane_and_each_time() -> None:
    """The peer may not know that the link was down here; then no process is known, either."""
    failed = FrameHeader(FrameKind.PULL_FAILED, NO_OPERATION, 0, 0, 0)
    bench = Bench(PLENTY, 0, PLENTY)
    bench.link.process = 1000
    for count in (1, 2):
        bench.link.stop_pulling()
        assert bench.link.process is None
        bench.connections[1].grant(PLENTY)
        for connection in bench.connections:
            assert connection.frames == count * [(failed, b"")]
    Bench().link.stop_pulling()


def test_without_a_lane_no_process_is_known() -> None:
    bench = Bench(PLENTY, PLENTY)
    link: Any = bench.link
    link.process, link.pulls = 1000, True
    bench.connections[0].lose()
    assert (link.process, link.pulls) == (1000, True)
    bench.connections[1].lose()
    assert (link.process, link.pulls) == (None, False)


def test_pulled_bytes_count_like_those_that_arrive() -> None:
    (lane,) = Bench(PLENTY).lanes
    lane.pulled(1000)
    assert (lane.payload_bytes, lane.intact_bytes, lane.moved_bytes) == (1000, 1000, 1000)
    assert lane.received_bytes == 0


@pytest.mark.parametrize("portion", [1, 55, 56, PLENTY])
def test_a_ping_is_answered(portion: int) -> None:
    bench = Bench(PLENTY, PLENTY)
    bench.connections[1].deliver(encode_header(PING) * 2 + encode_header(PONG), portion)
    assert bench.connections[1].frames == [(PONG, b"")] * 2
    assert bench.connections[0].frames == []
    assert bench.handler.sinks == []
    assert bench.lanes[1].received_bytes == 3 * 56
    assert not bench.lanes[1].receiving


def test_of_many_pings_at_most_one_answer_waits() -> None:
    bench = Bench(0)
    bench.connections[0].deliver(encode_header(PING) * 5000)
    assert bench.link.backlog_bytes <= 2 * 56  # one on its way, one behind it
    bench.connections[0].grant(PLENTY)
    assert [header for header, _ in bench.connections[0].frames] == [PONG, PONG]


def test_of_the_answers_that_wait_the_newest_stands_for_all() -> None:
    """By the question's number and by what it says, whichever order the questions came in."""
    bench = Bench(10)
    lane = bench.lanes[0]
    bench.send(0)
    for number, content in ((2, b"old"), (5, b"newer"), (3, b"newest")):
        lane.say(FrameHeader(FrameKind.HAVE, OPERATION, 0, number, len(content)), content)
    lane.say(FrameHeader(FrameKind.HAVE, ANOTHER, 0, 1, 5), b"other")
    bench.connections[0].grant(PLENTY)
    assert bench.connections[0].frames[1:] == [
        (FrameHeader(FrameKind.HAVE, OPERATION, 0, 5, 6), b"newest"),
        (FrameHeader(FrameKind.HAVE, ANOTHER, 0, 1, 5), b"other"),
    ]


def test_many_questions_wait_as_one() -> None:
    bench = Bench(10, PLENTY)
    bench.send(0)
    for number in range(1, 100):
        bench.link.ask(question(number))
    bench.connections[0].grant(PLENTY)
    assert [header for header, _ in bench.connections[0].frames] == [segment(0), question(99)]


# -- receiving -----------------------------------------------------------------------------------


@pytest.mark.parametrize("portion", [1, 13, 56, 100, PLENTY])
def test_frames_arrive_in_any_portions(portion: int) -> None:
    bench = Bench(0)
    contents = [bytes([number] * length) for number, length in enumerate((5, 0, 100, 1))]
    headers = [segment(number, len(content)) for number, content in enumerate(contents)]
    stream = b"".join(encode_frame(h, c) for h, c in zip(headers, contents, strict=True))
    bench.connections[0].deliver(stream, portion)
    assert [sink.header for sink in bench.handler.sinks] == headers
    assert [bytes(sink.payload) for sink in bench.handler.sinks] == contents
    assert [sink.ended for sink in bench.handler.sinks] == ["complete"] * 4
    assert bench.lanes[0].received_bytes == len(stream)


def test_a_lane_lost_in_the_middle_of_a_frame() -> None:
    bench = Bench(0)
    whole, half = encode_frame(segment(0), bytes(44)), encode_frame(segment(1), bytes(44))[:-1]
    bench.connections[0].deliver(whole + half)
    assert bench.lanes[0].receiving
    bench.connections[0].lose()
    assert [sink.ended for sink in bench.handler.sinks] == ["complete", "lost"]
    assert bench.handler.lost == bench.lanes
    assert not bench.lanes[0].receiving


@pytest.mark.parametrize(
    "data",
    [
        bytes(56),
        encode_header(PING)[:4] + b"\1" + encode_header(PING)[5:],
        encode_header(question(1))[:4] + b"\1" + encode_header(question(1))[5:],
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    bench = Bench(0)
    with pytest.raises(RemoteProtocolError):
        bench.connections[0].deliver(data)


def test_what_the_handler_refuses_is_refused() -> None:
    bench = Bench(0)
    bench.handler.refuses = True
    with pytest.raises(RemoteProtocolError, match="not wanted"):
        bench.connections[0].deliver(encode_header(segment(0)))


@pytest.mark.parametrize("wanted", [True, False])
def test_only_what_has_the_hash_that_was_sent_came_intact(wanted: bool) -> None:
    """A payload that nobody wants may be changed; the lane lives on, and is not proven by it."""
    bench = Bench(0)
    bench.handler.wants = wanted
    connection, lane = bench.connections[0], bench.lanes[0]
    whole = encode_frame(segment(0), bytes(44))
    connection.deliver(whole)
    assert lane.intact_bytes == 44
    changed = whole[:-1] + b"\1"
    if wanted:
        with pytest.raises(DamagedData, match="payload of 44 bytes was damaged"):
            connection.deliver(changed)
    else:
        connection.deliver(changed)
        assert [sink.ended for sink in bench.handler.sinks] == ["complete"] * 2
    assert lane.intact_bytes == 44
    assert lane.damaged_bytes == (44 if wanted else 0)


# -- the end of an operation ---------------------------------------------------------------------


def test_after_a_revoke_nothing_of_it_is_read() -> None:
    """What was partly on its way is completed from a copy; what waited never leaves."""
    bench = Bench(60, 0, 30)
    memory = bytearray(b"\7" * 44)
    for number in range(6):
        bench.link.send(segment(number), memoryview(memory), number)
    bench.send(9, operation=ANOTHER)
    bench.link.revoke(OPERATION)
    memory[:] = b"\xee" * 44
    for connection in bench.connections:
        connection.grant(PLENTY)
    sent = [connection.frames for connection in bench.connections]
    assert sent[0] == [(segment(0), b"\7" * 44), (segment(9, operation=ANOTHER), bytes([9] * 44))]
    assert sent[1] == []
    assert sent[2] == [(segment(2), b"\7" * 44)]
    assert [lane.carried for lane in bench.lanes] == [{ANOTHER: [9]}, {}, {}]
    assert bench.link.backlog_bytes == 0


def test_a_revoke_takes_back_questions_and_answers() -> None:
    bench = Bench(10)
    bench.send(0, operation=ANOTHER)
    bench.link.ask(question(1))
    bench.lanes[0].say(FrameHeader(FrameKind.HAVE, OPERATION, 0, 1, 2), b"ab")
    bench.lanes[0].ping()
    bench.link.revoke(OPERATION)
    bench.connections[0].grant(PLENTY)
    headers = [header for header, _ in bench.connections[0].frames]
    assert headers == [segment(0, operation=ANOTHER), PING]


def test_a_detached_operation_is_sent_from_a_copy() -> None:
    bench = Bench(60, 0)
    memory, kept = bytearray(b"\7" * 44), bytearray(b"\5" * 44)
    for number in range(4):
        bench.link.send(segment(number), memoryview(memory), number)
    bench.link.send(segment(9, operation=ANOTHER), memoryview(kept), 9)
    bench.link.detach(OPERATION, lambda header: b"\7" * header.length)
    memory[:], kept[:] = b"\xee" * 44, b"\6" * 44
    for connection in bench.connections:
        connection.grant(PLENTY)
    contents = {
        header.offset: payload
        for connection in bench.connections
        for header, payload in connection.frames
    }
    assert contents == dict.fromkeys(range(4), b"\7" * 44) | {9: b"\6" * 44}
    assert sorted(chain(*(lane.carried[OPERATION] for lane in bench.lanes))) == [0, 1, 2, 3]


def test_an_announcement_is_sent_as_it_is_after_a_detach() -> None:
    """It is withdrawn; what it announced is announced again, in the copy."""
    bench = Bench(0)
    header = FrameHeader(FrameKind.ANNOUNCE, OPERATION, 0, 0, 32)
    for number in range(2):
        bench.link.send(header, bytes(range(32)), number)
    bench.link.detach(OPERATION, lambda header: bytes(header.length))
    bench.connections[0].grant(PLENTY)
    assert bench.connections[0].frames == 2 * [(header, bytes(range(32)))]


# -- lost lanes ----------------------------------------------------------------------------------


def test_what_a_lost_lane_carried_is_known_and_the_rest_goes_out_on_the_others() -> None:
    bench = Bench(150, 0)
    for number in range(5):
        bench.send(number)
    bench.send(9, operation=ANOTHER)
    first, second = bench.connections
    assert first.offsets == [0]
    first.lose()
    assert bench.handler.lost == [bench.lanes[0]]
    assert bench.lanes[0].carried == {OPERATION: [0, 2]}
    assert bench.link.lanes == (bench.lanes[1],)
    assert bench.link.up
    second.grant(PLENTY)
    assert second.offsets == [1, 3, 9, 4]
    assert bench.lanes[1].carried == {OPERATION: [1, 3, 4], ANOTHER: [9]}


def test_operations_take_turns_and_inside_one_what_was_computed_here_comes_first() -> None:
    bench = Bench(0, near=True)
    bench.send(0)  # given to the lane at once
    for number in range(1, 5):
        bench.send(number)
    bench.send(20, operation=ANOTHER)
    bench.send(21, operation=ANOTHER)
    bench.send(10, step=1)
    bench.send(11, step=2)
    bench.connections[0].grant(PLENTY)
    assert bench.connections[0].offsets == [0, 11, 20, 10, 21, 1, 2, 3, 4]


def test_all_lanes_are_lost_and_a_new_one_sends_what_waits() -> None:
    bench = Bench(0, 0)
    for number in range(4):
        bench.send(number)
    for connection in list(bench.connections):
        connection.lose()
    assert not bench.link.up
    assert [lane.carried for lane in bench.lanes] == [{OPERATION: [0]}, {OPERATION: [1]}]
    bench.send(4)
    assert bench.add(PLENTY).offsets == [2, 3, 4]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_lane_that_was_closed_here_gets_no_segment(end: str) -> None:
    """Until the connection tells of its end, the lane is still there."""
    bench = Bench(PLENTY, PLENTY)
    getattr(bench.lanes[0], end)()
    for number in range(3):
        bench.send(number)
    bench.link.ask(question(1))
    bench.lanes[0].ping()
    bench.connections[0].grant(PLENTY)
    bench.lanes[0].writable()
    assert bench.connections[0].sent == b""
    assert bench.lanes[0].carried == {}
    assert bench.connections[1].offsets == [0, 1, 2]
    assert not bench.lanes[0].ready


def test_closing_a_link_closes_every_lane_and_what_waits_goes_on_waiting() -> None:
    bench = Bench(0, 0)
    for number in range(3):
        bench.send(number)
    bench.link.close()
    assert [connection.ended for connection in bench.connections] == ["closed", "closed"]
    for connection in bench.connections:
        connection.lose()
    assert bench.add(PLENTY).offsets == [2]


def test_lanes_by_number() -> None:
    bench = Bench(PLENTY, PLENTY, PLENTY)
    bench.send(0)  # the order of turns changes, the numbers do not
    assert [lane.number for lane in bench.link.lanes] == [0, 1, 2]
    assert bench.link.lane(1) is bench.lanes[1]
    assert bench.link.lane(3) is None
    assert bench.link.remove(bench.lanes[1])
    assert not bench.link.remove(bench.lanes[1])
    assert bench.link.lane(1) is None


# -- anything in any order -----------------------------------------------------------------------

OPERATIONS = tuple(OperationId(1, 0, 1, tag, 0) for tag in range(3))
LENGTHS = (0, 1, 30, 44, 500)


class AnyOrder(RuleBasedStateMachine):
    """Segments are sent, lanes come, go and take bytes, operations end: nothing gets lost.

    A byte of an operation's memory says whose it is; it is overwritten once that is allowed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.memory = {op: bytearray(bytes([1 + op.tag] * max(LENGTHS))) for op in OPERATIONS}
        self.copied: set[OperationId] = set()
        self.ended: set[OperationId] = set()
        self.given: dict[OperationId, list[int]] = {op: [] for op in OPERATIONS}
        self.reported: dict[OperationId, Counter[int]] = {op: Counter() for op in OPERATIONS}

    def living(self) -> list[FakeConnection]:
        return [connection for connection in self.bench.connections if not connection.ended]

    @rule(which=st.integers(0, 2), length=st.sampled_from(LENGTHS), step=st.integers(0, 2))
    def send(self, which: int, length: int, step: int) -> None:
        operation = OPERATIONS[which]
        if operation in self.ended or operation in self.copied:
            return
        number = len(self.given[operation])
        self.given[operation].append(number)
        header = segment(number, length, operation, step)
        self.bench.link.send(header, memoryview(self.memory[operation])[:length], number)

    @precondition(lambda self: len(self.living()) < 4)
    @rule(room=st.sampled_from((0, 100, 1000)))
    def add(self, room: int) -> None:
        self.bench.add(room)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), nbytes=st.sampled_from((1, 40, 100, 700)))
    def take(self, data: st.DataObject, nbytes: int) -> None:
        data.draw(st.sampled_from(self.living())).grant(nbytes)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), ours=st.booleans())
    def lose(self, data: st.DataObject, ours: bool) -> None:
        connection = data.draw(st.sampled_from(self.living()))
        lane = self.bench.lanes[self.bench.connections.index(connection)]
        if ours:
            lane.abort()
        connection.lose()
        for operation, numbers in lane.carried.items():
            assert operation not in self.ended
            self.reported[operation].update(numbers)

    @rule(number=st.integers(1, 9), which=st.integers(0, 2))
    def ask(self, number: int, which: int) -> None:
        if OPERATIONS[which] not in self.ended:
            self.bench.link.ask(question(number, OPERATIONS[which]))

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def is_pinged(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.living())).deliver(encode_header(PING))

    @rule(which=st.integers(0, 2))
    def revoke(self, which: int) -> None:
        operation = OPERATIONS[which]
        self.bench.link.revoke(operation)
        self.ended.add(operation)
        self.memory[operation][:] = b"\xee" * max(LENGTHS)

    @rule(which=st.integers(0, 2))
    def detach(self, which: int) -> None:
        operation = OPERATIONS[which]
        if operation not in self.ended:
            byte = bytes([1 + operation.tag])
            self.bench.link.detach(operation, lambda header: byte * header.length)
            self.copied.add(operation)
            self.memory[operation][:] = b"\xee" * max(LENGTHS)

    @invariant()
    def every_segment_is_in_the_queue_or_was_given_to_one_lane(self) -> None:
        queues = self.bench.link.queues
        for operation, numbers in self.given.items():
            found = Counter(frame.number for frame in queues.get(operation, ()))
            for lane in self.bench.link.lanes:
                found.update(lane.carried.get(operation, ()))
            if operation in self.ended:
                assert not found
            else:
                assert found + self.reported[operation] == Counter(numbers)

    @invariant()
    def nothing_waits_while_a_lane_is_ready(self) -> None:
        if any(lane.ready for lane in self.bench.link.lanes):
            assert not self.bench.link.queues

    @invariant()
    def streams_can_be_parsed_and_hold_what_was_sent(self) -> None:
        for connection, lane in zip(self.bench.connections, self.bench.lanes, strict=True):
            frames, rest = split(connection.sent)
            for header, payload in frames:
                if header.kind is FrameKind.DATA:
                    of = header.operation
                    assert payload == bytes([1 + of.tag] * len(payload))
                    carried = lane.carried.get(of, ())
                    assert of in self.ended or header.offset in carried
            assert b"\xee" not in rest[HEADER_BYTES:]

    def teardown(self) -> None:
        """In the end one lane that takes everything sends all that waits."""
        for connection in self.living():
            connection.grant(PLENTY)
        self.bench.add(PLENTY)
        self.streams_can_be_parsed_and_hold_what_was_sent()
        self.every_segment_is_in_the_queue_or_was_given_to_one_lane()
        assert self.bench.link.backlog_bytes == 0
        for connection in self.living():
            assert split(connection.sent)[1] == b""


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_anything_in_any_order = AnyOrder.TestCase


@pytest.mark.parametrize("sent", range(HEADER_BYTES + 9))
def test_a_payload_in_several_pieces_goes_on_where_the_network_stopped(sent: int) -> None:
    pieces = [memoryview(piece) for piece in (b"abc", b"d", b"efghi")]
    header = FrameHeader(FrameKind.DATA, OPERATION, 0, 0, 9)
    frame = Frame(header, pieces, 0)
    frame.sent = sent
    assert b"".join(frame.rest()) == encode_frame(header, b"abcdefghi")[sent:]
    assert all(len(buffer) for buffer in frame.rest())
    assert frame.missing == HEADER_BYTES + 9 - sent
    frame.keep()
    assert b"".join(frame.rest()) == encode_frame(header, b"abcdefghi")[sent:]
