"""Data planes joined by links in memory: every frame arrives at a moment of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.residual import Residual
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.checksum import payload_hash
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import (
    UNQUANTIZED,
    Algorithm,
    Descriptor,
    OperationId,
    PeerId,
    Quantization,
    ReduceOp,
)
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan
from pccl.runtime.collective import memory
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import Operand, borrow, borrow_many
from pccl.runtime.collective.transfers.transfer import Transfer
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload
from pccl.transports.sim.memory import SimMemories, SimMemory

Array = npt.NDArray[Any]

ALGORITHMS = (Algorithm.RING, Algorithm.STAR, Algorithm.MESH)

OPERATION = OperationId(term=1, group=0, view=3, tag=5, n=0)


class Wire(Link):
    """Queues references to memory, as a send queue does: it is read when the frame leaves.

    It is also what a data plane sees of the lane that a frame comes on.
    """

    def __init__(
        self,
        peer: PeerId,
        queue: Callable[[FrameHeader, Payload], None],
        copy_queued: Callable[[Callable[[FrameHeader], Payload]], None],
    ) -> None:
        super().__init__(peer)
        self._carry = queue
        self._copy_queued = copy_queued
        self.link = self

    @property
    def up(self) -> bool:
        return True

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        self._carry(replace(header, check=check or 0), payload)

    def ask(self, header: FrameHeader) -> None:
        self._carry(header, b"")

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        self._carry(header, payload)

    def pulled(self, nbytes: int) -> None:
        pass

    def detach(self, operation: OperationId, payload_of: Callable[[FrameHeader], Payload]) -> None:
        self._copy_queued(payload_of)


@dataclass(slots=True)
class Travelling:
    source: int
    target: int
    header: FrameHeader
    payload: Payload

    def read(self) -> memoryview:
        payload = self.payload() if callable(self.payload) else self.payload
        return memoryview(b"".join(payload) if isinstance(payload, list) else payload)


class Ring:
    """One data plane per rank. Peer ids are not ranks.

    Args:
        world_size: number of ranks.
        segment_bytes: size of a segment.
        rng: decides what is left to chance.
        local: whether all ranks are on one machine, and pull; None: left to chance.
    """

    def __init__(
        self, world_size: int, segment_bytes: int, rng: random.Random, *, local: bool | None = None
    ) -> None:
        self.peers = tuple(PeerId(10 + 3 * rank) for rank in range(world_size))
        self.frames: list[Travelling] = []
        self.done: dict[int, bytes] = {}
        self.refused: dict[int, PeerId] = {}
        """The ranks that refuse the result -> the member whose contribution is not finite."""
        self.infinite: frozenset[int] = frozenset()
        """The ranks that have declared a contribution that is not finite."""
        self.weights: tuple[float, ...] = ()
        """Of a weighted average."""
        shares: tuple[int, ...] = ()
        sites: tuple[int, ...] = ()
        if rng.random() < 0.5:
            drawn = [rng.choice((0, 0, 1, 5, rng.randrange(1000))) for _ in self.peers]
            shares = tuple(drawn) if any(drawn) else ()
        if rng.random() < 0.5:
            sites = tuple(rng.randrange(rng.randint(1, world_size)) for _ in self.peers)
        self.mesh = MeshPlan(shares, sites)
        """Shares and sites of a mesh; half of the rings have equal shares, half have no sites."""
        self.transfers: list[Transfer] = []
        """Of each rank, after a reduce."""
        self._rng = rng
        memory.PART_BYTES_MIN = rng.choice((0, 4, 1 << 20))  # never, if they are tiny, always
        self._to_begin = list(range(world_size))
        self._memories: list[SimMemory] = []
        if local or (local is None and rng.random() < 0.5):
            shared = SimMemories()
            shared.machines = {"here": "m"}
            booted = [shared.boot("here", lambda: True) for _ in self.peers]
            self._memories = [memory for memory in booted if memory is not None]
        self._wires: dict[tuple[int, PeerId], Wire] = {}
        self._link_to: list[Callable[[PeerId], Link]] = []
        self.planes = [self._plane(rank, segment_bytes) for rank in range(world_size)]

    def _plane(self, rank: int, segment_bytes: int) -> DataPlane:
        def link_to(peer: PeerId) -> Link:
            target = self.peers.index(peer)
            if (rank, peer) in self._wires:
                return self._wires[rank, peer]

            def queue(header: FrameHeader, payload: Payload) -> None:
                if callable(payload) and self._rng.random() < 0.5:  # a lane was idle
                    payload = payload()
                self.frames.append(Travelling(rank, target, header, payload))

            def copy_queued(payload_of: Callable[[FrameHeader], Payload]) -> None:
                for frame in self.frames:
                    is_queued = (frame.source, frame.target) == (rank, target)
                    if is_queued and frame.header.kind is FrameKind.DATA:
                        frame.payload = payload_of(frame.header)

            wire = self._wires[rank, peer] = Wire(peer, queue, copy_queued)
            if self._memories:
                wire.process, wire.pulls = self._memories[target].ancestry[0], True
            return wire

        def on_done(operation: OperationId, digest: bytes) -> None:
            assert operation == OPERATION
            assert rank not in self.done
            assert rank not in self._to_begin  # never before it has begun
            self.done[rank] = digest

        def on_not_finite(operation: OperationId, peer: PeerId) -> None:
            assert rank not in self.done
            assert rank not in self.refused
            self.refused[rank] = peer

        memory = self._memories[rank] if self._memories else None
        self._link_to.append(link_to)
        return DataPlane(
            link_to, lambda operation: False, on_done, segment_bytes, memory, on_not_finite
        )

    def post(
        self,
        descriptor: Descriptor,
        buffers: list[tuple[Array, Array]] | None,
        owed: list[ErrorFeedback] | None = None,
    ) -> list[Residual]:
        """Post it on all ranks; what comes of what they owe, if they keep account of it."""
        residuals = [one.begin("w", descriptor.count, descriptor.dtype) for one in owed or ()]
        for rank, plane in enumerate(self.planes):
            operand = self.borrow(*buffers[rank]) if buffers is not None else None
            residual = residuals[rank] if residuals else None
            ring, mesh = self.peers, self.mesh if descriptor.follows_mesh_plan else EQUAL_MESH
            plane.post(OPERATION, descriptor, operand, ring, ring[rank], residual, mesh=mesh)
        return residuals

    def reduce(
        self, descriptor: Descriptor, inputs: list[Array], owed: list[ErrorFeedback] | None = None
    ) -> Array:
        """What all ranks come to, which is the same; they leave what they have lent for reading."""
        buffers = lend(inputs, self._rng)
        self.post(descriptor, buffers, owed)
        self.run()
        self.check_done()
        self.transfers = [plane.end(OPERATION, committed=True) for plane in self.planes]
        assert len({recv.tobytes() for _, recv in buffers}) == 1
        check_inputs(inputs, buffers)
        return buffers[0][1]

    def borrow(self, send: Array, recv: Array) -> Operand:
        """Each rank decides for itself whether it is one tensor or many."""
        if self._rng.random() < 0.5:
            return borrow(send, recv)
        ends = sorted(self._rng.randint(0, len(send)) for _ in range(self._rng.randint(1, 9)))
        parts = [slice(a, b) for a, b in pairwise([0, *ends, len(send)])]
        return borrow_many([send[part] for part in parts], [recv[part] for part in parts])

    def step(self) -> bool:
        """One rank begins, or one frame arrives; False if there is neither."""
        choice = self._rng.randrange(len(self._to_begin) + len(self.frames) + 1)
        if self._to_begin and (choice < len(self._to_begin) or not self.frames):
            rank = self._to_begin.pop(self._rng.randrange(len(self._to_begin)))
            self.planes[rank].begin(OPERATION, weights=self.weights, infinite=self.infinite)
            return True
        if not self.frames:
            return False
        self._deliver(self.frames.pop(self._rng.randrange(len(self.frames))))
        return True

    def run(self, steps: int | None = None) -> None:
        """All steps that there are, or so many of them."""
        while steps != 0 and self.step():
            steps = None if steps is None else steps - 1

    def check_done(self) -> None:
        """All ranks are done, with the same result."""
        assert sorted(self.done) == list(range(len(self.peers)))
        assert len(set(self.done.values())) == 1

    def check_abort(self, inputs: list[Array], buffers: list[tuple[Array, Array]]) -> None:
        """It ends without a result: inputs are as they were, and no late frame changes anything."""
        self.end(committed=False)
        results = [recv.tobytes() for _, recv in buffers]
        assert [send.tobytes() for send, _ in buffers] == [own.tobytes() for own in inputs]
        self.deliver_the_rest()
        assert [recv.tobytes() for _, recv in buffers] == results

    def _deliver(self, frame: Travelling) -> None:
        lane: Any = self._link_to[frame.target](self.peers[frame.source])
        received, payload = 0, frame.read()
        check = payload_hash(payload)
        header = replace(frame.header, check=check)
        sink = self.planes[frame.target].frame_started(lane, header)
        while received < len(payload):
            memory = sink.memory(received)
            take = min(len(memory), self._rng.randint(1, len(payload) - received))
            memory[:take] = payload[received : received + take]
            received += take
        sink.complete()

    def deliver_the_rest(self) -> None:
        while self.frames:
            self._deliver(self.frames.pop())

    def end(self, committed: bool) -> None:
        for frame in self.frames:
            if callable(frame.payload):  # the others would be read too late
                frame.payload = frame.payload()
        for plane in self.planes:
            plane.end(OPERATION, committed=committed)


def all_reduce(
    data_type: DataType,
    op: ReduceOp,
    count: int,
    algorithm: Algorithm,
    quantization: Quantization = UNQUANTIZED,
) -> Descriptor:
    return Descriptor(data_type, op, count, quantization=quantization, algorithm=algorithm)


def random_values(data_type: DataType, count: int, rng: random.Random) -> Array:
    """Any bits at all, or small numbers: NaN, infinity and the like are among the bits."""
    dtype = data_type.to_numpy_dtype()
    if rng.random() < 0.5:
        return np.frombuffer(rng.randbytes(count * dtype.itemsize), dtype)
    return np.array([rng.randrange(100) for _ in range(count)]).astype(dtype)


def lend(inputs: list[Array], rng: random.Random) -> list[tuple[Array, Array]]:
    """Each rank decides for itself whether the collective is in place."""
    sends = [own.copy() for own in inputs]
    return [
        (send, send if rng.random() < 0.5 else np.frombuffer(bytearray(send.nbytes), send.dtype))
        for send in sends
    ]


def check_inputs(inputs: list[Array], buffers: list[tuple[Array, Array]]) -> None:
    """What was lent for reading only is as it was."""
    for own, (send, recv) in zip(inputs, buffers, strict=True):
        assert send is recv or send.tobytes() == own.tobytes()
