"""How the demo's peers let a newcomer in: on real connections, one thread for each peer."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.patience import LIMIT_S

torch = pytest.importorskip("torch")

import pccl  # noqa: E402
from pccl.cli.demo import peer as demo_peer  # noqa: E402
from pccl.cli.demo.record import Event, Joined, Stepped, Synced  # noqa: E402
from pccl.progress import SyncProgress  # noqa: E402

AWAIT_AT = 3
STEPS = 6
STATE_BYTES = 1797 * (64 * 4 + 8) + 2 * 4 * 29066 + 8
"""Images and digits; weights and their momentum; the step counter."""


class Peer:
    """One of the demo, and what it reported."""

    def __init__(self, shard: int, late: bool = False) -> None:
        generator = torch.Generator().manual_seed(9)
        images = torch.rand(demo_peer.DIGIT_COUNT, 8, 8, generator=generator)
        digits = torch.randint(1, 10, (demo_peer.DIGIT_COUNT,), generator=generator)
        self.digits = demo_peer.no_digits() if late else demo_peer.Examples(images, digits)
        self.model = demo_peer.make_model(77 if late else 0)
        self.shard = shard
        self.late = late
        self.events: list[Event] = []
        self.at_first, self.at_await = threading.Event(), threading.Event()
        self.after_first: threading.Event | None = None

    def run(self, address: str) -> None:
        demo_peer.train_together(
            self.model,
            self.digits,
            torch.arange(100 * self.shard, 100 * self.shard + 100),
            master=address,
            steps=STEPS,
            seed=self.shard,
            report=self.report,
            min_peers=1 if self.late else 2,
            await_at=None if self.late else AWAIT_AT,
            late=self.late,
        )

    def report(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stepped) and event.step == AWAIT_AT:
            self.at_await.set()
        if isinstance(event, Stepped) and event.step == 1 and self.after_first is not None:
            self.at_first.set()
            assert self.after_first.wait(LIMIT_S)

    def steps(self) -> dict[int, tuple[int, ...]]:
        return {e.step: e.contributors for e in self.events if isinstance(e, Stepped)}

    def losses(self) -> dict[int, float]:
        return {e.step: e.loss for e in self.events if isinstance(e, Stepped)}


def test_nobody_goes_on_before_the_newcomer_has_come() -> None:
    beginners, newcomer = [Peer(0), Peer(1)], Peer(2, late=True)
    with ThreadPoolExecutor(3) as pool, pccl.MasterNode("127.0.0.1:0") as node:
        runs: list[Future[None]] = [pool.submit(peer.run, node.address) for peer in beginners]
        for peer in beginners:
            assert peer.at_await.wait(LIMIT_S)
        runs.append(pool.submit(newcomer.run, node.address))
        for run in runs:
            run.result(LIMIT_S)
    two, three = (1, 2), (1, 2, 3)
    for peer in beginners:
        assert peer.steps() == {1: two, 2: two, 3: two, 4: three, 5: three, 6: three}
        assert peer.losses() == beginners[0].losses()
        assert not any(isinstance(event, Synced | SyncProgress) for event in peer.events)
    assert newcomer.steps() == {4: three, 5: three, 6: three}
    assert newcomer.losses() == {n: beginners[0].losses()[n] for n in (4, 5, 6)}
    assert newcomer.digits.images.equal(beginners[0].digits.images)
    assert len({demo_peer.digest(peer.model) for peer in [*beginners, newcomer]}) == 1

    told = [event for event in newcomer.events if isinstance(event, Joined | Synced)]
    assert told[0] == Joined(3)
    assert isinstance(told[1], Synced)
    assert told[1].fetched_bytes == STATE_BYTES
    assert told[1].joint_bytes <= STATE_BYTES
    assert len(told) == 2
    fetched = [event for event in newcomer.events if isinstance(event, SyncProgress)]
    assert fetched
    assert fetched[-1].done_bytes == STATE_BYTES


def test_a_newcomer_that_comes_early_is_not_awaited_again() -> None:
    beginners, newcomer = [Peer(0), Peer(1)], Peer(2, late=True)
    has_come = threading.Event()
    for peer in beginners:
        peer.after_first = has_come
    with ThreadPoolExecutor(3) as pool, pccl.MasterNode("127.0.0.1:0") as node:
        runs = [pool.submit(peer.run, node.address) for peer in beginners]
        for peer in beginners:
            assert peer.at_first.wait(LIMIT_S)
        runs.append(pool.submit(newcomer.run, node.address))
        wait_for_newcomer(node.address)
        has_come.set()
        for run in runs:
            run.result(LIMIT_S)
    two, three = (1, 2), (1, 2, 3)
    for peer in beginners:
        assert peer.steps() == {1: two, 2: three, 3: three, 4: three, 5: three, 6: three}
    assert newcomer.steps() == {2: three, 3: three, 4: three, 5: three, 6: three}
    assert len({demo_peer.digest(peer.model) for peer in [*beginners, newcomer]}) == 1


def wait_for_newcomer(address: str) -> None:
    """Until one has fetched what it can, and nothing but its admission is missing."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        newcomers = pccl.master_status(address).newcomers
        if [newcomer.waits_for for newcomer in newcomers] == ["the members' update_topology()"]:
            return
        time.sleep(0.01)
    raise TimeoutError("no newcomer is ready")
