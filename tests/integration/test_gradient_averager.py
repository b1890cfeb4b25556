"""Data parallelism on real connections, one thread for each peer.

Expected weights come from a loop written here: every peer's gradients from a model of its own, the
mean by NumPy, plain optimizer steps. Of two peers the mean has the same bits in whatever order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import QUICK, Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import pccl  # noqa: E402
from pccl.bindings.consumers import JsonlWriter  # noqa: E402
from pccl.bindings.events import (  # noqa: E402
    Event,
    GradientsAveraged,
    MembersChanged,
    RoundsMissed,
    StateSynced,
    TrainsAlone,
)
from pccl.bindings.gradient_averager import GradientAverager  # noqa: E402
from pccl.errors import DescriptorMismatch, MasterLost  # noqa: E402
from pccl.machines.peer.machine import Standing  # noqa: E402

SMALL = 200
"""Bytes of a bucket, so that the small model has several."""

Make = Callable[[Any], Any]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
}


def make_model(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3, dtype=torch.float32))


def batch(peer: int, step: int) -> Tensor:
    chosen: Tensor = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * peer + step))
    return chosen


def data_of(peer: int) -> Callable[[int], Tensor]:
    return lambda step: batch(peer, step)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :3])
    assert isinstance(loss, Tensor)
    return loss


def values_of(tensor: Tensor) -> list[float]:
    found: list[float] = tensor.detach().numpy().tolist()
    return found


def bits(model: nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def by_hand(
    make: Make, data: Callable[[int, int], list[Tensor]], steps: int, peers: int = 2
) -> list[bytes]:
    """The weights after so many steps with averages made by NumPy."""
    model = make_model(1)
    optimizer = make(model.parameters())
    for step in range(steps):
        gradients: list[list[Any]] = []
        for peer in range(peers):
            optimizer.zero_grad()
            for inputs in data(peer, step):
                torch.autograd.backward(loss_of(model, inputs))
            gradients.append(
                [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]
            )
        for parameter, *brought in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.from_numpy(np.sum(brought, axis=0) / np.float32(peers))
        optimizer.step()
    return bits(model)


class Peer:
    """A model that is trained, and what was told of it."""

    def __init__(
        self,
        run: Run,
        seed: int,
        make: Make = OPTIMIZERS["adamw"],
        schedule: Callable[[Any], object] | None = None,
        consumers: Sequence[Callable[[Event], None]] = (),
        **options: Any,
    ) -> None:
        self.model = make_model(seed)
        self.optimizer = make(self.model.parameters())
        if schedule is not None:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            schedule(scheduler)
            options["stateful"] = {"lr": scheduler}
        self.events: list[Event] = []
        self.comm = run.newcomer()
        options = {"bucket_bytes": SMALL, "min_peers": 2, **options}
        self.averager = GradientAverager(
            self.model,
            self.optimizer,
            comm=self.comm,
            on_event=[*consumers, self.events.append],
            **options,
        )

    def train(
        self,
        steps: int,
        data: Callable[[int], Tensor],
        on_step: Callable[[], object] | None = None,
        await_at: int | None = None,
    ) -> list[bytes]:
        """Take steps until the run has taken so many; the weights after that.

        At the step ``await_at`` wait until somebody new is there.
        """
        while True:
            joined = self.averager.update()
            while self.averager.steps == await_at and not joined:
                joined = self.averager.update()
            if self.averager.steps >= steps:
                self.averager.verify()
                return bits(self.model)
            self.optimizer.zero_grad()
            torch.autograd.backward(loss_of(self.model, data(self.averager.steps)))
            self.averager.step()
            if on_step is not None:
                on_step()

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 20])
def test_two_peers_do_what_a_loop_by_hand_does(
    new_run: Callable[..., Run], name: str, bucket_bytes: int
) -> None:
    run = new_run()
    peers = [Peer(run, 1, OPTIMIZERS[name], bucket_bytes=bucket_bytes) for _ in range(2)]
    ended = [run.start(peer.train, 6, data_of(number)) for number, peer in enumerate(peers)]
    expected = by_hand(OPTIMIZERS[name], lambda peer, step: [batch(peer, step)], 6)
    assert [future.result(LIMIT_S) for future in ended] == [expected] * 2
    for peer in peers:
        averaged = peer.told(GradientsAveraged)
        assert [event.step for event in averaged] == [1, 2, 3, 4, 5, 6]
        assert {event.contributors for event in averaged} == {(1, 2)}
        weight_bytes = 4 * sum(p.numel() for p in peer.model.parameters())
        assert {event.tx_bytes for event in averaged} == {weight_bytes}
        assert all(event.hidden_s >= 0 and event.exposed_s > 0 for event in averaged)
        assert engine_of(peer.comm).step == 6
        assert peer.told(RoundsMissed) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_consumer_whose_disk_is_full_ends_no_training(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run()
    with JsonlWriter("/dev/full") as log:
        peers = [Peer(run, 1, consumers=[log]), Peer(run, 1)]
        ended = [run.start(peer.train, 4, data_of(rank)) for rank, peer in enumerate(peers)]
        first, second = [future.result(LIMIT_S) for future in ended]
    assert first == second
    assert [len(peer.told(GradientsAveraged)) for peer in peers] == [4, 4]
    said = [one.getMessage() for one in caplog.records if one.name == "pccl.events"]
    assert len(said) == 1
    assert "training continues. OSError: [Errno 28]" in said[0]


def test_all_begin_with_the_weights_of_one(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, seed) for seed in (1, 2)]
    first, second = (run.start(peer.train, 3, data_of(number)) for number, peer in enumerate(peers))
    assert first.result(LIMIT_S) == second.result(LIMIT_S)
    received = [peer.told(StateSynced)[0].rx_bytes for peer in peers]
    assert sorted(received) == [0, 4 * sum(p.numel() for p in peers[0].model.parameters())]


def test_gradients_of_several_batches_add_up(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, 1) for _ in range(2)]

    def train(number: int) -> list[bytes]:
        peer = peers[number]
        for step in range(3):
            peer.averager.update()
            peer.optimizer.zero_grad(set_to_none=bool(step % 2))
            with peer.averager.no_sync():
                torch.autograd.backward(loss_of(peer.model, batch(number, 10 * step)))
            torch.autograd.backward(loss_of(peer.model, batch(number, 10 * step + 1)))
            peer.averager.step()
        return bits(peer.model)

    ended = [run.start(train, number) for number in range(2)]
    expected = by_hand(
        OPTIMIZERS["adamw"],
        lambda peer, step: [batch(peer, 10 * step), batch(peer, 10 * step + 1)],
        3,
    )
    assert [future.result(LIMIT_S) for future in ended] == [expected] * 2


class Branches(nn.Module):
    """Whose second part only some inputs use, and whose third part none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.seldom = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.never = nn.Parameter(torch.tensor([5.0]))

    def forward(self, factor: float, *, seldom: bool) -> Tensor:
        total = factor * self.always.sum()
        return total + factor * self.seldom.sum() if seldom else total


def test_parameters_without_a_gradient_count_as_zero(new_run: Callable[..., Run]) -> None:
    run = new_run()
    models = [Branches() for _ in range(2)]

    def train(number: int) -> None:
        model = models[number]
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        averager = GradientAverager(
            model, optimizer, comm=run.newcomer(), bucket_bytes=8, min_peers=2
        )
        averager.update()
        torch.autograd.backward(model(2.0 * (number + 1), seldom=number == 0))
        averager.step()
        averager.verify()

    for future in [run.start(train, number) for number in range(2)]:
        future.result(LIMIT_S)
    for model in models:
        assert values_of(model.always) == [1.0 - 3.0, 2.0 - 3.0]  # the mean of 2 and 4
        assert values_of(model.seldom) == [3.0 - 1.0, 4.0 - 1.0]  # of 2 and 0
        assert values_of(model.never) == [5.0]
        assert model.never.grad is not None


def test_a_batch_that_fails_counts_as_zero(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, 1, lambda p: torch.optim.SGD(p, lr=1.0)) for _ in range(2)]
    before = peers[0].model.get_parameter("2.bias").detach().clone()

    def train(number: int) -> None:
        peer = peers[number]
        peer.averager.update()
        if number == 0:
            output = peer.model(torch.ones(1, 4))
            torch.autograd.backward(output.sum())
        assert peer.averager.step()

    for future in [run.start(train, number) for number in range(2)]:
        future.result(LIMIT_S)
    for peer in peers:
        after = peer.model.get_parameter("2.bias").detach()
        assert values_of(after) == values_of(before - 0.5)


def test_more_tensors_are_averaged_with_the_gradients(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, 1) for _ in range(2)]

    def train(number: int) -> list[float]:
        peer, seen = peers[number], list[float]()
        for step in range(2):
            peer.averager.update()
            torch.autograd.backward(loss_of(peer.model, batch(number, step)))
            loss, ones = torch.tensor([float(step + number)]), torch.full((3,), 4.0 * number)
            assert peer.averager.synchronize(loss, ones)
            nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
            peer.optimizer.step()
            seen += [loss.item(), *values_of(ones)]
        peer.averager.verify()
        return seen

    ended = [run.start(train, number) for number in range(2)]
    expected = [0.5, 2.0, 2.0, 2.0, 1.5, 2.0, 2.0, 2.0]
    assert [future.result(LIMIT_S) for future in ended] == [expected] * 2
    assert [peer.averager.steps for peer in peers] == [2, 2]


def test_a_newcomer_takes_over_what_the_others_have(new_run: Callable[..., Run]) -> None:
    """Weights, momentum, the scheduler's numbers; then it takes the same steps."""
    run = new_run()
    halfway, schedulers = threading.Event(), list[Any]()

    def make_peer(seed: int) -> Peer:
        return Peer(run, seed, schedule=schedulers.append)

    peers = [make_peer(1), make_peer(1)]

    def after_step(number: int) -> None:
        schedulers[number].step()
        if peers[0].averager.steps >= 5:
            halfway.set()

    ended = [
        run.start(peer.train, 12, data_of(number), partial(after_step, number), await_at=5)
        for number, peer in enumerate(peers)
    ]
    assert halfway.wait(LIMIT_S)
    newcomer = make_peer(7)
    peers.append(newcomer)
    mine = run.start(newcomer.train, 12, data_of(2), partial(after_step, 2))
    weights = [future.result(LIMIT_S) for future in [*ended, mine]]
    assert weights[0] == weights[1] == weights[2]
    assert [event.step for event in newcomer.told(GradientsAveraged)] == list(range(6, 13))
    assert {event.contributors for event in newcomer.told(GradientsAveraged)} == {(1, 2, 3)}
    assert {scheduler.last_epoch for scheduler in schedulers} == {12}
    lrs = [peer.optimizer.param_groups[0]["lr"] for peer in peers]
    assert lrs == [lrs[0]] * 3
    assert lrs[0] == pytest.approx(0.01 * 0.9**12)
    joined = [event.joined for event in peers[0].told(MembersChanged)]
    assert joined == [(1, 2), (3,)]


def test_alone_the_own_gradients_count(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peer = Peer(run, 1, min_peers=1)
    weights = peer.train(4, data_of(0))
    expected = by_hand(OPTIMIZERS["adamw"], lambda _, step: [batch(0, step)], 4, peers=1)
    assert weights == expected
    assert peer.told(TrainsAlone) == [TrainsAlone(step=0)]
    assert [event.contributors for event in peer.told(GradientsAveraged)] == [(1,)] * 4
    assert {event.tx_bytes for event in peer.told(GradientsAveraged)} == {0}


def test_who_is_left_alone_goes_on(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, 1) for _ in range(2)]
    leaving = run.start(peers[1].train, 3, data_of(1))
    staying = run.start(peers[0].train, 3, data_of(0))
    assert leaving.result(LIMIT_S) == staying.result(LIMIT_S)
    peers[1].comm.close()
    assert run.start(peers[0].train, 6, data_of(0)).result(LIMIT_S)
    assert peers[0].told(TrainsAlone) == [TrainsAlone(step=3)]
    assert peers[0].averager.steps == 6


def test_who_leaves_before_the_reduce_is_not_in_it(new_run: Callable[..., Run]) -> None:
    """Two of three go on in the same step, and end alike."""
    run = new_run()
    peers = [Peer(run, 1, min_peers=3) for _ in range(3)]
    ended = [run.start(peer.train, 2, data_of(number)) for number, peer in enumerate(peers)]
    for future in ended:
        future.result(LIMIT_S)
    ids = [peer.comm.peer_id for peer in peers]
    for entered in [run.start(peer.averager.update) for peer in peers]:
        entered.result(LIMIT_S)

    def step(number: int) -> bool:
        torch.autograd.backward(loss_of(peers[number].model, batch(number, 2)))
        return peers[number].averager.step()

    first = run.start(step, 0)
    peers[2].comm.close()
    second = run.start(step, 1)
    assert first.result(LIMIT_S)
    assert second.result(LIMIT_S)
    assert bits(peers[0].model) == bits(peers[1].model)
    for peer in peers[:2]:
        assert peer.told(GradientsAveraged)[-1].contributors == tuple(sorted(ids[:2]))


@pytest.mark.parametrize("compression", ["int8", pccl.QuantizationOptions(format="bfloat16")])
def test_compressed_gradients_are_the_same_for_all(
    new_run: Callable[..., Run], compression: Any
) -> None:
    run = new_run()
    peers = [Peer(run, 1, compression=compression) for _ in range(2)]
    ended = [run.start(peer.train, 4, data_of(number)) for number, peer in enumerate(peers)]
    first, second = (future.result(LIMIT_S) for future in ended)
    assert first == second
    sent = peers[0].told(GradientsAveraged)[0].tx_bytes
    assert sent < 4 * sum(p.numel() for p in peers[0].model.parameters())
    saved = peers[0].averager.state_dict()
    assert saved["steps"] == 4
    assert len(saved["error_feedback"]) == (4 if compression == "int8" else 0)


def test_a_checkpoint_counts_more_than_who_is_fresh(new_run: Callable[..., Run]) -> None:
    run = new_run()
    elder = Peer(run, 1, min_peers=1)
    weights = elder.train(5, data_of(0))
    saved = [elder.model.state_dict(), elder.optimizer.state_dict(), elder.averager.state_dict()]
    elder.comm.close()

    again = new_run()
    peers = [Peer(again, seed) for seed in (2, 3)]
    peers[1].model.load_state_dict(saved[0])
    peers[1].optimizer.load_state_dict(saved[1])
    peers[1].averager.load_state_dict(saved[2])
    ended = [again.start(peer.train, 5, data_of(0)) for peer in peers]
    assert [future.result(LIMIT_S) for future in ended] == [weights] * 2
    ended = [again.start(peer.train, 8, data_of(0)) for peer in peers]
    first, second = (future.result(LIMIT_S) for future in ended)
    assert first == second
    with pytest.raises(RuntimeError, match="before the first update"):
        peers[0].averager.load_state_dict(saved[2])


def test_a_peer_that_is_behind_is_told_by_how_many_steps(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, 1) for _ in range(2)]
    for peer, steps in zip(peers, (2, 5), strict=True):
        saved = {**peer.averager.state_dict(), "steps": steps}
        peer.averager.load_state_dict(saved)
    ended = [run.start(peer.train, 6, data_of(0)) for peer in peers]
    first, second = (future.result(LIMIT_S) for future in ended)
    assert first == second
    missed = [peer.told(RoundsMissed) for peer in peers]
    assert missed == [[RoundsMissed(step=5, number=5, missed=3)], []]


def test_steps_that_the_run_does_not_have_are_told(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run()
    member, newcomer = Peer(run, 1, min_peers=1), Peer(run, 2)
    schedule = torch.optim.lr_scheduler.ExponentialLR
    schedulers = [schedule(peer.optimizer, 0.9) for peer in (member, newcomer)]
    member.train(2, data_of(0))
    newcomer.averager.load_state_dict({"steps": 5, "error_feedback": {}})
    entered = run.start(newcomer.averager.update)
    ended = run.start(member.train, 4, data_of(0), await_at=2)
    entered.result(LIMIT_S)
    newcomer.comm.close()
    ended.result(LIMIT_S)
    told = "".join(record.message for record in caplog.records)
    assert "this peer: it was at step 5, and the group elected the state of step" in told
    assert "ExponentialLR begins at step 0, and the run has made" in told
    assert "pass it in stateful=" in told
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 0]


@pytest.mark.parametrize("lost", ["in the step", "before the step", "told to another call"])
def test_a_peer_whose_master_is_gone_takes_no_step(
    new_run: Callable[..., Run], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It joins the run that is coordinated there afterwards, and goes on where it was."""
    impatient = replace(QUICK, master_lost_s=1.0)
    run = new_run(timing=impatient)
    peers = [Peer(run, 1) for _ in range(2)]
    ended = [run.start(peer.train, 3, data_of(number)) for number, peer in enumerate(peers)]
    assert ended[0].result(LIMIT_S) == ended[1].result(LIMIT_S)
    for entered in [run.start(peer.averager.update) for peer in peers]:
        entered.result(LIMIT_S)
    run.master.interrupt()

    def step(number: int) -> bool:
        comm = peers[number].comm
        if lost == "before the step":
            machine = engine_of(comm).machine
            run.until(lambda: machine.standing is Standing.LOST)
        elif lost == "told to another call":
            with pytest.raises(MasterLost):
                comm.are_peers_pending()
        torch.autograd.backward(loss_of(peers[number].model, batch(number, 3)))
        return peers[number].averager.step()

    before = bits(peers[0].model)
    first, second = run.start(step, 0), run.start(step, 1)
    assert not first.result(LIMIT_S)
    assert not second.result(LIMIT_S)
    assert bits(peers[0].model) == bits(peers[1].model) == before
    assert not any(peer.averager.is_member for peer in peers)
    dropped = "dropped the gradients of step 4, because this peer lost its membership: no message"
    assert sum(record.message.startswith(dropped) for record in caplog.records) == 2
    with pccl.MasterNode(run.master.address, timing=impatient):
        ended = [run.start(peer.train, 6, data_of(number)) for number, peer in enumerate(peers)]
        assert ended[0].result(LIMIT_S) == ended[1].result(LIMIT_S)


def test_other_buckets_are_told(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peers = [Peer(run, 1, bucket_bytes=size) for size in (SMALL, 1 << 20)]
    ended = [run.start(peer.train, 1, data_of(0)) for peer in peers]
    for future in ended:
        with pytest.raises(DescriptorMismatch, match="131 x float32"):
            future.result(LIMIT_S)


# -- mistakes --------------------------------------------------------------------------------------


def test_calls_in_the_wrong_order_are_told(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peer = Peer(run, 1, min_peers=1)
    with pytest.raises(RuntimeError, match=r"call averager\.update\(\)"):
        peer.averager.step()
    with pytest.raises(RuntimeError, match=r"call averager\.update\(\)"):
        torch.autograd.backward(loss_of(peer.model, batch(0, 0)))
    peer.averager.update()
    torch.autograd.backward(loss_of(peer.model, batch(0, 0)))
    with pytest.raises(RuntimeError, match="no_sync"):
        torch.autograd.backward(loss_of(peer.model, batch(0, 0)))
    with pytest.raises(RuntimeError, match="call synchronize"):
        peer.averager.update()
    with pytest.raises(RuntimeError, match=r"call averager\.step\(\)"):
        peer.optimizer.step()
    peer.averager.step()
    peer.model.get_parameter("0.bias").requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad"):
        peer.averager.update()


def test_nothing_is_heard_after_close(new_run: Callable[..., Run]) -> None:
    run = new_run()
    peer = Peer(run, 1)
    with peer.averager:
        pass
    torch.autograd.backward(loss_of(peer.model, batch(0, 0)))
    peer.optimizer.step()
    assert peer.averager.steps == 0


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_models_that_cannot_be_averaged_are_refused(new_run: Callable[..., Run]) -> None:
    comm = new_run().newcomer()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to average"):
        GradientAverager(frozen, sgd(frozen), comm=comm)
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ValueError, match="'0' makes sparse gradients"):
        GradientAverager(sparse, sgd(sparse), comm=comm)
    complex_ = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        GradientAverager(complex_, sgd(complex_), comm=comm)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not the model's"):
        GradientAverager(model, sgd(other), comm=comm)
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="is on cpu, meta"):
        GradientAverager(spread, sgd(spread), comm=comm)
    with pytest.raises(ValueError, match="bucket_bytes must be from 1 to 2147483647, not 0"):
        GradientAverager(model, sgd(model), comm=comm, bucket_bytes=0)
    with pytest.raises(TypeError, match=r"comm must be a pccl\.Communicator, not None"):
        GradientAverager(model, sgd(model), comm=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compression must be one of .*, not 'int3'"):
        GradientAverager(model, sgd(model), comm=comm, compression="int3")


def test_a_sparse_gradient_is_told(new_run: Callable[..., Run]) -> None:
    model = nn.ParameterList([torch.ones(4, 2)])
    averager = GradientAverager(model, sgd(model), comm=new_run().newcomer())
    averager.update()
    rows = nn.functional.embedding(torch.tensor([1]), model[0], sparse=True)
    with pytest.raises(TypeError, match="the gradient of '0' is sparse"):
        torch.autograd.backward(rows.sum())


def test_a_sharded_parameter_is_refused(new_run: Callable[..., Run]) -> None:
    class DTensor(nn.Parameter):
        """Called as torch's own is."""

    model = nn.Module()
    model.register_parameter("weight", DTensor(torch.ones(2)))
    with pytest.raises(ValueError, match="'weight' is a DTensor"):
        GradientAverager(model, sgd(model), comm=new_run().newcomer())
