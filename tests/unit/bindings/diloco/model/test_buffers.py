"""The buffers of a model: which go with it, how members average them, and what they keep."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco.model.buffers import SharedBuffers, named_buffers  # noqa: E402


def model_with(mean: float = 0.0, count: int = 0) -> Any:
    """One buffer of each kind."""
    self = torch.nn.Module()
    self.weight = torch.nn.Parameter(torch.zeros(2))
    self.register_buffer("mean", torch.full((2, 2), mean))
    self.register_buffer("short", torch.full((3,), mean, dtype=torch.bfloat16))
    self.register_buffer("count", torch.tensor(count))
    self.register_buffer("mask", torch.tensor([True, False, count % 2 == 1]))
    self.register_buffer("table", torch.arange(4.0), persistent=False)
    self.register_buffer("nothing", None)
    self.inside = torch.nn.BatchNorm1d(2, dtype=torch.float64)
    return self


NAMES = [
    *("mean", "short", "count", "mask"),
    *("inside.running_mean", "inside.running_var", "inside.num_batches_tracked"),
]


def listed(tensor: Any) -> list[Any]:
    """Its values."""
    values: list[Any] = tensor.tolist()
    return values


def flat(tensor: Any) -> list[Any]:
    return listed(tensor.flatten())


def made(model: Any) -> SharedBuffers:
    return SharedBuffers(named_buffers(None, model))


def total(*parts: tuple[Any, float]) -> Any:
    """The sum of models with weights; the first gives what is not averaged."""
    sums = [made(model).take(weight) for model, weight in parts]
    for one in sums[1:]:
        made(parts[0][0]).follow(one)
    return torch.stack(sums).sum(0)


def test_those_of_a_module_are_those_of_its_state_dict() -> None:
    assert [name for name, _ in named_buffers(None, model_with())] == NAMES
    assert named_buffers(None, model_with().parameters()) == []
    assert named_buffers((), model_with()) == []
    pairs = [("a", torch.zeros(1)), ("empty", torch.zeros(0))]
    assert [name for name, _ in named_buffers(pairs, model_with())] == ["a"]
    compiled = [("_orig_mod.a", torch.zeros(1))]
    assert [name for name, _ in named_buffers(compiled, model_with())] == ["a"]


@pytest.mark.parametrize("wrong", [3, [torch.zeros(2)], [("a",)], [("a", 1)], [("a", print)], "ab"])
def test_buffers_are_checked(wrong: Any) -> None:
    with pytest.raises(TypeError, match="buffers must be pairs of name and tensor"):
        named_buffers(wrong, model_with())


def test_two_of_one_name() -> None:
    pairs = [("a", torch.zeros(1)), ("a", torch.ones(1))]
    with pytest.raises(ValueError, match="two buffers have the same name"):
        named_buffers(pairs, model_with())


def test_floats_are_averaged_by_weight_and_the_rest_is_that_of_one() -> None:
    models = [model_with(1.0, 2**40 + 7), model_with(5.0, 3), model_with(math.nan, 4)]
    models[1].inside.running_var.fill_(0.25)
    buffers = made(models[1])
    buffers.apply(total((models[0], 3.0), (models[1], 1.0), (models[2], 0.0)))
    mean, short, count, mask, _, variance, batches = buffers.common
    assert listed(mean) == [[2.0, 2.0], [2.0, 2.0]]
    assert listed(short) == [2.0, 2.0, 2.0]
    assert short.dtype == torch.bfloat16
    assert count.item() == 2**40 + 7
    assert listed(mask) == [True, False, True]
    assert listed(variance) == [(3 + 0.25) / 4] * 2
    assert batches.item() == 0
    buffers.merge(buffers.copies(), 0.0)
    assert torch.equal(models[1].mean, mean)
    assert models[1].count.item() == 2**40 + 7


def test_an_average_of_equal_values_is_that_value() -> None:
    """In float32, constants would move by a rounding error in some rounds."""
    models = [model_with() for _ in range(3)]
    wanted = torch.randn(2, 2, generator=torch.Generator().manual_seed(3))
    for model in models:
        model.mean.copy_(wanted)
    buffers = made(models[0])
    buffers.apply(total(*zip(models, (0.1, 0.7, 1e7 / 3), strict=True)))
    assert torch.equal(buffers.common[0], wanted)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_nobody_gives_what_is_not_averaged_or_nobody_has_worked(weight: float) -> None:
    buffers = made(model_with(7.0, 9))
    sums = made(model_with(1.0, 1)).take(weight)
    buffers.follow(sums)
    buffers.apply(sums)
    assert flat(buffers.common[0]) == [1.0 if weight else 7.0] * 4
    assert buffers.common[2].item() == 9


def test_words_out_of_range_are_ignored() -> None:
    buffers = made(model_with(7.0, 9))
    for wrong in (math.nan, math.inf, 0.5, 2.0**31 + 1):
        sums = made(model_with(7.0, 1)).take(1.0)
        sums[-1] = wrong
        buffers.apply(sums)
    assert buffers.common[2].item() == 9


def test_a_merge_keeps_a_share_of_the_floats() -> None:
    model = model_with(8.0, 5)
    buffers = made(model)
    model.mean = torch.full((2, 2), 4.0)  # replaced, as some forward passes do
    model.count += 1
    buffers.merge(buffers.copies(), 0.25)
    assert flat(model.mean) == [0.75 * 8 + 0.25 * 4] * 4
    assert model.count.item() == 5


def test_the_first_forward_pass_may_come_before_the_run_is_joined() -> None:
    """What it has changed stays, unless the run has other buffers."""
    model = model_with(8.0, 5)
    buffers = made(model)
    before = buffers.copies()
    model.count += 1
    buffers.anchor(before)
    assert model.count.item() == 6
    buffers.anchor(made(model_with(8.0, 9)).copies())
    assert model.count.item() == 9


def test_a_buffer_of_another_shape() -> None:
    model = model_with()
    buffers = made(model)
    model.mean = torch.zeros(3)
    with pytest.raises(ValueError, match=r"buffer mean has become torch.float32 of shape \(3,\)"):
        buffers.take(1.0)


def test_a_checkpoint() -> None:
    saved = made(model_with(3.0, 4)).state_dict()
    assert list(saved) == NAMES
    model = model_with(1.0, 1)
    buffers = made(model)
    buffers.load_state_dict(saved)
    assert flat(buffers.common[0]) == [3.0] * 4
    model.mean.fill_(2.0)
    buffers.load_state_dict(None)  # of a version without buffers
    assert flat(buffers.common[0]) == [2.0] * 4
    saved["mean"] = torch.zeros(5)
    with pytest.raises(ValueError, match="other buffers"):
        buffers.load_state_dict(saved)


def test_the_entries_of_the_shared_state() -> None:
    buffers = made(model_with(3.0, 4))
    infos = buffers.infos()
    assert [info.name for info in infos] == [f"buffer/{name}" for name in NAMES]
    buffers.common[2].fill_(6)
    assert [info.numel for info in infos] == [4, 3, 8, 3, 2, 2, 8]
    held: Any = infos[2].tensor
    assert listed(held.view(torch.int64)) == [6]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_buffers_that_are_not_finite_are_no_contribution(value: float) -> None:
    """Otherwise one replica that diverges would ruin those of all."""
    broken = made(model_with(value))
    assert not broken.take(2.0).any()
    one, other = made(model_with(3.0)), made(model_with(5.0))
    one.apply(broken.take(2.0) + other.take(4.0))
    assert flat(one.common[0]) == [5.0] * 4
