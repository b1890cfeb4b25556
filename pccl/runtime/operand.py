"""The caller's arrays: checked at the edge, then borrowed until the call returns.

NumPy arrays and torch CPU tensors are taken as they are; no byte is copied. Torch is never
imported here: whoever hands in a tensor has done so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pccl.collectives.reductions import data_type_of, numpy_dtype
from pccl.protocol.types import DataType

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """Flat views of what a reduce reads and writes; the same memory if it is in place."""

    send: Array
    """Shape (n,)."""
    result: Array
    """Shape (n,), same dtype, writable."""
    own: Array
    """The own contribution while the result is being written: ``send``, or in place a buffer of its
    own, into which each part of the input is saved before it is overwritten."""
    data_type: DataType
    in_place: bool

    def collides_with(self, other: Operand) -> bool:
        """Whether one of the two would write what the other one uses."""
        return (
            np.may_share_memory(self.result, other.result)
            or np.may_share_memory(self.result, other.send)
            or np.may_share_memory(self.send, other.result)
        )


def borrow(send: object, recv: object | None = None) -> Operand:
    """Check the buffers of a reduce.

    Args:
        send: NumPy array or torch CPU tensor, contiguous, int32, int64, float32 or float64.
        recv: likewise, same dtype and number of elements; None or ``send`` itself: in place.

    Raises:
        TypeError: not an array, or a dtype that is not supported.
        ValueError: a buffer that cannot be used as it is; the message says how to mend it.
        MemoryError: in place, there is no room for a copy of the input.
    """
    source = _as_array(send, "send")
    in_place = recv is None or recv is send
    target = source if in_place else _as_array(recv, "recv")
    data_type = data_type_of(source.dtype)
    if data_type is None:
        supported = ", ".join(str(numpy_dtype(kind)) for kind in DataType)
        raise TypeError(f"dtype {source.dtype} is not supported by collectives (use {supported})")
    if target.dtype != source.dtype:
        raise ValueError(f"recv has dtype {target.dtype}, send has {source.dtype}; make them equal")
    if target.size != source.size:
        raise ValueError(f"recv has {target.size} elements, send has {source.size}")
    if source.size == 0:
        raise ValueError("nothing to reduce: the buffer has no elements")
    if not target.flags.writeable:
        name = "send (in place)" if in_place else "recv"
        raise ValueError(f"{name} is read-only; pass a writable array, for example a copy()")
    flat_send, flat_result = _flat(source, "send"), _flat(target, "recv")
    if not in_place and np.shares_memory(flat_send, flat_result):
        if flat_send.ctypes.data != flat_result.ctypes.data:
            raise ValueError("send and recv overlap; use the same buffer or two separate ones")
        in_place = True
    own = np.empty_like(flat_send) if in_place else flat_send
    return Operand(flat_send, flat_result, own, data_type, in_place)


def _as_array(buffer: object, name: str) -> Array:
    if isinstance(buffer, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, and masks are not reduced; pass its filled()")
    if isinstance(buffer, np.ndarray):
        return np.asarray(cast("Array", buffer))  # of a subclass: the same memory, without frills
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        tensor: Any = buffer
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; copy it to the CPU first (.cpu())")
        try:
            array: Array = tensor.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"{name}: this tensor cannot be used: {error}") from error
        return array
    raise TypeError(f"{name} must be a NumPy array or a torch tensor, not {type(buffer).__name__}")


def _flat(array: Array, name: str) -> Array:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous; pass np.ascontiguousarray() / .contiguous()")
    return array.reshape(-1)
