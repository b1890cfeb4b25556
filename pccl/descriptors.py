"""What a caller may say about a reduce: plain holders, checked when a reduce uses them."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccl.checks import check_range, check_type
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.types import QuantizationAlgorithm, ReduceOp, WireFormat
from pccl.runtime.collective.operand import borrow

POINTER_MAX = 2**64 - 1


class DeviceType(enum.IntEnum):
    """Where a tensor lies."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, device_type: str) -> DeviceType | None:
        """The device type of torch's ``device.type``; None: not known here."""
        return {"cpu": cls.CPU, "cuda": cls.CUDA}.get(device_type)


class DistributionHint(enum.IntEnum):
    """How the values are distributed. Accepted and not used."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


@dataclass
class ReduceOperandDescriptor:
    """What the tensors of a reduce hold.

    Attributes:
        datatype: must be the tensors' own; with raw pointers it says what they point to.
        distribution_hint: accepted and not used.
    """

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass
class QuantizationOptions:
    """How values are shortened for the wire.

    All members must ask for the same, but for ``error_feedback`` and ``name``, which are each
    member's own. Only floats are quantized. A format that is not shorter than the tensor's own
    dtype is none.

    Attributes:
        quantized_datatype: PCCL's way to choose, if ``format`` is not given: 8 bit dtypes are the
            format ``uint8`` with MIN_MAX and ``int8`` with ZERO_POINT_SCALE, 16 bit integers are
            ``uint16``, FLOAT16 and BFLOAT16 are themselves; with longer ones nothing is quantized.
        algorithm: see there; NONE: no quantization.
        format: ``"uint8"``, ``"int8"``, ``"companded8"``, ``"int4"``, ``"float16"``,
            ``"bfloat16"``, ``"uint16"`` or ``"none"``, or a ``pccl.WireFormat``.
        block: values that share a step, from 8 to 65536; None: what is good for the format.
        stochastic: round up with the probability that keeps the mean, instead of to the nearest.
            The draws follow from operation, rank and position, so they can be repeated.
        error_feedback: adds what quantization left out of this tensor the last time. For SUM and
            AVG.
        name: of the tensor, for ``error_feedback``.
    """

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX
    format: WireFormat | str | None = field(default=None, kw_only=True)
    block: int | None = field(default=None, kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    error_feedback: ErrorFeedback | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)


@dataclass
class ReduceDescriptor:
    """One reduce among several.

    Attributes:
        count: elements of the tensors.
        op: what becomes of the contributions.
        tag: pairs the tensors of the members; each reduce has one of its own.
        operand_descriptor: what the tensors hold; None: what they say themselves.
        quantization_options: None: no quantization.
        weight: how much the own tensor counts in an AVG; None: all count the same.
    """

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor | None
    quantization_options: QuantizationOptions | None
    weight: float | None = field(default=None, kw_only=True)


class ReduceOpDescriptor:
    """A reduce with its memory.

    Args:
        sendbuf_ptr: address of the input, ``count`` elements; the caller keeps the memory alive
            until the reduce has returned.
        recvbuf_ptr: address of the result; ``sendbuf_ptr``: in place.
        reduce_descriptor: the reduce; its operand descriptor says the dtype.

    Attributes:
        buffers: the input and the result if this was made from tensors or arrays, which it keeps
            alive; None if it was made from addresses.

    Raises:
        TypeError: an address is not an integer, or no ReduceDescriptor.
        ValueError: a null pointer.
    """

    def __init__(
        self, sendbuf_ptr: int, recvbuf_ptr: int, reduce_descriptor: ReduceDescriptor
    ) -> None:
        self.sendbuf_ptr = check_range("sendbuf_ptr", sendbuf_ptr, 1, POINTER_MAX)
        self.recvbuf_ptr = check_range("recvbuf_ptr", recvbuf_ptr, 1, POINTER_MAX)
        self.reduce_descriptor = check_type(
            "reduce_descriptor", reduce_descriptor, ReduceDescriptor
        )
        self.buffers: tuple[object, object] | None = None

    @staticmethod
    def from_torch(send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Reduce torch CPU tensors; ``recv`` may be ``send``.

        Raises:
            TypeError: not torch tensors, or a dtype that cannot be reduced.
            ValueError: tensors that cannot be used as they are, or that differ from the descriptor.
        """
        torch = sys.modules.get("torch")
        for name, tensor in (("send", send), ("recv", recv)):
            if torch is None or not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
        return _from_buffers(send, recv, reduce_descriptor)

    @staticmethod
    def from_numpy(send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Reduce NumPy arrays; ``recv`` may be ``send``.

        Raises:
            TypeError: not NumPy arrays, or a dtype that cannot be reduced.
            ValueError: arrays that cannot be used as they are, or that differ from the descriptor.
        """
        for name, array in (("send", send), ("recv", recv)):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
        return _from_buffers(send, recv, reduce_descriptor)


def check_operand_descriptor(described: ReduceOperandDescriptor, held: DataType) -> None:
    """Check that a tensor holds what was said.

    Raises:
        TypeError: no ReduceOperandDescriptor.
        ValueError: it holds something else.
    """
    check_type("operand_descriptor", described, ReduceOperandDescriptor)
    if described.datatype != held:
        raise ValueError(
            f"operand_descriptor says {described.datatype!r}, but the tensor holds {held!r}; "
            f"say DataType.{held.name}, or leave the descriptor out"
        )


def _from_buffers(
    send: object, recv: object, reduce_descriptor: ReduceDescriptor
) -> ReduceOpDescriptor:
    check_type("reduce_descriptor", reduce_descriptor, ReduceDescriptor)
    operand = borrow(send, recv)
    if reduce_descriptor.operand_descriptor is not None:
        check_operand_descriptor(reduce_descriptor.operand_descriptor, operand.data_type)
    check_count(reduce_descriptor.count, operand.send.size)
    made = ReduceOpDescriptor(
        operand.send.ctypes.data, operand.result.ctypes.data, reduce_descriptor
    )
    made.buffers = (send, recv)
    return made


def check_count(described: int, held: int) -> None:
    """Check that a tensor has as many elements as was said.

    Raises:
        ValueError: it has not.
    """
    if described != held:
        raise ValueError(f"the descriptor says {described} elements, but the tensor has {held}")
