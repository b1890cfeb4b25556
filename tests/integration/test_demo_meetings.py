"""How the demo's peers let a newcomer in: on real connections, one thread for each peer."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.patience import LIMIT_S

torch = pytest.importorskip("torch")

import pccl  # noqa: E402
from pccl.cli.demo import peer as demo_peer  # noqa: E402
from pccl.cli.demo.record import DemoTask, Told  # noqa: E402
from pccl.progress import size  # noqa: E402

AWAIT_AT = 3
STEPS = 6
STATE_BYTES = 1797 * (64 * 4 + 8) + 2 * 4 * 29066 + 8
"""Images and digits; weights and their momentum; the step counter."""


class Peer:
    """One of the demo, and what it told."""

    def __init__(self, shard: int, late: bool = False) -> None:
        generator = torch.Generator().manual_seed(9)
        images = torch.rand(demo_peer.DIGIT_COUNT, 8, 8, generator=generator)
        digits = torch.randint(1, 10, (demo_peer.DIGIT_COUNT,), generator=generator)
        known = {"images": images, "digits": digits}
        self.digits = demo_peer.load_digits(late=True) if late else known
        self.shard = shard
        self.late = late
        self.told: list[Told] = []
        self.at_first, self.at_await = threading.Event(), threading.Event()
        self.after_first: threading.Event | None = None

    def run(self, address: str) -> None:
        await_at = None if self.late else AWAIT_AT
        task = DemoTask(self.shard, 3, STEPS, 0, address, 2, await_at, self.late)
        peer = demo_peer.DemoPeer(task, self.tell, self.digits)
        peer.train_together()
        peer.finish()

    def tell(self, told: Told) -> None:
        self.told.append(told)
        if told.step == AWAIT_AT:
            self.at_await.set()
        if told.step == 1 and self.after_first is not None and not self.at_first.is_set():
            self.at_first.set()
            assert self.after_first.wait(LIMIT_S)

    def steps(self) -> dict[int, tuple[int, ...]]:
        return {told.step: told.contributors for told in self.told if told.step}

    def losses(self) -> dict[int, float]:
        return {told.step: told.loss for told in self.told if told.step}

    @property
    def digest(self) -> str:
        return self.told[-1].digest


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
        assert not any(told.fetch or "downloaded" in told.note for told in peer.told)
    assert newcomer.steps() == {4: three, 5: three, 6: three}
    assert newcomer.losses() == {n: beginners[0].losses()[n] for n in (4, 5, 6)}
    assert newcomer.digits["images"].equal(beginners[0].digits["images"])
    assert len({peer.digest for peer in [*beginners, newcomer]} - {""}) == 1

    notes = [told.note for told in newcomer.told if told.note]
    assert notes[0].startswith("joined (shard 2, pid ")
    assert notes[1].startswith(f"downloaded {size(STATE_BYTES)}, ")
    assert notes[2].startswith("finished, held-out accuracy 0.")
    assert len(notes) == 3
    assert newcomer.told[-1].fetched_bytes == STATE_BYTES
    assert newcomer.told[-1].peer_id == 3


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
    assert len({peer.digest for peer in [*beginners, newcomer]} - {""}) == 1


def wait_for_newcomer(address: str) -> None:
    """Until one has fetched what it can, and nothing but its admission is missing."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        newcomers = pccl.master_status(address).newcomers
        if [newcomer.waits_for for newcomer in newcomers] == ["the members' update_topology()"]:
            return
        time.sleep(0.01)
    raise TimeoutError("no newcomer is ready")
