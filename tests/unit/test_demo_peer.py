"""The learning part of the demo, without anybody to average with."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from pccl.cli import demo_peer  # noqa: E402


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
