"""``ElasticSampler`` with both wrappers, on real connections, while peers come and go.

Each sample must be in exactly as many outcomes as there are epochs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.integration.conftest import Run
from tests.support.patience import LIMIT_S

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import pccl  # noqa: E402
from pccl.bindings.data import ElasticSampler  # noqa: E402
from pccl.bindings.diloco import DiLoCo  # noqa: E402
from pccl.bindings.events import Event, GradientsAveraged  # noqa: E402
from pccl.bindings.gradient_averager import GradientAverager  # noqa: E402
from pccl.errors import StateMismatch  # noqa: E402

NewRun = Callable[..., Run]

SAMPLES = 3000
STEP_S = 0.005


class Outcomes:
    """What all peers say was averaged: samples by round and peer, and the contributors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[tuple[int, int], list[int]] = {}
        self._contributors: dict[int, tuple[int, ...]] = {}

    def give(self, number: int, peer: int, samples: Iterable[int]) -> None:
        """Record what a peer gives to a round."""
        with self._lock:
            self._given[number, peer] = list(samples)

    def ended(self, number: int, contributors: tuple[int, ...]) -> None:
        """Record an outcome, which all members have alike."""
        with self._lock:
            assert self._contributors.setdefault(number, contributors) == contributors

    def counts(self) -> Counter[int]:
        """Return how often each sample was averaged."""
        return Counter(
            sample
            for number, contributors in self._contributors.items()
            for peer in contributors
            for sample in self._given[number, peer]
        )


def train_averaged(
    run: Run, sampler: ElasticSampler, outcomes: Outcomes, leave_at: int | None = None
) -> bool:
    """Train with averaged gradients to the end of all epochs, or until this peer vanishes."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def on_event(event: Event) -> None:
        if isinstance(event, GradientsAveraged):
            outcomes.ended(event.step, event.contributors)

    comm = run.newcomer()
    averager = GradientAverager(
        model, optimizer, comm=comm, min_peers=1, data=sampler, on_event=on_event
    )
    loader: Any = DataLoader(
        TensorDataset(torch.arange(1000).float()[:, None]), batch_sampler=sampler
    )
    batches = sampler.batches(loader)
    taken = 0
    while True:
        averager.update()
        if sampler.finished:
            averager.verify()
            comm.close()
            return True
        optimizer.zero_grad()
        batch = next(batches)
        samples: list[int] = [] if batch is None else batch[0].int().flatten().tolist()
        if batch is not None:
            model(batch[0]).sum().backward()
        outcomes.give(averager.steps + 1, comm.peer_id, samples)
        if taken == leave_at:
            comm.close()
            return False
        taken += averager.step()


def test_averaged_peers_that_come_and_go(new_run: NewRun) -> None:
    run, outcomes = new_run(), Outcomes()

    def start(leave_at: int | None = None) -> Any:
        sampler = ElasticSampler(600, 4, epochs=2, lease=24)
        return run.start(train_averaged, run, sampler, outcomes, leave_at)

    stays = [start() for _ in range(2)]
    for number in range(6):
        assert not start(leave_at=3 + number).result(LIMIT_S)
    assert all(future.result(LIMIT_S) for future in stays)
    assert outcomes.counts() == Counter(dict.fromkeys(range(600), 2))


OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {"sync_every": 3},
    "delayed": {"sync_every": 4, "delay": 2},
    "one round delayed": {"sync_every": 3, "delay": 3},
    "eager": {"sync_every": 3, "delay": 3, "eager": True},
    "streaming": {"sync_every": 4, "delay": 1, "fragments": 2},
    "time budget": {"sync_every": "20ms"},
    "quorum": {"sync_every": 3, "quorum": 2, "grace_s": 0.05},
}


class Rounds:
    """The rounds of the first fragment, as the members learn their outcomes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: dict[Any, dict[int, float]] = {}
        """Operation -> weight of each peer."""
        self.trained: dict[int, list[int]] = {}
        """Peer -> samples in its steps, in order."""

    def listen_to(self, comm: pccl.Communicator) -> None:
        """Note the outcomes that this communicator gets."""
        reduce: Any = comm.all_reduce

        def all_reduce(*tensors: Any, tag: int, **options: Any) -> pccl.ReduceInfo:
            info: pccl.ReduceInfo = reduce(*tensors, tag=tag, **options)
            assert info.outcome is not None
            if tag == 1:
                with self._lock:
                    weights = dict(zip(info.contributors, info.weights, strict=True))
                    assert self._weights.setdefault(info.outcome.operation, weights) == weights
            return info

        setattr(comm, "all_reduce", all_reduce)  # noqa: B010

    def counts(self) -> Counter[int]:
        """Return how often each sample is in an outcome: those of a peer are in order."""
        totals: Counter[int] = Counter()
        for weights in self._weights.values():
            totals.update({peer: int(weight) for peer, weight in weights.items()})
        return Counter(
            sample for peer, total in totals.items() for sample in self.trained[peer][:total]
        )


def train_rounds(
    run: Run,
    sampler: ElasticSampler,
    rounds: Rounds,
    options: dict[str, Any],
    visits: threading.Event,
    leave_at: int | None = None,
) -> bool:
    """Train with DiLoCo to the end of all epochs, or until this replica vanishes.

    Until ``visits`` is set, other replicas come, and steps take longer.
    """
    model: Any = nn.Linear(4, 4)
    comm = run.newcomer()
    rounds.listen_to(comm)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, inner=inner, comm=comm, data=sampler, min_peers=2, **options) as opt:
        for number, batch in enumerate(sampler.batches()):
            if number == leave_at:
                comm.close()
                return False
            model(torch.ones(1, 4)).sum().backward()
            rounds.trained.setdefault(comm.peer_id, []).extend(batch)
            visits.wait(STEP_S)  # stands for a larger model
            opt.step()
            opt.zero_grad()
        opt.finish()
    return True


@pytest.mark.parametrize("mode", OPTIONS)
def test_replicas_that_come_and_go(new_run: NewRun, mode: str) -> None:
    run, rounds, visits = new_run(), Rounds(), threading.Event()

    def start(leave_at: int | None = None) -> Any:
        sampler = ElasticSampler(SAMPLES, 4, epochs=1, lease=36)
        return run.start(train_rounds, run, sampler, rounds, OPTIONS[mode], visits, leave_at)

    stays = [start() for _ in range(2)]
    have_stayed = [start(leave_at=2 + 2 * number).result(LIMIT_S) for number in range(4)]
    assert not all(have_stayed[:2])
    visits.set()
    assert all(future.result(LIMIT_S) for future in stays)
    assert rounds.counts() == Counter(range(SAMPLES))


def test_a_checkpoint_of_an_averager_has_the_samples(new_run: NewRun) -> None:
    seen: list[int] = []
    saved: dict[str, Any] = {}
    for lives in range(2):
        run = new_run()
        sampler = ElasticSampler(100, 10, epochs=1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        comm = run.newcomer()
        averager = GradientAverager(model, optimizer, comm=comm, min_peers=1, data=sampler)
        if saved:
            averager.load_state_dict(saved)
        batches = sampler.batches()
        while True:
            averager.update()
            if sampler.finished or (averager.steps == 4 and not lives):
                break
            seen += next(batches)
            averager.step()
        saved = averager.state_dict()
        comm.close()
    assert sorted(seen) == list(range(100))


def test_a_checkpoint_of_a_replica_has_the_samples(new_run: NewRun) -> None:
    """Of two replicas, in the middle of a period, with work that no round has."""
    rounds, saved = Rounds(), dict[int, Any]()

    def life(run: Run, rank: int, batches: int) -> list[int]:
        model: Any = nn.Linear(4, 4)
        comm = run.newcomer()
        rounds.listen_to(comm)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler = ElasticSampler(200, 4, epochs=1, lease=40)
        trained: list[int] = []
        with DiLoCo(model, inner=inner, comm=comm, data=sampler, min_peers=2, sync_every=3) as opt:
            if rank in saved:
                model.load_state_dict(saved[rank]["model"])
                opt.load_state_dict(saved[rank]["opt"])
            for batch in sampler.batches():
                model(torch.ones(1, 4)).sum().backward()
                trained += batch
                opt.step()
                opt.zero_grad()
                if opt.inner_steps == batches:
                    saved[rank] = {"model": model.state_dict(), "opt": opt.state_dict()}
                    return trained
            opt.finish()
        return trained

    def lives(batches: int) -> Counter[int]:
        run, calls = new_run(), list[Any]()
        for rank in range(2):  # in the same order, so each has its id again
            calls.append(run.start(life, run, rank, batches))
            run.until(lambda: run.registered == len(calls))
        return Counter(sample for call in calls for sample in call.result(LIMIT_S))

    assert lives(7) + lives(1000) == Counter(range(200))


def test_a_step_weighs_as_many_as_its_samples(new_run: NewRun) -> None:
    model: Any = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = ElasticSampler(10, 1)
    with DiLoCo(model, inner=inner, comm=new_run().newcomer(), data=sampler) as opt:
        with pytest.raises(ValueError, match="pass no weight"):
            opt.step(weight=3)
        assert next(sampler.batches())


def test_other_settings_are_told(new_run: NewRun) -> None:
    run = new_run()

    def join(sampler: ElasticSampler | None) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        GradientAverager(model, optimizer, comm=run.newcomer(), min_peers=2, data=sampler).update()

    ended = [run.start(join, ElasticSampler(10, 1, seed=seed)) for seed in range(2)]
    for future in ended:
        with pytest.raises(StateMismatch, match="seed="):
            future.result(LIMIT_S)


def test_only_a_sampler_is_data(new_run: NewRun) -> None:
    model: Any = nn.Linear(1, 1)
    other: Any = [1, 2, 3]
    with pytest.raises(TypeError, match="ElasticSampler"):
        GradientAverager(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            comm=new_run().newcomer(),
            data=other,
        )
