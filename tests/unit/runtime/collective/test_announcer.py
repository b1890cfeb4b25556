"""Segments that are announced and pulled, by two data planes over the memory of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.protocol.checksum import payload_hash
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.limits import ANNOUNCE_BYTES_MAX, ANNOUNCED_PARTS_MAX
from pccl.protocol.operation import Eager
from pccl.protocol.types import (
    Algorithm,
    Descriptor,
    OperationId,
    PeerId,
    Quantization,
    ReduceOp,
    WireFormat,
)
from pccl.runtime.collective.announcer import Announcer
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import borrow, borrow_many
from pccl.transports.announcement import (
    decode_announcement,
    encode_announcement,
)
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload
from pccl.transports.sim.memory import SimMemories, SimMemory

OPERATION = OperationId(term=1, group=0, view=3, tag=5, n=0)
RING = (PeerId(1), PeerId(2))
ANNOUNCE, DATA = FrameKind.ANNOUNCE, FrameKind.DATA
COUNT, SEGMENT_BYTES = 32, 32
"""Four segments of 8 int32. The first two are the chunk of rank 0."""

Values = npt.NDArray[np.int32]


class Wire(Link):
    """A link and its only lane. Notes what is sent on it; payload of segments is read later."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.frames: list[tuple[FrameHeader, Payload]] = []
        self.link = self
        self.carried: dict[OperationId, list[int]] = {}
        self.pulled_bytes: list[int] = []

    @property
    def lanes(self) -> Any:
        return (self,)

    @property
    def up(self) -> bool:
        return True

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        self.frames.append((header, payload))
        self.carried.setdefault(header.operation, []).append(number)

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        self.frames.append((header, payload))

    def pulled(self, nbytes: int) -> None:
        self.pulled_bytes.append(nbytes)

    def revoke(self, operation: OperationId) -> None:
        self.frames = [frame for frame in self.frames if frame[0].operation != operation]

    def detach(self, operation: OperationId, payload_of: Callable[[FrameHeader], Payload]) -> None:
        for number, (header, _) in enumerate(self.frames):
            if header.kind is DATA:
                self.frames[number] = header, payload_of(header)


class Node:
    """One of two peers, and its end of the link."""

    def __init__(self, rank: int, memory: SimMemory) -> None:
        self.rank, self.memory = rank, memory
        self.link = Wire(RING[1 - rank])
        self.link.pulls = True
        self.digest: bytes | None = None
        self.coming = False
        self.send: Values = np.arange(COUNT, dtype=np.int32) * (1 + 999 * rank)
        self.recv: Values = np.full(COUNT, -1, np.int32)
        self.make_plane(memory)

    def make_plane(self, memory: SimMemory | None) -> None:
        self.plane = DataPlane(
            lambda peer: self.link,
            lambda operation: self.coming,
            self._on_done,
            SEGMENT_BYTES,
            memory,
        )
        self.plane.expect_peer(self.link.peer)

    def _on_done(self, operation: OperationId, digest: bytes) -> None:
        self.digest = digest

    def post(self, descriptor: Descriptor, *, in_place: bool = False) -> None:
        recv = None if in_place else self.recv
        self.plane.post(OPERATION, descriptor, borrow(self.send, recv), RING, RING[self.rank])

    def hear(self, header: FrameHeader, payload: Payload) -> None:
        """A frame arrives. What ``Pulls`` does with PULL_FAILED happens here."""
        if header.kind is FrameKind.PULL_FAILED:
            self.link.pulls = False
            self.plane.pulls_failed(self.link.peer)
            return
        content = content_of(payload)
        lane: Any = self.link
        sink = self.plane.frame_started(lane, replace(header, check=payload_hash(content)))
        received = 0
        while received < len(content):
            view = sink.memory(received)
            view[:] = content[received : received + len(view)]
            received += len(view)
        sink.complete()

    @property
    def free_buffers(self) -> int:
        return len(self.plane._buffers._free)  # pyright: ignore[reportPrivateUsage]

    @property
    def missing(self) -> set[int]:
        (inlet,) = self.plane.transfers[OPERATION].inlets.values()
        return inlet.missing


def content_of(payload: Payload) -> bytes:
    made = payload() if callable(payload) else payload
    return b"".join(made) if isinstance(made, list) else bytes(made)


class Pair:
    """Two peers of one machine that have agreed to pull."""

    def __init__(self) -> None:
        memories = SimMemories()
        memories.machines = {"a": "m", "b": "m"}
        self.nodes: list[Node] = []
        for rank, host in enumerate("ab"):
            memory = memories.boot(host, lambda: True)
            assert memory is not None
            self.nodes.append(Node(rank, memory))
        for node, other in (self.nodes, self.nodes[::-1]):
            node.link.process = other.memory.ancestry[0]
        self.expected = self.nodes[0].send + self.nodes[1].send

    def post(self, descriptor: Descriptor, *, in_place: bool = False) -> None:
        for node in self.nodes:
            node.post(descriptor, in_place=in_place)
        for node in self.nodes:
            node.plane.begin(OPERATION)

    def deliver(self, to: Node) -> list[FrameHeader]:
        """Deliver what is on its way to a node."""
        (other,) = (node for node in self.nodes if node is not to)
        frames, other.link.frames = other.link.frames, []
        for header, payload in frames:
            to.hear(header, payload)
        return [header for header, _ in frames]

    def run(self) -> list[FrameHeader]:
        """Deliver all; return the headers."""
        headers: list[FrameHeader] = []
        while any(node.link.frames for node in self.nodes):
            for node in self.nodes:
                headers += self.deliver(node)
        return headers

    def check(self, *, in_place: bool = False) -> None:
        """Both are done, with the right result."""
        digests = {node.digest for node in self.nodes}
        assert len(digests) == 1
        assert None not in digests
        for node in self.nodes:
            node.plane.end(OPERATION, committed=True)
            result = node.send if in_place else node.recv
            assert result.tolist() == self.expected.tolist()
            assert in_place or (node.send == np.arange(COUNT) * (1 + 999 * node.rank)).all()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def add_up(algorithm: Algorithm = Algorithm.RING, **options: Any) -> Descriptor:
    return Descriptor(DataType.INT32, ReduceOp.SUM, COUNT, algorithm=algorithm, **options)


def kinds(headers: list[FrameHeader]) -> set[FrameKind]:
    return {header.kind for header in headers}


# -- what is announced ---------------------------------------------------------------------------


def test_bytes_that_stay_where_they_are_are_announced(pair: Pair) -> None:
    memory, data = pair.nodes[0].memory, memoryview(bytearray(b"abcdef"))
    announcer = Announcer(memory)
    assert announcer.announce(b"abc") is None
    assert announcer.announce(lambda: data) is None
    assert memory.leases == {}
    most = [data[n % 6 :][:1] for n in range(ANNOUNCED_PARTS_MAX)]
    for parts in ([data], [data[:2], data[2:]], most):
        announced = announcer.announce(parts[0] if len(parts) == 1 else parts)
        assert announced is not None
        where = decode_announcement(announced)
        into = memoryview(bytearray(where.length))
        assert memory.pull(memory.ancestry[0], where, [into])
        assert into == b"".join(parts)
    assert announcer.announce([data] * (ANNOUNCED_PARTS_MAX + 1)) is None
    assert len(memory.leases) == 1


def test_short_segments_are_sent(pair: Pair) -> None:
    memory = pair.nodes[0].memory
    memory.pull_bytes_min = 6
    announcer = Announcer(memory)
    data = memoryview(bytearray(6))
    assert announcer.announce(data[:5]) is None
    assert announcer.announce([data[:3], data[3:5]]) is None
    assert announcer.announce(data) is not None
    assert announcer.announce([data[:3], data[3:]]) is not None


def test_what_was_withdrawn_may_be_announced_again(pair: Pair) -> None:
    memory, data = pair.nodes[0].memory, memoryview(bytearray(4))
    announcer = Announcer(memory)
    announcer.withdraw()
    announcer.end()

    def pulls(announced: bytes | None) -> bool:
        assert announced is not None
        where = decode_announcement(announced)
        return memory.pull(memory.ancestry[0], where, [memoryview(bytearray(4))])

    first = announcer.announce(data)
    announcer.withdraw()
    second = announcer.announce(data)
    assert not pulls(first)
    assert pulls(second)
    announcer.end()
    announcer.end()
    assert not pulls(second)
    assert pulls(announcer.announce(data))


# -- a whole operation ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.MESH, Algorithm.STAR])
def test_all_segments_are_pulled(pair: Pair, algorithm: Algorithm, in_place: bool) -> None:
    pair.post(add_up(algorithm), in_place=in_place)
    headers = pair.run()
    assert kinds(headers) == {ANNOUNCE}
    assert {header.length for header in headers} == {32}  # of the announcements
    pulled = [sum(node.link.pulled_bytes) for node in pair.nodes]
    transfers = [node.plane.transfers[OPERATION] for node in pair.nodes]
    assert pulled == [transfer.rx_bytes for transfer in transfers]
    assert sum(pulled) == 2 * 4 * COUNT == sum(transfer.tx_bytes for transfer in transfers)
    pair.check(in_place=in_place)


def test_segments_are_announced_before_the_start_and_pulled_once_they_are_posted(
    pair: Pair,
) -> None:
    first, second = pair.nodes
    second.coming = True
    first.post(add_up())
    first.plane.begin(OPERATION, eager=Eager.ANNOUNCEMENTS)
    assert kinds(pair.deliver(second)) == {ANNOUNCE}
    second.post(add_up())
    assert second.plane.transfers[OPERATION].rx_bytes == 2 * COUNT  # half of the tensor
    for node in (second, first):
        node.plane.begin(OPERATION)
        pair.run()
    pair.check()


def test_segments_that_cannot_be_announced_wait_for_the_start(pair: Pair) -> None:
    first, second = pair.nodes
    first.memory.pull_bytes_min = second.memory.pull_bytes_min = 4 * COUNT
    for node in pair.nodes:
        node.post(add_up())
        node.plane.begin(OPERATION, eager=Eager.ANNOUNCEMENTS)
    assert pair.run() == []
    assert [node.plane.transfers[OPERATION].tx_bytes for node in pair.nodes] == [0, 0]
    first.plane.begin(OPERATION)
    assert kinds(pair.run()) == {DATA}
    second.plane.begin(OPERATION)
    pair.run()
    pair.check()


def test_if_the_pull_fails_before_the_start_the_bytes_wait_for_it(pair: Pair) -> None:
    first, second = pair.nodes
    for node in pair.nodes:
        node.post(add_up())
        node.plane.begin(OPERATION, eager=Eager.ANNOUNCEMENTS)
    second.link.process = None
    headers = pair.run()
    assert FrameKind.PULL_FAILED in kinds(headers)
    assert DATA not in kinds(headers)
    assert first.digest is second.digest is None
    for node in pair.nodes:
        node.plane.begin(OPERATION)
    pair.run()
    pair.check()


def test_a_broadcast_is_pulled(pair: Pair) -> None:
    first, second = pair.nodes
    pair.post(Descriptor.broadcast(DataType.INT32, COUNT, 1), in_place=True)
    assert kinds(pair.run()) == {ANNOUNCE}
    assert first.digest == second.digest is not None
    assert (first.send == 1000 * np.arange(COUNT)).all()


def test_one_pulls_and_the_other_is_sent(pair: Pair) -> None:
    first, second = pair.nodes
    first.link.pulls = False
    pair.post(add_up())
    assert kinds(pair.deliver(second)) == {DATA}
    assert kinds(pair.deliver(first)) == {ANNOUNCE}
    pair.run()
    pair.check()
    assert sum(second.link.pulled_bytes) == 0 < sum(first.link.pulled_bytes)


def test_a_list_of_arrays(pair: Pair) -> None:
    """Parts as the sender has them, and as the receiver has them; many small ones are gathered."""
    sizes = ([COUNT], [20, 12])
    for node in pair.nodes:
        ends = np.cumsum(sizes[node.rank])[:-1]
        operand = borrow_many(np.split(node.send, ends), np.split(node.recv, ends))
        node.plane.post(OPERATION, add_up(), operand, RING, RING[node.rank])
        node.plane.begin(OPERATION)
    assert kinds(pair.run()) == {ANNOUNCE, DATA}
    pair.check()


def test_coded_segments_are_sent(pair: Pair) -> None:
    quantization = Quantization(WireFormat.INT8, 32)
    descriptor = Descriptor(DataType.FLOAT, ReduceOp.SUM, COUNT, quantization=quantization)
    for node in pair.nodes:
        operand = borrow(np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32))
        node.plane.post(OPERATION, descriptor, operand, RING, RING[node.rank])
        node.plane.begin(OPERATION)
    assert kinds(pair.run()) == {DATA}
    assert pair.nodes[0].digest == pair.nodes[1].digest is not None


def test_of_a_weighted_average_only_sums_are_announced(pair: Pair) -> None:
    """Scaled contributions are made just before they are sent."""
    descriptor = Descriptor(DataType.FLOAT, ReduceOp.AVG, COUNT, weighted=True)
    results = [np.zeros(COUNT, np.float32) for _ in RING]
    for node, result in zip(pair.nodes, results, strict=True):
        operand = borrow(np.full(COUNT, 1.0 + node.rank, np.float32), result)
        node.plane.post(OPERATION, descriptor, operand, RING, RING[node.rank])
    for node in pair.nodes:
        node.plane.begin(OPERATION, weights=(1.0, 3.0))
    headers = pair.run()
    assert {(header.step, header.kind) for header in headers} == {(0, DATA), (1, ANNOUNCE)}
    assert pair.nodes[0].digest == pair.nodes[1].digest is not None
    assert results[0].tolist() == results[1].tolist() == [1.75] * COUNT


def test_without_memory_all_is_sent(pair: Pair) -> None:
    for node in pair.nodes:
        node.make_plane(None)
    pair.post(add_up())
    assert kinds(pair.run()) == {DATA}
    pair.check()


# -- counted once, or not at all -----------------------------------------------------------------


def test_second_announcements_count_once(pair: Pair) -> None:
    first, second = pair.nodes
    pair.post(add_up())
    second.link.frames = second.link.frames * 3
    pair.deliver(first)
    assert first.link.pulled_bytes == [32, 32, 0, 0, 0, 0]
    pair.run()
    pair.check()


def test_a_copy_that_arrives_at_the_same_time_counts_no_more(pair: Pair) -> None:
    """A lane with the bytes was thought to be lost; the segment is announced on another one."""
    first, second = pair.nodes
    pair.post(add_up())
    header, payload = second.link.frames[0]
    where = decode_announcement(content_of(payload))
    lane: Any = first.link
    slow = first.plane.frame_started(lane, replace(header, kind=DATA, length=where.length))
    slow.memory(0)[:5] = b"\xff" * 5
    pair.deliver(first)
    before = first.recv.tolist()
    slow.memory(5)[:] = b"\xff" * 27
    slow.complete()
    assert first.recv.tolist() == before
    pair.run()
    pair.check()


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.MESH])
def test_a_withdrawn_segment_does_not_count(pair: Pair, algorithm: Algorithm) -> None:
    first, second = pair.nodes
    pair.post(add_up(algorithm), in_place=True)
    frames = second.link.frames
    second.plane.end(OPERATION, committed=False)
    second.link.frames = frames
    missing = set(first.missing)
    pair.deliver(first)
    assert first.link.pulled_bytes == [0, 0]
    assert first.missing == missing
    assert first.free_buffers == (algorithm is Algorithm.MESH)  # the same one twice
    transfer = first.plane.end(OPERATION, committed=False)
    assert transfer.rx_bytes == 0
    for node in pair.nodes:
        assert (node.send == np.arange(COUNT) * (1 + 999 * node.rank)).all()


def test_an_operation_that_ends_while_an_announcement_arrives(pair: Pair) -> None:
    first, second = pair.nodes
    pair.post(add_up())
    header, payload = second.link.frames[0]
    content = content_of(payload)
    lane: Any = first.link
    sink = first.plane.frame_started(lane, header)
    sink.memory(0)[:5] = content[:5]
    first.plane.end(OPERATION, committed=False)
    sink.memory(5)[:] = content[5:]
    sink.complete()
    assert (first.recv == -1).all()
    assert first.link.pulled_bytes == []


# -- pulls that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.MESH])
@pytest.mark.parametrize("pulled", range(4))
def test_after_a_failure_the_sender_sends(pair: Pair, algorithm: Algorithm, pulled: int) -> None:
    first, second = pair.nodes
    pair.post(add_up(algorithm))
    while len(first.link.pulled_bytes) < pulled:
        if not second.link.frames:
            pair.deliver(second)
        first.hear(*second.link.frames.pop(0))
    first.memory.forbidden = True
    headers = pair.run()
    pair.check()
    assert sum(first.link.pulled_bytes) == 32 * pulled
    assert (first.link.process, second.link.pulls) == (None, False)
    assert first.link.pulls  # the other one still pulls
    failed = [header for header in headers if header.kind is FrameKind.PULL_FAILED]
    assert len(failed) >= 1
    assert first.free_buffers == second.free_buffers


def test_an_announcement_without_an_agreement(pair: Pair) -> None:
    """The link was down here, and the other side did not notice."""
    first, _ = pair.nodes
    pair.post(add_up())
    first.link.process = None
    assert FrameKind.PULL_FAILED in kinds(pair.run())
    pair.check()
    assert first.link.pulled_bytes == [0] * len(first.link.pulled_bytes)


def test_an_announcement_that_waited_while_the_link_was_down(pair: Pair) -> None:
    pair.post(add_up())
    for node in pair.nodes:
        node.link.process, node.link.pulls = None, False
    headers = pair.run()
    assert FrameKind.PULL_FAILED in kinds(headers)
    pair.check()


def test_a_lost_lane_and_an_announcement(pair: Pair) -> None:
    _, second = pair.nodes
    pair.post(add_up())
    second.link.frames.clear()
    lane: Any = second.link
    second.plane.lane_lost(lane)
    headers = pair.run()
    assert {FrameKind.QUERY, FrameKind.HAVE} < kinds(headers)
    pair.check()


# -- detach --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("arrives", [False, True])
def test_who_leaves_withdraws_and_announces_the_copy(
    pair: Pair, in_place: bool, arrives: bool
) -> None:
    """The caller uses its memory at once; the other one gets the results all the same."""
    first, second = pair.nodes
    pair.post(add_up(), in_place=in_place)
    pair.deliver(first)
    pair.deliver(second)  # the sums of rank 0, and its contributions
    assert second.digest is not None
    assert first.digest is None
    old = list(second.link.frames)
    second.plane.detach(OPERATION)
    second.send[:], second.recv[:] = 12345, 54321
    headers = [header.kind for header, _ in second.link.frames]
    assert headers[-1] is FrameKind.QUERY
    if not arrives:  # the question overtakes what was announced
        second.link.frames = [frame for frame in second.link.frames if frame not in old]
    pair.run()
    for late in old:
        first.hear(*late)
    assert first.digest == second.digest
    result = first.send if in_place else first.recv
    assert result.tolist() == pair.expected.tolist()
    assert (second.send == 12345).all()
    assert (second.recv == 54321).all()


# -- early announcements -------------------------------------------------------------------------


def test_announcements_wait_for_their_operation(pair: Pair) -> None:
    first, second = pair.nodes
    first.coming = True
    second.post(add_up())
    second.plane.begin(OPERATION)
    pair.deliver(first)
    assert first.link.pulled_bytes == []
    first.post(add_up())
    assert len(first.missing) == 2
    first.plane.begin(OPERATION)
    pair.run()
    pair.check()


def test_early_announcements_that_were_withdrawn(pair: Pair) -> None:
    first, second = pair.nodes
    first.coming = True
    second.post(add_up())
    second.plane.begin(OPERATION)
    pair.deliver(first)
    second.plane.end(OPERATION, committed=False)
    first.post(add_up())
    assert len(first.missing) == 4


@pytest.mark.parametrize("process", [True, False])
def test_early_announcements_that_cannot_be_pulled(pair: Pair, process: bool) -> None:
    first, second = pair.nodes
    first.coming = True
    second.post(add_up())
    second.plane.begin(OPERATION)
    pair.deliver(first)
    if process:
        first.memory.forbidden = True
    else:
        first.link.process = None
    first.post(add_up())
    assert kinds([header for header, _ in first.link.frames]) == {FrameKind.PULL_FAILED}
    first.plane.begin(OPERATION)
    pair.run()
    pair.check()


def test_early_announcements_that_make_no_sense_close_the_link(pair: Pair) -> None:
    first, _ = pair.nodes
    closed: list[bool] = []
    first.coming = True
    first.link.close = lambda: closed.append(True)  # type: ignore[method-assign]
    first.hear(FrameHeader(ANNOUNCE, OPERATION, 0, 64, 17), bytes(17))
    first.post(add_up())
    assert closed == [True]


# -- lies ----------------------------------------------------------------------------------------


def test_other_bytes_give_other_digests(pair: Pair) -> None:
    """A member that changes its memory cannot give the others different results unnoticed."""
    first, second = pair.nodes
    pair.post(add_up())
    pair.deliver(first)
    pair.deliver(second)
    assert second.digest is not None
    second.recv[0] += 1
    second.recv[8] += 1
    pair.run()
    assert first.digest is not None
    assert first.digest != second.digest


def test_the_digest_covers_what_was_pulled(pair: Pair) -> None:
    pair.post(add_up())
    pair.run()
    pulled = pair.nodes[0].digest
    other = Pair()
    for node in other.nodes:
        node.link.pulls = False
    other.post(add_up())
    other.run()
    assert pulled == other.nodes[0].digest is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offset": 65}, "unexpected segment"),
        ({"offset": 0}, "unexpected segment"),
        ({"step": 7}, "unexpected segment"),
        ({"length": ANNOUNCE_BYTES_MAX + 1}, "an announcement has"),
        ({"length": 48}, "unexpected segment"),  # twice as long
        ({"length": 31}, "malformed"),
        ({"length": 16}, "malformed"),
        ({"length": 0}, "malformed"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_announcements_that_nobody_may_send(
    pair: Pair, change: dict[str, Any], words: str, early: bool
) -> None:
    first, second = pair.nodes
    pair.post(add_up())
    header, payload = second.link.frames[0]
    content = content_of(payload)
    content += content[16:]
    header = replace(header, **change)
    if early and header.length <= ANNOUNCE_BYTES_MAX:
        first.plane.end(OPERATION, committed=False)
        first.coming = True
        closed: list[bool] = []
        first.link.close = lambda: closed.append(True)  # type: ignore[method-assign]
        first.hear(header, content[: header.length])
        first.post(add_up())
        assert closed == [True]
    else:
        with pytest.raises(RemoteProtocolError, match=words):
            first.hear(header, content[: header.length])
    assert first.link.pulled_bytes == []
    assert (first.recv == -1).all()


def test_parts_beyond_what_is_there(pair: Pair) -> None:
    """Of the right length altogether, but nowhere: the link goes on without pulls."""
    first, second = pair.nodes
    pair.post(add_up())
    header, payload = second.link.frames.pop(0)
    where = decode_announcement(content_of(payload))
    parts = [(1 << 60, 31), (1 << 61, 1)]
    forged = encode_announcement(where.word, where.generation, parts)
    first.hear(replace(header, length=len(forged)), forged)
    assert first.link.process is None
    assert first.link.pulled_bytes == [0]
