"""Options and descriptions of a reduce. The reduce checks the plain dataclasses among them."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccl.checks import check_between, check_member, check_range, check_type
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.guards.contributions import (
    DEVIATIONS_MAX,
    GUARD_ROUNDS_MAX,
    ContributionGuard,
    GuardAction,
)
from pccl.protocol.types import ReduceOp, WireFormat
from pccl.runtime.collective.operand import borrow

POINTER_MAX = 2**64 - 1


class DeviceType(enum.IntEnum):
    """The kind of memory that holds a tensor."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, device_type: str) -> DeviceType | None:
        """Convert torch's ``device.type``; None if the library does not support this type."""
        return {"cpu": cls.CPU, "cuda": cls.CUDA}.get(device_type)


class DistributionHint(enum.IntEnum):
    """The distribution of the values. The library accepts it, but does not use it."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(enum.IntEnum):
    """The quantization algorithms of PCCL."""

    NONE = 0
    MIN_MAX = 1
    ZERO_POINT_SCALE = 2


@dataclass
class ReduceOperandDescriptor:
    """Describes the elements of a reduce's tensors.

    Attributes:
        datatype: dtype of the tensors; with addresses, dtype of the elements in memory.
        distribution_hint: accepted, but not used.
    """

    datatype: DataType | str
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass
class QuantizationOptions:
    """The quantization of values for the wire.

    All members must give equal options, except for ``error_feedback`` and ``name``, which each
    member chooses. Only floats are quantized. A format that is not shorter than the tensor's dtype
    has no effect.

    Attributes:
        quantized_datatype: PCCL's way to choose a format, used if ``format`` is None. 8-bit dtypes
            mean ``uint8`` with MIN_MAX and ``int8`` with ZERO_POINT_SCALE. 16-bit integers mean
            ``uint16``, FLOAT16 and BFLOAT16 their own format, longer dtypes no quantization.
        algorithm: see ``quantized_datatype``; NONE: no quantization.
        format: ``"uint8"``, ``"int8"``, ``"companded8"``, ``"int4"``, ``"e3m0"``,
            ``"int2"``, ``"sparse"``, ``"float16"``, ``"bfloat16"``, ``"uint16"`` or ``"none"``, or
            a ``pccl.WireFormat``. With ``"sparse"``, each peer sends the 64 largest values of each
            block to all others: for SUM and AVG, with error feedback.
        block: number of values that share a step, from 8 to 65536; None: chosen for the format.
            For ``"sparse"`` 3200, so that 2 % of the values are sent.
        stochastic: round up or down at random so that the mean is kept; False: to the nearest.
            The draws depend on operation, rank and position only, so they can be repeated.
        error_feedback: adds the quantization error of this tensor's last reduce. For SUM and AVG.
        name: name of the tensor, for ``error_feedback``.
    """

    quantized_datatype: DataType | str = DataType.UINT8
    algorithm: QuantizationAlgorithm | str = QuantizationAlgorithm.MIN_MAX
    format: WireFormat | str | None = field(default=None, kw_only=True)
    block: int | None = field(default=None, kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    error_feedback: ErrorFeedback | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)


@dataclass
class Guard:
    """What happens to a contribution that would spoil a weighted average.

    All members must give equal guards. ``GuardAction`` has the actions: ``"exclude"`` (the
    contribution counts as one of weight 0), ``"warn"`` (an event and a log line) and ``"off"``.

    Attributes:
        not_finite: action for a contribution with NaN or infinity.
        outliers: action for one whose L2 norm is above the median of all contributions of this and
            earlier rounds, by more than ``deviations`` times the spread: the scaled median
            deviation, or 5 % of the median if that is more. With fewer than five norms, none is an
            outlier. If most norms of a round are larger than before, that round counts alone.
        deviations: see ``outliers``; 1 or more.
        rounds: number of earlier reduces with this tag that count, up to 64.
    """

    not_finite: GuardAction | str = GuardAction.EXCLUDE
    outliers: GuardAction | str = GuardAction.WARN
    deviations: float = 8.0
    rounds: int = 8


@dataclass
class ReduceDescriptor:
    """One reduce among several.

    Attributes:
        count: number of elements of the tensor.
        op: operation that combines the contributions, or its name.
        tag: number by which the members pair their tensors; unique for each reduce.
        operand_descriptor: dtype of the tensor; None: not checked.
        quantization_options: quantization; None: no quantization.
        weight: weight of the own tensor in an AVG; None: all members count equally.
        guard: guard of an AVG, as for ``all_reduce``.
        quorum: as for ``all_reduce``.
        grace_s: as for ``all_reduce``.
    """

    count: int
    op: ReduceOp | str
    tag: int
    operand_descriptor: ReduceOperandDescriptor | None
    quantization_options: QuantizationOptions | None
    weight: float | None = field(default=None, kw_only=True)
    guard: Guard | str | None = field(default=None, kw_only=True)
    quorum: int | float | None = field(default=None, kw_only=True)
    grace_s: float | str = field(default="auto", kw_only=True)


class ReduceOpDescriptor:
    """A reduce with the memory of its input and result.

    Args:
        sendbuf_ptr: address of the input, ``count`` elements; the caller keeps the memory alive
            until the reduce has returned.
        recvbuf_ptr: address of the result; equal to ``sendbuf_ptr``: in place.
        reduce_descriptor: the reduce; its operand descriptor must state the dtype.

    Attributes:
        buffers: the tensors or arrays of input and result, which this object keeps alive; None if
            it was made from addresses.

    Raises:
        TypeError: an address is not an integer, or ``reduce_descriptor`` has another type.
        ValueError: an address is 0.
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
        """Make a descriptor of torch CPU tensors; ``recv`` may be ``send``.

        Raises:
            TypeError: an argument is no torch tensor, or its dtype cannot be reduced.
            ValueError: a tensor cannot be used as it is, or differs from the descriptor.
        """
        torch = sys.modules.get("torch")
        for name, tensor in (("send", send), ("recv", recv)):
            if torch is None or not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
        return _from_buffers(send, recv, reduce_descriptor)

    @staticmethod
    def from_numpy(send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Make a descriptor of NumPy arrays; ``recv`` may be ``send``.

        Raises:
            TypeError: an argument is no NumPy array, or its dtype cannot be reduced.
            ValueError: an array cannot be used as it is, or differs from the descriptor.
        """
        for name, array in (("send", send), ("recv", recv)):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
        return _from_buffers(send, recv, reduce_descriptor)


def check_operand_descriptor(described: ReduceOperandDescriptor, held: DataType) -> None:
    """Check that the dtype of a tensor is the described one.

    Raises:
        TypeError: ``described`` is no ReduceOperandDescriptor.
        ValueError: the dtypes differ.
    """
    check_type("operand_descriptor", described, ReduceOperandDescriptor)
    if check_member("datatype", described.datatype, DataType) != held:
        raise ValueError(
            f"operand_descriptor says {described.datatype!r}, but the tensor holds {held!r}; "
            f"pass DataType.{held.name}, or no operand_descriptor"
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


def check_guard(given: Guard | str) -> ContributionGuard | None:
    """Check a guard and return what members agree on; None if it does nothing.

    Raises:
        TypeError, ValueError: it is no guard, or has a wrong field.
    """
    if isinstance(given, str):
        action = check_member("guard", given, GuardAction)
        given = Guard(action, action)
    check_type("guard", given, Guard)
    made = ContributionGuard(
        check_member("not_finite", given.not_finite, GuardAction),
        check_member("outliers", given.outliers, GuardAction),
        check_between("deviations", given.deviations, 1, DEVIATIONS_MAX),
        check_range("rounds", given.rounds, 0, GUARD_ROUNDS_MAX),
    )
    return made if made.not_finite or made.outliers else None


def check_count(described: int, held: int) -> None:
    """Check that a tensor has the described number of elements.

    Raises:
        ValueError: the numbers differ.
    """
    if described != held:
        raise ValueError(f"the descriptor says {described} elements, but the tensor has {held}")
