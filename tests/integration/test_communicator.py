"""The blocking API: values, several calls at once, membership, mistakes.

Expected values are computed here with NumPy, by a fold that is written from the definition of the
ring alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pccl
from pccl import Attribute, ReduceOp, Result
from pccl.errors import (
    CollectiveAborted,
    DescriptorMismatch,
    NotConnected,
    PendingOperations,
    TooFewPeers,
)
from tests.integration.conftest import Array, Run
from tests.support.patience import LIMIT_S
from tests.support.unnamed import unnamed


def world_size(comm: pccl.Communicator) -> int:
    return comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)


def values_of(dtype: str, count: int, rank: int) -> Array:
    draw = np.random.default_rng((count, rank))
    if dtype.startswith("int"):
        whole: Array = draw.integers(-(10**6), 10**6, count).astype(dtype)
        return whole
    real: Array = draw.normal(size=count).astype(dtype)
    return real


COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


def ring_fold(arrays: list[Array], op: ReduceOp) -> Array:
    """Chunk c folds ranks c, c + 1, ... in this order; the first chunks are longer."""
    size, count = len(arrays), len(arrays[0])
    expected: list[Array] = []
    offset = 0
    for chunk in range(size):
        end = offset + count // size + (chunk < count % size)
        total = arrays[chunk][offset:end].copy()
        for step in range(1, size):
            total = COMBINE[op](total, arrays[(chunk + step) % size][offset:end])
        expected.append(total)
        offset = end
    result: Array = np.concatenate(expected)
    if op is ReduceOp.AVG and result.dtype.kind == "i":
        result = np.sign(result) * (np.abs(result) // size)
    elif op is ReduceOp.AVG:
        result = result / result.dtype.type(size)
    return result


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("op", ReduceOp)
def test_all_reduce(run_of: Callable[..., Run], size: int, dtype: str, op: ReduceOp) -> None:
    run = run_of(size)
    for count in (1, size - 1, size, size + 1, 100_003):
        sends = [values_of(dtype, count, rank) for rank in range(size)]
        kept = [send.copy() for send in sends]
        expected = ring_fold(sends, op)
        results = [np.zeros_like(send) for send in sends]
        infos = run.reduce(sends, results, op=op, algorithm="ring")
        for send, original, result in zip(sends, kept, results, strict=True):
            assert np.array_equal(send, original)
            assert np.array_equal(result, expected)
        run.reduce(sends, op=op, algorithm="ring")
        for send in sends:
            assert np.array_equal(send, expected)
        ids = tuple(member.peer_id for member in run.members)
        assert {info.contributors for info in infos} == {ids}
        assert {info.local_world_size for info in infos} == {size}
        total = 2 * (size - 1) * count * sends[0].itemsize
        assert sum(info.tx_bytes for info in infos) == sum(info.rx_bytes for info in infos) == total


@pytest.mark.parametrize("algorithm", ["auto", "star", "mesh"])
@pytest.mark.parametrize("op", ReduceOp)
def test_all_reduce_another_way(run_of: Callable[..., Run], algorithm: str, op: ReduceOp) -> None:
    """Integers, so that the order of additions shows nowhere."""
    run = run_of(3)
    for count in (1, 2, 4, 100_003):
        sends = [values_of("int64", count, rank) for rank in range(3)]
        kept = [send.copy() for send in sends]
        expected = ring_fold(sends, op)
        results = [np.zeros_like(send) for send in sends]
        infos = run.reduce(sends, results, op=op, algorithm=algorithm)
        for send, original, result in zip(sends, kept, results, strict=True):
            assert np.array_equal(send, original)
            assert np.array_equal(result, expected)
        run.reduce(sends, op=op, algorithm=algorithm)
        assert all(np.array_equal(send, expected) for send in sends)
        assert len({info.algorithm for info in infos}) == 1
        assert algorithm in ("auto", infos[0].algorithm)


EVERY_DTYPE: dict[str, list[int]] = {
    "int8": [-128, -7, 0, 7, 100],
    "int16": [-32768, -7, 0, 7, 32767],
    "int32": [-(2**31), -7, 0, 7, 2**31 - 1],
    "int64": [-(2**63), -7, 0, 7, 2**63 - 1],
    "uint8": [0, 1, 7, 100, 255],
    "uint16": [0, 1, 7, 100, 65535],
    "uint32": [0, 1, 7, 100, 2**32 - 1],
    "uint64": [0, 1, 7, 100, 2**64 - 1],
    "float16": [-8, -1, 0, 3, 12],
    "bfloat16": [-8, -1, 0, 3, 12],
    "float32": [-8, -1, 0, 3, 12],
    "float64": [-8, -1, 0, 3, 12],
}
"""Values whose results are exact (the real ones) or wrap (the whole ones)."""


def folded(one: int, other: int, op: ReduceOp, dtype: Any) -> float:
    """The result of two values, by Python's own integers."""
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        return max(one, other) if op is ReduceOp.MAX else min(one, other)
    total = one * other if op is ReduceOp.PROD else one + other
    whole = dtype.kind in "iu"
    if whole:
        bits = 8 * dtype.itemsize
        lowest = -(1 << (bits - 1)) if dtype.kind == "i" else 0
        total = (total - lowest) % (1 << bits) + lowest
    if op is not ReduceOp.AVG:
        return total
    return (abs(total) // 2) * (1 if total > 0 else -1) if whole else total / 2


@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_every_dtype(run_of: Callable[..., Run], name: str) -> None:
    run = run_of(2)
    dtype: Any = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    numbers = EVERY_DTYPE[name]
    pairs = [(a, b) for a in numbers for b in numbers]
    first, second = ([pair[rank] for pair in pairs] for rank in range(2))
    for op in ReduceOp:
        expected = np.array([folded(a, b, op, dtype) for a, b in pairs], dtype)
        arrays: list[Any] = [np.array(first, dtype), np.array(second, dtype)]
        run.reduce(arrays, op=op)
        assert arrays[0].tolist() == arrays[1].tolist() == expected.tolist(), op


def test_shapes_and_views(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    raw = bytearray(4 * 100 + 1)
    unaligned = np.frombuffer(raw, np.float32, offset=1)
    for make in (
        lambda: np.ones(()),
        lambda: np.ones((3, 4, 5)),
        lambda: np.ones(100)[10:20],
        lambda: np.ones((4, 5), order="F").T,
        lambda: unaligned.__setitem__(slice(None), 1) or unaligned,
    ):
        array: Array = make()
        other = np.ones(array.size, array.dtype)
        run.reduce([array, other])
        assert (array == 2).all()
        assert (other == 2).all()
    same: Array = np.ones(100)
    futures = [
        run.start(member.all_reduce, array, array.reshape(4, 25))
        for member, array in zip(run.members, (same, same.copy()), strict=True)
    ]
    assert [future.result(LIMIT_S).local_world_size for future in futures] == [2, 2]
    assert (same == 2).all()


def test_torch_tensors(run_of: Callable[..., Run]) -> None:
    torch = pytest.importorskip("torch")
    run = run_of(2)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        tensors = [torch.arange(1000).reshape(10, 100).to(dtype) * rank for rank in (1, 2)]
        results = [torch.zeros(1000, dtype=dtype) for _ in tensors]
        run.reduce(tensors, results)
        expected = np.arange(1000) * 3
        assert all(np.array_equal(result.numpy(), expected) for result in results)
        assert torch.equal(tensors[1], 2 * tensors[0])
        run.reduce(tensors)
        assert all(np.array_equal(tensor.numpy().ravel(), expected) for tensor in tensors)
    halves = [torch.full((7,), 1.5, dtype=torch.bfloat16) for _ in run.members]
    run.reduce(halves, op=ReduceOp.PROD)
    assert all((half == 2.25).all() and half.dtype == torch.bfloat16 for half in halves)
    parameters = [torch.nn.Parameter(torch.ones(5)) for _ in run.members]
    arrays: list[Any] = [parameters[0], parameters[1].detach().numpy()]
    run.reduce(arrays, op=ReduceOp.SUM)
    assert all((parameter == 2).all() for parameter in parameters)


# -- several at once -----------------------------------------------------------------------------


def test_many_tags_from_threads(run_of: Callable[..., Run]) -> None:
    run = run_of(3)
    tags = list(range(6))
    for _ in range(3):
        arrays = {
            (tag, rank): values_of("int64", 1 + 20_011 * tag, rank)
            for tag in tags
            for rank in range(3)
        }
        expected = {tag: sum(arrays[tag, rank] for rank in range(3)) for tag in tags}
        # Each member starts them in an order of its own.
        order = [(tag, rank) for rank in range(3) for tag in tags[rank:] + tags[:rank]]
        futures = [
            run.start(run.members[rank].all_reduce, arrays[tag, rank], tag=tag)
            for tag, rank in order
        ]
        for future in futures:
            future.result(LIMIT_S)
        assert all(np.array_equal(array, expected[tag]) for (tag, _), array in arrays.items())


def test_one_tag_or_one_buffer_twice_at_once(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members
    array = np.ones(1000)
    other = np.ones(1000)
    waiting = run.start(first.all_reduce, array, tag=1)
    run.until(lambda: run.requests == 1)
    with pytest.raises(pccl.PCCLError, match="tag 1 is in use"):
        first.all_reduce(np.ones(1000), tag=1)
    for send, recv in ((array, None), (array[500:].copy(), array[500:]), (array, np.ones(1000))):
        with pytest.raises(ValueError, match="still uses this memory"):
            first.all_reduce(send, recv, tag=2)
    with pytest.raises(PendingOperations, match="still open"):
        first.update_topology()
    second.all_reduce(other, tag=1)
    waiting.result(LIMIT_S)
    assert (array == 2).all()
    run.check()


def test_one_round_twice_at_once(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members
    run.check()
    waiting = run.start(first.update_topology)
    run.until(lambda: run.round_requests == 1)
    with pytest.raises(PendingOperations, match="another thread is in update_topology"):
        first.update_topology()
    second.update_topology()
    waiting.result(LIMIT_S)


def test_are_peers_pending_during_a_reduce(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    first, second = run.members
    waiting = run.start(first.all_reduce, np.ones(10))
    run.until(lambda: run.requests == 1)
    assert run.each(pccl.Communicator.are_peers_pending) == [False, False]
    second.all_reduce(np.ones(10))
    waiting.result(LIMIT_S)


# -- membership ----------------------------------------------------------------------------------


def sizes(comm: pccl.Communicator) -> tuple[int, ...]:
    return tuple(comm.get_attribute(attribute) for attribute in Attribute)


def test_world_sizes_after_joins_and_leaves(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (first,) = run.members
    assert sizes(first) == (1, 1, 1, 1)
    second = run.join()
    third = run.join(group=7)
    assert [sizes(member) for member in run.members] == [(3, 2, 2, 2), (3, 2, 2, 2), (3, 1, 2, 2)]
    assert first.peer_id < second.peer_id < third.peer_id
    with pytest.raises(TooFewPeers):
        third.all_reduce(np.ones(3))
    third.close()
    assert sizes(first) == (3, 2, 2, 2), "nothing changes but in a joint call"
    run.members = [first, second]
    run.each(pccl.Communicator.update_topology)
    assert sizes(first) == sizes(second) == (2, 2, 1, 2)
    run.check()
    gone = second.peer_id
    second.close()
    run.until(lambda: run.registered == 1)
    raised: list[str] = []
    while sizes(first) != (1, 1, 1, 1):
        with pytest.raises(CollectiveAborted) as caught:
            first.all_reduce(np.ones(3))
        raised.append(str(caught.value))
    assert len(raised) == 1, "once, before the world size that it shows"
    assert f"peer {gone}" in raised[0]
    with pytest.raises(TooFewPeers):
        first.all_reduce(np.ones(3))


def test_the_first_one_leaves_and_others_come(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    run.check()
    for _ in range(3):
        run.members.pop(0).close()
        run.until(lambda: run.registered == 2)
        run.each(pccl.Communicator.update_topology)
        run.join()
        assert {sizes(member) for member in run.members} == {(3, 3, 1, 3)}
        run.check()


def test_all_members_leave_while_somebody_waits(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (first,) = run.members
    waiting = run.newcomer()
    joining = run.start(waiting.connect)
    run.until(lambda: run.registered == 2)
    first.close()
    joining.result(LIMIT_S)
    assert sizes(waiting) == (1, 1, 1, 1)


def test_alone(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (alone,) = run.members
    for _ in range(3):
        alone.update_topology()
        assert alone.are_peers_pending() is False
    array = np.arange(5.0)
    with pytest.raises(TooFewPeers, match="update_topology") as caught:
        alone.all_reduce(array)
    assert caught.value.result == Result.TOO_FEW_PEERS
    assert caught.value.func == "all_reduce"
    assert np.array_equal(array, np.arange(5.0))


def test_somebody_is_pending(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    (first,) = run.members
    second = run.newcomer()
    joining = run.start(second.connect)
    run.until(first.are_peers_pending)
    assert world_size(first) == 1
    first.update_topology()
    joining.result(LIMIT_S)
    run.members.append(second)
    assert run.each(pccl.Communicator.are_peers_pending) == [False, False]


# -- mistakes ------------------------------------------------------------------------------------


SUM_WORDS = "SUM of 100 x float32"


@pytest.mark.parametrize(
    ("dtype", "count", "op", "words"),
    [
        ("float64", 100, ReduceOp.SUM, "SUM of 100 x float64"),
        ("float32", 101, ReduceOp.SUM, "SUM of 101 x float32"),
        ("float32", 100, ReduceOp.AVG, "AVG of 100 x float32"),
    ],
)
@pytest.mark.parametrize("late", [None, 0, 2])
def test_descriptor_mismatch(
    run_of: Callable[..., Run], dtype: str, count: int, op: ReduceOp, words: str, late: int | None
) -> None:
    run = run_of(3)
    arrays: list[Array] = [
        np.ones(100, np.float32),
        np.ones(count, dtype),
        np.ones(100, np.float32),
    ]
    calls = list(zip(run.members, arrays, (ReduceOp.SUM, op, ReduceOp.SUM), strict=True))
    order = calls if late is None else [*calls[:late], *calls[late + 1 :], calls[late]]
    futures: list[Future[pccl.ReduceInfo]] = []
    for member, array, asked in order:
        if late is not None and len(futures) == 2:  # it knows of the mismatch before it calls
            assert all(isinstance(f.exception(LIMIT_S), DescriptorMismatch) for f in futures)
            run.each(pccl.Communicator.are_peers_pending)
        futures.append(run.start(member.all_reduce, array, op=asked, tag=5))
    own_words = [words if member is run.members[1] else SUM_WORDS for member, _, _ in order]
    for future, own in zip(futures, own_words, strict=True):
        error = future.exception(LIMIT_S)
        assert isinstance(error, DescriptorMismatch)
        assert error.result == Result.INVALID_ARGUMENT
        assert f"peer {run.members[1].peer_id} asked for {words}" in unnamed(error)
        assert f"this peer asked for {own}" in str(error)
        assert SUM_WORDS in str(error)
        assert "tag 5" in str(error)
    assert all((array == 1).all() for array in arrays)
    run.check()


@pytest.mark.parametrize("counts", [(8, 9, 9, 9), (8, 8, 9, 9)], ids=["one is right", "two each"])
def test_each_member_is_told_of_its_own_mistake(
    run_of: Callable[..., Run], counts: tuple[int, ...]
) -> None:
    """Also a member that calls after the outcome, which its request could not enter any more."""
    run = run_of(4)
    futures = [
        run.start(member.all_reduce, np.ones(count, np.float32))
        for member, count in zip(run.members, counts, strict=True)
    ]
    for future, count in zip(futures, counts, strict=True):
        error = future.exception(LIMIT_S)
        assert isinstance(error, DescriptorMismatch)
        assert f"this peer asked for SUM of {count} x float32;" in str(error)
        assert "asked for SUM of 8 x" in str(error)
        assert "asked for SUM of 9 x" in str(error)


def frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


_OVERLAPPING = np.zeros(11)

WRONG_BUFFERS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "not contiguous": (np.ones((4, 4))[:, :2], None, ValueError, "ascontiguousarray"),
    "recv not contiguous": (np.ones(4), np.ones(8)[::2], ValueError, "ascontiguousarray"),
    "read-only in place": (frozen(np.ones(4)), None, ValueError, r"read-only.*copy\(\)"),
    "read-only recv": (np.ones(4), frozen(np.ones(4)), ValueError, r"recv is read-only.*copy\(\)"),
    "overlapping": (_OVERLAPPING[1:], _OVERLAPPING[:-1], ValueError, "two separate ones"),
    "complex": (np.ones(4, complex), None, TypeError, "convert to one of .*float32, float64"),
    "bool": (np.ones(4, bool), None, TypeError, "dtype bool is not supported"),
    "foreign byte order": (np.ones(4, ">f4"), None, TypeError, "newbyteorder"),
    "two dtypes": (np.ones(4), np.ones(4, np.float32), TypeError, "make them equal"),
    "two sizes": (np.ones(4), np.ones(5), ValueError, "5 elements, send has 4"),
    "nothing": (np.ones(0), None, ValueError, "no elements"),
    "a list": ([1.0, 2.0], None, TypeError, "must be a NumPy array or a torch tensor, not list"),
    "recv is bytes": (np.ones(4), bytearray(32), TypeError, "recv must be"),
}


@pytest.mark.parametrize(
    ("send", "recv", "kind", "words"), WRONG_BUFFERS.values(), ids=WRONG_BUFFERS
)
def test_wrong_buffers(send: Any, recv: Any, kind: type[Exception], words: str) -> None:
    """Found before anything is sent: no run is needed."""
    with pccl.Communicator("127.0.0.1:1") as comm, pytest.raises(kind, match=words):
        comm.all_reduce(send, recv)


def test_wrong_tensors() -> None:
    torch = pytest.importorskip("torch")
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(4, device="meta"), ValueError, "on meta .* create it on the CPU"),
        (torch.ones(4, 4).t()[:2], ValueError, r"contiguous\(\)"),
        (torch.ones(4).to_sparse(), ValueError, r"to_dense\(\)"),
        (torch.ones(4, dtype=torch.cfloat), TypeError, "not supported"),
    ]
    with pccl.Communicator("127.0.0.1:1") as comm:
        for tensor, kind, words in wrong:
            with pytest.raises(kind, match=words):
                comm.all_reduce(tensor)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        pccl.Communicator("localhost")
    with pytest.raises(ValueError, match="peer_group"):
        pccl.Communicator("127.0.0.1:1", -1)
    with pytest.raises(ValueError, match="p2p_connection_pool_size must be from 0 to 256"):
        pccl.Communicator("127.0.0.1:1", 0, 257)
    with pytest.raises(ValueError, match="token: a secret of 5 bytes is too short"):
        pccl.Communicator("127.0.0.1:1", token="short")
    with pytest.raises(TypeError, match=r"timing must be a pccl\.Timing"):
        pccl.Communicator("127.0.0.1:1", timing=5)  # type: ignore[arg-type]
    with pccl.Communicator("127.0.0.1:1") as comm:
        for tag, kind in (
            (-1, ValueError),
            (2**64, ValueError),
            (True, TypeError),
            ("1", TypeError),
        ):
            with pytest.raises(kind, match="tag"):
                comm.all_reduce(np.ones(3), tag=tag)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="7"):
            comm.all_reduce(np.ones(3), op=7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="retry must be True or False"):
            comm.all_reduce(np.ones(3), retry=1)  # type: ignore[arg-type]
        for attempts in (0, -1):
            with pytest.raises(ValueError, match="n_attempts must be from 1"):
                comm.connect(attempts)
        with pytest.raises(ValueError, match="min_peers must be from 1"):
            comm.connect(min_peers=0)
        with pytest.raises(ValueError, match="max_in_flight must be from 1"):
            comm.all_reduce_multiple_with_retry([], max_in_flight=0)


def several() -> pccl.ReduceOpDescriptor:
    array = np.ones(3)
    what = pccl.ReduceDescriptor(3, ReduceOp.SUM, 0, None, None)
    return pccl.ReduceOpDescriptor.from_numpy(array, array, what)


def all_reduce(comm: pccl.Communicator, **options: Any) -> object:
    return comm.all_reduce(np.ones(3), **options)


def all_reduce_async(comm: pccl.Communicator, **options: Any) -> object:
    return comm.all_reduce_async(np.ones(3), **options)


def all_reduce_several(comm: pccl.Communicator, **options: Any) -> object:
    return comm.all_reduce_multiple_with_retry([several()], **options)


def broadcast(comm: pccl.Communicator, **options: Any) -> object:
    return comm.broadcast(np.ones(3), **options)


JOINT_CALLS: dict[str, Callable[..., object]] = {
    "update_topology": pccl.Communicator.update_topology,
    "are_peers_pending": pccl.Communicator.are_peers_pending,
    "optimize_topology": pccl.Communicator.optimize_topology,
    "all_reduce": all_reduce,
    "all_reduce_async": all_reduce_async,
    "all_reduce_multiple_with_retry": all_reduce_several,
    "broadcast": broadcast,
    "barrier": pccl.Communicator.barrier,
}
TIMED = {"connect": pccl.Communicator.connect, **JOINT_CALLS}


@pytest.mark.parametrize("call", TIMED.values(), ids=TIMED)
def test_wrong_timeouts(call: Callable[..., object]) -> None:
    with pccl.Communicator("127.0.0.1:1") as comm:
        for timeout_s in (0, -1.0, float("nan"), float("inf"), 1e12):
            with pytest.raises(ValueError, match=r"timeout_s must be above 0 .*None waits"):
                call(comm, timeout_s=timeout_s)
        for wrong in ("1", True, 1j):
            with pytest.raises(TypeError, match="timeout_s must be a number"):
                call(comm, timeout_s=wrong)


CALLS: dict[str, Callable[[pccl.Communicator], object]] = {
    **JOINT_CALLS,
    "get_attribute": world_size,
    "peer_id": lambda comm: comm.peer_id,
    "rank": lambda comm: comm.rank,
    "world_size": lambda comm: comm.world_size,
    "members": pccl.Communicator.members,
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_before_connect_and_after_close(new_run: Callable[..., Run], call: str) -> None:
    run = new_run()
    with pccl.Communicator(run.master.address) as comm:
        with pytest.raises(NotConnected, match=r"connect\(\)") as caught:
            CALLS[call](comm)
        assert caught.value.func == call
        assert caught.value.result == Result.INVALID_USAGE
        comm.connect()
        comm.close()
        with pytest.raises(NotConnected, match="closed; make a new one") as caught:
            CALLS[call](comm)
        assert caught.value.func == call
        with pytest.raises(NotConnected, match="closed; make a new one"):
            comm.connect()


def test_second_connect(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    with pytest.raises(pccl.PCCLError, match="connected already") as caught:
        run.members[0].connect()
    assert caught.value.result == Result.INVALID_USAGE
    run.check()
