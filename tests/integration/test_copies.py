"""No byte of a tensor is copied in Python: the network reads and writes the caller's memory.

Between engine and network stands a transport that records, by address, which memory every byte
was read into or sent from.
"""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.collectives.layout import SEGMENT_BYTES_MAX
from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import HEADER_BYTES
from pccl.protocol.handshake.exchange import PROOF_BYTES
from pccl.protocol.handshake.opening import OPENING_BYTES
from pccl.protocol.limits import Timing
from pccl.protocol.types import Algorithm, Descriptor, ReduceOp, RoundKind
from pccl.runtime.clock import LoopClock
from pccl.runtime.collective import operand
from pccl.runtime.collective.buffers import Backups
from pccl.runtime.collective.operand import borrow
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.requests import JoinRequest, PeerOptions, ReduceInfo, ReduceRequest, RunRequest
from pccl.transports.base import Address, Connection, Listener, Receiver, Transport
from pccl.transports.tcp import TcpTransport
from tests.support.patience import LIMIT_S

Array = npt.NDArray[Any]
LOOPBACK = Address("127.0.0.1", 0)


def address_of(buffer: bytes | bytearray | memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


class Ledger:
    """Which memory was read into, and which was sent from: (address, bytes) in order."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []
        self.sent: list[tuple[int, int]] = []

    def clear(self) -> None:
        self.read.clear()
        self.sent.clear()


def sum_of(send: Array, result: Array, algorithm: Algorithm) -> ReduceRequest:
    data_type = DataType.from_numpy_dtype(send.dtype)
    descriptor = Descriptor(data_type, ReduceOp.SUM, send.size, algorithm=algorithm)
    return ReduceRequest(borrow(send, result), ReduceCall(0, 0, descriptor))


def inside(entries: list[tuple[int, int]], *arrays: Array) -> int:
    """Bytes of ``entries`` that lie in ``arrays``."""
    return sum(
        nbytes
        for address, nbytes in entries
        if any(a.ctypes.data <= address < a.ctypes.data + a.nbytes for a in arrays)
    )


def outside(entries: list[tuple[int, int]], *arrays: Array) -> int:
    """Bytes of ``entries`` that lie elsewhere."""
    return sum(nbytes for _, nbytes in entries) - inside(entries, *arrays)


class RecordingReceiver:
    def __init__(self, receiver: Receiver, ledger: Ledger) -> None:
        self._receiver = receiver
        self._ledger = ledger
        self._address = 0
        self._size = 0

    def get_buffer(self) -> memoryview:
        buffer = self._receiver.get_buffer()
        self._address, self._size = address_of(buffer), len(buffer)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert 0 < nbytes <= self._size
        self._ledger.read.append((self._address, nbytes))
        self._receiver.buffer_updated(nbytes)

    def writable(self) -> None:
        self._receiver.writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._receiver.connection_lost(error)


class RecordingConnection:
    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self._connection = connection
        self._ledger = ledger
        self.remote = connection.remote
        self.local = connection.local
        self.congestion = connection.congestion
        self.measure = connection.measure
        self.notify_writable = connection.notify_writable
        self.close = connection.close
        self.pause_reading = connection.pause_reading
        self.resume_reading = connection.resume_reading
        self.abort = connection.abort

    def start(self, receiver: Receiver) -> None:
        self._connection.start(RecordingReceiver(receiver, self._ledger))

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        addresses = [(address_of(buffer), len(buffer)) for buffer in buffers if len(buffer)]
        taken = left = self._connection.send(buffers)
        for address, size in addresses:
            if left:
                self._ledger.sent.append((address, min(left, size)))
            left -= min(left, size)
        return taken


class RecordingTransport:
    """A peer's network; what goes to the master is kept apart."""

    def __init__(self, inner: Transport, master: Address) -> None:
        self.lanes = Ledger()
        self.control = Ledger()
        self.port_limits, self.memory = inner.port_limits, inner.memory
        self._inner = inner
        self._master = master

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        def accept(connection: Connection) -> None:
            on_connection(RecordingConnection(connection, self.lanes))

        return await self._inner.listen(address, accept)

    def hosts(self, address: Address) -> tuple[str, ...]:
        return self._inner.hosts(address)

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
        hosts: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> Connection:
        ledger = self.control if address == self._master else self.lanes
        connection = await self._inner.dial(address, timeout_s, may_dial, hosts, segment_bytes)
        return RecordingConnection(connection, ledger)

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int = 0,
    ) -> Connection:
        return await self._inner.punch(local, address, timeout_s, may_dial, segment_bytes)


class Run:
    """A master and members, all on one loop."""

    def __init__(self, size: int, *, record: bool, segment_bytes: int | None = None) -> None:
        self._size = size
        self._record = record
        self._segment_bytes = segment_bytes
        self.networks: list[RecordingTransport] = []
        self.engines: list[PeerEngine] = []

    async def __aenter__(self) -> Run:
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        self._master = MasterServer(clock, TcpTransport(loop), Timing(), os.urandom)
        await self._master.start(LOOPBACK)
        address = self._master.address
        for _ in range(self._size):
            network = RecordingTransport(TcpTransport(loop), address)
            self.networks.append(network)
            transport = network if self._record else TcpTransport(loop)
            # With a fixed number of lanes nothing is sent to measure them.
            options = PeerOptions(listen=LOOPBACK, segment_bytes=self._segment_bytes, lanes=1)
            engine = PeerEngine(loop, clock, transport, address, 0, options)
            growing = [self._grow(member) for member in self.engines]
            await asyncio.gather(engine.connect(JoinRequest()), *growing)
            self.engines.append(engine)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for engine in self.engines:
            await engine.close()
        self._master.close()
        for _ in range(2):
            await asyncio.sleep(0)

    async def _grow(self, member: PeerEngine) -> None:
        while member.roster is None or len(member.roster.members) <= len(self.engines):
            await member.round(RunRequest(RoundKind.UPDATE_TOPOLOGY))

    async def reduce(
        self, sends: list[Array], results: list[Array], algorithm: Algorithm = Algorithm.RING
    ) -> list[ReduceInfo]:
        return await asyncio.gather(
            *(
                engine.reduce(sum_of(send, result, algorithm))
                for engine, send, result in zip(self.engines, sends, results, strict=True)
            )
        )


def on_loop(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main

    asyncio.run(limited())


def ring_traffic(count: int, itemsize: int, size: int, rank: int, segment: int) -> tuple[int, int]:
    """Payload bytes and frames that a rank sends in a ring, counted anew from its definition."""
    chunks = [(count // size + (chunk < count % size)) * itemsize for chunk in range(size)]
    sent = [chunks[(rank - step) % size] for step in range(2 * (size - 1))]
    return sum(sent), sum(-(-nbytes // segment) for nbytes in sent)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("in_place", [False, True], ids=["separate", "in place"])
def test_payload_is_read_into_and_sent_from_the_callers_arrays(size: int, in_place: bool) -> None:
    count, segment = 1_000_003, 64 << 10

    async def main() -> None:
        sends: list[Array] = [np.arange(count, dtype=np.float32) % (7 + r) for r in range(size)]
        expected = np.sum(sends, axis=0, dtype=np.float32)
        results = sends if in_place else [np.zeros_like(send) for send in sends]
        async with Run(size, record=True, segment_bytes=segment) as run:
            for rank, network in enumerate(run.networks):
                # Both ways: on each lane, when the master and the youngest member test a newcomer.
                probes = 2 + (0 < rank < size - 1)
                greetings = (size - 1 + probes) * (OPENING_BYTES + PROOF_BYTES)
                assert outside(network.lanes.read) == outside(network.lanes.sent) == greetings
                network.lanes.clear()
                network.control.clear()
            infos = await run.reduce(sends, results)
            for rank, network in enumerate(run.networks):
                sent_bytes, sent_frames = ring_traffic(count, 4, size, rank, segment)
                read_bytes, read_frames = ring_traffic(count, 4, size, (rank - 1) % size, segment)
                send, result, lanes = sends[rank], results[rank], network.lanes
                assert inside(lanes.read, result) == read_bytes == infos[rank].rx_bytes
                assert outside(lanes.read, result) == read_frames * HEADER_BYTES
                assert inside(lanes.sent, send, result) == sent_bytes == infos[rank].tx_bytes
                assert outside(lanes.sent, send, result) == sent_frames * HEADER_BYTES
                assert sent_frames > 20
                if not in_place:
                    first_chunk = (count // size + (rank < count % size)) * 4
                    assert inside(lanes.sent, send) == first_chunk, "the rest is partial sums"
                assert inside(network.control.read, send, result) == 0
                assert inside(network.control.sent, send, result) == 0
                assert outside(network.control.sent) < 1000
                assert np.array_equal(result, expected)

    on_loop(main())


@pytest.mark.parametrize(
    ("size", "algorithm"), [(2, Algorithm.RING), (3, Algorithm.RING), (3, Algorithm.MESH)]
)
@pytest.mark.parametrize("in_place", [False, True], ids=["separate", "in place"])
def test_memory_of_a_reduce(
    monkeypatch: pytest.MonkeyPatch, size: int, algorithm: Algorithm, in_place: bool
) -> None:
    """Next to nothing with separate buffers; in place one backup of the input for each peer.

    In a mesh each lane reads into a buffer of one segment.
    """
    monkeypatch.setattr(operand, "_BACKUPS", Backups())  # keeps nothing of other tests
    nbytes = 64 << 20
    buffers = 2 << 20
    if algorithm is Algorithm.MESH:
        buffers += size * (size - 1) * SEGMENT_BYTES_MAX

    async def main() -> None:
        sends: list[Array] = [np.full(nbytes // 4, r + 1, np.int32) for r in range(size)]
        results = sends if in_place else [np.empty_like(send) for send in sends]
        async with Run(size, record=False) as run:
            tracemalloc.start()
            try:
                await run.reduce(sends, results, algorithm)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        backups = size * nbytes if in_place else 0
        assert 0 <= peak - backups < buffers
        assert all((result == size * (size + 1) // 2).all() for result in results)

    on_loop(main())
