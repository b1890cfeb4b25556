"""The caller's arrays: checked, then borrowed until the collective ends.

NumPy arrays, torch CPU tensors and raw addresses are used in place, without a copy. This module
never imports torch: a program with a tensor has imported it. An unusable argument raises at once:
TypeError for a wrong type or dtype, ValueError otherwise. The message says what to do.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pccl.protocol.data_type import DataType, numpy_dtypes
from pccl.protocol.types import ReduceOp
from pccl.runtime.collective.buffers import Backups
from pccl.runtime.collective.memory import Memory, Range, clash

Array = npt.NDArray[Any]

_BACKUPS = Backups()

_ADDRESS_MAX = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1


@dataclass(slots=True, eq=False)
class Operand:
    """The memory that a collective reads and writes; the same memory if it works in place."""

    source: Memory
    """The input."""
    target: Memory
    """The result, writable and of the same dtype; in an exchange, its parts may differ."""
    saved: Memory
    """The own contribution while the result is written: ``source``; in place, a separate array.
    Each part of the input is copied into this array before the part is overwritten."""
    data_type: DataType
    in_place: bool
    ranges: tuple[Range, ...] = field(init=False)
    """Address ranges of input and result."""
    count: int = field(init=False)
    """Number of elements."""
    is_overwritten: bool = field(default=False, init=False)
    """Whether the whole input was overwritten, and ``saved`` holds all of it."""

    def __post_init__(self) -> None:
        ranges: list[Range] = []
        for memory in (self.target,) if self.in_place else (self.target, self.source):
            written = memory is self.target
            for start, part in zip(memory.addresses, memory.parts, strict=True):
                ranges.append((start, start + part.nbytes, written, ""))
        self.ranges, self.count = tuple(ranges), self.source.size

    @property
    def send(self) -> Array:
        """The input, shape (n,); only for operands of one array."""
        return _only(self.source)

    @property
    def result(self) -> Array:
        """The result, shape (n,); only for operands of one array."""
        return _only(self.target)

    @property
    def own(self) -> Array:
        """The saved contribution, shape (n,); only for operands of one array."""
        return _only(self.saved)

    def save(self, first: int, last: int) -> None:
        """Save a range of bytes of the input before an in-place collective overwrites it."""
        at = first
        for view in self.source.views(first, last):
            self.saved.write(at, view)
            at += len(view)

    def put_back(self, first: int, last: int) -> None:
        """Restore a range of bytes of the input that :meth:`save` has saved."""
        self.source.write(first, self.saved.read(first, last))

    def for_chunk(self, first: int, size: int, *, scratch: bool) -> Operand:
        """Return the operand of a reduction of which this member gets one chunk.

        Args:
            first: the first element of the chunk.
            size: its number of elements.
            scratch: whether the caller does not get it, so that it needs other memory.
        """
        parts = self.target.parts
        if scratch and self.in_place:  # nothing is overwritten, so nothing has to be saved
            parts = (self.own[first : first + size],)
        elif scratch:
            parts = (np.empty(size, self.source.dtype),)
        target = Memory(parts, first * self.source.dtype.itemsize)
        return Operand(self.source, target, self.source, self.data_type, in_place=False)

    def restore(self) -> None:
        """Restore the whole input, if a result has overwritten it."""
        if self.is_overwritten:
            self.put_back(0, self.source.nbytes)


def _only(memory: Memory) -> Array:
    (part,) = memory.parts
    return part


def nothing(data_type: DataType) -> Operand:
    """Return an operand without elements, for a barrier."""
    empty = Memory([np.empty(0, data_type.to_numpy_dtype())])
    return Operand(empty, empty, empty, data_type, in_place=True)


def borrow(send: object, recv: object | None = None) -> Operand:
    """Check the buffers of a collective, and return its operand.

    Args:
        send: contiguous NumPy array or torch CPU tensor, with at least one element and a dtype of
            :class:`~pccl.protocol.data_type.DataType`. If a tensor requires a gradient, the
            operand uses ``detach()``.
        recv: buffer for the result, of the same kind, dtype and number of elements; None, or the
            memory of ``send``, means in place.

    Raises:
        TypeError: a buffer is no array, or its dtype is unsupported or different.
        ValueError: a buffer cannot be used as it is; the message says what to pass instead.
        MemoryError: in place, there is no memory for a copy of the input.
    """
    result = send if recv is None else recv
    known = send.dtype if type(send) is np.ndarray and send.dtype in DATA_TYPES else None
    source, target = _quick_pair(send, result, known) or _pair(send, result, "send", "recv")
    if source.size == 0:
        raise ValueError("send has no elements; pass at least one")
    return _operand(source, target, DATA_TYPES[source.dtype])


def borrow_many(tensors: Iterable[object], recv: Iterable[object] | None = None) -> Operand:
    """Check the buffers of a collective over the concatenation of several tensors.

    Args:
        tensors: tensors as in :func:`borrow`, all of one dtype; some may be empty.
        recv: one result buffer per tensor, as in :func:`borrow`; None, or the memory of
            ``tensors``, means in place. Either all are in place, or none.

    Raises:
        TypeError: ``tensors`` is no list, or :func:`borrow` would raise it for a tensor.
        ValueError: as in :func:`borrow`; or all tensors are empty, dtypes differ, or two overlap.
        MemoryError: in place, there is no memory for a copy of the input.
    """
    sends = _listed(tensors, "tensors")
    results = sends if recv is None else _listed(recv, "recv")
    if len(results) != len(sends):
        raise ValueError(
            f"recv has {len(results)} tensors, but tensors has {len(sends)}; pass as many of both"
        )
    pairs: list[tuple[Array, Array]] = []
    numbers: list[int] = []
    for number, (send, result) in enumerate(zip(sends, results, strict=True)):
        known = pairs[0][0].dtype if pairs else None
        pair = _quick_pair(send, result, known) or _pair(
            send, result, f"tensors[{number}]", f"recv[{number}]"
        )
        if pair[0].size:
            pairs.append(pair)
            numbers.append(number)
            _check_same_dtype(pairs[0][0], numbers[0], pair[0], number)
    if not pairs:
        raise ValueError("nothing to reduce: tensors has no elements; pass at least one element")
    source = Memory([source for source, _ in pairs])
    if recv is None:
        target, in_place = source, True
    else:
        target = Memory([target for _, target in pairs])
        same = [a == b for a, b in zip(source.addresses, target.addresses, strict=True)]
        in_place = all(same)
        if any(same) and not in_place:
            raise ValueError(
                f"recv[{numbers[same.index(True)]}] is the memory of its tensor, and "
                f"recv[{numbers[same.index(False)]}] is not; reduce all of them in place, or none"
            )
    saved = Memory([_BACKUPS.take(source.size, source.dtype)]) if in_place else source
    operand = Operand(source, target, saved, DATA_TYPES[source.dtype], in_place)
    if clash(operand.ranges) is not None:
        raise ValueError(_overlap(operand, numbers))
    return operand


def _listed(tensors: object, name: str) -> list[object]:
    if _kind(tensors) in (_ARRAY, _TENSOR):
        raise TypeError(f"{name} must be a list of tensors, not one tensor; pass [{name}]")
    if not isinstance(tensors, Iterable):
        raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
    return list(cast("Iterable[object]", tensors))


def _check_same_dtype(first: Array, first_number: int, other: Array, number: int) -> None:
    if first.dtype != other.dtype:
        raise ValueError(
            f"tensors[{number}] has dtype {other.dtype}, tensors[{first_number}] has "
            f"{first.dtype}; group the tensors by dtype, and make one call for each"
        )


def _overlap(operand: Operand, numbers: list[int]) -> str:
    names = [f"tensors[{number}]" for number in numbers]
    if not operand.in_place:
        names = [f"recv[{number}]" for number in numbers] + names
    found = clash((*where[:3], name) for where, name in zip(operand.ranges, names, strict=True))
    assert found is not None
    return f"{found[0]} and {found[1]} overlap; pass separate ones"


def borrow_pointers(send_ptr: int, recv_ptr: int, count: int, data_type: DataType) -> Operand:
    """Return an operand on raw memory, which the caller must keep until the collective ends.

    Args:
        send_ptr: address of the input.
        recv_ptr: address of the result; ``send_ptr`` means in place.
        count: number of elements at each address, at least 1.
        data_type: type of the elements.

    Raises:
        TypeError: an address or the count is no integer, or ``data_type`` is no DataType.
        ValueError: an address or the count is impossible, or the two buffers overlap in part.
        MemoryError: in place, there is no memory for a copy of the input.
    """
    if type(data_type) is not DataType:
        raise TypeError(f"the data type must be a DataType, not {data_type!r}")
    send_ptr, recv_ptr = _integer(send_ptr, "send_ptr"), _integer(recv_ptr, "recv_ptr")
    count = _integer(count, "count")
    if count < 1:
        raise ValueError(f"the count must be at least 1, not {count}; pass the number of elements")
    source = _at_address(send_ptr, count, data_type, "send_ptr")
    target = _at_address(recv_ptr, count, data_type, "recv_ptr")
    return _operand(source, target, data_type)


def _operand(source: Array, target: Array, data_type: DataType) -> Operand:
    """Return the operand of two checked buffers: flat, of equal size and dtype, target writable."""
    given, result = Memory([source]), Memory([target])
    in_place = given.addresses == result.addresses
    if not in_place and np.may_share_memory(source, target):  # exact: both are contiguous
        raise ValueError("send and recv overlap; use the same buffer or two separate ones")
    saved = Memory([_BACKUPS.take(given.size, given.dtype)]) if in_place else given
    return Operand(given, result, saved, data_type, in_place)


def _integer(value: object, name: str) -> int:
    try:
        return operator.index(cast("int", value))
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def _at_address(pointer: int, count: int, data_type: DataType, name: str) -> Array:
    nbytes = count * data_type.itemsize
    if pointer == 0:
        raise ValueError(f"{name} is null; pass the address of the data (data_ptr(), ctypes.data)")
    if not 0 < pointer <= _ADDRESS_MAX - nbytes:
        raise ValueError(
            f"{name} {pointer:#x} with {count} elements is outside the address space; pass the "
            "address of the data and the number of elements there"
        )
    if pointer % data_type.itemsize:
        raise ValueError(
            f"{name} {pointer:#x} is misaligned: {data_type.name} needs a multiple of "
            f"{data_type.itemsize}; copy the data to such an address"
        )
    memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
    return np.frombuffer(memoryview(memory), data_type.to_numpy_dtype())


# -- arrays and tensors ----------------------------------------------------------------------------

_ARRAY, _TENSOR = "NumPy array", "torch tensor"
_BRAIN = DataType.BFLOAT16.to_numpy_dtype()
DATA_TYPES = {dtype: data_type for data_type, dtype in numpy_dtypes().items()}


def _kind(buffer: object) -> str:
    """Return ``_ARRAY`` or ``_TENSOR``, or the name of the type for any other object."""
    torch = sys.modules.get("torch")
    if isinstance(buffer, np.ndarray):
        return _ARRAY
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _TENSOR
    return type(buffer).__name__


def _pair(send: object, recv: object, send_name: str, recv_name: str) -> tuple[Array, Array]:
    """Return an input and its result as arrays of shape (n,), of equal size and dtype."""
    if recv is not send and {_kind(send), _kind(recv)} == {_ARRAY, _TENSOR}:
        raise ValueError(
            f"{send_name} and {recv_name} must be both torch CPU tensors or both NumPy arrays; "
            "torch.from_numpy() and Tensor.numpy() turn one into the other without a copy"
        )
    source = flat_array(send, send_name)
    target = source if recv is send else flat_array(recv, recv_name)
    if target.dtype != source.dtype:
        raise TypeError(
            f"{recv_name} has dtype {target.dtype}, {send_name} has {source.dtype}; make them equal"
        )
    if target.size != source.size:
        raise ValueError(
            f"{recv_name} has {target.size or 'no'} elements, {send_name} has "
            f"{source.size or 'no'}; make them equal"
        )
    if not target.flags.writeable:
        name = f"{send_name} (in place)" if recv is send else recv_name
        raise ValueError(f"{name} is read-only; pass a writable array, for example a copy()")
    return source, target


def _quick_pair(
    send: object, recv: object, dtype: np.dtype[Any] | None
) -> tuple[Array, Array] | None:
    """Return the same as ``_pair`` for plain buffers; None: ``_pair`` has to check the buffers."""
    if (type(send) is np.ndarray) is not (type(recv) is np.ndarray):
        return None
    source = _quick(send, dtype)
    target = source if recv is send else _quick(recv, dtype)
    if source is None or target is None or source.size != target.size:
        return None
    return (source, target) if target.flags.writeable else None


def _quick(buffer: object, dtype: np.dtype[Any] | None) -> Array | None:
    """Return ``buffer`` as an array of shape (n,) if it is plain and of ``dtype``; else None.

    With hundreds of small tensors, the detailed checks would take longer than the reduce.
    """
    if dtype is None:
        return None
    torch = sys.modules.get("torch")
    if type(buffer) is np.ndarray:
        array: Array = buffer
        if array.dtype is not dtype:
            return None
    elif torch is not None and type(buffer) in (torch.Tensor, torch.nn.Parameter):
        tensor: Any = buffer
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
            return None
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
        is_brain = tensor.dtype is torch.bfloat16  # unknown to Tensor.numpy()
        try:
            plain = tensor.detach()
            array = plain.view(torch.int16).numpy().view(_BRAIN) if is_brain else plain.numpy()
        except (TypeError, RuntimeError):
            return None
        if array.dtype != dtype:
            return None
    else:
        return None
    return array.reshape(-1) if array.flags.c_contiguous else None


def flat_array(buffer: object, name: str) -> Array:
    """Return ``buffer`` as a NumPy array of shape (n,) on the same memory."""
    kind = _kind(buffer)
    if kind == _ARRAY:
        array = _checked_array(cast("Array", buffer), name)
    elif kind == _TENSOR:
        array = _checked_tensor(buffer, name)
    else:
        remedy = ""
        if isinstance(buffer, ReduceOp):
            remedy = f"; name it, as in op=ReduceOp.{buffer.name}"
        raise TypeError(f"{name} must be a {_ARRAY} or a {_TENSOR}, not {kind}{remedy}")
    return array.reshape(-1)


def _checked_array(array: Array, name: str) -> Array:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and masks are not reduced; pass {name}.filled()"
        )
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} is in foreign byte order ({array.dtype.str}); pass "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    if array.dtype not in DATA_TYPES:
        raise _unsupported(name, array.dtype)
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not contiguous; pass np.ascontiguousarray({name}), and copy the result back"
        )
    return np.asarray(array)  # a plain array on the memory of a subclass


def _checked_tensor(tensor: Any, name: str) -> Array:
    torch: Any = sys.modules["torch"]
    kind = cast("Any", type(tensor))
    if any(base.__name__ == "DTensor" for base in kind.__mro__):
        raise TypeError(
            f"{name} is a DTensor, one shard of a tensor that several processes share; pass "
            f"{name}.to_local()"
        )
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor; pass its parts ({name}.unbind())")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{name} is a {kind.__name__}; pass a plain tensor with its values")
    if tensor._is_zerotensor():
        raise TypeError(f"{name} holds no memory; pass a plain tensor of zeros")
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name} is on meta and holds no values; create it on the CPU "
            f"(torch.empty_like({name}, device='cpu'))"
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is on {tensor.device}; pass {name}.cpu(), and copy the result back"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse ({tensor.layout}); pass {name}.to_dense()")
    if tensor.is_quantized:
        raise ValueError(f"{name} is quantized; pass {name}.dequantize()")
    try:
        data_type = DataType.from_torch_dtype(tensor.dtype)
    except ValueError:
        raise _unsupported(name, tensor.dtype) from None
    if tensor.is_neg():
        raise ValueError(f"{name} is a view with the negative bit; pass {name}.resolve_neg()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous; pass {name}.contiguous(), and copy the result back"
        )
    try:
        plain = tensor.detach()
        if data_type is DataType.BFLOAT16:  # unknown to Tensor.numpy()
            plain = plain.view(torch.int16)
        array: Array = plain.numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{name} cannot be used as it is ({error}); pass a plain tensor with its values"
        ) from error
    return array.view(data_type.to_numpy_dtype())


def _unsupported(name: str, dtype: object) -> TypeError:
    supported = ", ".join(str(known) for known in numpy_dtypes().values())
    return TypeError(
        f"{name}: dtype {dtype} is not supported by collectives; convert to one of {supported}"
    )
