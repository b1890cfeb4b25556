"""Checks every argument of a call, and makes a request from them. No lower layer checks again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial

from pccl.checks import (
    ATTEMPTS_MAX,
    IN_FLIGHT_MAX,
    TAG_MAX,
    check_flag,
    check_listener,
    check_member,
    check_quorum,
    check_range,
    check_text,
    check_timeout,
    check_type,
    check_upload,
    check_weight,
)
from pccl.collectives.norms import l2_norm
from pccl.collectives.residual import Residual
from pccl.config import resolve_min_peers
from pccl.descriptors import (
    Guard,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    check_count,
    check_guard,
    check_operand_descriptor,
)
from pccl.error_feedback import ErrorFeedback
from pccl.machines.peer.events import ReduceCall
from pccl.progress import listener_of
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
    Quorum,
    ReduceOp,
    WireFormat,
)
from pccl.runtime.collective.operand import Operand, borrow, borrow_many, borrow_pointers
from pccl.runtime.publishing.publisher import PublishRequest
from pccl.runtime.requests import JoinRequest, ReduceManyRequest, ReduceRequest
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.progress import SyncProgress
from pccl.runtime.state.replay import ObservedReduction
from pccl.runtime.state.running_prefetch import PrefetchRequest
from pccl.runtime.state.sync import SyncOptions
from pccl.shared_state import SharedState
from pccl.state.versions import shaped

COUNT_MAX = 2**63 - 1
STAGING_BYTES_MAX = 2**63 - 1

CALLS_KEPT_MAX = 1024
"""Number of checked reduces that are kept for later calls with the same arguments."""

_FLOATS = frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE})
_HALVES = {DataType.FLOAT16: WireFormat.FLOAT16, DataType.BFLOAT16: WireFormat.BFLOAT16}


def join_request(
    n_attempts: int = 5,
    *,
    min_peers: int | None = None,
    shared_state: SharedState | None = None,
    staging_bytes_max: int = 1 << 30,
    staging_directory: str | os.PathLike[str] | None = None,
    on_progress: Callable[[SyncProgress], None] | None = None,
    on_reduction: Callable[[ObservedReduction], None] | None = None,
    timeout_s: float | None = None,
) -> JoinRequest:
    """Check the arguments of ``connect``.

    Raises:
        TypeError, ValueError: an argument is wrong. The functions below raise these errors too.
    """
    attempts = check_range("n_attempts", n_attempts, 1, ATTEMPTS_MAX)
    peers = resolve_min_peers(min_peers)
    limit_s = check_timeout(timeout_s)
    check_listener("on_reduction", on_reduction)
    listener = listener_of(on_progress, "joining")
    staging_max = check_range("staging_bytes_max", staging_bytes_max, 0, STAGING_BYTES_MAX)
    directory = _check_directory("staging_directory", staging_directory)
    prefetch = None
    if shared_state is not None:
        memory = check_type("shared_state", shared_state, SharedState).memory
        fetched = FetchedPieces(memory, staging_max, directory)
        prefetch = PrefetchRequest(memory, fetched, listener, on_reduction)
    elif on_reduction is not None:
        raise ValueError("on_reduction needs the shared_state to which reductions are applied")
    return JoinRequest(attempts, peers, prefetch, limit_s)


def reduce_request(
    send: object,
    recv: object | None = None,
    *,
    op: ReduceOp | str = ReduceOp.SUM,
    weight: float | None = None,
    guard: Guard | str | None = None,
    quorum: int | float | None = None,
    grace_s: float | str = "auto",
    tag: int = 0,
    operand_descriptor: ReduceOperandDescriptor | None = None,
    quantization_options: QuantizationOptions | None = None,
    algorithm: Algorithm | str = "auto",
    observable: bool = False,
    retry: bool = False,
    timeout_s: float | None = None,
) -> ReduceRequest:
    """Check the arguments of ``all_reduce`` and ``all_reduce_async``."""
    operand = borrow(send, recv)
    if operand_descriptor is not None:
        check_operand_descriptor(operand_descriptor, operand.data_type)
    return ReduceRequest(
        operand,
        *_asked(
            operand,
            op=op,
            tag=tag,
            options=quantization_options,
            algorithm=algorithm,
            weight=weight,
            guard=guard,
            quorum=check_quorum(quorum, grace_s),
        ),
        observable=check_flag("observable", observable),
        retry=check_flag("retry", retry),
        timeout_s=check_timeout(timeout_s),
    )


def list_request(
    tensors: Iterable[object],
    recv: Iterable[object] | None = None,
    *,
    op: ReduceOp | str = ReduceOp.SUM,
    weight: float | None = None,
    guard: Guard | str | None = None,
    quorum: int | float | None = None,
    grace_s: float | str = "auto",
    tag: int = 0,
    quantization_options: QuantizationOptions | None = None,
    algorithm: Algorithm | str = "auto",
    observable: bool = False,
    retry: bool = False,
    timeout_s: float | None = None,
) -> ReduceRequest:
    """Check the arguments of ``all_reduce_many``."""
    operand = borrow_many(tensors, recv)
    return ReduceRequest(
        operand,
        *_asked(
            operand,
            op=op,
            tag=tag,
            options=quantization_options,
            algorithm=algorithm,
            weight=weight,
            guard=guard,
            quorum=check_quorum(quorum, grace_s),
        ),
        observable=check_flag("observable", observable),
        retry=check_flag("retry", retry),
        timeout_s=check_timeout(timeout_s),
    )


def _by(algorithm: Algorithm, descriptor: Descriptor) -> Descriptor:
    if descriptor.quantization.is_gathered:
        if descriptor.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(
                f"format 'sparse' is for SUM and AVG, because {descriptor.op.name} of values that "
                "are left out has no meaning; use another format"
            )
        if algorithm not in (Algorithm.AUTO, Algorithm.MESH):
            raise ValueError(
                f"format 'sparse' travels from each peer to all others, not by "
                f"'{algorithm.label}'; leave algorithm out, or use another format"
            )
    if algorithm is Algorithm.AUTO:
        return descriptor
    if algorithm is Algorithm.STAR and descriptor.tensor_bytes > STAR_BYTES_MAX:
        raise ValueError(
            f"algorithm 'star' is for tensors up to {STAR_BYTES_MAX} bytes, and this tensor has "
            f"{descriptor.tensor_bytes}; use 'mesh', 'ring' or 'auto'"
        )
    return replace(descriptor, algorithm=algorithm, forced=True)


def many_request(
    descriptors: Iterable[ReduceOpDescriptor],
    *,
    max_in_flight: int = 4,
    timeout_s: float | None = None,
) -> ReduceManyRequest:
    """Check the arguments of ``all_reduce_multiple_with_retry``."""
    in_flight = check_range("max_in_flight", max_in_flight, 1, IN_FLIGHT_MAX)
    limit_s = check_timeout(timeout_s)
    if not isinstance(descriptors, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"descriptors must be a list of ReduceOpDescriptors, not {descriptors!r}")
    given = list(descriptors)
    requests = tuple(_described_request(descriptor) for descriptor in given)
    _check_names(given)
    if not requests:
        raise ValueError("nothing to reduce: descriptors is empty; pass at least one")
    return ReduceManyRequest(requests, in_flight, limit_s)


def _check_names(descriptors: list[ReduceOpDescriptor]) -> None:
    """Check that no two tensors share a residual of the same error feedback."""
    seen: set[tuple[int, str]] = set()
    for given in descriptors:
        options = given.reduce_descriptor.quantization_options
        if options is None or options.error_feedback is None or options.name is None:
            continue
        key = (id(options.error_feedback), options.name)
        if key in seen:
            raise ValueError(
                f"two tensors have the same residual {options.name!r}; give each its own name"
            )
        seen.add(key)


def broadcast_request(
    tensor: object, *, root: int = 0, tag: int = 0, timeout_s: float | None = None
) -> ReduceRequest:
    """Check the arguments of ``broadcast``. The engine checks the rank when the call begins."""
    limit_s = check_timeout(timeout_s)
    rank = check_range("root", root, 0, PEERS_MAX - 1)
    number = check_range("tag", tag, 0, TAG_MAX)
    operand = borrow(tensor)
    descriptor = Descriptor.broadcast(operand.data_type, operand.count, rank)
    return ReduceRequest(operand, ReduceCall(0, number, descriptor), timeout_s=limit_s)


def barrier_request(*, tag: int = 0, timeout_s: float | None = None) -> ReduceRequest:
    """Check the arguments of ``barrier``."""
    limit_s = check_timeout(timeout_s)
    asks = ReduceCall(0, check_range("tag", tag, 0, TAG_MAX), Descriptor.barrier())
    return ReduceRequest(None, asks, timeout_s=limit_s)


def _described_request(given: ReduceOpDescriptor) -> ReduceRequest:
    given = check_type("a descriptor", given, ReduceOpDescriptor)
    what = given.reduce_descriptor
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
            f"tag {tag}: an address does not tell the type of its elements; give the "
            "ReduceDescriptor an operand_descriptor, as in ReduceOperandDescriptor(DataType.FLOAT)"
        )
    else:
        check_type("operand_descriptor", held, ReduceOperandDescriptor)
        data_type = check_member("datatype", held.datatype, DataType)
        operand = borrow_pointers(given.sendbuf_ptr, given.recvbuf_ptr, count, data_type)
    options = what.quantization_options
    asked = _asked(
        operand,
        op=what.op,
        tag=tag,
        options=options,
        weight=what.weight,
        guard=what.guard,
        quorum=check_quorum(what.quorum, what.grace_s),
    )
    return ReduceRequest(operand, *asked)


def _asked(
    operand: Operand,
    *,
    op: ReduceOp | str,
    tag: int,
    options: QuantizationOptions | None,
    algorithm: Algorithm | str = Algorithm.AUTO,
    weight: float | None,
    guard: Guard | str | None,
    quorum: Quorum | None,
) -> tuple[ReduceCall, Callable[[], Residual] | None]:
    """Return the event for the machine, and what opens the residual of error feedback."""
    quantization = UNQUANTIZED
    if options is not None:
        op = check_member("op", op, ReduceOp)
        check_type("quantization_options", options, QuantizationOptions)
        quantization = _quantization(operand.data_type, options)
        _check_error_feedback(op, options)
    guarded = None if guard is None else check_guard(guard)
    if guarded is not None and weight is None:
        weight = 1.0
    is_weighted = weight is not None
    what = (operand.data_type, operand.count, op, tag, quantization, algorithm, is_weighted)
    try:
        asks = reduce_call(*what)
    except TypeError:  # perhaps an argument that cannot be hashed
        asks = None
    asks = asks or reduce_call.__wrapped__(*what)  # the checks name the argument
    if weight is not None:
        asks = replace(asks, weight=check_weight(weight))
    if guarded is not None:
        norm = l2_norm(operand.source.parts) if weight else 0.0
        asks = replace(asks, descriptor=replace(asks.descriptor, guard=guarded), norm=norm)
    if quorum is not None:
        if operand.in_place:
            raise ValueError(
                "with a quorum, a late call gets the result without its own values, so these "
                "must stay: give the call a recv of its own"
            )
        asks = replace(asks, descriptor=replace(asks.descriptor, quorum=quorum))
    if options is None or options.error_feedback is None or not quantization.active:
        return asks, None
    assert options.name is not None
    feedback, name, (dtype, count) = options.error_feedback, options.name, what[:2]
    feedback.check(name, count, dtype)
    return asks, partial(feedback.begin, name, count, dtype)


@lru_cache(maxsize=CALLS_KEPT_MAX, typed=True)
def reduce_call(
    data_type: DataType,
    count: int,
    op: ReduceOp | str,
    tag: int,
    quantization: Quantization,
    algorithm: Algorithm | str,
    is_weighted: bool,
) -> ReduceCall:
    """Return the event for a reduce of equal arguments; programs repeat the same calls."""
    op = check_member("op", op, ReduceOp)
    tag = check_range("tag", tag, 0, TAG_MAX)
    descriptor = Descriptor(data_type, op, count, quantization=quantization)
    descriptor = _by(check_member("algorithm", algorithm, Algorithm), descriptor)
    return ReduceCall(0, tag, _weighted(descriptor) if is_weighted else descriptor)


def _weighted(descriptor: Descriptor) -> Descriptor:
    if descriptor.op is not ReduceOp.AVG:
        raise ValueError(
            f"weight and guard are for op=ReduceOp.AVG, not for {descriptor.op.name}; leave them "
            "out"
        )
    if descriptor.dtype not in _FLOATS:
        raise ValueError(
            f"{descriptor.dtype.label} can't be averaged by weight: only floats can; leave weight "
            "out, or reduce a float tensor"
        )
    return replace(descriptor, weighted=True)


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
    if stochastic and wire is WireFormat.SPARSE:
        raise ValueError("format 'sparse' cannot round at random; use error_feedback instead")
    return Quantization(wire, wire.default_block if block is None else block, stochastic)


def _wire_format(options: QuantizationOptions) -> WireFormat:
    """Return the wire format of ``options``: by its name, or by PCCL's dtype and algorithm."""
    algorithm = check_member("algorithm", options.algorithm, QuantizationAlgorithm)
    wire = check_member("quantized_datatype", options.quantized_datatype, DataType)
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
                "name is for error_feedback only; pass an error_feedback too, or leave name out"
            )
        return
    check_type("error_feedback", options.error_feedback, ErrorFeedback)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(
            f"error_feedback works with SUM and AVG only, because {op.name} does not add an error "
            "to later contributions; leave error_feedback out"
        )
    if options.name is None:
        raise ValueError("error_feedback needs the tensor's name, as in name='layer1'")
    check_text("name", options.name)


def sync_request(
    shared_state: SharedState,
    strategy: SharedStateSyncStrategy | str = SharedStateSyncStrategy.ENFORCE_POPULAR,
    *,
    expect_unchanged: bool = False,
    resume: str = "never",
    in_place: bool = False,
    staging_bytes_max: int = 1 << 30,
    staging_directory: str | os.PathLike[str] | None = None,
    on_progress: Callable[[SyncProgress], None] | None = None,
    quorum: int | float | None = None,
    grace_s: float | str = "auto",
    timeout_s: float | None = None,
) -> SyncOptions:
    """Check the arguments of ``sync_shared_state``."""
    state = check_type("shared_state", shared_state, SharedState)
    if check_flag("in_place", in_place) and state.lineage is not None:
        raise ValueError(
            "in_place is for the first synchronization of a state only: this state has been "
            "synchronized, and a failure half-way would destroy its contents; leave in_place out"
        )
    return SyncOptions(
        state,
        strategy=check_member("strategy", strategy, SharedStateSyncStrategy),
        resume=check_member("resume", resume, ResumePolicy),
        expect_unchanged=check_flag("expect_unchanged", expect_unchanged),
        in_place=in_place,
        staging_bytes_max=check_range("staging_bytes_max", staging_bytes_max, 0, STAGING_BYTES_MAX),
        staging_directory=_check_directory("staging_directory", staging_directory),
        on_progress=listener_of(on_progress, "synchronizing"),
        timeout_s=check_timeout(timeout_s),
        quorum=check_quorum(quorum, grace_s),
    )


def verify_request(shared_state: SharedState, *, timeout_s: float | None = None) -> SyncOptions:
    """Check the arguments of ``verify``."""
    state = check_type("shared_state", shared_state, SharedState)
    return SyncOptions(state, SyncPurpose.VERIFY, timeout_s=check_timeout(timeout_s))


def publish_request(
    shared_state: SharedState, *, readers_bytes_per_s_max: int | None = None
) -> PublishRequest:
    """Check the arguments of ``publish``."""
    state = check_type("shared_state", shared_state, SharedState)
    name, limit = "readers_bytes_per_s_max", readers_bytes_per_s_max
    entries = tuple(
        None if entry.may_differ else shaped(entry, info.shape)
        for entry, info in zip(state.memory.layout.entries, state.tensor_infos, strict=True)
    )
    if not any(entries):
        raise ValueError("members may hold different values of all tensors: none is published")
    return PublishRequest(
        state.memory,
        entries,
        state.revision,
        state.lineage,
        None if limit is None else check_upload(name, limit),
    )


def _check_directory(name: str, path: str | os.PathLike[str] | None) -> str | None:
    """Return ``path`` as a string; refuse a missing directory now, not after a large download."""
    if path is None:
        return None
    directory = os.fspath(path)
    if not os.path.isdir(directory):
        raise ValueError(f"{name}: no directory {directory!r}; create it, or leave {name} out")
    return directory
