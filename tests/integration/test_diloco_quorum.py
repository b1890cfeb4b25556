"""``DiLoCo`` with a quorum over sockets: a replica that naps, and one that is four times slower.

The model is one number. An inner step subtracts 1, so the work of a round is its number of steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, OuterStep, RoundsMissed
from pccl.protocol.limits import MISSED_KEPT_MAX
from tests.support.commands import environment_with, run_to_end
from tests.support.diloco_peers import Peers
from tests.support.patience import LIMIT_S, patient

STEP_S = patient(0.01)
GRACE_S = patient(0.3)
REPLICAS = 3


@dataclass
class Trained:
    """What became of one replica."""

    steps: int = 0
    value: float = 0.0
    events: list[Event] = field(default_factory=lambda: [])

    @property
    def rounds(self) -> list[OuterStep]:
        return [event for event in self.events if isinstance(event, OuterStep)]

    @property
    def averaged(self) -> float:
        """Weight of its work in all rounds: each step weighs 1."""
        return sum(event.own_weight for event in self.rounds)

    @property
    def waited_s(self) -> float:
        return sum(event.exposed_s for event in self.rounds)

    @property
    def misses_in_a_row(self) -> int:
        longest = now = 0
        for event in self.rounds:
            now = 0 if event.own_weight else now + 1
            longest = max(longest, now)
        return longest


class Group:
    """Replicas that train to the same round, and leave when all are there."""

    def __init__(self, peers: Peers, rounds: int, **options: Any) -> None:
        self._peers, self._rounds, self._options = peers, rounds, options
        self._all_there = threading.Barrier(REPLICAS)
        self._moved = threading.Condition()
        self._foremost = 0
        """The highest round that a replica has reached."""

    def _reached(self, number: int) -> None:
        with self._moved:
            self._foremost = max(self._foremost, number)
            self._moved.notify_all()

    def _nap(self, until: int) -> None:
        """Do nothing until another replica has reached that round."""
        with self._moved:
            assert self._moved.wait_for(lambda: self._foremost >= until, LIMIT_S)

    def _train(self, step_s: float, naps_after: int, naps_for: int) -> Trained:
        done = Trained()
        model = torch.nn.Module()
        model.w = weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
        inner = torch.optim.SGD([weight], lr=1.0)
        optimizer = DiLoCo(
            model,
            inner=inner,
            comm=self._peers.comm(),
            outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            min_peers=REPLICAS,
            quorum=2,
            on_event=done.events.append,
            **self._options,
        )
        with optimizer:
            optimizer.join()
            while optimizer.round < self._rounds:
                if naps_for and done.steps == naps_after:
                    self._nap(optimizer.round + naps_for)
                time.sleep(step_s)  # it computes: how long is what the tests are about
                weight.grad = torch.ones(1)
                optimizer.step()
                done.steps += 1
                self._reached(optimizer.round)
            optimizer.finish()
            self._all_there.wait(LIMIT_S)
        done.value = weight.item()
        return done

    def train(
        self, *, slowest: float = 1.0, naps_after: int = 0, naps_for: int = 0
    ) -> list[Trained]:
        """The last replica naps before a step, for some rounds of the others, or is slower."""
        started = [self._peers.start(self._train, STEP_S, 0, 0) for _ in range(REPLICAS - 1)]
        started.append(self._peers.start(self._train, slowest * STEP_S, naps_after, naps_for))
        return [one.result(LIMIT_S) for one in started]


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


MODES: dict[str, dict[str, Any]] = {
    "few rounds": {"sync_every": 25},
    "more rounds than members remember": {"sync_every": 4},
    "delayed": {"sync_every": 20, "delay": 10, "mixing": 0.0},
    "radial": {"sync_every": 25, "averaging": "radial-directional"},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_others_do_not_wait_for_one_that_naps(peers: Peers, mode: str) -> None:
    options = MODES[mode]
    rounds, naps_for = (11, 4) if options["sync_every"] > 10 else (50, MISSED_KEPT_MAX + 4)
    group = Group(peers, rounds, grace_s=GRACE_S, **options)
    *others, napper = group.train(naps_after=2 * options["sync_every"] + 2, naps_for=naps_for)
    for one in others:
        assert one.waited_s < patient(1.5)
        assert one.misses_in_a_row == 0
    assert len({one.value for one in (*others, napper)}) == 1
    missed = sum(event.missed for event in napper.events if isinstance(event, RoundsMissed))
    missed += sum(not event.own_weight for event in napper.rounds)
    assert missed > 1
    if not options.get("delay"):  # otherwise merges replace steps, of all replicas
        assert napper.averaged == napper.steps
        assert all(one.averaged == one.steps for one in others)
    assert napper.rounds[-1].contributors == others[0].rounds[-1].contributors
    assert len(napper.rounds[-1].contributors) == REPLICAS


@pytest.mark.parametrize(
    ("grace_s", "misses_max"),
    [(GRACE_S, 1), (STEP_S / 2, 2)],
    ids=["longer than its steps", "shorter than its steps"],
)
def test_one_that_is_four_times_slower_takes_part(
    peers: Peers, grace_s: float, misses_max: int
) -> None:
    group = Group(peers, 9, sync_every=10, grace_s=grace_s)
    *others, slow = group.train(slowest=4.0)
    assert slow.misses_in_a_row <= misses_max
    assert sum(bool(event.own_weight) for event in slow.rounds) >= 9 // (misses_max + 1)
    assert len({one.value for one in (*others, slow)}) == 1
    assert slow.steps < others[0].steps / 2
    last = next(event for event in reversed(slow.rounds) if event.own_weight)
    left = slow.steps - slow.averaged
    assert left == 0 or last is not slow.rounds[-1], "only missed rounds leave work"


def test_one_run_after_another_in_the_same_process() -> None:
    """With another master, the second run begins anew, and needs nothing of the first one."""
    for _ in range(2):
        peers = Peers()
        trained = Group(peers, 4, sync_every=10, grace_s=60.0).train()
        peers.close()
        assert [one.rounds[0].number for one in trained] == [1] * REPLICAS
        assert all(one.averaged == one.steps for one in trained)
        assert len({one.value for one in trained}) == 1


LAUNCHED = """
import torch, pccl
from pccl.bindings.diloco import DiLoCo

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
inner = torch.optim.SGD(model.parameters(), lr=1.0)
outer = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
comm = pccl.Communicator()
with DiLoCo(
    model, inner=inner, comm=comm, outer=outer, sync_every=5, min_peers=3, quorum=2, grace_s=60.0
) as optimizer:
    optimizer.join()
    while optimizer.round < 3:
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    optimizer.finish()
print(optimizer.outer_steps, model.weight.item())
"""


def test_launched_replicas_with_a_quorum(
    ready_pccl: tuple[str, ...], ready_python: tuple[str, ...]
) -> None:
    """The grace is long, so all are in all rounds, perhaps with fewer steps than others."""
    command = (*ready_pccl, "launch", "-n", "3", "--", *ready_python, "-c", LAUNCHED)
    done = run_to_end(*command, env=environment_with())
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in sorted(done.stdout.splitlines())]
    assert [line[:2] for line in told] == [[f"[p{n}]", "3"] for n in range(3)]
    (value,) = {float(line[2]) for line in told}
    assert -15.0 <= value < 0.0
