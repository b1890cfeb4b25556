"""The learning part of the demo, without anybody to average with."""

from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if find_spec("sklearn") is None:  # only its digits are read, and its import takes a second
    pytest.skip("the demo needs sklearn", allow_module_level=True)

from pccl.cli.demo import peer as demo_peer  # noqa: E402
from pccl.cli.demo.record import DemoTask, Told  # noqa: E402


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


def weights(seed: int) -> list[Any]:
    return [each.detach() for each in demo_peer.make_model(seed).parameters()]


def test_replicas_start_equal() -> None:
    assert all(one.equal(other) for one, other in zip(weights(1), weights(1), strict=True))
    assert not weights(1)[0].equal(weights(2)[0])


def trained(steps: int) -> list[Told]:
    """What a peer tells that takes so many steps alone."""
    told: list[Told] = []
    peer = demo_peer.DemoPeer(DemoTask(1, 4, steps, 3), told.append, demo_peer.load_digits())
    peer.train_alone()
    peer.finish()
    return told


def test_training_alone_repeats_itself() -> None:
    first = trained(5)
    assert [(each.step, each.loss, each.digest) for each in first] == [
        (each.step, each.loss, each.digest) for each in trained(5)
    ]
    assert [each.step for each in first] == [1, 2, 3, 4, 5, 5]
    assert [each.status for each in first] == ["training"] * 5 + ["finished"]
    assert all(each.contributors == () for each in first)
    assert len(first[-1].digest) == 64
    assert first[-1].digest != trained(6)[-1].digest


def test_one_that_comes_late_has_room_for_all_digits() -> None:
    rooms, all_digits = demo_peer.load_digits(late=True), demo_peer.load_digits()
    assert list(rooms) == list(all_digits)
    for room, digits in zip(rooms.values(), all_digits.values(), strict=True):
        assert (room.shape, room.dtype) == (digits.shape, digits.dtype)
        assert not room.any()
