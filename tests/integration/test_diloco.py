"""``DiLoCo`` over real sockets: against a textbook, in all modes, and in its surroundings."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import pccl
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.diloco.rounds import Entered
from pccl.bindings.events import (
    Event,
    InnerStep,
    MembersChanged,
    OuterStep,
    PeerReport,
    StateSynced,
)
from pccl.errors import Evicted, PCCLError, StateMismatch
from pccl.inquiry import master_status
from pccl.observe.events import Joined
from tests.support.diloco_peers import (
    Batch,
    Peers,
    backward,
    batch,
    equal,
    make_inner,
    make_model,
    parameters,
)
from tests.support.diloco_reference import Setting, train
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

OUTER_STEPS = 5


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


# -- the algorithm -------------------------------------------------------------------------------


def mean_of(works: list[torch.Tensor]) -> torch.Tensor:
    total = works[0]
    for other in works[1:]:
        total = total + other
    return total / len(works)


def radial_mean_of(works: list[torch.Tensor]) -> torch.Tensor:
    """RDA of Decoupled DiLoCo (arXiv:2604.21428)."""
    lengths = [_length(work) for work in works]
    root = works[0].numel() ** 0.5
    shown = [work * (root / length) for work, length in zip(works, lengths, strict=True)]
    direction = mean_of(shown)
    return direction * (sum(lengths) / len(works) / _length(direction))


def _length(work: torch.Tensor) -> float:
    """Of few values, so each addition of the library is exact to the last bit as well."""
    return math.sqrt(math.fsum(float(value) ** 2 for value in work.flatten()))


def textbook(
    ranks: tuple[int, ...],
    inner_steps: int,
    momentum: float = 0.9,
    average: Callable[[list[torch.Tensor]], torch.Tensor] = mean_of,
) -> list[torch.Tensor]:
    """Algorithm 1 of DiLoCo (arXiv:2311.08105), all replicas in one process.

    Args:
        ranks: of the peers, in the order in which their pseudo-gradients are added.
        inner_steps: H.
        momentum: of the outer optimizer.
        average: of the pseudo-gradients of one parameter.

    Returns:
        The parameters after OUTER_STEPS outer steps.
    """
    common = [torch.nn.Parameter(value) for value in parameters(make_model())]
    outer: Any = torch.optim.SGD(common, lr=0.7, momentum=momentum, nesterov=True)
    models = {rank: make_model() for rank in ranks}
    inners = {rank: make_inner(model) for rank, model in models.items()}
    for outer_step in range(OUTER_STEPS):
        for rank, model in models.items():
            for inner_step in range(inner_steps):
                inners[rank].zero_grad()
                backward(model, batch(rank, outer_step * inner_steps + inner_step))
                inners[rank].step()
        locals_ = [parameters(models[rank]) for rank in ranks]
        for index, parameter in enumerate(common):
            parameter.grad = average([parameter.detach() - one[index] for one in locals_])
        outer.step()
        for model in models.values():
            for target, value in zip(model.parameters(), common, strict=True):
                target.data.copy_(value.detach())
    return parameters(next(iter(models.values())))


@pytest.mark.parametrize("inner_steps", [4, 7])
@pytest.mark.parametrize("count", [2, 3])
def test_it_is_the_textbook_bit_for_bit(peers: Peers, count: int, inner_steps: int) -> None:
    ended = peers.train_all(count, OUTER_STEPS * inner_steps, sync_every=inner_steps)
    wanted = textbook(tuple(range(count)), inner_steps)
    assert all(equal(one, wanted) for one in ended)
    assert [event.number for event in peers.outer_steps(0)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [2, 3])
def test_radial_averages_are_the_formulas_bit_for_bit(peers: Peers, count: int) -> None:
    options = {"sync_every": 4, "averaging": "radial-directional"}
    ended = peers.train_all(count, OUTER_STEPS * 4, **options)
    wanted = textbook(tuple(range(count)), 4, average=radial_mean_of)
    assert all(equal(one, wanted) for one in ended)
    norms = [[one.pseudo_gradient_norm for one in peers.outer_steps(rank)] for rank in range(count)]
    for event, *own in zip(peers.outer_steps(0), *norms, strict=True):
        assert min(own) <= event.mean_norm <= max(own)
        assert math.isnan(event.noise_scale)


def test_a_small_model_has_less_momentum_by_default(peers: Peers) -> None:
    ended = peers.train_all(2, OUTER_STEPS * 4, sync_every=4, outer=None)
    assert all(equal(one, textbook((0, 1), 4, momentum=0.6)) for one in ended)


def test_what_the_outer_steps_tell(peers: Peers) -> None:
    """Of n equal contributions c and their mean m, the products c * m add up to n * m * m."""
    plain = partial(torch.optim.SGD, lr=0.5)
    peers.train_all(3, 8, sync_every=4, outer=plain)
    for rounds in zip(*(peers.outer_steps(rank) for rank in range(3)), strict=True):
        mean_norm = rounds[0].mean_norm
        products = [one.cosine * one.pseudo_gradient_norm * mean_norm for one in rounds]
        assert sum(products) == pytest.approx(3 * mean_norm**2, rel=1e-5)
        assert all(-1 <= one.cosine <= 1 for one in rounds)
        assert rounds[0].step_norm == pytest.approx(0.5 * mean_norm, rel=1e-5)
        squares = [one.pseudo_gradient_norm**2 for one in rounds]
        for one, square in zip(rounds, squares, strict=True):
            signal = (3 * mean_norm**2 - square) / 2
            noise = 1.5 * (square - mean_norm**2)
            assert one.noise_scale == pytest.approx(max(0.0, noise) / signal, rel=1e-6)


def test_the_run_sees_what_the_outer_steps_tell(peers: Peers) -> None:
    def seen() -> list[dict[str, float]]:
        members = master_status(peers.master.address).members
        return [{one.name: one.value for one in member.figures} for member in members]

    def run(rank: int) -> None:
        model = make_model()
        with peers.make(rank, model, min_peers=2, sync_every=2) as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                backward(model, batch(rank, step))
                optimizer.step()
            last = peers.outer_steps(rank)[-1]
            figures = {
                "own norm": last.pseudo_gradient_norm,
                "mean norm": last.mean_norm,
                "outer step": last.step_norm,
                "cosine": last.cosine,
                "noise scale": last.noise_scale,
            }
            until(lambda: figures in seen())

    for call in [peers.start(run, rank) for rank in range(2)]:
        call.result(LIMIT_S)


SETTINGS = {
    "delayed": Setting(6, 2, 0.5, False, ((0, 1, 2, 3),)),
    "mixed": Setting(6, 4, 0.3, False, ((0, 1, 2, 3),)),
    "one round delayed": Setting(6, 6, 0.0, False, ((0, 1, 2, 3),)),
    "eager": Setting(6, 6, 0.0, True, ((0, 1, 2, 3),)),
    "streaming": Setting(6, 0, 0.0, False, ((0,), (2,), (1, 3))),
    "streaming, overlapping": Setting(7, 5, 0.3, False, ((0,), (2,), (1, 3))),
    "streaming, eager": Setting(7, 7, 0.0, True, ((0,), (1, 2, 3))),
    "sparse": Setting(6, 0, 0.0, False, ((0, 1, 2, 3),), 200),
    "sparse, streaming": Setting(6, 2, 0.5, False, ((0,), (2,), (1, 3)), 70),
}


@pytest.mark.parametrize("mode", SETTINGS)
@pytest.mark.parametrize("count", [2, 3])
def test_each_mode_is_its_paper_bit_for_bit(peers: Peers, count: int, mode: str) -> None:
    """The local models just before the end, and the common model after it."""
    setting, steps = SETTINGS[mode], 4 * SETTINGS[mode].every
    fragments = len(setting.fragments)
    sparse = pccl.QuantizationOptions(format="sparse", block=setting.sparse_block or None)

    def run(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_model()
        names = [name for name, _ in model.named_parameters()]
        with peers.make(
            rank,
            model,
            min_peers=count,
            sync_every=setting.every,
            delay=setting.delay,
            mixing=setting.mixing,
            eager=setting.eager,
            fragments=fragments,
            compression=sparse if setting.sparse_block else None,
        ) as optimizer:
            assert optimizer.fragments == tuple(
                tuple(names[index] for index in part) for part in setting.fragments
            )
            optimizer.join()
            for step in range(steps):
                optimizer.zero_grad()
                backward(model, batch(rank, step))
                optimizer.step()
            before = parameters(model)
            optimizer.finish()
        return before, parameters(model)

    models = [make_model() for _ in range(count)]
    inners = [make_inner(model) for model in models]
    before: list[list[torch.Tensor]] = []

    def inner_step(rank: int, step: int) -> None:
        inners[rank].zero_grad()
        backward(models[rank], batch(rank, step))
        inners[rank].step()

    trained = [[one.data for one in model.parameters()] for model in models]

    def note() -> None:
        before.extend(map(parameters, models))

    common = train(trained, setting, steps, inner_step, note)
    calls: list[Future[tuple[list[torch.Tensor], list[torch.Tensor]]]] = []
    for rank in range(count):
        calls.append(peers.start(run, rank))
        peers.until_registered(len(calls))
    for rank, call in enumerate(calls):
        local, ended = call.result(LIMIT_S)
        assert equal(local, before[rank])
        assert equal(ended, common)
    ends_in_a_merge = mode in ("one round delayed", "sparse")
    assert equal(*before[:2]) == ends_in_a_merge


def gentle(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """With a delay of a whole round the default would overshoot in so few steps."""
    return torch.optim.SGD(parameters, lr=0.5)


def falling(step: int) -> float:
    return 1 / (1 + step)


def halving(step: int) -> float:
    return 2.0**-step


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"sync_every": 6},
    "delayed": {"sync_every": 6, "delay": 2},
    "one round delayed": {"sync_every": 6, "delay": 6, "outer": gentle},
    "eager": {"sync_every": 6, "delay": 6, "outer": gentle, "eager": True},
    "streaming": {"sync_every": 6, "delay": 2, "fragments": 3},
    "streaming, overlapping": {"sync_every": 6, "delay": 5, "fragments": 4, "mixing": 0.3},
    "sequential": {"sync_every": 6, "fragments": 2, "fragment_order": "sequential"},
    "4 bits": {"sync_every": 6, "delay": 2, "fragments": 2, "compression": "int4"},
    "sparse": {"sync_every": 3, "outer": gentle, "compression": "sparse"},
    "radial": {"sync_every": 6, "delay": 2, "fragments": 2, "averaging": "radial-directional"},
    "radial, eager, 4 bits": {
        "sync_every": 6,
        "delay": 6,
        "outer": gentle,
        "eager": True,
        "compression": "int4",
        "averaging": "radial-directional",
    },
    "time": {"sync_every": "30ms"},
    "scheduled": {
        "sync_every": 6,
        "delay": 6,
        "eager": True,
        "fragments": 2,
        "fragment_order": "strided-blocks",
        "outer_lr_lambda": falling,
    },
}


LATE = ["synchronous", "streaming", "one round delayed", "eager", "4 bits"]


@pytest.mark.parametrize("mode", MODES)
def test_all_end_with_the_same_model(peers: Peers, mode: str) -> None:
    """Whatever they began with."""

    def run(rank: int) -> list[torch.Tensor]:
        model = make_model(seed=rank)
        with peers.make(rank, model, min_peers=2, **MODES[mode]) as optimizer:
            optimizer.join()
            losses: list[float] = []
            step = 0
            while optimizer.round < 12:
                optimizer.zero_grad()
                losses.append(backward(model, batch(rank, step)).item())
                optimizer.step()
                step += 1
            optimizer.finish()
        assert sum(losses[-3:]) < sum(losses[:3])
        return parameters(model)

    calls = [peers.start(run, rank) for rank in range(2)]
    ended = [call.result(LIMIT_S) for call in calls]
    assert equal(*ended)
    fragments = MODES[mode].get("fragments", 1)
    rounds = 12 + fragments - 1  # each that was trained since its last round has one more
    for rank in range(2):
        steps = peers.outer_steps(rank)
        assert [event.number for event in steps] == list(range(1, rounds + 1))
        assert [event.fragment for event in steps] == [n % fragments for n in range(rounds)]
        assert all(len(event.contributors) == 2 for event in steps)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"delay": 4}, True),
        ({"delay": 4, "eager": True}, False),
        ({"delay": 4, "outer": gentle}, False),
        ({"delay": 3}, False),
        ({}, False),
    ],
)
def test_a_whole_round_late_with_momentum_is_warned_of(
    peers: Peers, caplog: pytest.LogCaptureFixture, options: dict[str, Any], *, warns: bool
) -> None:
    peers.make(0, make_model(), sync_every=4, **options)
    assert ("overshoot with outer momentum; use eager=True" in caplog.text) == warns


def test_averages_are_weighted_by_the_work(peers: Peers) -> None:
    """One replica moves by 1 a step and says it has done three times the work of the other."""

    def run(rank: int, weight: float, way: float) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        with DiLoCo(
            [parameter],
            inner=torch.optim.SGD([parameter], lr=1.0),
            comm=peers.comm(),
            sync_every=2,
            min_peers=2,
            outer=lambda p: torch.optim.SGD(p, lr=1.0),
        ) as optimizer:
            for _ in range(2):
                parameter.grad = torch.full((1,), -way)
                optimizer.step(weight=weight)
            return parameter.item()

    calls = [peers.start(run, 0, 3.0, 1.0), peers.start(run, 1, 1.0, 5.0)]
    assert [call.result(LIMIT_S) for call in calls] == [(3 * 2 + 1 * 10) / 4] * 2


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_a_replica_whose_model_is_nan_comes_back_with_that_of_the_run(
    peers: Peers, count: int, fragments: int
) -> None:
    def spoilt(rank: int, step: int) -> Batch:
        inputs, targets = batch(rank, step)
        return (
            (inputs * math.nan, targets) if (rank, step) == (count // 2, 3) else (inputs, targets)
        )

    models = peers.train_all(count, 12, data=spoilt, sync_every=2, fragments=fragments)
    assert all(equal(model, models[0]) for model in models)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in models[0])
    for rank in range(count):
        steps = peers.outer_steps(rank)
        assert all(math.isfinite(event.mean_norm) for event in steps)
        if rank != count // 2:
            assert [e.number for e in steps if len(e.contributors) < count] == [2 * fragments]


def has_been_excluded(optimizer: Any) -> bool:
    """Whether the next step will hear that this replica enters anew."""
    return any(isinstance(one.what, Entered) for one in optimizer._caller._news)


@pytest.mark.parametrize("delay", [2, 3])
def test_a_replica_that_trains_meanwhile_is_excluded_once(peers: Peers, delay: int) -> None:
    """The gradients of the broken model do not break the new one."""

    def run(rank: int) -> list[torch.Tensor]:
        model = make_model()
        options: dict[str, Any] = {"sync_every": 3, "delay": delay, "outer": gentle}
        with peers.make(rank, model, min_peers=3, **options) as optimizer:
            optimizer.join()
            step = 0
            while optimizer.round < 6:
                optimizer.zero_grad()
                inputs, targets = batch(rank, step)
                backward(model, (inputs * math.nan if (rank, step) == (1, 4) else inputs, targets))
                if (rank, step) == (1, 6):
                    until(partial(has_been_excluded, optimizer))
                optimizer.step()
                step += 1
            optimizer.finish()
        return parameters(model)

    calls = [peers.start(run, rank) for rank in range(3)]
    models = [call.result(LIMIT_S) for call in calls]
    assert all(equal(model, models[0]) for model in models)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in models[0])
    missing = [event.number for event in peers.outer_steps(0) if len(event.contributors) < 3]
    assert missing == [2]


def test_a_guard_may_be_off_and_must_be_valid(peers: Peers) -> None:
    with pytest.raises(ValueError, match="guard"):
        peers.make(0, make_model(), guard="sometimes")
    with pytest.raises(ValueError, match="rounds"):
        peers.make(0, make_model(), guard=pccl.Guard(rounds=-1))

    def nan_of_rank_0(rank: int, step: int) -> Batch:
        inputs, targets = batch(rank, step)
        return inputs * (1 if rank else math.nan), targets

    spoilt = peers.train_all(2, 4, data=nan_of_rank_0, sync_every=2, guard="off")
    assert not any(bool(torch.isfinite(parameter).all()) for parameter in spoilt[0])


def test_alone_it_trains_on_and_says_so(peers: Peers) -> None:
    steps = 2 * OUTER_STEPS
    ended = peers.train(0, steps, sync_every=2)
    kinds = [type(event).__name__ for event in peers.events[0]]
    assert kinds.count("TrainsAlone") == 1
    assert kinds.count("OuterStep") == OUTER_STEPS
    assert equal(ended, textbook((0,), 2))


# -- coming and going ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        "synchronous",
        "streaming",
        "one round delayed",
        "eager",
        "4 bits",
        "sparse",
        "radial",
        "radial, eager, 4 bits",
        "scheduled",
    ],
)
def test_one_that_joins_late_ends_with_the_same_model(peers: Peers, mode: str) -> None:
    def run(rank: int, min_peers: int) -> list[torch.Tensor]:
        model = make_model(seed=rank)
        with peers.make(rank, model, min_peers=min_peers, **MODES[mode]) as optimizer:
            step = 0
            while optimizer.round < 10 + outer_step_of_three(peers, rank):
                optimizer.zero_grad()
                backward(model, batch(rank, step))
                optimizer.step()
                step += 1
            optimizer.finish()
        return parameters(model)

    calls = [peers.start(run, rank, 2) for rank in range(2)]
    until(lambda: 0 in peers.events and bool(peers.outer_steps(0)))
    calls.append(peers.start(run, 2, 2))
    ended = [call.result(LIMIT_S) for call in calls]
    assert equal(ended[0], ended[1])
    assert equal(ended[0], ended[2])
    first = peers.outer_steps(2)[0]
    assert first.own_weight == 0.0  # it came into the middle of this round
    assert len(first.contributors) == 3


def test_a_newcomer_does_not_begin_a_run_anew(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits until somebody comes who has what the run had got to."""
    first = make_model()
    with peers.make(0, first, sync_every=1) as optimizer:
        optimizer.join()
        for step in range(OUTER_STEPS):
            optimizer.zero_grad()
            backward(first, batch(0, step))
            optimizer.step()
        saved = optimizer.state_dict()
    newcomer, holder = make_model(seed=1), make_model(seed=2)
    late = peers.make(1, newcomer, sync_every=1)
    joins = peers.start(late.join)
    until(lambda: "waits for the run's outer parameters" in caplog.text)
    assert "no member offers contents with revision" in caplog.text
    assert not joins.done()
    holder.load_state_dict(first.state_dict())
    with peers.make(2, holder, sync_every=1) as back:
        back.load_state_dict(saved)
        joined = peers.start(back.join)
        joins.result(LIMIT_S)
        joined.result(LIMIT_S)
        assert late.outer_steps == back.outer_steps == OUTER_STEPS
        assert equal(parameters(newcomer), parameters(holder))
    late.close()


def test_whoever_waits_for_the_work_of_a_run_can_be_closed(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    peers.train(0, 3, sync_every=1)
    late = peers.make(1, make_model(), sync_every=1)
    joins = peers.start(late.join)
    until(lambda: "waits for the run's" in caplog.text)
    late.close()
    with pytest.raises(PCCLError):
        joins.result(LIMIT_S)


def test_whoever_waits_for_others_to_begin_can_be_closed(peers: Peers) -> None:
    first = peers.make(0, make_model(), min_peers=3)
    joins = peers.start(first.join)
    peers.until_registered(1)
    first.close()
    with pytest.raises(PCCLError):
        joins.result(LIMIT_S)


def outer_step_of_three(peers: Peers, rank: int) -> float:
    """Of the first outer step that three have made, once it is made."""
    three = [event for event in peers.outer_steps(rank) if len(event.contributors) == 3]
    return three[0].number if three else math.inf


def test_a_member_that_leaves(peers: Peers) -> None:
    """The others go on without it, and lose no step."""

    def run(rank: int, rounds: int) -> int:
        model = make_model()
        comm = peers.comm()
        peers.events[rank] = []
        with DiLoCo(
            model.named_parameters(),
            inner=make_inner(model),
            comm=comm,
            sync_every=3,
            min_peers=2,
            on_event=peers.events[rank].append,
        ) as optimizer:
            step = 0
            while optimizer.round < rounds:
                optimizer.zero_grad()
                backward(model, batch(rank, step))
                optimizer.step()
                step += 1
            steps = optimizer.inner_steps
        comm.close()
        return steps

    calls = [peers.start(run, rank, 4 if rank == 2 else 8) for rank in range(3)]
    assert all(call.result(LIMIT_S) > 0 for call in calls)
    worlds = [len(event.contributors) for event in peers.outer_steps(0)]
    assert worlds[-1] in (1, 2)
    assert 3 in worlds
    weights = [event.own_weight for event in peers.outer_steps(0)]
    assert weights[0] in (0.0, 3.0)  # the others may have begun without it: then it follows a round
    assert all(weight == 3.0 for weight in weights[1:])


DISAGREEMENTS: list[tuple[tuple[dict[str, Any], dict[str, Any]], str]] = [
    (({"min_peers": 2}, {"min_peers": 1}), "min_peers=1"),
    (({"outer": gentle, "min_peers": 1}, {"min_peers": 1}), "lr=0.5"),
    (({"compression": "int8"}, {}), "compression=int8"),
    (({"averaging": "radial-directional"}, {}), "averaging=radial-directional"),
    (({"fragments": 2, "outer": gentle}, {"fragments": 1, "outer": gentle}), "fragments=2 strided"),
    (
        (
            {"fragments": 2, "outer": gentle},
            {"fragments": 2, "fragment_order": "sequential", "outer": gentle},
        ),
        "fragments=2 sequential",
    ),
    (({"outer_lr_lambda": halving}, {}), "outer lr times 1 0.5 0.0009766 "),
    (({"quorum": 2}, {"quorum": 0.5}), "a quorum of 2 members and an adaptive grace"),
    (({"quorum": 2, "grace_s": 1}, {"quorum": 2}), "a quorum of 2 members and 1 s"),
    (({"guard": "off"}, {}), "guard off"),
]


@pytest.mark.parametrize(("settings", "named"), DISAGREEMENTS)
def test_members_must_agree(
    peers: Peers, settings: tuple[dict[str, Any], dict[str, Any]], named: str
) -> None:
    """Who differs from the others is told in what; that would end in models that differ."""

    refused = threading.Event()

    def run(rank: int) -> None:
        model = make_model()
        with peers.make(rank, model, sync_every=2, **settings[rank]) as optimizer:
            try:
                while not refused.is_set():
                    optimizer.zero_grad()
                    backward(model, batch(rank, 0))
                    optimizer.step()
            except PCCLError:
                refused.set()
                raise

    calls: list[Future[None]] = []
    for rank in range(2):
        calls.append(peers.start(run, rank))
        peers.until_registered(rank + 1)
    errors = [call.exception(LIMIT_S) for call in calls]
    told = [error for error in errors if isinstance(error, (StateMismatch, Evicted))]
    assert told
    assert all(named in str(error) for error in told)


def test_a_communicator_serves_one(peers: Peers) -> None:
    comm, model = peers.comm(), make_model()
    with DiLoCo(model.parameters(), inner=make_inner(model), comm=comm) as first:
        first.join()
        with pytest.raises(ValueError, match="a DiLoCo uses this communicator"):
            DiLoCo(model, inner=make_inner(model), comm=comm)
        assert comm.world_size == 1  # it is the first one's


def test_a_consumer_that_raises_ends_no_training(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """It is dropped; no work is lost, here or at the partner, and other consumers hear on."""
    model, told = make_model(), list[Event]()

    def listen(event: Event) -> None:
        if isinstance(event, InnerStep) and event.step == 3:
            raise OSError(28, "No space left on device", "run.jsonl")

    with DiLoCo(
        model.parameters(),
        inner=make_inner(model),
        comm=peers.comm(),
        sync_every=4,
        on_event=[listen, told.append],
    ) as optimizer:
        for step in range(12):
            optimizer.zero_grad()
            backward(model, batch(0, step))
            optimizer.step()
    rounds = [event for event in told if isinstance(event, OuterStep)]
    assert [event.own_weight for event in rounds] == [4.0, 4.0, 4.0]
    said = [one.getMessage() for one in caplog.records if one.name == "pccl.events"]
    assert len(said) == 1
    assert "run.jsonl" in said[0]


def test_ctrl_c_in_a_listener_loses_no_work(peers: Peers) -> None:
    """What it was not told it is told the next time."""
    model, told, fails = make_model(), list[Event](), [3, 7, 8]

    def listen(event: Event) -> None:
        if isinstance(event, InnerStep) and event.step in fails:
            fails.remove(event.step)
            raise KeyboardInterrupt
        told.append(event)

    with DiLoCo(
        model.parameters(),
        inner=make_inner(model),
        comm=peers.comm(),
        sync_every=4,
        on_event=listen,
    ) as optimizer:
        for step in range(12):
            optimizer.zero_grad()
            backward(model, batch(0, step))
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
    rounds = [event for event in told if isinstance(event, OuterStep)]
    assert [event.own_weight for event in rounds] == [4.0, 4.0, 4.0]


# -- what surrounds it ---------------------------------------------------------------------------


def test_it_looks_like_the_inner_optimizer(peers: Peers) -> None:
    model = make_model()
    inner = make_inner(model)
    optimizer = DiLoCo(model.parameters(), inner=inner, comm=peers.comm(), sync_every=2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            backward(model, batch(0, step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    assert [group["lr"] for group in inner.param_groups] == [1e-2 / 5]
    assert optimizer.inner_steps == 4
    assert optimizer.outer_steps == 2


def test_a_closure(peers: Peers) -> None:
    model = make_model()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with DiLoCo(model.parameters(), inner=inner, comm=peers.comm(), sync_every=1) as optimizer:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return backward(model, batch(0, 0))

        first = optimizer.step(closure)
        assert optimizer.step(closure) < first


def test_a_gradient_scaler(peers: Peers) -> None:
    """A step whose gradients are not finite is none."""
    parameter = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with DiLoCo([parameter], inner=inner, comm=peers.comm(), sync_every=100) as optimizer:
        for gradient in (1.0, math.inf):
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(parameter.sum() * gradient))
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.inner_steps == 1
    assert torch.equal(parameter.detach(), torch.full((2,), 0.5))


def test_no_more_parameters(peers: Peers) -> None:
    model = make_model()
    optimizer = DiLoCo(model.parameters(), inner=make_inner(model), comm=peers.comm())
    with pytest.raises(RuntimeError, match="make the inner optimizer with all param groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_tied_and_frozen_and_short_parameters(peers: Peers) -> None:
    table = torch.nn.Embedding(8, 4, dtype=torch.bfloat16)
    head = torch.nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
    head.weight = table.weight
    frozen = torch.nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
    model = torch.nn.Sequential(table, frozen, head)
    before = frozen.weight.clone()
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with DiLoCo(
        model.named_parameters(), inner=inner, comm=peers.comm(), sync_every=2
    ) as optimizer:
        names = [info.name for info in optimizer.shared_state.tensor_infos]
        assert names[1:] == ["outer/0.weight", "momentum_buffer/0.weight"]
        assert optimizer.shared_state.tensor_infos[1].dtype is pccl.DataType.FLOAT
        for _ in range(4):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.arange(8)).float().square().sum())
            optimizer.step()
    assert torch.equal(frozen.weight, before)
    assert head.weight is table.weight


def of_the_first(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[:1], lr=1.0)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sync_every": 0}, ValueError, "sync_every must be from 1 to 2147483647, not 0"),
    ({"sync_every": "soon"}, ValueError, "a time such as '30s'"),
    ({"sync_every": 4, "delay": 5}, ValueError, r"delay must be at most sync_every \(4\)"),
    ({"delay": -1}, ValueError, "delay must be from 0 to 2147483647, not -1"),
    ({"fragments": 5}, ValueError, "fragments must be at most 4"),
    ({"outer_lr_lambda": 0.5}, TypeError, "outer_lr_lambda must be a function"),
    ({"fragment_order": "random"}, ValueError, "must be one of strided, sequential"),
    ({"mixing": 1.0}, ValueError, "mixing must be at least 0"),
    ({"eager": True}, ValueError, "eager needs a delay of sync_every inner steps"),
    ({"eager": True, "sync_every": "1s", "delay": 5}, ValueError, "eager needs a delay of sync"),
    ({"eager": True, "sync_every": 4, "delay": 4, "mixing": 0.5}, ValueError, "mixing must be 0"),
    ({"eager": 1}, TypeError, "eager must be True or False, not 1"),
    ({"min_peers": 0}, ValueError, "min_peers must be from 1 to 2800, not 0"),
    ({"compression": "int3"}, ValueError, "int3"),
    ({"compression": 4}, TypeError, "the name of a format"),
    ({"outer": of_the_first}, ValueError, "for exactly the param"),
    ({"on_event": [print, 3]}, TypeError, "on_event must be a function of an event, or several"),
    ({"on_event": 3}, TypeError, "not 3"),
    ({"outer": 5}, TypeError, "outer must be a function that makes an optimizer .* not 5"),
    ({"outer": list}, TypeError, r"outer must make a torch.optim.Optimizer, not \["),
    ({"inner": None}, TypeError, "inner must be a torch.optim.Optimizer, .* not None"),
    ({"comm": None}, TypeError, "comm must be a pccl.Communicator, not None"),
    ({"comm": pccl.Communicator}, TypeError, "comm must be a pccl.Communicator, not <class"),
    ({"warm_up": -1}, ValueError, "warm_up must be from 0 to 2147483647, not -1"),
    ({"warm_up": "soon"}, TypeError, "warm_up"),
    ({"buffers": [3]}, TypeError, "buffers must be pairs of name and tensor"),
    ({"min_peers": 10**30}, ValueError, "min_peers must be from 1 to 2800"),
    ({"delay": 10**30, "sync_every": "1s"}, ValueError, "delay must be from 0 to 2147483647"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_arguments_are_checked(
    peers: Peers, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = make_model()
    given: dict[str, Any] = {"inner": make_inner(model), "comm": peers.comm(), **options}
    with pytest.raises(error, match=message):
        DiLoCo(model.parameters(), **given)


def test_an_asyncio_communicator_is_refused() -> None:
    async def pass_one() -> None:
        model = make_model()
        comm: Any = pccl.aio.Communicator("127.0.0.1:1")
        with pytest.raises(TypeError, match=r"blocking pccl.Communicator, not one of pccl\.aio"):
            DiLoCo(model.parameters(), inner=make_inner(model), comm=comm)

    asyncio.run(pass_one())


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(peers: Peers, copy_of: Callable[[object], object]) -> None:
    model = make_model()
    optimizer = DiLoCo(model.parameters(), inner=make_inner(model), comm=peers.comm())
    with pytest.raises(TypeError, match="save its state_dict"):
        copy_of(optimizer)


def test_parameters_are_checked(peers: Peers) -> None:
    model, comm = make_model(), peers.comm()
    inner = make_inner(model)
    with pytest.raises(ValueError, match="inner trains 3 tensors that are not in params"):
        DiLoCo(list(model.parameters())[:1], inner=inner, comm=comm)
    with pytest.raises(TypeError, match="params must be a module"):
        DiLoCo(["weight"], inner=inner, comm=comm)
    with pytest.raises(ValueError, match="no tensor that requires a gradient"):
        DiLoCo([], inner=inner, comm=comm)


def test_a_weight_must_be_a_number(peers: Peers) -> None:
    model = make_model()
    optimizer = DiLoCo(model.parameters(), inner=make_inner(model), comm=peers.comm())
    with pytest.raises(ValueError, match="weight must be at least 0 and less than 1e"):
        optimizer.step(weight=-1.0)


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_checkpoint_without_names_loads_where_parameters_have_names(
    peers: Peers, fragments: int
) -> None:
    model = make_model()
    numbered = DiLoCo(
        model.parameters(), inner=make_inner(model), comm=peers.comm(), fragments=fragments
    )
    named = DiLoCo(model, inner=make_inner(model), comm=peers.comm(), fragments=fragments)
    assert {name for part in numbered.fragments for name in part} == {"0", "1", "2", "3"}
    own = {name for name, _ in model.named_parameters()}
    assert {name for part in named.fragments for name in part} == own
    saved = numbered.state_dict()
    saved["position"]["steps"] = 3
    named.load_state_dict(saved)
    assert named.inner_steps == 3
    with pytest.raises(ValueError, match="other parameters"):
        numbered.load_state_dict(named.state_dict())


@pytest.mark.parametrize(
    "mode",
    [
        "synchronous",
        "streaming",
        "one round delayed",
        "eager",
        "4 bits",
        "sparse",
        "radial",
        "radial, eager, 4 bits",
        "scheduled",
    ],
)
def test_a_run_that_stops_and_goes_on(mode: str, tmp_path: Any) -> None:
    """Stopping in the middle of the pipeline changes nothing."""

    def part(peers: Peers, rank: int, first: int, last: int, path: str, *, ends: bool) -> Any:
        model = make_model()
        with peers.make(rank, model, min_peers=2, **MODES[mode]) as optimizer:
            if first:
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            for step in range(first, last):
                optimizer.zero_grad()
                backward(model, batch(rank, step))
                optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path)
            if ends:
                optimizer.finish()
        return parameters(model)

    def run(*bounds: int) -> list[list[torch.Tensor]]:
        ended: list[list[torch.Tensor]] = []
        for first, last in pairwise(bounds):
            peers = Peers()
            calls: list[Future[list[torch.Tensor]]] = []
            for rank in range(2):
                path, ends = str(tmp_path / f"{rank}.pt"), last == bounds[-1]
                calls.append(peers.start(part, peers, rank, first, last, path, ends=ends))
                peers.until_registered(len(calls))
            ended = [call.result(LIMIT_S) for call in calls]
            peers.close()
        return ended

    whole, in_parts = run(0, 32), run(0, 7, 19, 32)
    assert equal(whole[0], whole[1])
    assert equal(whole[0], in_parts[0])
    assert equal(whole[0], in_parts[1])


def test_a_state_that_does_not_fit(peers: Peers) -> None:
    model = make_model()

    def make(**options: Any) -> DiLoCo:
        return DiLoCo(model.parameters(), inner=make_inner(model), comm=peers.comm(), **options)

    saved = make(fragments=2).state_dict()
    with pytest.raises(ValueError, match="other parameters, fragments or fragment_order"):
        make().load_state_dict(saved)
    with pytest.raises(ValueError, match="not the state of a DiLoCo"):
        make().load_state_dict(make_inner(model).state_dict())
    with make(fragments=2) as optimizer:
        optimizer.join()
        with pytest.raises(RuntimeError, match="before the first step"):
            optimizer.load_state_dict(saved)


# -- what is told --------------------------------------------------------------------------------


def test_events(peers: Peers) -> None:
    peers.train_all(2, 4, sync_every=2)
    for rank in range(2):
        told = peers.events[rank]
        assert any(isinstance(event, Joined) for event in told)
        kinds = [type(event) for event in told if not isinstance(event, PeerReport)]
        assert kinds[0] is MembersChanged
        assert [kind for kind in kinds if kind not in (MembersChanged, StateSynced)] == [
            InnerStep,
            InnerStep,
            OuterStep,
            InnerStep,
            InnerStep,
            OuterStep,
        ]
        first = peers.outer_steps(rank)[0]
        assert (first.step, first.own_weight, first.total_weight) == (2, 2.0, 4.0)
        assert (
            first.tx_bytes
            == first.rx_bytes
            == 4 * sum(p.numel() for p in make_model().parameters())
        )
        assert first.pseudo_gradient_norm > 0
        assert first.mean_norm > 0
