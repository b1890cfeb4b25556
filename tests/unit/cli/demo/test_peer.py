"""The learning part of the demo, without anybody to average with."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from pccl.cli.demo import peer as demo_peer  # noqa: E402
from pccl.cli.demo.record import Stepped  # noqa: E402


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


def trained(model: Any, digits: demo_peer.Examples, steps: int) -> list[float]:
    """The losses of so many steps alone."""
    losses: list[float] = []

    def report(event: object) -> None:
        assert isinstance(event, Stepped)
        assert event.contributors == ()
        losses.append(event.loss)

    shard = torch.arange(100)
    demo_peer.train_alone(model, digits, shard, steps=steps, seed=3, report=report)
    return losses


def test_training_alone_repeats_itself() -> None:
    digits = demo_peer.load_digits()
    first, second = demo_peer.make_model(1), demo_peer.make_model(1)
    assert trained(first, digits, 5) == trained(second, digits, 5)
    assert demo_peer.digest(first) == demo_peer.digest(second)
    assert demo_peer.digest(first) != demo_peer.digest(demo_peer.make_model(1))


def test_batches_are_of_the_shard_and_follow_from_the_seed() -> None:
    shard = torch.tensor([5, 6, 9])
    drawn = demo_peer.batches(shard, seed=3)
    again = demo_peer.batches(shard, seed=3)
    for _ in range(3):
        batch = next(drawn)
        assert len(batch) == demo_peer.BATCH_SIZE
        assert torch.isin(batch, shard).all()
        assert batch.equal(next(again))
    assert not next(drawn).equal(next(demo_peer.batches(shard, seed=4)))


def test_one_that_comes_late_has_room_for_all_digits() -> None:
    for room, digits in zip(demo_peer.no_digits(), demo_peer.load_digits(), strict=True):
        assert (room.shape, room.dtype) == (digits.shape, digits.dtype)
        assert not room.any()
