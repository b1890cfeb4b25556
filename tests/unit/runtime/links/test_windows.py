"""Links over connections of which a test says what the kernel knows."""

from __future__ import annotations

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import NS_PER_S, OperationId, PeerId
from pccl.runtime.links.windows import POLL_NS, LinkWindows
from pccl.stress.sim.loop import VirtualLoop
from pccl.topology.link_window import FIRST_BYTES
from pccl.transports.base import Connection, PathMeasure
from pccl.transports.link import Lane, Link, Links
from tests.unit.transports.test_link import FakeConnection, Handler

OPERATION = OperationId(term=1, group=0, view=3, tag=5, n=0)
SLOW = 125_000


class Known(FakeConnection):
    """Takes all, and says that nothing of it has arrived."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.acked = self.looks = 0

    def measure(self) -> PathMeasure | None:
        self.looks += 1
        outstanding = len(self.sent) - self.acked
        return PathMeasure(
            1, 0, is_lower_bound=True, segment_bytes=1460,
            acked_bytes=self.acked, unsent_bytes=outstanding,
        )  # fmt: skip


class Bench:
    """A peer with links over connections of its own."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.links = Links()
        self.windows = LinkWindows(self.loop, self.links)

    def link(self, number: int, connection: Connection) -> Link:
        link = self.links.to(PeerId(number))
        lane = Lane(connection, len(link.lanes), link, Handler())
        self.windows.opening(lane)
        link.add(lane)
        return link

    def sleep(self, ns: int) -> None:
        self.loop.run_until_complete(self._sleep(self.loop.now_ns() + ns))

    async def _sleep(self, until_ns: int) -> None:
        future = self.loop.create_future()
        self.loop.call_at_ns(until_ns, future.set_result, None)
        await future


def send(link: Link, number: int, nbytes: int = 1 << 20) -> None:
    header = FrameHeader(FrameKind.DATA, OPERATION, 0, number, nbytes)
    link.send(header, memoryview(bytes(nbytes)), number)


def test_new_links_share_what_is_handed_over_first() -> None:
    bench = Bench()
    links = [bench.link(number, Known()) for number in (2, 3, 4)]
    assert [link.room for link in links] == [FIRST_BYTES, FIRST_BYTES // 2, FIRST_BYTES // 3]
    bench.windows.close()
    bench.loop.close()


def test_what_was_acknowledged_makes_room_and_then_the_timer_ends() -> None:
    bench, connection = Bench(), Known()
    link = bench.link(2, connection)
    send(link, 0, FIRST_BYTES + 100_000)
    assert len(connection.sent) == FIRST_BYTES
    bench.sleep(NS_PER_S)
    assert len(connection.sent) == FIRST_BYTES, "nothing was acknowledged"
    for _ in range(80):
        connection.acked = min(len(connection.sent), connection.acked + SLOW // 20)
        bench.sleep(NS_PER_S // 20)
        outstanding = len(connection.sent) - connection.acked
        assert outstanding <= FIRST_BYTES
    assert connection.offsets == [0]
    assert not link.waits
    looks = connection.looks
    bench.sleep(NS_PER_S)
    assert connection.looks <= looks + 1
    bench.windows.close()
    bench.loop.close()


def test_neither_links_in_a_machine_nor_over_unknown_lines_have_a_window() -> None:
    bench, near = Bench(), Known()
    near.remote = near.local
    assert bench.link(2, near).room is None
    assert bench.link(3, FakeConnection(0)).room is None
    bench.loop.close()


def test_the_first_lane_over_another_line_begins_anew() -> None:
    bench, connection = Bench(), Known()
    link = bench.link(2, connection)
    send(link, 0)
    assert link.waits
    bench.link(2, Known())
    assert link.waits, "a further lane changes nothing"
    for lane in link.lanes:
        link.remove(lane)
    again = Known()
    bench.link(2, again)
    assert link.room is not None
    bench.sleep(POLL_NS)
    bench.windows.close()
    bench.loop.close()


def test_segments_that_waited_for_a_lane_are_limited_by_its_window() -> None:
    bench, connection = Bench(), Known()
    send(bench.links.to(PeerId(2)), 0)
    link = bench.link(2, connection)
    assert len(connection.sent) == FIRST_BYTES
    (lane,) = link.lanes
    link.remove(lane)
    lane.connection_lost(None)
    send(link, 1)
    again = Known()
    bench.link(2, again)
    assert len(again.sent) == FIRST_BYTES
    bench.windows.close()
    bench.loop.close()
