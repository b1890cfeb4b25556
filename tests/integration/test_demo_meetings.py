"""How the demo's peers let a newcomer in: on real connections, one thread for each peer."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import pccl  # noqa: E402
from pccl.cli.demo_peer import Meetings, Progress  # noqa: E402

LIMIT_S = 60.0
AWAIT_AT = 3
STEPS = 6


class Peer:
    """Adds its contributors' number to a total, step by step."""

    def __init__(self, seed: int) -> None:
        self.step_count = torch.full((1,), seed, dtype=torch.int64)
        self.total = torch.full((1000,), float(seed))
        self.contributors: dict[int, int] = {}
        tensors = {"step_count": self.step_count, "total": self.total}
        self.state = pccl.SharedState(
            [pccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()]
        )
        self.at_await = threading.Event()

    def run(self, address: str, await_at: int | None, progress: Progress | None) -> None:
        with pccl.Communicator(address) as comm:
            if progress is None:
                comm.connect(min_peers=2, timeout_s=LIMIT_S)
            else:
                comm.connect(shared_state=self.state, on_progress=progress, timeout_s=LIMIT_S)
            meetings = Meetings(comm, self.state, self.step_count, await_at, progress)
            while True:
                meetings.hold()
                step = int(self.step_count.item())
                if step >= STEPS:
                    break
                ones = torch.ones(1000)
                info = comm.all_reduce(ones)
                self.contributors[step] = len(info.contributors)
                self.total += ones
                self.step_count += 1
                if step + 1 == AWAIT_AT:
                    self.at_await.set()
            comm.verify(self.state)


def test_nobody_goes_on_before_the_newcomer_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    beginners, newcomer = [Peer(0), Peer(0)], Peer(77)
    progress = Progress()
    with ThreadPoolExecutor(3) as pool, pccl.MasterNode("127.0.0.1:0") as node:
        runs: list[Future[None]] = [
            pool.submit(peer.run, node.address, AWAIT_AT, None) for peer in beginners
        ]
        for peer in beginners:
            assert peer.at_await.wait(LIMIT_S)
        runs.append(pool.submit(newcomer.run, node.address, None, progress))
        for run in runs:
            run.result(LIMIT_S)
    for peer in beginners:
        assert peer.contributors == {0: 2, 1: 2, 2: 2, 3: 3, 4: 3, 5: 3}
    assert newcomer.contributors == {3: 3, 4: 3, 5: 3}
    assert newcomer.total.tolist() == [15.0] * 1000
    assert progress.done_bytes == 4008
    assert '"event": "synced"' in capsys.readouterr().out
