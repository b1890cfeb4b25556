"""Borrowing buffers: what is taken as it is, and what is refused with which remedy."""

from __future__ import annotations

import array
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.types import ReduceOp
from pccl.runtime.collective.memory import LentRanges
from pccl.runtime.collective.operand import Operand, borrow, borrow_pointers, nothing

torch = pytest.importorskip("torch")

Array = npt.NDArray[Any]

NUMPY: dict[DataType, Any] = {
    DataType.UINT8: np.uint8,
    DataType.INT8: np.int8,
    DataType.INT16: np.int16,
    DataType.UINT16: np.uint16,
    DataType.UINT32: np.uint32,
    DataType.INT32: np.int32,
    DataType.UINT64: np.uint64,
    DataType.INT64: np.int64,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
    DataType.FLOAT: np.float32,
    DataType.DOUBLE: np.float64,
}
TORCH: dict[DataType, Any] = {
    data_type: getattr(torch, np.dtype(known).name) for data_type, known in NUMPY.items()
}


def address(values: Array) -> int:
    return int(values.ctypes.data)


def check(operand: Operand, data_type: DataType, send: int, recv: int, count: int) -> None:
    """Same memory, same values, nothing copied; in place there is room for the input."""
    assert operand.data_type is data_type
    assert operand.in_place == (send == recv)
    for flat in (operand.send, operand.result, operand.own):
        assert flat.shape == (count,)
        assert flat.dtype == np.dtype(NUMPY[data_type])
    assert (address(operand.send), address(operand.result)) == (send, recv)
    if operand.in_place:
        assert not np.shares_memory(operand.own, operand.send)
    else:
        assert address(operand.own) == send


# -- what is taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("data_type", DataType)
def test_numpy_arrays_of_every_dtype(data_type: DataType) -> None:
    send = np.arange(6).astype(NUMPY[data_type]).reshape(2, 3)
    recv = np.zeros(6, NUMPY[data_type])
    check(borrow(send), data_type, address(send), address(send), 6)
    check(borrow(send, send), data_type, address(send), address(send), 6)
    check(borrow(send, recv), data_type, address(send), address(recv), 6)
    assert borrow(send, recv).send.astype(int).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("data_type", DataType)
def test_tensors_of_every_dtype(data_type: DataType) -> None:
    send = torch.arange(6).to(TORCH[data_type]).reshape(2, 3)
    recv = torch.zeros(6, dtype=TORCH[data_type])
    check(borrow(send), data_type, send.data_ptr(), send.data_ptr(), 6)
    check(borrow(send, recv), data_type, send.data_ptr(), recv.data_ptr(), 6)
    operand = borrow(send, recv)
    assert operand.send.astype(int).tolist() == [0, 1, 2, 3, 4, 5]
    operand.result[:] = operand.send
    assert recv.tolist() == send.flatten().tolist()


@pytest.mark.parametrize("data_type", DataType)
def test_addresses(data_type: DataType) -> None:
    send, recv = np.arange(6).astype(NUMPY[data_type]), np.zeros(6, NUMPY[data_type])
    pointers = address(send), address(recv)
    operand = borrow_pointers(*pointers, 6, data_type)
    check(operand, data_type, *pointers, 6)
    operand.result[:] = operand.send
    assert recv.tolist() == send.tolist()
    same = pointers[0], pointers[0]
    check(borrow_pointers(*same, 6, data_type), data_type, *same, 6)
    assert borrow_pointers(*pointers, np.int64(6), data_type).send.size == 6  # type: ignore[arg-type]


@pytest.mark.parametrize("scalar", [np.array(3.0), torch.tensor(3.0, dtype=torch.bfloat16)])
def test_an_array_without_dimensions_is_one_element(scalar: Any) -> None:
    operand = borrow(scalar)
    assert operand.send.tolist() == [3.0]
    operand.result[0] = 4
    assert scalar.item() == 4


def test_two_views_of_the_same_memory_are_in_place() -> None:
    values = np.zeros((2, 3))
    assert borrow(values, values.reshape(-1)).in_place
    tensor = torch.zeros(6)
    assert borrow(tensor, tensor.view(2, 3)).in_place
    assert not borrow(tensor[:3], tensor[3:]).in_place


def test_a_read_only_input_is_fine_beside_a_result() -> None:
    send = np.ones(4)
    send.flags.writeable = False
    assert not borrow(send, np.zeros(4)).in_place


def test_subclasses_lose_their_frills() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.matrix([[1.0, 2.0]])
    operand = borrow(matrix)
    assert type(operand.send) is np.ndarray
    assert operand.send.shape == (2,)


def test_tensors_that_require_a_gradient_are_detached() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert address(borrow(leaf).result) == leaf.data_ptr()
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert address(borrow(parameter).result) == parameter.data_ptr()
    assert leaf.requires_grad


def test_any_alignment_of_an_array() -> None:
    odd = np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float64)
    assert not odd.flags.aligned
    operand = borrow(odd)
    operand.result[:] = 5.0
    assert odd.tolist() == [5.0, 5.0]


def collide(mine: Operand, theirs: Operand) -> bool:
    """Whether a call that has ``mine`` is refused while another one has ``theirs``."""
    lent = LentRanges()
    lent.add(theirs.ranges)
    return lent.clash(mine.ranges)


def test_nothing() -> None:
    operand = nothing(DataType.UINT8)
    assert (operand.send.size, operand.result.size, operand.own.size) == (0, 0, 0)
    assert not collide(operand, operand)


# -- what is refused ---------------------------------------------------------------------------


def read_only(count: int) -> Array:
    values = np.ones(count)
    values.flags.writeable = False
    return values


def swapped() -> Array:
    foreign = ">" if np.little_endian else "<"
    return np.ones(4, f"{foreign}f4")


OVERLAPPING = np.zeros(11)
FOR_ARRAYS: dict[str, tuple[Callable[[], tuple[Any, ...]], type[Exception], str]] = {
    "a list": (lambda: ([1.0, 2.0],), TypeError, "send must be a NumPy array or a torch tensor"),
    "array.array": (lambda: (array.array("f", [1.0]),), TypeError, "not array"),
    "recv is bytes": (lambda: (np.ones(4), bytearray(32)), TypeError, "recv must be a NumPy"),
    "the op as recv": (
        lambda: (np.ones(4), ReduceOp.AVG),
        TypeError,
        r"recv must be a NumPy.* not ReduceOp; name it, as in op=ReduceOp\.AVG",
    ),
    "a NumPy scalar": (lambda: (np.float32(1),), TypeError, "not float32"),
    "masked": (
        lambda: (np.ma.masked_array([1.0, 2.0], [False, True]),),
        TypeError,
        r"send\.filled\(\)",
    ),
    "byte order": (
        lambda: (swapped(),),
        TypeError,
        r"foreign byte order.*send\.astype\(send\.dtype\.newbyteorder\('='\)\)",
    ),
    "recv's byte order": (lambda: (np.ones(4, np.float32), swapped()), TypeError, r"recv\.astype"),
    "bool": (lambda: (np.ones(4, bool),), TypeError, "bool is not supported.*bfloat16, float32"),
    "complex": (lambda: (np.ones(4, complex),), TypeError, "complex128 is not supported"),
    "object": (lambda: (np.array([None]),), TypeError, "object is not supported"),
    "long double": (lambda: (np.ones(4, np.longdouble),), TypeError, "is not supported"),
    "dates": (lambda: (np.zeros(4, "M8[s]"),), TypeError, "is not supported"),
    "records": (lambda: (np.zeros(4, "f4,f4"),), TypeError, "is not supported"),
    "float8": (lambda: (np.zeros(4, ml_dtypes.float8_e5m2),), TypeError, "is not supported"),
    "columns": (lambda: (np.ones((4, 4))[:, :2],), ValueError, r"np\.ascontiguousarray\(send\)"),
    "transposed": (lambda: (np.ones((4, 3)).T,), ValueError, "send is not contiguous"),
    "recv in steps": (lambda: (np.ones(4), np.ones(8)[::2]), ValueError, "recv is not contiguous"),
    "overlaps itself": (
        lambda: (np.ones(4), np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))),
        ValueError,
        "recv is not contiguous",
    ),
    "broadcast": (lambda: (np.broadcast_to(np.ones(1), 4),), ValueError, "not contiguous"),
    "read-only": (lambda: (read_only(4),), ValueError, r"in place\) is read-only.*copy\(\)"),
    "read-only recv": (lambda: (np.ones(4), read_only(4)), ValueError, r"recv is read-only.*copy"),
    "dtypes": (lambda: (np.ones(4), np.ones(4, np.float32)), TypeError, "make them equal"),
    "sizes": (lambda: (np.ones(4), np.ones(5)), ValueError, "5 elements, send has 4; make them"),
    "overlap": (lambda: (OVERLAPPING[1:], OVERLAPPING[:-1]), ValueError, "two separate ones"),
    "empty": (lambda: (np.ones(0),), ValueError, "send has no elements; pass at least one"),
    "empty recv": (lambda: (np.ones(4), np.ones((0, 4))), ValueError, "recv has no elements"),
    "recv is a tensor": (lambda: (np.ones(4), torch.ones(4)), ValueError, "both torch CPU tensors"),
    "send is a tensor": (lambda: (torch.ones(4), np.ones(4)), ValueError, "or both NumPy arrays"),
}


@pytest.mark.parametrize(("make", "kind", "words"), FOR_ARRAYS.values(), ids=FOR_ARRAYS)
def test_refused_arrays(
    make: Callable[[], tuple[Any, ...]], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        borrow(*make())


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def nested(layout: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def masked() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


FOR_TENSORS: dict[str, tuple[Callable[[], tuple[Any, ...]], type[Exception], str]] = {
    "meta": (
        lambda: (torch.ones(4, device="meta"),),
        ValueError,
        r"no values; create it on the CPU \(torch\.empty_like\(send, device='cpu'\)\)",
    ),
    "sparse": (lambda: (torch.ones(4).to_sparse(),), ValueError, r"send\.to_dense\(\)"),
    "sparse rows": (
        lambda: (torch.ones(4), torch.eye(4).to_sparse_coo()),
        ValueError,
        r"recv\.to_dense\(\)",
    ),
    "quantized": (lambda: (quantized(),), ValueError, r"send\.dequantize\(\)"),
    "nested": (lambda: (nested(torch.strided),), ValueError, r"send\.unbind\(\)"),
    "jagged": (lambda: (nested(torch.jagged),), ValueError, r"send\.unbind\(\)"),
    "masked": (lambda: (masked(),), TypeError, "is a MaskedTensor; pass a plain"),
    "zeros without memory": (
        lambda: (torch._efficientzerotensor(3),),
        TypeError,
        "pass a plain tensor",
    ),
    "negative bit": (
        lambda: (torch.zeros(1, dtype=torch.cfloat).conj().imag,),
        ValueError,
        r"send\.resolve_neg\(\)",
    ),
    "conjugate": (
        lambda: (torch.zeros(3, dtype=torch.cfloat).conj(),),
        TypeError,
        "complex64 is not supported",
    ),
    "bool": (lambda: (torch.ones(4, dtype=torch.bool),), TypeError, r"torch\.bool is not supp"),
    "float8": (lambda: (torch.ones(4).to(torch.float8_e5m2),), TypeError, "is not supported"),
    "transposed": (lambda: (torch.ones(4, 3).t(),), ValueError, r"send\.contiguous\(\)"),
    "overlaps itself": (
        lambda: (torch.ones(4), torch.ones(1).expand(4)),
        ValueError,
        r"recv\.contiguous\(\)",
    ),
    "dtypes": (lambda: (torch.ones(4), torch.ones(4).half()), TypeError, "make them equal"),
    "sizes": (lambda: (torch.ones(4), torch.ones(3)), ValueError, "3 elements, send has 4"),
    "overlap": (
        lambda: (torch.from_numpy(OVERLAPPING)[1:], torch.from_numpy(OVERLAPPING)[:-1]),
        ValueError,
        "two separate ones",
    ),
    "empty": (lambda: (torch.ones(0),), ValueError, "no elements"),
}


@pytest.mark.parametrize(("make", "kind", "words"), FOR_TENSORS.values(), ids=FOR_TENSORS)
def test_refused_tensors(
    make: Callable[[], tuple[Any, ...]], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        borrow(*make())


@pytest.mark.parametrize("device", ["cuda:0", "mps:0"])
def test_tensors_of_other_devices(device: str) -> None:
    """A tensor that says so is enough: no such device is needed."""

    class Elsewhere(torch.Tensor):  # type: ignore[misc, name-defined]
        @property
        def device(self) -> Any:
            return torch.device(device)

    far = torch.ones(3).as_subclass(Elsewhere)
    with pytest.raises(ValueError, match=rf"recv is on {device}; pass recv\.cpu\(\)"):
        borrow(torch.ones(3), far)


def test_dtensors() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        spread = DTensor.from_local(torch.ones(4), DeviceMesh("cpu", [0]))
        with pytest.raises(TypeError, match=r"send is a DTensor.*pass send\.to_local\(\)"):
            borrow(spread)
        assert borrow(spread.to_local()).in_place
    finally:
        torch.distributed.destroy_process_group()


MEMORY = np.zeros(16)
AT = address(MEMORY)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((0, AT, 4, DataType.FLOAT), ValueError, "send_ptr is null; pass the address"),
        ((AT, 0, 4, DataType.FLOAT), ValueError, "recv_ptr is null"),
        ((-8, AT, 4, DataType.FLOAT), ValueError, "send_ptr -0x8 .*outside the address space"),
        ((AT, 2**64 - 8, 4, DataType.FLOAT), ValueError, "recv_ptr .*outside the address space"),
        ((AT, 2**64, 4, DataType.FLOAT), ValueError, "recv_ptr .*outside the address space"),
        ((AT, AT, 2**62, DataType.DOUBLE), ValueError, "send_ptr .*outside the address space"),
        ((AT, AT, 0, DataType.FLOAT), ValueError, "at least 1, not 0; pass the number of elements"),
        ((AT, AT, -1, DataType.FLOAT), ValueError, "at least 1, not -1"),
        ((AT + 2, AT + 64, 4, DataType.FLOAT), ValueError, "send_ptr .*misaligned.*multiple of 4"),
        ((AT, AT + 68, 4, DataType.DOUBLE), ValueError, "recv_ptr .*misaligned.*multiple of 8"),
        ((AT, AT + 8, 4, DataType.FLOAT), ValueError, "overlap; use the same buffer or two"),
        ((AT + 15, AT, 16, DataType.INT8), ValueError, "overlap"),
        ((AT + 0.0, AT, 4, DataType.FLOAT), TypeError, "send_ptr must be an int, not float"),
        ((AT, None, 4, DataType.FLOAT), TypeError, "recv_ptr must be an int, not NoneType"),
        ((AT, AT, "4", DataType.FLOAT), TypeError, "count must be an int, not str"),
        ((AT, AT, 4, 10), TypeError, "must be a DataType, not 10"),
    ],
)
def test_refused_addresses(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        borrow_pointers(*arguments)


def test_neighbouring_addresses_do_not_overlap() -> None:
    assert not borrow_pointers(AT, AT + 64, 16, DataType.FLOAT).in_place


# -- two collectives ---------------------------------------------------------------------------


def test_collisions() -> None:
    values = np.zeros(12)
    first, second, result = values[:4], values[4:8], values[8:]
    reads = borrow(first, second)
    assert collide(reads, borrow(first))
    assert collide(borrow(first), reads)
    assert collide(reads, borrow(result, second))
    assert not collide(reads, borrow(first, result))  # both only read it
    five = borrow_pointers(address(values), address(values), 5, DataType.DOUBLE)
    assert collide(five, borrow(result, second))


def test_a_chunk_that_the_caller_does_not_get_lies_in_the_backup() -> None:
    values = np.arange(8, dtype=np.int16)
    whole = borrow(values)
    chunk = whole.for_chunk(2, 3, scratch=True)
    assert np.shares_memory(chunk.result, whole.own)
    chunk.target.write(4, np.full(3, 9, np.int16))
    assert values.tolist() == list(range(8))
    elsewhere = borrow(values, values.copy()).for_chunk(2, 3, scratch=True)
    assert not np.shares_memory(elsewhere.result, values)
