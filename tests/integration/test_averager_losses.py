"""Peers that are killed or frozen in the middle of data-parallel training: real processes.

This file is also the peers' program. Gradients are known numbers that do not depend on the weights,
so what every weight must be follows from who contributed at which step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.insides import engine_of
from tests.support.patience import LONG_LIMIT_S

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import pccl  # noqa: E402
from pccl.bindings.events import Event, GradientsAveraged, StateSynced  # noqa: E402
from pccl.bindings.gradient_averager import GradientAverager  # noqa: E402
from pccl.machines.peer.machine import Standing  # noqa: E402
from tests.support.peers import PeerProcess, report  # noqa: E402
from tests.support.processes import wait_stopped  # noqa: E402

PAUSE_S = 0.01
"""Of a peer at each step, so that the test can follow."""

PARAMETERS, SIZE = 6, 1000
LR = 0.25
KILL_AT = 3
STOP_AT = 2
"""Complete backward passes between two stops."""
QUICK = pccl.Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, deadline_s=2.0)


def gradient(shard: int, step: int, number: int) -> float:
    """Of every element of a parameter; a small integer."""
    return float((shard + 1) * (step + 2) + number)


# -- the peers' program ----------------------------------------------------------------------------


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def has_been_told_to_stop() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def stop_here(comm: pccl.Communicator, *, until_lost: bool) -> None:
    """Stop as by SIGSTOP; go on when this process has heard that it was removed, or at once."""
    os.kill(os.getpid(), signal.SIGSTOP)
    machine = engine_of(comm).machine
    while until_lost and machine.standing is not Standing.LOST:
        time.sleep(0.001)


def train(address: str, shard: int, peers: int, kill: bool, stops: list[tuple[int, bool]]) -> None:
    """Train until told to stop.

    Args:
        address: of the master.
        shard: number of this peer, from 0.
        peers: how many there are at the beginning.
        kill: whether it kills itself in the middle of a backward pass.
        stops: when it stops, once in each membership: after so many gradients of a backward pass,
            and whether it hears of its removal before it makes the next one.
    """
    torch.set_num_threads(1)
    model = nn.ParameterList([torch.full((SIZE,), float(shard)) for _ in range(PARAMETERS)])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    contributors: list[int] = []
    syncs = 0

    def on_event(event: Event) -> None:
        nonlocal syncs
        if isinstance(event, GradientsAveraged):
            contributors[:] = event.contributors
        syncs += isinstance(event, StateSynced)

    comm = pccl.Communicator(address, timing=QUICK)
    averager = GradientAverager(
        model, optimizer, comm=comm, bucket_bytes=1, min_peers=peers, on_event=on_event
    )
    made = 0
    made_in_run = 0.0

    def count(_: Tensor) -> None:
        nonlocal made, made_in_run
        made, made_in_run = made + 1, made_in_run + 1
        if kill and made == KILL_AT * PARAMETERS + PARAMETERS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if stops and made_in_run == STOP_AT * PARAMETERS + stops[0][0]:
            made_in_run = math.inf  # until it is back in the run
            stop_here(comm, until_lost=stops.pop(0)[1])

    for parameter in model:
        hooked: Any = parameter
        hooked.register_post_accumulate_grad_hook(count)
    report({"ready": True})
    stop = torch.zeros(1)
    while not stop.item():
        averager.update()
        optimizer.zero_grad()
        step = averager.steps
        torch.autograd.backward(
            [p.sum() for p in model],
            [torch.tensor(gradient(shard, step, number)) for number in range(PARAMETERS)],
        )
        stop.fill_(float(has_been_told_to_stop()))
        if not averager.step(stop):
            report({"refused": True})
            stop.zero_()
            made_in_run = 0.0
            continue
        report({"step": averager.steps, "contributors": contributors, "digest": digest(model)})
        time.sleep(PAUSE_S)
    averager.verify()
    for parameter in model:
        assert (parameter == parameter[0]).all()
    report({"weights": [parameter[0].item() for parameter in model], "syncs": syncs})
    comm.close()


# -- the test's side -------------------------------------------------------------------------------


class Process(PeerProcess):
    """A peer that trains, and what it has reported."""

    def __init__(
        self,
        address: str,
        shard: int,
        peers: int,
        kill: bool = False,
        stops: Sequence[tuple[int, bool]] = (),
    ) -> None:
        self.steps: dict[int, tuple[tuple[int, ...], str]] = {}
        """Who contributed to each step, and the digest of the weights after it."""
        self.last: dict[str, Any] = {}
        self.refusals = 0
        """Steps that were not taken."""
        given = json.dumps([address, shard, peers, kill, list(stops)])
        super().__init__(__name__, given, limit_s=LONG_LIMIT_S)

    def until(self, condition: Callable[[Process], bool]) -> None:
        """Take in what it says until the condition holds."""
        while not condition(self):
            said = self.answer()
            if "step" in said:
                self.steps[said["step"]] = (tuple(said["contributors"]), said["digest"])
            elif "weights" in said:
                self.last = said
            self.refusals += "refused" in said

    @property
    def size(self) -> int:
        """How many contributed to the latest step; 0 before the first."""
        return len(self.steps[max(self.steps)][0]) if self.steps else 0


@contextmanager
def crew(
    size: int, killed: int | None = None, stops: Sequence[tuple[int, bool]] = ()
) -> Generator[list[Process]]:
    """So many peers that train together; one is going to kill itself, or the last one to stop."""
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as node:
        peers = [Process(node.address, n, size, kill=n == killed) for n in range(size - 1)]
        peers.append(Process(node.address, size - 1, size, size - 1 == killed, stops))
        try:
            yield peers
        finally:
            for peer in peers:
                peer.end()


def ended(peers: list[Process]) -> list[list[float]]:
    """Stop them all; their weights at the end."""
    peers[0].tell("stop")
    for peer in peers:
        peer.until(lambda peer: bool(peer.last))
        assert peer.process.wait(LONG_LIMIT_S) == 0
    return [peer.last["weights"] for peer in peers]


def test_survivors_of_a_kill_in_the_middle_of_backward_stay_alike() -> None:
    """The victim dies when half of its gradients are made, and on their way."""
    with crew(3, killed=2) as (first, second, victim):
        for peer in (first, second):
            peer.until(lambda peer: len(peer.steps) >= KILL_AT + 5)
        assert victim.process.wait(LONG_LIMIT_S) == -signal.SIGKILL
        weights = ended([first, second])
        assert first.steps == second.steps
        assert weights[0] == weights[1]
        sizes = [len(contributors) for contributors, _ in first.steps.values()]
        assert sizes == [3] * KILL_AT + [2] * (len(sizes) - KILL_AT)

        # All weights begin as those of one of the three, whoever was elected.
        candidates = [
            possible_weights(number, begin, len(sizes))
            for begin in range(3)
            for number in range(PARAMETERS)
        ]
        elected = [
            begin
            for begin in range(3)
            if all(
                weight in candidates[begin * PARAMETERS + number]
                for number, weight in enumerate(weights[0])
            )
        ]
        assert len(elected) == 1
        # The last parameters' gradients are made first. The others' were never on their way.
        for number in range(PARAMETERS // 2):
            assert weights[0][number] == candidates[elected[0] * PARAMETERS + number][1]


def possible_weights(number: int, begin: int, steps: int) -> tuple[float, float]:
    """A weight after all steps: with the victim in the step in which it died, and without."""
    found: list[float] = []
    for last in (KILL_AT + 1, KILL_AT):
        weight = np.float32(begin)
        for step in range(steps):
            brought = [gradient(shard, step, number) for shard in range(3 if step < last else 2)]
            mean = np.float32(sum(brought)) / np.float32(len(brought))
            weight = weight - np.float32(LR) * mean
        found.append(float(weight))
    return found[0], found[1]


def check_alike(peers: list[Process]) -> None:
    """All are there again, and the last one has the same steps, as far as it made them."""
    first, second, frozen = peers
    frozen.until(lambda peer: peer.size == 3 and max(peer.steps) >= max(first.steps))
    weights = ended(peers)
    assert weights[0] == weights[1] == weights[2]
    assert first.steps == second.steps
    for step, made in frozen.steps.items():
        assert first.steps[step] == made


def test_a_peer_that_was_frozen_comes_back_and_is_alike() -> None:
    with crew(3) as peers:
        first, second, frozen = peers
        for peer in peers:
            peer.until(lambda peer: len(peer.steps) >= 5)
        frozen.process.send_signal(signal.SIGSTOP)
        for peer in (first, second):
            peer.until(lambda peer: peer.size == 2)
        frozen.process.send_signal(signal.SIGCONT)
        for peer in (first, second):
            peer.until(lambda peer: peer.size == 3)
        check_alike(peers)
        assert len(frozen.steps) < len(first.steps)
        assert [peer.last["syncs"] for peer in peers] == [2, 2, 2]


def has_refused(peer: Process, count: int) -> bool:
    return peer.refusals == count


def test_a_peer_that_stops_between_two_buckets_comes_back_every_time() -> None:
    """The buckets after the stop are launched when the peer is not a member any more."""
    stops = [(1, True), (3, True), (4, False), (5, True), (2, False)]
    with crew(3, stops=stops) as peers:
        first, second, frozen = peers
        for count in range(len(stops)):
            wait_stopped(frozen.process.pid)
            for peer in (first, second):
                peer.until(lambda peer: peer.size == 2)
            frozen.process.send_signal(signal.SIGCONT)
            frozen.until(partial(has_refused, count=count + 1))
            for peer in (first, second):
                peer.until(lambda peer: peer.size == 3)
        check_alike(peers)
        assert [peer.refusals for peer in peers] == [0, 0, len(stops)]
        assert [peer.last["syncs"] for peer in peers] == [1 + len(stops)] * 3


if __name__ == "__main__":
    train(*json.loads(sys.argv[1]))
