"""torch's operations and buffers in terms of ours."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from pccl.bindings.process_group.arguments import Staged, parts


@pytest.mark.parametrize(
    ("tensor", "is_copy"),
    [
        (torch.arange(6.0), False),
        (torch.arange(6.0).view(2, 3), False),
        (torch.arange(6.0).view(2, 3).t(), True),
        (torch.arange(6.0)[::2], True),
        (torch.tensor(5.0), False),
        (torch.complex(torch.ones(3), torch.zeros(3)), False),
        (torch.complex(torch.ones(3), torch.ones(3)).conj(), True),
        (torch.complex(torch.ones(3), torch.ones(3)).conj().imag, True),
        (torch.tensor([True, False]), False),
        (torch.zeros(0), False),
    ],
)
def test_what_is_written_arrives_in_the_tensor(tensor: torch.Tensor, is_copy: bool) -> None:
    before = tensor.clone()
    staged = Staged(tensor, computes=False)
    assert staged.is_copy is is_copy
    assert staged.values.is_contiguous()
    assert staged.values.dim() == 1
    assert staged.values.dtype == torch.uint8
    assert staged.values.numel() == tensor.numel() * tensor.element_size()
    other = Staged(torch.zeros_like(before.resolve_conj().resolve_neg()), computes=False)
    other.values.copy_(staged.values)
    staged.values.zero_()
    staged.give_back()
    assert not tensor.any()
    staged.values.copy_(other.values)
    staged.give_back()
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1).expand(3), torch.zeros(2, 1, 4).expand(2, 3, 4)[:, 1:]]
)
def test_memory_that_elements_share_is_only_read(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"share memory, as after expand\(\); clone\(\) it"):
        Staged(tensor, computes=True)
    staged = Staged(tensor, computes=True, is_read=True)
    assert staged.values.numel() == tensor.numel()
    staged.values.fill_(1)
    staged.give_back()
    assert not tensor.any()


@pytest.mark.parametrize("tensor", [torch.zeros(0).expand(3, 0), torch.zeros(1, 1).expand(1, 1)])
def test_memory_that_nothing_shares(tensor: torch.Tensor) -> None:
    Staged(tensor, computes=True).give_back()


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not torch\.sparse_coo; call to_dense\(\)"):
        Staged(torch.eye(2).to_sparse(), computes=True)


def test_a_leaf_that_needs_a_gradient_can_be_written() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    Staged(parameter, computes=True).values.fill_(3)
    assert torch.equal(parameter, torch.full((2,), 3.0))


def test_parts() -> None:
    rows = torch.arange(12).view(6, 2)
    for number, part in enumerate(parts(rows, [], 3)):
        assert torch.equal(part, rows[2 * number : 2 * number + 2])
    assert [len(part) for part in parts(rows, [1, 0, 5], 3)] == [1, 0, 5]
    with pytest.raises(ValueError, match="6 rows are not divisible by 4 ranks"):
        parts(rows, [], 4)
    for wrong in ([1, 2], [1, 2, 4]):
        with pytest.raises(ValueError, match="do not fit 6 rows"):
            parts(rows, wrong, 3)
