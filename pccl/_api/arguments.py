"""From what a caller asks for to what the engine does: every argument is checked here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from pccl.checks import (
    TAG_MAX,
    check_flag,
    check_member,
    check_range,
    check_text,
    check_type,
    check_weight,
)
from pccl.descriptors import (
    QuantizationOptions,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    check_count,
    check_operand_descriptor,
)
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.shared_state import ResumePolicy, SharedStateSyncStrategy, SyncPurpose
from pccl.protocol.types import (
    BLOCK_MAX,
    BLOCK_MIN,
    STAR_BYTES_MAX,
    UNQUANTIZED,
    Algorithm,
    Descriptor,
    Quantization,
    QuantizationAlgorithm,
    ReduceOp,
    WireFormat,
)
from pccl.runtime.collective.operand import Operand, borrow, borrow_many, borrow_pointers
from pccl.runtime.requests import ReduceRequest
from pccl.runtime.state.memory.stock import Stock
from pccl.runtime.state.progress import SyncProgress
from pccl.runtime.state.replay import ObservedReduction
from pccl.runtime.state.running_prefetch import PrefetchRequest
from pccl.runtime.state.sync import SyncOptions
from pccl.shared_state import SharedState

COUNT_MAX = 2**63 - 1
STAGING_BYTES_MAX = 2**63 - 1

_FLOATS = frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE})
_HALVES = {DataType.FLOAT16: WireFormat.FLOAT16, DataType.BFLOAT16: WireFormat.BFLOAT16}


def reduce_request(
    send: object,
    recv: object | None,
    op: ReduceOp,
    tag: int,
    operand_descriptor: ReduceOperandDescriptor | None,
    quantization_options: QuantizationOptions | None,
    algorithm: Algorithm | str = Algorithm.AUTO,
    observable: object = False,
    weight: object = None,
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
    request = _request(operand, op, tag, quantization_options, check_algorithm(algorithm), weight)
    return replace(request, observable=check_flag("observable", observable))


def list_request(
    tensors: Iterable[object],
    recv: Iterable[object] | None,
    op: ReduceOp,
    tag: int,
    quantization_options: QuantizationOptions | None,
    algorithm: Algorithm | str,
    observable: object = False,
    weight: object = None,
) -> ReduceRequest:
    """Check what ``all_reduce_many`` is given.

    Raises:
        TypeError, ValueError: a mistake; the message says how to mend it.
    """
    op = check_member("op", op, ReduceOp)
    tag = check_range("tag", tag, 0, TAG_MAX)
    operand = borrow_many(tensors, recv)
    request = _request(operand, op, tag, quantization_options, check_algorithm(algorithm), weight)
    return replace(request, observable=check_flag("observable", observable))


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
    given = list(descriptors)
    requests = [_described_request(descriptor) for descriptor in given]
    _check_names(given)
    if not requests:
        raise ValueError("nothing to reduce: no descriptors")
    return requests


def _check_names(descriptors: list[ReduceOpDescriptor]) -> None:
    """Each tensor with error feedback must have a name of its own."""
    seen: set[tuple[int, str]] = set()
    for given in descriptors:
        options = given.reduce_descriptor.quantization_options
        if options is None or options.error_feedback is None or options.name is None:
            continue
        key = (id(options.error_feedback), options.name)
        if key in seen:
            raise ValueError(
                f"two tensors share the residual of {options.name!r}; give each a name of its own"
            )
        seen.add(key)


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
    descriptor = Descriptor.broadcast(operand.data_type, operand.count, root)
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
        check_count(count, operand.count)
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
    options = what.quantization_options
    return _request(operand, op, tag, options, Algorithm.AUTO, what.weight)


def _request(
    operand: Operand,
    op: ReduceOp,
    tag: int,
    options: QuantizationOptions | None,
    algorithm: Algorithm,
    weight: object,
) -> ReduceRequest:
    descriptor = _by(algorithm, _descriptor(operand, op, options))
    own = 0.0
    if weight is not None:
        own = check_weight(weight)
        descriptor = _weighted(descriptor)
    if options is None or options.error_feedback is None or not descriptor.quantization.active:
        return ReduceRequest(operand, descriptor, tag, weight=own)
    assert options.name is not None
    what = (options.name, descriptor.count, descriptor.dtype)
    options.error_feedback.check(*what)
    begin = partial(options.error_feedback.begin, *what)
    return ReduceRequest(operand, descriptor, tag, begin, weight=own)


def _weighted(descriptor: Descriptor) -> Descriptor:
    if descriptor.op is not ReduceOp.AVG:
        raise ValueError(
            f"weight is for op=ReduceOp.AVG, not for {descriptor.op.name}; leave it out"
        )
    if descriptor.dtype not in _FLOATS:
        raise ValueError(
            f"{descriptor.dtype.label} can't be averaged by weight: only floats can; leave weight "
            "out, or reduce a float tensor"
        )
    return replace(descriptor, weighted=True)


def _descriptor(operand: Operand, op: ReduceOp, options: QuantizationOptions | None) -> Descriptor:
    quantization = UNQUANTIZED
    if options is not None:
        check_type("quantization_options", options, QuantizationOptions)
        quantization = _quantization(operand.data_type, options)
        _check_error_feedback(op, options)
    return Descriptor(operand.data_type, op, operand.count, quantization=quantization)


def _quantization(held: DataType, options: QuantizationOptions) -> Quantization:
    wire = _wire_format(options)
    block = None
    if options.block is not None:
        block = check_range("block", options.block, BLOCK_MIN, BLOCK_MAX)
    stochastic = check_flag("stochastic", options.stochastic)
    if wire is WireFormat.NONE or (options.format is None and wire.bits >= 8 * held.itemsize):
        return UNQUANTIZED
    if held not in _FLOATS:
        raise ValueError(
            f"{held.label} cannot be quantized to {wire.label}: only floats can; leave "
            "quantization_options out, or reduce a float tensor"
        )
    if wire.bits >= 8 * held.itemsize:
        return UNQUANTIZED
    return Quantization(wire, wire.default_block if block is None else block, stochastic)


def _wire_format(options: QuantizationOptions) -> WireFormat:
    """The format asked for by our name, or by PCCL's dtype and algorithm."""
    algorithm = check_member("algorithm", options.algorithm, QuantizationAlgorithm)
    wire = check_member("quantized_datatype", options.quantized_datatype, DataType)
    if isinstance(options.format, str):
        known = {member.label: member for member in WireFormat}
        if options.format not in known:
            raise ValueError(f"format must be one of {', '.join(known)}, not {options.format!r}")
        return known[options.format]
    if options.format is not None:
        return check_member("format", options.format, WireFormat)
    if algorithm is QuantizationAlgorithm.NONE or wire.itemsize > 2:
        return WireFormat.NONE
    if wire.itemsize == 2:
        return _HALVES.get(wire, WireFormat.UINT16)
    affine = algorithm is QuantizationAlgorithm.MIN_MAX
    return WireFormat.UINT8 if affine else WireFormat.INT8


def _check_error_feedback(op: ReduceOp, options: QuantizationOptions) -> None:
    if options.error_feedback is None:
        if options.name is not None:
            raise ValueError(
                "name tells an error_feedback which tensor this is; give one, or leave name out"
            )
        return
    check_type("error_feedback", options.error_feedback, ErrorFeedback)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(
            f"error_feedback cannot make good what {op.name} loses: only with SUM and AVG does an "
            "error add up with later contributions; leave it out"
        )
    if options.name is None:
        raise ValueError("error_feedback needs the tensor's name, as in name='layer1'")
    check_text("name", options.name)


def sync_request(
    shared_state: object,
    strategy: object,
    expect_unchanged: object,
    resume: object,
    in_place: object,
    staging_bytes_max: object,
    staging_directory: str | os.PathLike[str] | None,
    on_progress: Callable[[SyncProgress], None] | None,
) -> SyncOptions:
    """Check the arguments of ``sync_shared_state``.

    Raises:
        TypeError, ValueError: one of them can't be used; the message says which.
    """
    state = check_type("shared_state", shared_state, SharedState)
    policies = {policy.name.lower(): policy for policy in ResumePolicy}
    if not isinstance(resume, str) or resume not in policies:
        known = ", ".join(map(repr, policies))
        raise ValueError(f"resume must be one of {known}, not {resume!r}")
    straight = check_flag("in_place", in_place)
    if straight and state.lineage is not None:
        raise ValueError(
            "in_place is for the first synchronization of a state only: these contents have been "
            "synchronized before, and would be lost if this failed half-way"
        )
    check_listener("on_progress", on_progress)
    return SyncOptions(
        state,
        SyncPurpose.SYNC,
        check_member("strategy", strategy, SharedStateSyncStrategy),
        policies[resume],
        check_flag("expect_unchanged", expect_unchanged),
        straight,
        check_range("staging_bytes_max", staging_bytes_max, 0, STAGING_BYTES_MAX),
        _check_directory("staging_directory", staging_directory),
        on_progress,
    )


def prefetch_request(
    shared_state: object,
    staging_bytes_max: object,
    staging_directory: str | os.PathLike[str] | None,
    on_progress: Callable[[SyncProgress], None] | None,
    on_reduction: Callable[[ObservedReduction], None] | None,
) -> PrefetchRequest | None:
    """Check the arguments of ``connect`` about shared state; None: there is none.

    Raises:
        TypeError, ValueError: one of them can't be used; the message says which.
    """
    check_listener("on_progress", on_progress)
    check_listener("on_reduction", on_reduction)
    limit = check_range("staging_bytes_max", staging_bytes_max, 0, STAGING_BYTES_MAX)
    directory = _check_directory("staging_directory", staging_directory)
    if shared_state is None:
        if on_reduction is not None:
            raise ValueError("on_reduction needs the shared_state that it changes")
        return None
    memory = check_type("shared_state", shared_state, SharedState).memory
    stock = Stock(memory, limit, directory)
    return PrefetchRequest(memory, stock, on_progress, on_reduction)


def _check_directory(name: str, path: str | os.PathLike[str] | None) -> str | None:
    """Also where it may not be needed: a mistake is not to wait until much is to be fetched."""
    if path is None:
        return None
    directory = os.fspath(path)
    if not os.path.isdir(directory):
        raise ValueError(f"{name}: {directory!r} is no directory; make it first, or leave it out")
    return directory


def check_listener(name: str, listener: object) -> None:
    """Check a function that is to be called.

    Raises:
        TypeError: it is none.
    """
    if listener is not None and not callable(listener):
        raise TypeError(f"{name} must be a function, not {type(listener).__name__}")


def verify_request(shared_state: object) -> SyncOptions:
    """Check the arguments of ``verify``.

    Raises:
        TypeError: not a shared state.
    """
    state = check_type("shared_state", shared_state, SharedState)
    return SyncOptions(state, SyncPurpose.VERIFY)
