"""Borrowing a list of tensors: what is taken as it is, and what is refused with which remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pccl._api import arguments
from pccl._api.arguments import list_request, reduce_request
from pccl.descriptors import QuantizationOptions
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Algorithm, ReduceOp, WireFormat
from pccl.runtime.collective.operand import borrow, borrow_many
from tests.unit.runtime.collective.test_operand import collide

torch = pytest.importorskip("torch")

Array = npt.NDArray[Any]


def address(values: Array) -> int:
    return int(values.ctypes.data)


def ones(*sizes: int, dtype: Any = np.float32) -> list[Array]:
    return [np.ones(size, dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_arrays_are_borrowed_where_they_are(dtype: Any) -> None:
    send, recv = ones(2, 3, dtype=dtype), ones(2, 3, dtype=dtype)
    operand = borrow_many(send, recv)
    assert operand.count == 5
    assert operand.data_type is DataType.from_numpy_dtype(np.dtype(dtype))
    assert not operand.in_place
    assert operand.source.addresses == [address(part) for part in send]
    assert operand.target.addresses == [address(part) for part in recv]
    assert operand.saved is operand.source


@pytest.mark.parametrize("again", [False, True])
def test_in_place_there_is_room_for_the_input(again: bool) -> None:
    send = ones(2, 3)
    operand = borrow_many(send, [part.reshape(1, -1) for part in send] if again else None)
    assert operand.in_place
    assert operand.target.addresses == [address(part) for part in send]
    assert operand.saved.nbytes == 20
    operand.save(4, 20)
    send[0][1], send[1][:] = 7, 7
    operand.put_back(4, 20)
    assert [part.tolist() for part in send] == [[1, 1], [1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_tensors(dtype: Any) -> None:
    send = [torch.nn.Parameter(torch.ones(2, 2).to(dtype), False), torch.ones(3).to(dtype)]
    recv = [torch.zeros(4, dtype=dtype), torch.zeros(3, dtype=dtype)]
    operand = borrow_many(iter(send), recv)
    assert operand.source.addresses == [part.data_ptr() for part in send]
    assert operand.target.addresses == [part.data_ptr() for part in recv]
    operand.target.write(0, operand.source.copy())
    assert [part.tolist() for part in recv] == [[1] * 4, [1] * 3]


def test_a_tensor_that_requires_a_gradient_is_taken_as_its_values() -> None:
    weights = [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(2))]
    operand = borrow_many(weights)
    assert operand.source.addresses == [part.data_ptr() for part in weights]


def test_tensors_without_elements_add_nothing() -> None:
    send = ones(0, 2, 0, 3, 0)
    operand = borrow_many(send, ones(0, 2, 0, 3, 0))
    assert operand.count == 5
    assert operand.source.addresses == [address(send[1]), address(send[3])]
    mixed = [np.ones(0, np.int8), np.ones(2, np.float32)]
    assert borrow_many(mixed).data_type is DataType.FLOAT


def test_inputs_may_overlap_and_results_may_not() -> None:
    values = np.ones(8, np.float32)
    assert borrow_many([values, values[2:]], ones(8, 6)).count == 14
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[2\] overlap"):
        borrow_many([values[:4], np.ones(1, np.float32), values[3:]])
    with pytest.raises(ValueError, match=r"recv\[1\] and tensors\[0\] overlap|tensors\[0\] and"):
        borrow_many([values[:4], np.ones(4, np.float32)], [np.ones(4, np.float32), values[3:7]])
    with pytest.raises(ValueError, match=r"recv\[0\] and recv\[1\] overlap; pass separate ones"):
        borrow_many(ones(4, 4), [values[:4], values[3:7]])


def test_collisions_with_other_calls() -> None:
    values, other = np.ones(8, np.float32), np.ones(8, np.float32)
    mine = borrow_many([values[:3], values[5:]])
    assert not collide(mine, borrow(values[3:5]))
    assert collide(mine, borrow(values[4:6]))
    assert collide(mine, borrow_many([other, values[2:4]]))
    reading = borrow_many([values], [other])
    assert collide(reading, mine)
    assert not collide(reading, borrow_many([values[2:]], ones(6)))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: (ones(),), ValueError, "nothing to reduce"),
        (lambda: (ones(0, 0),), ValueError, "nothing to reduce: tensors has no elements"),
        (lambda: (np.ones(3),), TypeError, r"must be a list of tensors.*pass \[tensors\]"),
        (lambda: (torch.ones(3),), TypeError, r"pass \[tensors\]"),
        (lambda: (3,), TypeError, "must be a list of tensors, not int"),
        (lambda: (ones(3), 3), TypeError, "recv must be a list"),
        (lambda: ([np.ones(3), [1.0]],), TypeError, r"tensors\[1\] must be a NumPy"),
        (lambda: (ones(1, 1), ones(1)), ValueError, "recv has 1 tensors, but tensors has 2"),
        (lambda: (ones(1, 2), ones(1, 3)), ValueError, r"recv\[1\] has 3 elements, tensors\[1\]"),
        (lambda: (ones(1, 2), ones(1, 0)), ValueError, r"recv\[1\] has no elements, tensors\[1\]"),
        (lambda: (ones(1, 0), ones(1, 2)), ValueError, r"recv\[1\] has 2 elements, tensors\[1\]"),
        (
            lambda: (ones(0, 1, 1) + ones(1, dtype=np.int32),),
            ValueError,
            r"tensors\[3\] has dtype int32, tensors\[1\] has float32; group the tensors by dtype",
        ),
        (
            lambda: ([torch.ones(1), torch.ones(1).half()],),
            ValueError,
            r"tensors\[1\] has dtype float16.*group the tensors by dtype",
        ),
        (lambda: (ones(1, 1), [*ones(1), np.ones(1)]), TypeError, r"recv\[1\] has dtype float64"),
        (lambda: (ones(1, 1), [*ones(1), torch.ones(1)]), ValueError, "both NumPy arrays"),
        (lambda: ([np.ones(2), np.ones((4, 4))[:, 1]],), ValueError, r"tensors\[1\] is not conti"),
        (lambda: ([np.ones(2), np.broadcast_to(1.0, 3)],), ValueError, r"tensors\[1\]"),
        (lambda: ([torch.ones(2), torch.ones(4, 3).t()],), ValueError, r"tensors\[1\]\.contig"),
        (lambda: ([torch.ones(2), torch.ones(2).to_sparse()],), ValueError, r"\]\.to_dense\(\)"),
    ],
)
def test_refused(make: Callable[[], tuple[Any, ...]], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        borrow_many(*make())


def test_read_only_results_are_refused() -> None:
    frozen = np.ones(2, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"tensors\[1\] \(in place\) is read-only"):
        borrow_many([*ones(2), frozen])
    with pytest.raises(ValueError, match=r"recv\[1\] is read-only"):
        borrow_many(ones(2, 2), [*ones(2), frozen])
    assert borrow_many([*ones(2), frozen], ones(2, 2)).count == 4


def test_either_all_in_place_or_none() -> None:
    send = ones(2, 2)
    with pytest.raises(ValueError, match=r"recv\[1\] is the memory of its tensor, and recv\[0\]"):
        borrow_many(send, [*ones(2), send[1]])


def test_the_request_is_that_of_the_concatenation() -> None:
    request = list_request(ones(2, 0, 3), op=ReduceOp.AVG, tag=7, algorithm="mesh")
    assert (request.asks.descriptor.count, request.asks.descriptor.dtype) == (5, DataType.FLOAT)
    assert (request.asks.descriptor.op, request.tag) == (ReduceOp.AVG, 7)
    assert request.asks.descriptor.algorithm is Algorithm.MESH


def test_equal_arguments_make_one_event_whatever_the_memory() -> None:
    one, other = (reduce_request(*ones(5, 5), tag=7) for _ in range(2))
    assert one.asks is other.asks
    assert one.operand is not other.operand
    assert reduce_request(*ones(6, 6), tag=7).asks.descriptor.count == 6
    assert reduce_request(*ones(5, 5, dtype=np.int8), tag=7).asks.descriptor.dtype is DataType.INT8


@pytest.mark.parametrize(
    ("wrong", "error", "names"),
    [
        ({"tag": True}, TypeError, "tag must be an integer, not True"),
        ({"tag": 1.0}, TypeError, "tag must be an integer, not 1.0"),
        ({"tag": [1]}, TypeError, "tag must be an integer"),
        ({"op": True}, TypeError, "op must be one of"),
        ({"op": []}, TypeError, "op must be one of"),
        ({"algorithm": {}}, TypeError, "algorithm must be one of"),
        ({"retry": 1}, TypeError, "retry must be True or False"),
    ],
)
def test_wrong_arguments_are_named_after_equal_right_ones(
    wrong: dict[str, Any], error: type[Exception], names: str
) -> None:
    """A True equals the tag 1 that was right; a list cannot be looked up at all."""
    reduce_request(*ones(5, 5), tag=1, op=ReduceOp.AVG, retry=True)
    for _ in range(2):
        with pytest.raises(error, match=names) as raised:
            reduce_request(*ones(5, 5), **wrong)
        assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_options_that_have_changed_since_count() -> None:
    options = QuantizationOptions(format="int8")
    eight = reduce_request(*ones(64, 64), quantization_options=options)
    options.format = "int4"
    four = reduce_request(*ones(64, 64), quantization_options=options)
    formats = [request.asks.descriptor.quantization.format for request in (eight, four)]
    assert formats == [WireFormat.INT8, WireFormat.INT4]


def test_ten_thousand_shapes_leave_few_events() -> None:
    memory = np.ones(10_000, np.int8)
    for count in range(1, 10_001):
        reduce_request(memory[:count])
    assert arguments.reduce_call.cache_info().currsize == arguments.CALLS_KEPT_MAX
