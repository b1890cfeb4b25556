"""The learning part of the demo, without anybody to average with."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from pccl.cli import demo_peer  # noqa: E402
from pccl.cli.demo_record import Stepped  # noqa: E402


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
def test_shards_are_disjoint_and_complete(shards: int) -> None:
    held_out, parts = demo_peer.split(1797, shards, seed=5)
    assert len(held_out) == demo_peer.HELD_OUT_COUNT
    assert len(parts) == shards
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    dealt = torch.cat([held_out, *parts]).sort().values
    assert dealt.equal(torch.arange(1797))


def test_every_peer_deals_the_same_shards() -> None:
    first, second = (demo_peer.split(1797, 4, seed=5) for _ in range(2))
    assert first[0].equal(second[0])
    assert all(one.equal(other) for one, other in zip(first[1], second[1], strict=True))
    assert not demo_peer.split(1797, 4, seed=6)[0].equal(first[0])


def test_replicas_start_equal() -> None:
    assert demo_peer.digest(demo_peer.make_model(1)) == demo_peer.digest(demo_peer.make_model(1))
    assert demo_peer.digest(demo_peer.make_model(1)) != demo_peer.digest(demo_peer.make_model(2))


def test_gradients_are_views_of_one_vector() -> None:
    model = demo_peer.make_model(0)
    vector = demo_peer.gradient_vector(model)
    torch.autograd.backward(model(torch.ones(3, 8, 8)).square().sum())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert vector[:-1].equal(torch.cat([gradient.flatten() for gradient in gradients]))
    assert vector[:-1].abs().sum() > 0
    assert vector[-1] == 0
    vector.fill_(2.0)
    assert all(gradient.equal(torch.full_like(gradient, 2.0)) for gradient in gradients)


def trained(replica: demo_peer.Replica, steps: int) -> list[float]:
    losses: list[float] = []

    def report(event: object) -> None:
        assert isinstance(event, Stepped)
        losses.append(event.loss)

    demo_peer.train(
        replica,
        torch.arange(100),
        steps=steps,
        seed=3,
        meet=lambda: None,
        average=lambda _: demo_peer.Averaged((), 0, 0),
        report=report,
    )
    return losses


def test_the_shared_state_is_all_that_training_goes_on_with() -> None:
    """A newcomer that has taken it over takes the same steps, bit for bit."""
    elder = demo_peer.Replica(demo_peer.load_digits(), seed=1)
    newcomer = demo_peer.Replica(demo_peer.no_digits(), seed=2)
    assert len(trained(elder, 3)) == 3
    assert demo_peer.digest(newcomer.model) != demo_peer.digest(elder.model)
    infos = zip(
        elder.shared_state().tensor_infos, newcomer.shared_state().tensor_infos, strict=True
    )
    for theirs, own in infos:
        assert (theirs.name, theirs.dtype, theirs.shape) == (own.name, own.dtype, own.shape)
        empty: Any = own.tensor
        empty.copy_(theirs.tensor)
    assert trained(elder, 5) == trained(newcomer, 5)
    assert demo_peer.digest(newcomer.model) == demo_peer.digest(elder.model)
    assert newcomer.step_count.item() == 5
    assert trained(newcomer, 5) == []


def test_momentum_that_is_there_from_the_first_changes_nothing() -> None:
    replica = demo_peer.Replica(demo_peer.load_digits(), seed=1)
    lazy = demo_peer.Replica(demo_peer.load_digits(), seed=1)
    lazy.optimizer.state.clear()
    assert trained(replica, 3) == trained(lazy, 3)
    assert demo_peer.digest(replica.model) == demo_peer.digest(lazy.model)
