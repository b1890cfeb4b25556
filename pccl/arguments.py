"""From what a caller asks for to what the engine does: every argument is checked here."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

from pccl.checks import TAG_MAX, check_member, check_range, check_type
from pccl.descriptors import (
    QuantizationOptions,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    check_count,
    check_operand_descriptor,
)
from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.types import (
    STAR_BYTES_MAX,
    Algorithm,
    DataType,
    Descriptor,
    QuantizationAlgorithm,
    ReduceOp,
)
from pccl.runtime.operand import Operand, borrow, borrow_pointers
from pccl.runtime.requests import ReduceRequest

_log = logging.getLogger("pccl.peer")

COUNT_MAX = 2**63 - 1

_unquantized = itertools.count()
"""How often quantization was asked for; only the first time is worth a line."""


def reduce_request(
    send: object,
    recv: object | None,
    op: ReduceOp,
    tag: int,
    operand_descriptor: ReduceOperandDescriptor | None,
    quantization_options: QuantizationOptions | None,
    algorithm: Algorithm | str = Algorithm.AUTO,
) -> ReduceRequest:
    """Check what ``all_reduce`` is given.

    Raises:
        TypeError, ValueError: a mistake; the message says how to mend it.
    """
    op = check_member("op", op, ReduceOp)
    tag = check_range("tag", tag, 0, TAG_MAX)
    operand = borrow(send, recv)
    if operand_descriptor is not None:
        check_operand_descriptor(operand_descriptor, operand.data_type)
    descriptor = _descriptor(operand, op, quantization_options)
    return ReduceRequest(operand, _by(check_algorithm(algorithm), descriptor), tag)


def check_algorithm(given: object) -> Algorithm:
    """Check an algorithm, by its name or as the enum's member, and return it.

    Raises:
        TypeError: it is neither.
        ValueError: there is none of that name.
    """
    if isinstance(given, Algorithm):
        return given
    names = {algorithm.label: algorithm for algorithm in Algorithm}
    known = ", ".join(repr(name) for name in names)
    if not isinstance(given, str):
        raise TypeError(f"algorithm must be one of {known}, not {given!r}")
    if given not in names:
        raise ValueError(f"algorithm must be one of {known}, not {given!r}")
    return names[given]


def _by(algorithm: Algorithm, descriptor: Descriptor) -> Descriptor:
    if algorithm is Algorithm.AUTO:
        return descriptor
    if algorithm is Algorithm.STAR and descriptor.tensor_bytes > STAR_BYTES_MAX:
        raise ValueError(
            f"algorithm 'star' is for tensors up to {STAR_BYTES_MAX} bytes, and this one has "
            f"{descriptor.tensor_bytes}; take 'mesh', 'ring' or 'auto'"
        )
    return replace(descriptor, algorithm=algorithm, forced=True)


def many_requests(descriptors: Iterable[ReduceOpDescriptor]) -> list[ReduceRequest]:
    """Check what ``all_reduce_multiple_with_retry`` is given.

    Raises:
        TypeError, ValueError: a mistake in one of them, or no descriptor at all.
    """
    if not isinstance(descriptors, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"descriptors must be a list of ReduceOpDescriptors, not {descriptors!r}")
    requests = [_described_request(descriptor) for descriptor in descriptors]
    if not requests:
        raise ValueError("nothing to reduce: no descriptors")
    return requests


def broadcast_request(tensor: object, root: int, tag: int) -> ReduceRequest:
    """Check what ``broadcast`` is given.

    Args:
        tensor: in place.
        root: a rank; whether there is such a member is seen when the call begins.
        tag: as of a reduce.

    Raises:
        TypeError, ValueError: a mistake; the message says how to mend it.
    """
    root = check_range("root", root, 0, PEERS_MAX - 1)
    tag = check_range("tag", tag, 0, TAG_MAX)
    operand = borrow(tensor)
    descriptor = Descriptor.broadcast(operand.data_type, operand.send.size, root)
    return ReduceRequest(operand, descriptor, tag)


def _described_request(given: ReduceOpDescriptor) -> ReduceRequest:
    given = check_type("a descriptor", given, ReduceOpDescriptor)
    what = given.reduce_descriptor
    op = check_member("op", what.op, ReduceOp)
    tag = check_range("tag", what.tag, 0, TAG_MAX)
    count = check_range("count", what.count, 1, COUNT_MAX)
    held = what.operand_descriptor
    if given.buffers is not None:
        operand = borrow(*given.buffers)
        check_count(count, operand.send.size)
        if held is not None:
            check_operand_descriptor(held, operand.data_type)
    elif held is None:
        raise ValueError(
            f"tag {tag}: an address does not tell what it points to; give the ReduceDescriptor an "
            "operand_descriptor, as in ReduceOperandDescriptor(DataType.FLOAT)"
        )
    else:
        check_type("operand_descriptor", held, ReduceOperandDescriptor)
        data_type = check_member("datatype", held.datatype, DataType)
        operand = borrow_pointers(given.sendbuf_ptr, given.recvbuf_ptr, count, data_type)
    return ReduceRequest(operand, _descriptor(operand, op, what.quantization_options), tag)


def _descriptor(operand: Operand, op: ReduceOp, options: QuantizationOptions | None) -> Descriptor:
    plain = Descriptor(operand.data_type, op, operand.send.size)
    if options is None:
        return plain
    check_type("quantization_options", options, QuantizationOptions)
    algorithm = check_member("algorithm", options.algorithm, QuantizationAlgorithm)
    wire = check_member("quantized_datatype", options.quantized_datatype, DataType)
    if algorithm is QuantizationAlgorithm.NONE or wire is operand.data_type:
        return plain
    if next(_unquantized) == 0:
        _log.warning(
            "%s to %s was asked for; this version sends the values as they are",
            algorithm.name,
            wire.label,
        )
    return Descriptor(
        operand.data_type, op, operand.send.size, quantization=algorithm, quantized_dtype=wire
    )
