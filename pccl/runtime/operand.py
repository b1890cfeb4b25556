"""The caller's arrays: checked at the edge, then borrowed until the call returns.

NumPy arrays, torch CPU tensors and raw addresses are taken as they are; no byte is copied. Torch is
never imported here: whoever hands in a tensor has done so. What cannot be used is refused at once,
with what to do about it in the message: TypeError for things of the wrong type or dtype, ValueError
for everything else.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pccl.collectives.residual import Residual
from pccl.protocol.types import DataType, numpy_dtypes
from pccl.runtime.memory import Memory, Range, clash, ranges_of

Array = npt.NDArray[Any]

_ADDRESS_MAX = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1


@dataclass(frozen=True, slots=True)
class Operand:
    """What a collective reads and writes; the same memory if it is in place."""

    source: Memory
    """The input."""
    target: Memory
    """The result: as many parts as ``source`` has, and as long, of the same dtype, writable."""
    saved: Memory
    """The own contribution while the result is being written: ``source``, or in place an array of
    its own, into which each part of the input is saved before it is overwritten."""
    data_type: DataType
    in_place: bool
    ranges: tuple[Range, ...] = field(init=False)
    """Where all that is."""
    residual: Residual | None = None
    """Of a reduce with error feedback."""
    overwritten: list[bool] = field(default_factory=lambda: [False], init=False)
    """Whether the whole input was overwritten, and all of it is in ``saved``."""

    def __post_init__(self) -> None:
        ranges = ranges_of(self.target, "", written=True)
        if not self.in_place:
            ranges += ranges_of(self.source, "", written=False)
        object.__setattr__(self, "ranges", tuple(ranges))

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.source.size

    @property
    def send(self) -> Array:
        """The input, shape (n,), if it is one array."""
        return _only(self.source)

    @property
    def result(self) -> Array:
        """The result, likewise."""
        return _only(self.target)

    @property
    def own(self) -> Array:
        """What is saved, likewise."""
        return _only(self.saved)

    def save(self, first: int, last: int) -> None:
        """In place: save a range of bytes of the input, which is about to be overwritten."""
        at = first
        for view in self.source.views(first, last):
            self.saved.write(at, view)
            at += len(view)

    def put_back(self, first: int, last: int) -> None:
        """In place: make a range of bytes that was saved what it was."""
        self.source.write(first, self.saved.read(first, last))

    def restore(self) -> None:
        """Make the input what it was before a result took its place."""
        if self.overwritten[0]:
            self.put_back(0, self.source.nbytes)

    def collides_with(self, other: Operand) -> bool:
        """Whether one of the two would write what the other one uses."""
        return clash((*self.ranges, *other.ranges)) is not None


def _only(memory: Memory) -> Array:
    (part,) = memory.parts
    return part


def nothing(data_type: DataType) -> Operand:
    """An operand without elements, for a barrier."""
    empty = Memory([np.empty(0, data_type.to_numpy_dtype())])
    return Operand(empty, empty, empty, data_type, in_place=True)


def borrow(send: object, recv: object | None = None) -> Operand:
    """Check the buffers of a collective.

    Args:
        send: NumPy array or torch CPU tensor, contiguous, at least one element, of a dtype that
            :class:`~pccl.protocol.types.DataType` names. A tensor that requires a gradient is taken
            as its ``detach()``.
        recv: likewise, of the same kind, dtype and number of elements; None, or the memory of
            ``send``: in place.

    Raises:
        TypeError: not an array, or a dtype that is not supported or not the same.
        ValueError: a buffer that cannot be used as it is; the message says how to mend it.
        MemoryError: in place, there is no room for a copy of the input.
    """
    if recv is None:
        recv = send
    if {_kind(send), _kind(recv)} == {_ARRAY, _TENSOR}:
        raise ValueError(
            "send and recv must be both torch CPU tensors or both NumPy arrays; torch.from_numpy() "
            "and Tensor.numpy() turn one into the other without a copy"
        )
    source = _flat(send, "send")
    target = source if recv is send else _flat(recv, "recv")
    if target.dtype != source.dtype:
        raise TypeError(f"recv has dtype {target.dtype}, send has {source.dtype}; make them equal")
    if target.size != source.size:
        raise ValueError(
            f"recv has {target.size} elements, send has {source.size}; make them equal"
        )
    if not target.flags.writeable:
        name = "send (in place)" if recv is send else "recv"
        raise ValueError(f"{name} is read-only; pass a writable array, for example a copy()")
    return _operand(source, target, DataType.from_numpy_dtype(source.dtype))


def borrow_pointers(send_ptr: int, recv_ptr: int, count: int, data_type: DataType) -> Operand:
    """Take memory by its address. The caller promises that it lives until the collective ends.

    Args:
        send_ptr: address of the input.
        recv_ptr: address of the result; ``send_ptr``: in place.
        count: number of elements at each address, at least 1.
        data_type: of the elements.

    Raises:
        TypeError: addresses and count are not integers, or ``data_type`` is no DataType.
        ValueError: an address that cannot be right, or parts that overlap.
        MemoryError: in place, there is no room for a copy of the input.
    """
    if type(data_type) is not DataType:
        raise TypeError(f"the data type must be a DataType, not {data_type!r}")
    send_ptr, recv_ptr = _integer(send_ptr, "send_ptr"), _integer(recv_ptr, "recv_ptr")
    count = _integer(count, "count")
    if count < 1:
        raise ValueError(f"nothing to do: the count is {count}; pass the number of elements")
    source = _at_address(send_ptr, count, data_type, "send_ptr")
    target = _at_address(recv_ptr, count, data_type, "recv_ptr")
    return _operand(source, target, data_type)


def _operand(source: Array, target: Array, data_type: DataType) -> Operand:
    """The operand of two checked buffers: flat, of one size and dtype, the target writable."""
    in_place = source.ctypes.data == target.ctypes.data
    if not in_place and np.may_share_memory(source, target):  # exact: both are contiguous
        raise ValueError("send and recv overlap; use the same buffer or two separate ones")
    return _lent(Memory([source]), Memory([target]), data_type, in_place=in_place)


def _lent(source: Memory, target: Memory, data_type: DataType, *, in_place: bool) -> Operand:
    saved = Memory([np.empty(source.size, source.dtype)]) if in_place else source
    return Operand(source, target, saved, data_type, in_place)


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
            f"{name} {pointer:#x} with {count} elements is no part of memory; pass the address of "
            "the data and the number of elements there"
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


def _kind(buffer: object) -> str:
    """One of the two names above, or the name of a type that is neither."""
    torch = sys.modules.get("torch")
    if isinstance(buffer, np.ndarray):
        return _ARRAY
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _TENSOR
    return type(buffer).__name__


def _flat(buffer: object, name: str) -> Array:
    """``buffer`` as a NumPy array of shape (n,) on the same memory."""
    kind = _kind(buffer)
    if kind == _ARRAY:
        array = _checked_array(cast("Array", buffer), name)
    elif kind == _TENSOR:
        array = _checked_tensor(buffer, name)
    else:
        raise TypeError(f"{name} must be a {_ARRAY} or a {_TENSOR}, not {kind}")
    if array.size == 0:
        raise ValueError(f"{name} has no elements; pass at least one")
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
    if array.dtype not in numpy_dtypes().values():
        raise _unsupported(name, array.dtype)
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not contiguous; pass np.ascontiguousarray({name}), and copy the result back"
        )
    return np.asarray(array)  # of a subclass: the same memory, without frills


def _checked_tensor(tensor: Any, name: str) -> Array:
    torch: Any = sys.modules["torch"]
    kind = cast("Any", type(tensor))
    if any(base.__name__ == "DTensor" for base in kind.__mro__):
        raise TypeError(
            f"{name} is a DTensor, one part of a tensor that is spread over processes; pass "
            f"{name}.to_local()"
        )
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor; pass its parts ({name}.unbind())")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{name} is a {kind.__name__}; pass a plain tensor with its values")
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
