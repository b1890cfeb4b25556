"""torch's operations, dtypes and buffers in terms of ours.

Our collectives take contiguous CPU tensors of the dtypes with arithmetic. Where no arithmetic is
needed, any dtype goes as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp as TorchOp

from pccl import DataType, ReduceOp

_OPS = (
    (TorchOp.SUM, ReduceOp.SUM),
    (TorchOp.AVG, ReduceOp.AVG),
    (TorchOp.PRODUCT, ReduceOp.PROD),
    (TorchOp.MIN, ReduceOp.MIN),
    (TorchOp.MAX, ReduceOp.MAX),
)


def op_of(op: Any) -> ReduceOp:
    """Return our operation.

    Raises:
        ValueError: we have no such operation.
    """
    for theirs, ours in _OPS:
        if op == theirs:
            return ours
    name = next((name for name, one in TorchOp.RedOpType.__members__.items() if op == one), op)
    raise ValueError(f"pccl reduces with SUM, AVG, PRODUCT, MIN or MAX, not with {name}")


class Staged:
    """A tensor as our collectives take it, and the way back.

    Args:
        tensor: the tensor.
        computes: whether its values are reduced.
        is_read: whether it only gives values.

    Attributes:
        values: contiguous, on the CPU, of one dimension; the tensor's own memory where possible.
        is_copy: whether ``values`` is a copy.
    """

    def __init__(self, tensor: Tensor, *, computes: bool, is_read: bool = False) -> None:
        if tensor.layout is not torch.strided:
            raise ValueError(f"pccl takes dense tensors, not {tensor.layout}; call to_dense()")
        if not is_read and _shares(tensor):
            raise ValueError(
                "a result cannot be written to a tensor whose elements share memory, as after "
                "expand(); clone() it"
            )
        self._tensor, self._is_read = tensor.detach(), is_read
        own = self._tensor
        self.is_copy = own.is_cuda or own.is_conj() or own.is_neg() or not own.is_contiguous()
        plain = own.resolve_conj().resolve_neg().contiguous()
        if own.is_cuda:
            plain = torch.empty_like(plain, device="cpu", pin_memory=True).copy_(plain)
        self.values = (torch.view_as_real(plain) if own.is_complex() else plain).reshape(-1)
        if not computes:
            self.values = self.values.view(torch.uint8)
        elif not _computes(self.values):
            raise ValueError(f"pccl cannot reduce {tensor.dtype}; convert the tensor")

    def give_back(self) -> None:
        """Write a copy back to the tensor."""
        if self.is_copy and not self._is_read:
            self._tensor.copy_(self.values.view(self._tensor.dtype).view(self._tensor.shape))


def _shares(tensor: Tensor) -> bool:
    """Whether the elements along a dimension of a tensor are one."""
    by_dimension = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(n > 1 and step == 0 for n, step in by_dimension)


def _computes(values: Tensor) -> bool:
    try:
        DataType.from_torch_dtype(values.dtype)
    except ValueError:
        return False
    return True


def staged(tensors: Sequence[Tensor], *, is_read: bool = False) -> list[Staged]:
    """Return tensors as bytes for our collectives."""
    return [Staged(one, computes=False, is_read=is_read) for one in tensors]


def giving_back(buffers: Sequence[Staged]) -> Callable[[], None]:
    """Return a function that writes the copies back to the tensors."""

    def give_back() -> None:
        for one in buffers:
            one.give_back()

    return give_back


def parts(tensor: Tensor, lengths: Sequence[int], count: int) -> list[Tensor]:
    """Cut a tensor along its first dimension: in ``count`` equal parts, or in those ``lengths``."""
    if not lengths:
        if tensor.shape[0] % count:
            raise ValueError(f"{tensor.shape[0]} rows are not divisible by {count} ranks")
        lengths = [tensor.shape[0] // count] * count
    if sum(lengths) != tensor.shape[0] or len(lengths) != count:
        raise ValueError(f"split sizes {list(lengths)} do not fit {tensor.shape[0]} rows")
    return list(torch.split(tensor, list(lengths)))
