"""The memory of a bucket."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from pccl.bindings.gradient_averager.buckets import Bucket  # noqa: E402


def make_bucket() -> tuple[list[Tensor], Bucket]:
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))]
    return parameters, Bucket([("b", parameters[1]), ("a", parameters[0])])


def values_of(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    found: list[float] = tensor.detach().flatten().numpy().tolist()
    return found


def test_gradients_become_parts_of_it() -> None:
    (first, second), bucket = make_bucket()
    first.grad, second.grad = torch.arange(6.0).view(3, 2), torch.tensor([8.0, 9.0])
    bucket.take(0)
    assert not bucket.is_complete
    bucket.take(1)
    assert bucket.is_on_host
    assert values_of(bucket.values) == [8, 9, 0, 1, 2, 3, 4, 5]
    bucket.values.mul_(2)
    bucket.give_back()
    assert values_of(first.grad) == [0, 2, 4, 6, 8, 10]
    assert first.grad is not None
    assert first.grad.shape == (3, 2)
    assert values_of(second.grad) == [16, 18]


def test_a_gradient_that_stayed_is_not_copied() -> None:
    (first, second), bucket = make_bucket()
    bucket.take_rest()
    bucket.begin()
    kept = first.grad
    torch.autograd.backward((first * 3).sum() + second.sum())
    assert first.grad is kept
    bucket.take_rest()
    assert values_of(bucket.values) == [1, 1, 3, 3, 3, 3, 3, 3]


def test_what_is_missing_is_zero() -> None:
    (first, second), bucket = make_bucket()
    bucket.values.fill_(7)
    second.grad = torch.ones(2)
    bucket.take(0)
    bucket.take_rest()
    assert values_of(bucket.values) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert first.grad is not None


def test_nothing_is_taken_twice() -> None:
    _, bucket = make_bucket()
    bucket.take(1)
    with pytest.raises(RuntimeError, match="a gradient of 'a'"):
        bucket.take(1)
    bucket.begin()
    bucket.take(1)
