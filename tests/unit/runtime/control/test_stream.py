"""One control connection whose other side reads, or does not, on a network of one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pccl.protocol import messages as msg
from pccl.protocol.codec import encode
from pccl.protocol.guards.allowance import masters_bytes_max
from pccl.protocol.limits import LINGER_S
from pccl.protocol.types import NS_PER_S
from pccl.runtime.control.stream import ControlStream
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, PathMeasure, Receiver

LINGER_NS = round(LINGER_S * NS_PER_S)
WORDS = msg.Heartbeat()


class Remote:
    """A connection of which the test says how much the other side reads."""

    remote, local, congestion = Address("far", 1), Address("near", 2), ""

    def __init__(self) -> None:
        self.room = 0
        self.taken = b""
        self.ended = ""
        self.paused = False
        self._receiver: Receiver | None = None

    def measure(self) -> PathMeasure | None:
        return None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        data = b"".join(buffers)[: self.room]
        self.room -= len(data)
        self.taken += data
        return len(data)

    def notify_writable(self) -> None:
        """The test calls ``reads``."""

    def close(self) -> None:
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, how: str) -> None:
        if not self.ended:
            self.ended = how
            assert self._receiver is not None
            self._receiver.connection_lost(None)

    def reads(self, nbytes: int) -> None:
        self.room += nbytes
        assert self._receiver is not None
        self._receiver.writable()

    def says(self, message: msg.Message) -> None:
        data = encode(message)
        assert self._receiver is not None
        self._receiver.get_buffer()[: len(data)] = data
        self._receiver.buffer_updated(len(data))


class World:
    """The stream, its other side, and time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.wait_ns = 0
        """What ``spend`` answers."""
        self.remote = Remote()
        self.heard: list[msg.Message] = []
        self.reasons: list[str] = []
        self.stream = ControlStream(
            self.remote, self.heard.append, self.reasons.append, self.loop, masters_bytes_max,
            spend=lambda _: self.wait_ns,
        )  # fmt: skip

    def sleep_ns(self, duration_ns: int) -> None:
        async def sleep() -> None:
            woken = self.loop.create_future()
            self.loop.call_at_ns(self.loop.now_ns() + duration_ns, woken.set_result, None)
            await woken

        self.loop.run_until_complete(sleep())


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


def test_a_closed_stream_whose_reader_never_reads_is_cut_off(world: World) -> None:
    world.stream.send(WORDS)
    world.stream.close()
    world.sleep_ns(LINGER_NS - 1)
    world.remote.reads(1)  # a byte now and then wins no time
    world.stream.close()
    assert world.remote.ended == ""
    world.sleep_ns(1)
    assert world.remote.ended == "aborted"
    assert world.reasons == []


@pytest.mark.parametrize("late_ns", [0, LINGER_NS // 2])
def test_a_closed_stream_ends_in_order_when_all_is_read(world: World, late_ns: int) -> None:
    world.stream.send(WORDS)
    world.stream.close()
    world.sleep_ns(late_ns)
    world.remote.reads(1 << 10)
    assert (world.remote.ended, world.remote.taken) == ("closed", encode(WORDS))
    world.sleep_ns(LINGER_NS)
    assert world.remote.ended == "closed"


def test_an_open_stream_has_time(world: World) -> None:
    world.stream.send(WORDS)
    world.sleep_ns(10 * LINGER_NS)
    assert world.remote.ended == ""


def test_a_pause_ends_in_its_time_or_earlier(world: World) -> None:
    world.wait_ns = 100
    world.remote.says(msg.MasterHeartbeat())
    assert world.remote.paused
    world.sleep_ns(99)
    assert world.remote.paused
    world.sleep_ns(1)
    assert not world.remote.paused
    assert not world.stream.read_on()
    world.remote.says(msg.MasterHeartbeat())
    assert world.stream.read_on()
    assert not world.remote.paused
    world.remote.says(msg.MasterHeartbeat())
    world.sleep_ns(99)
    assert world.remote.paused, "the timer of the pause before has been cancelled"
    assert len(world.heard) == 3
