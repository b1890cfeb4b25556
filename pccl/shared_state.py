"""Shared state: named tensors and a revision, equal on all members of a group.

A program describes its state with these classes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, cast

import numpy as np

from pccl import checkpoint, cuda
from pccl.checks import (
    check_flag,
    check_member,
    check_range,
    check_text,
)
from pccl.descriptors import POINTER_MAX, DeviceType
from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import REVISION_MAX, Lineage, SharedStateSyncStrategy
from pccl.runtime.requests import SharedStateSyncInfo
from pccl.runtime.state.memory.state_memory import StateMemory

__all__ = ["SharedState", "SharedStateSyncInfo", "SharedStateSyncStrategy", "TensorInfo"]

ELEMENTS_MAX = 2**63 - 1


class TensorInfo:
    """One entry of a shared state.

    Args:
        name: name of the tensor, the same on all members.
        data_ptr: address of the first element, aligned or not; the caller keeps the memory alive
            as long as the shared state is used.
        numel: number of elements; 1 for a scalar, 0 for a tensor that is empty on all members.
        dtype: type of the elements.
        device_type: CPU. For a tensor on a CUDA device use ``from_torch``.
        allow_content_inequality: whether members may hold different values.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the address is 0, or an argument is out of range.
    """

    def __init__(
        self,
        name: str,
        data_ptr: int,
        *,
        numel: int,
        dtype: DataType | str,
        device_type: DeviceType | str,
        allow_content_inequality: bool,
    ) -> None:
        self.name = _encodable(check_text("name", name))
        self.numel = check_range(f"numel of {name!r}", numel, 0, ELEMENTS_MAX)
        pointer_min = 1 if self.numel else 0
        self.data_ptr = check_range(f"data_ptr of {name!r}", data_ptr, pointer_min, POINTER_MAX)
        self.dtype = check_member("dtype", dtype, DataType)
        self.device_type = check_member("device_type", device_type, DeviceType)
        self.allow_content_inequality = check_flag(
            "allow_content_inequality", allow_content_inequality
        )
        self.tensor: object | None = None
        """The tensor or array of this entry, kept alive; None if it was made from an address."""
        if self.device_type is DeviceType.CUDA:
            raise ValueError(
                f"{name!r} is an address on a CUDA device, from which pccl cannot copy; pass the "
                "tensor instead: TensorInfo.from_torch(tensor, name)"
            )

    def __repr__(self) -> str:
        differs = ", allow_content_inequality" if self.allow_content_inequality else ""
        what = f"{self.name!r}: {self.numel} x {self.dtype.label} on {self.device_type.name}"
        return f"<TensorInfo {what}{differs}>"

    @property
    def is_cuda(self) -> bool:
        """Whether the entry is a torch tensor on a CUDA device."""
        return self.device_type is DeviceType.CUDA

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor or array; ``(numel,)`` for an address."""
        held: Any = self.tensor
        return (self.numel,) if held is None else tuple(held.shape)

    @staticmethod
    def from_torch(tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Make an entry of a torch tensor: contiguous, on the CPU or a CUDA device.

        Afterwards, update the tensor in place (``copy_``): the entry keeps using this memory.

        Raises:
            TypeError: ``tensor`` is no torch tensor, a DTensor, or has an unsupported dtype.
            ValueError: the tensor cannot be used as it is; the message says what to pass.
        """
        _check_name(name, "from_torch(tensor, name)")
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} must be a torch tensor, not {type(tensor).__name__}")
        held: Any = tensor
        if _is_dtensor(held):
            raise TypeError(f"{name!r} is a DTensor; pass its local shard (.to_local())")
        if held.layout is not torch.strided:
            raise TypeError(f"{name!r} is not a dense tensor; pass its .to_dense()")
        device_type = DeviceType.from_torch_device_type(held.device.type)
        if device_type is None:
            raise ValueError(f"{name!r} is on {held.device}; copy it to the CPU first (.cpu())")
        if device_type is DeviceType.CUDA and not cuda.is_available():
            raise ValueError(f"{name!r} is on {held.device}, but torch finds no CUDA device")
        if held.is_neg():
            raise ValueError(f"{name!r} is a view with the negative bit; pass its .resolve_neg()")
        if not held.is_contiguous():
            raise ValueError(f"{name!r} is not contiguous; pass its .contiguous()")
        return _entry(
            held,
            name,
            data_ptr=_pointer_of(name, held.data_ptr(), held.numel()),
            numel=held.numel(),
            dtype=_carried(name, DataType.from_torch_dtype, held.dtype, "torch"),
            device_type=device_type,
            allow_content_inequality=allow_content_inequality,
        )

    @staticmethod
    def from_numpy(tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Make an entry of a NumPy array: contiguous and writable.

        Afterwards, update the array in place (``array[...] = ``): the entry keeps this memory.

        Raises:
            TypeError: ``tensor`` is no NumPy array, or has an unsupported dtype.
            ValueError: the array cannot be used as it is; the message says what to pass.
        """
        _check_name(name, "from_numpy(array, name)")
        array: Any = tensor
        if not _is_array(tensor):
            raise TypeError(f"{name!r} must be a NumPy array, not {type(array).__name__}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{name!r} is not contiguous; pass np.ascontiguousarray() of it")
        if not array.flags.writeable:
            raise ValueError(f"{name!r} is read-only; pass a writable array, such as a copy()")
        return _entry(
            array,
            name,
            data_ptr=array.ctypes.data,
            numel=array.size,
            dtype=_carried(name, DataType.from_numpy_dtype, array.dtype, "np"),
            device_type=DeviceType.CPU,
            allow_content_inequality=allow_content_inequality,
        )


class SharedState:
    """An ordered list of named tensors, and a revision that starts at 0.

    It keeps references only: change the contents in place, then increase the revision.

    Args:
        tensor_infos: the entries, in the same order on all members.
        track_touched: a synchronization compares only the tensors that the program passed to
            :meth:`touch` since the last one, and treats the rest as unchanged. Otherwise it
            compares all tensors.

    Raises:
        TypeError: ``tensor_infos`` is no list of TensorInfos, or ``track_touched`` is no bool.
        ValueError: the list is empty, or two entries have the same name.
    """

    def __init__(self, tensor_infos: Iterable[TensorInfo], *, track_touched: bool = False) -> None:
        self._infos = _entries(tensor_infos)
        if not self._infos:
            raise ValueError("a shared state needs at least one tensor")
        names: set[str] = set()
        for info in self._infos:
            if info.name in names:
                raise ValueError(f"two tensors are called {info.name!r}; give each its own name")
            names.add(info.name)
        self._tracks = check_flag("track_touched", track_touched)
        self._revision = 0
        self._lineage: Lineage | None = None
        self._memory: StateMemory | None = None

    def __repr__(self) -> str:
        count = f"{len(self._infos)} tensor{'s' * (len(self._infos) != 1)}"
        return f"<SharedState: revision {self._revision}, {count}, {self.nbytes} bytes>"

    @property
    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        """The entries of the state, in order."""
        return tuple(self._infos)

    @property
    def revision(self) -> int:
        """Version of the contents, as the program counts them; an unsigned 64-bit number."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self._revision = check_range("revision", revision, 0, REVISION_MAX)

    def push_revision(self) -> None:
        """Add 1 to the revision."""
        self.revision = self._revision + 1

    @property
    def lineage(self) -> Lineage | None:
        """The last synchronization after which the whole group had these contents, or None.

        Revisions can be compared only within one lineage.
        """
        return self._lineage

    def synchronized(self, revision: int, lineage: Lineage | None) -> None:
        """Record that a synchronization elected these contents. Only the library calls this."""
        self._revision, self._lineage = revision, lineage

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(info.numel * info.dtype.itemsize for info in self._infos)

    @property
    def memory(self) -> StateMemory:
        """The memory of the tensors, as an object that is made on first use.

        Raises:
            ValueError: the memory of a tensor was replaced (``tensor.data = ...``, a resize).
        """
        if self._memory is None:
            self._memory = StateMemory(self._infos, track_touched=self._tracks)
        self._memory.check_in_place()
        return self._memory

    def touch(self, *names: str) -> None:
        """Mark tensors that have changed since the last synchronization.

        It has an effect only with ``track_touched``.

        Args:
            names: names of the tensors; without names, all tensors.

        Raises:
            ValueError: there is no tensor of that name; then no tensor is marked.
        """
        numbers = {info.name: number for number, info in enumerate(self._infos)}
        for name in names:
            if name not in numbers:
                raise ValueError(f"no tensor is called {name!r}{_suggestion(name, numbers)}")
        if self._memory is None:  # the first synchronization compares all tensors
            return
        for name in names or numbers:
            self._memory.touch(numbers[name])

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, path: checkpoint.Path) -> None:
        """Write a checkpoint: a safetensors file with revision and lineage in it.

        The new file replaces an older one only when it is complete and on the disk. Needs memory
        for one piece. Do not change the tensors meanwhile.

        Raises:
            OSError: the file cannot be written.
            ValueError: safetensors files do not allow a name, or the number of tensors; or
                another call uses the state.
        """
        memory, shapes = self.memory, [info.shape for info in self._infos]
        with memory.claimed():
            checkpoint.write(path, memory, shapes, self._revision, self._lineage)

    @classmethod
    def load(cls, path: checkpoint.Path, *, track_touched: bool = False) -> SharedState:
        """Make a state from a checkpoint, in new NumPy arrays (``tensor_infos[0].tensor``).

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no checkpoint, truncated, or altered; the message names file
                and tensor.
        """
        found, arrays = checkpoint.load(path)
        infos = [
            TensorInfo.from_numpy(
                array, one.name, allow_content_inequality=one.allow_content_inequality
            )
            for one, array in zip(found.tensors, arrays, strict=True)
        ]
        state = cls(infos, track_touched=track_touched)
        state._adopt(found)
        return state

    def restore(self, path: checkpoint.Path) -> None:
        """Load tensors, revision and lineage from a checkpoint.

        It verifies the whole file before it overwrites the first byte.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is truncated, altered or no checkpoint. Or its tensors have other
                names, dtypes, lengths, flags or another order; the message names file and tensor.
                Or another call uses the state.
        """
        memory = self.memory
        with memory.claimed():
            self._adopt(checkpoint.restore(path, memory))

    def _adopt(self, found: checkpoint.Checkpoint) -> None:
        self.synchronized(found.revision, found.lineage)


def _entries(given: object) -> list[TensorInfo]:
    """Check the argument ``tensor_infos``, and return it as a list."""
    remedy = "make each with TensorInfo.from_torch(tensor, name) or TensorInfo.from_numpy"
    if isinstance(given, TensorInfo):
        raise TypeError("tensor_infos must be a list, even of one: SharedState([info])")
    kind = type(given).__name__
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"tensor_infos must be a list of TensorInfos, not {kind}; {remedy}")
    infos: list[TensorInfo] = []
    for info in cast("Iterable[object]", given):
        if not isinstance(info, TensorInfo):
            kind = type(info).__name__
            raise TypeError(
                f"each entry of tensor_infos must be a pccl.TensorInfo, not {kind}; {remedy}"
            )
        infos.append(info)
    return infos


def _check_name(name: object, call: str) -> None:
    """Check the name first, so that no error message prints a whole tensor as a name."""
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(f"name must be a string, not {kind}; the tensor comes first: {call}")


def _entry(tensor: object, name: str, *, device_type: DeviceType, **said: Any) -> TensorInfo:
    """Return an entry that keeps ``tensor`` alive, which may be on a CUDA device."""
    info = TensorInfo(name, device_type=DeviceType.CPU, **said)
    info.device_type = device_type
    info.tensor = tensor
    return info


def _suggestion(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), list(known))
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _encodable(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!r} is not valid Unicode (lone surrogate)") from None
    return name


def _is_array(value: object) -> bool:
    """Whether ``value`` is a NumPy array that its memory describes completely: no masked array."""
    return not isinstance(value, np.ma.MaskedArray) and isinstance(value, np.ndarray)


def _is_dtensor(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor, or derived from it; the class has moved within torch."""
    return any(
        kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")
        for kind in type(tensor).__mro__
    )


def _pointer_of(name: str, data_ptr: int, numel: int) -> int:
    if numel and not data_ptr:
        raise ValueError(f"{name!r} has no memory of its own (its data_ptr is null)")
    return data_ptr


def _carried(name: str, data_type_of: Any, dtype: object, module: str) -> DataType:
    try:
        data_type: DataType = data_type_of(dtype)
    except ValueError as error:
        words = f"{name!r}: {error}"
        if any(kind in str(dtype) for kind in ("bool", "complex")):
            words += f"; or share a view of its bytes, such as .view({module}.uint8)"
        raise TypeError(words) from None
    return data_type
